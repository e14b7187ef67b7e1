"""rebased demo: train ReBased, Based and attention on a small MQAR task on the CPU, and write a page about them."""

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

from rebased.cli import INTERRUPTED
from rebased.cli.board import Board
from rebased.cli.interruption import AT_ONCE
from rebased.cli.output import OUT_OPTION, TO_TERMINAL, Output, say
from rebased.config import load_config, plural
from rebased.report import check_replaceable, demo_page, write_page
from rebased.report.demo import MARK, findings
from rebased.runs.finished import read_run
from rebased.runs.record import RECORD, read_record
from rebased.runs.shipped import find_config
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.train.executors import Failed, Job, LocalExecutor, Outcome

MODELS = ("rebased", "based", "conv_attention")
OUT = Path("runs") / "demo"
SEEDS = 3  # two minutes on two cores; too few to decide which model learns sooner, and the page says so
FIRST_SEED = 42  # the paper's


def demo(
    *,
    out: Annotated[Path, OUT_OPTION] = OUT,
    seeds: int = SEEDS,
    config: Path | None = None,
    to: Output = TO_TERMINAL,
) -> int:
    """Train ReBased, Based and attention on a small MQAR task on the CPU, and write a page that compares them.

    This takes two to three minutes on two cores. The same command resumes it; runs that are done are not repeated.

    Parameters
    ----------
    out
        Folder for the runs and for report.html.
    seeds
        Number of runs per model.
    config
        YAML file or name of a shipped config to use instead of the demo's own. Its model.preset and train.seed are
        replaced.
    """
    if seeds < 1:
        raise ValueError(f"--seeds {seeds}: give 1 or more")
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; choose a folder (--out)")
    to.check()
    console, page, command = to.console(), out / "report.html", command_line(out, seeds, config)
    check_replaceable(page)  # before minutes of training, not after
    configs = demo_configs(config, seeds)
    folders = {name: out / f"{name.replace(' ', '-')}-{run.digest()}" for name, run in configs.items()}
    left = sum(not is_done(folder) for folder in folders.values())
    if left:
        say(
            console,
            f"{plural(left, 'run')} to train, {seeds} per model, in {out}; Ctrl-C saves, and the same command goes on",
        )
    try:
        with Board(console) as board:
            jobs = [
                Job(configs[name], folder, board.sink(name, configs[name].train.epochs))
                for name, folder in folders.items()
                if not is_done(folder)
            ]
            results = LocalExecutor().run(jobs, partial(give_up, command), board.stopping)
    except KeyboardInterrupt:
        say(console, f"{AT_ONCE}: {command}")
        return INTERRUPTED
    if any(result is None or getattr(result, "status", None) == "interrupted" for result in results):
        say(console, f"interrupted, saved; continue with: {command}")
        return INTERRUPTED
    runs = [read_run(folder) for folder in folders.values()]
    write_page(demo_page(runs, command), page)
    for finding in findings(runs):
        say(to.result_console(), finding)
    say(console, f"wrote {page}: open it in a browser")
    each = [
        {
            "folder": str(folder),
            "model": run.model,
            "seed": run.seed,
            "accuracy": run.reported.accuracy,
            "epochs_until_mark": run.epochs_until(MARK),
        }
        for folder, run in zip(folders.values(), runs, strict=True)
    ]
    to.emit({"findings": findings(runs), "page": page, "mark": MARK, "runs": each})
    return 0


def demo_configs(path: Path | None, seeds: int) -> dict[str, SyntheticRunConfig]:
    """The runs of the demo by name: one per model and seed, all with the same data and settings."""
    path = find_config(path or "demo", "run")
    return {
        f"{model} seed {seed}": load_config(SyntheticRunConfig, path, {"model.preset": model, "train.seed": str(seed)})
        for model in MODELS
        for seed in range(FIRST_SEED, FIRST_SEED + seeds)
    }


def is_done(folder: Path) -> bool:
    """True if the record in the folder says that the run is done."""
    return (folder / RECORD).exists() and any(line.get("status") == "done" for line in read_record(folder)[-1:])


def give_up(command: str, index: int, outcome: Outcome) -> None:
    """Raise ValueError if a run failed, which ends and saves the others: the page needs all models."""
    if isinstance(outcome, Failed):
        raise ValueError(f"{outcome.error}; try it again with: {command}")


def command_line(out: Path, seeds: int, config: Path | None) -> str:
    """The command that starts or resumes this demo."""
    words = ["rebased", "demo"]
    words += ["--out", str(out)] if out != OUT else []
    words += ["--seeds", str(seeds)] if seeds != SEEDS else []
    words += ["--config", str(config)] if config else []
    return shlex.join(words)
