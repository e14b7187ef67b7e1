"""rebased lm eval --tasks: tasks of lm-evaluation-harness, and ours, on a trained language model."""

import sys
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from rebased.cli.output import Output, say
from rebased.cli.results import OnProgress, digits, progress_bars
from rebased.cli.terminal import Terminal
from rebased.evaluate.harness.tasks import task_names
from rebased.ops.backend import choose_device
from rebased.runs.evaluations import append_evaluation
from rebased.runs.load import open_text_model
from rebased.runs.provenance import describe_code, describe_machine
from rebased.runs.shipped import model_name, shipped_models


def list_tasks() -> int:
    """Print the names of our tasks."""
    print("\n".join(task_names()))
    print("and those of lm-evaluation-harness (pip install 'rebased[eval]'): lm-eval ls tasks")
    return 0


def eval_tasks(
    model: Path,
    tasks: str,
    *,
    tokenizer: str | None,
    data: Path | None,
    facts: Path | None,
    squad: Path | None,
    task_folder: Path | None,
    limit: int | None,
    seq_len: int | None,
    batch_size: int,
    device: str,
    dtype: torch.dtype | None,
    to: Output,
) -> int:
    """Run the tasks, print a table of their scores, and keep them beside the run's record; a shipped model's here."""
    try:
        from rebased.evaluate.harness.model import HarnessModel
        from rebased.evaluate.harness.run import run_tasks
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; --tasks needs: pip install 'rebased[eval]'") from error
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    if not names:
        raise ValueError("--tasks is empty; name tasks, separated by commas, or `list`")
    where = choose_device(device)
    opened = open_text_model(model, tokenizer, data, where)
    with progress_bars(Terminal(file=sys.stderr)) as begin_bar:  # this file: the harness's own stderr is not shown
        bars: dict[tuple[str, int], OnProgress] = {}

        def on_progress(what: str, done: int, total: int) -> None:
            bars.setdefault((what, total), begin_bar(what))(done, total)

        under_test = HarnessModel(
            opened.model,
            opened.tokenizer,
            max_length=seq_len,
            batch_size=batch_size,
            dtype=dtype,
            on_progress=on_progress,
        )
        scores = run_tasks(under_test, names, facts=facts, squad=squad, folder=task_folder, limit=limit)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("task", no_wrap=True)
    table.add_column("score")
    for name in ("value", "standard error", "examples"):
        table.add_column(name, justify="right")
    for score in scores:
        spread = "" if score.stderr is None else digits(score.stderr)
        table.add_row(score.task, score.metric, digits(score.value), spread, f"{score.examples:,}")
    to.result_console().print(table)
    entry = {
        "type": "tasks",
        "model": model_name(model),
        "scores": [score._asdict() for score in scores],
        "limit": limit,
        "max_length": under_test.max_length,
        "precision": "fp32" if dtype is None else str(dtype).removeprefix("torch."),
        "parameters": opened.model.num_parameters(),
        "tokenizer": opened.tokenizer.name,
        "code": describe_code(),
        "machine": describe_machine(where),
    }
    if model.is_dir():  # the package's own folder is never written to
        kept = append_evaluation(Path() if model in shipped_models().values() else model, entry)
        say(to.console(), f"added to {kept}")
    to.emit(entry)
    return 0
