"""rebased lm eval --tasks: tasks of lm-evaluation-harness, and ours, on a trained language model."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter

from rebased.cli.model_options import Computing
from rebased.cli.output import OnProgress, Output, Terminal, digits, progress_bars, say
from rebased.cli.rich_table import TerminalTable
from rebased.evaluate.harness.tasks import task_names
from rebased.report.tables import Table
from rebased.runs.evaluations import append_evaluation
from rebased.runs.load import open_text_model
from rebased.runs.provenance import describe_code, describe_machine
from rebased.runs.shipped import model_name, shipped_models


@Parameter(name="*")
@dataclass(frozen=True)
class TaskOptions:
    """Tasks of lm-evaluation-harness, instead of a text.

    Parameters
    ----------
    tasks
        Names of tasks, separated by commas: those of lm-evaluation-harness, and ours (rebased_mqar_words_16,
        rebased_facts, rebased_squad, ...; each also with _twice, the context read twice). `list` lists ours.
    facts
        With --tasks: facts for rebased_facts, as in `rebased lm recall`.
    squad
        With --tasks: the SQuAD file for rebased_squad.
    task_folder
        With --tasks: a folder with your own tasks, as YAML files of lm-evaluation-harness.
    limit
        With --tasks: examples per task at most.
    tokenizer
        With --tasks: bytes, a tokenizer.json, or a name on the Hugging Face Hub. Default: the run's.
    """

    tasks: Annotated[str | None, Parameter(show_default=False)] = None
    facts: Path | None = None
    squad: Path | None = None
    task_folder: Path | None = None
    limit: int | None = None
    tokenizer: str | None = None


def list_tasks() -> int:
    """Print the names of our tasks."""
    print("\n".join(task_names()))
    print("and those of lm-evaluation-harness (pip install 'rebased[eval]'): lm-eval ls tasks")
    return 0


def eval_tasks(
    model: Path,
    options: TaskOptions,
    data: Path | None,
    seq_len: int | None,
    computing: Computing,
    where: torch.device,
    to: Output,
) -> int:
    """Run the tasks, print a table of their scores, and keep them beside the run's record; a shipped model's here."""
    try:
        from rebased.evaluate.harness.model import HarnessModel
        from rebased.evaluate.harness.run import run_tasks
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; --tasks needs: pip install 'rebased[eval]'") from error
    names = [name.strip() for name in (options.tasks or "").split(",") if name.strip()]
    if not names:
        raise ValueError("--tasks is empty; name tasks, separated by commas, or `list`")
    opened = open_text_model(model, options.tokenizer, data, where)
    with progress_bars(Terminal(file=sys.stderr)) as begin_bar:  # this file: the harness's own stderr is not shown
        bars: dict[tuple[str, int], OnProgress] = {}

        def on_progress(what: str, done: int, total: int) -> None:
            bars.setdefault((what, total), begin_bar(what))(done, total)

        under_test = HarnessModel(
            opened.model,
            opened.tokenizer,
            max_length=seq_len,
            batch_size=computing.batch_size,
            dtype=computing.dtype,
            on_progress=on_progress,
        )
        scores = run_tasks(
            under_test,
            names,
            facts=options.facts,
            squad=options.squad,
            folder=options.task_folder,
            limit=options.limit,
        )
    rows = [
        (
            score.task,
            score.metric,
            digits(score.value),
            "" if score.stderr is None else digits(score.stderr),
            f"{score.examples:,}",
        )
        for score in scores
    ]
    to.result_console().print(TerminalTable(Table(("task", "score", "value", "standard error", "examples"), rows)))
    entry = {
        "type": "tasks",
        "model": model_name(model),
        "scores": [score._asdict() for score in scores],
        "limit": options.limit,
        "max_length": under_test.max_length,
        "precision": "fp32" if computing.dtype is None else str(computing.dtype).removeprefix("torch."),
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
