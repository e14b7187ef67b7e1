"""rebased sweep: train all runs of a grid, several at once. The same command resumes it."""

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console

from rebased.cli import INTERRUPTED
from rebased.cli.imports import import_all, import_user_code
from rebased.cli.interruption import AT_ONCE
from rebased.cli.output import OPTIONS as OUTPUT
from rebased.cli.output import TO_TERMINAL, Output, say
from rebased.cli.overrides import parse_overrides
from rebased.cli.sweep_board import Tally, describe_plan, plan_table, score_of, sweep_board
from rebased.cli.warn_once import each_warning_once
from rebased.runs.record import lines_so_far, read_record
from rebased.runs.shipped import find_config
from rebased.runs.sweep_log import LOG, SweepLog, check_folder, sweep_folder
from rebased.runs.synthetic_config import SyntheticTrainConfig
from rebased.train.executors import Executor, LocalExecutor, RayExecutor
from rebased.train.oom import OUT_OF_MEMORY
from rebased.train.sweep import Plan, PlannedRun, Point, estimate, from_python, make_plan, read_sweep, train_runs

OPTIONS = (
    "--out",
    "--dry-run",
    "--executor",
    "--workers",
    "--import",
    "--retry-failed",
    "--help",
    *OUTPUT,
    *(f"--train.{key}" for key in SyntheticTrainConfig.model_fields),
)
SOME_FAILED = 1


def sweep(
    file: Path,
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    out: Annotated[Path | None, Parameter(name=["--out", "-o"])] = None,
    dry_run: Annotated[bool, Parameter(negative="")] = False,
    executor: Literal["local", "ray"] = "local",
    workers: int | None = None,
    imports: Annotated[tuple[str, ...], Parameter(name="--import", negative="", show_default=False)] = (),
    retry_failed: Annotated[bool, Parameter(negative="")] = False,
    to: Output = TO_TERMINAL,
) -> int:
    """Train every run of a grid. The same command resumes a stopped sweep; runs that are done are not repeated.

    The exit code is 1 if a run has failed and 130 if the sweep was interrupted.

    Parameters
    ----------
    file
        YAML file with a base run and a grid, or the name of a shipped one, such as table1-cpu (`rebased list configs`
        lists them), or Python file with `configs = [...]`. Options change a setting of every run, --train.epochs 8, or
        an axis of the grid: --grid.train.seed "[42]"
    out
        Folder for the runs, one subfolder per run, named by its digest. Default: runs/ and the file's name.
    dry_run
        Print the plan and an estimate of the time, and stop.
    executor
        local: processes of this machine, one per GPU or one per core. ray: the Ray cluster at RAY_ADDRESS, or one
        started here; its nodes must share the file system with the folder.
    workers
        Number of runs at once. If there are more than GPUs, several runs share a GPU.
    imports
        Python file or module with mixers or tasks of your own (@register_mixer, @register_task). Can be given
        several times.
    retry_failed
        Also train the runs that failed before.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"--workers {workers}: give 1 or more")
    to.check()
    console, folder = to.console(), out or Path("runs") / file.stem
    names = [*imports, *([str(file)] if file.suffix == ".py" else [])]
    names = [
        str(Path(name).absolute()) if name.endswith(".py") else name for name in names
    ]  # workers may have another working directory
    check_folder(folder)
    with each_warning_once(console):
        points = read_points(file, imports, parse_overrides(settings, OPTIONS))
    chosen = LocalExecutor if executor == "local" else RayExecutor
    uses_gpu = any(point.config.train.device != "cpu" for point in points)
    with ExitStack() as stack:
        where: Executor = chosen(workers, uses_gpu=uses_gpu, prepare=partial(import_all, tuple(names)))
        stack.callback(where.close)
        log = SweepLog(folder) if dry_run else stack.enter_context(sweep_folder(folder))
        plan = make_plan(points, folder, log.failures)
        runs = plan.to_do(retry_failed)
        console.print(plan_table(plan))
        if log.damaged:
            lines = f"{log.damaged} damaged line{'s' * (log.damaged > 1)}"
            say(console, f"skipped {lines} of {folder / LOG}: runs that failed there are trained again")
        with console.status("timing a few steps of each model ..."):
            cost = estimate(runs, plan.runs, where)
        for line in describe_plan(plan, runs, cost, where, retry_failed):
            say(console, line)
        if dry_run:
            to.emit(result_of(plan, plan.runs) | {"estimated_seconds": cost.total})
            return 0
        log.begin(file, [run.digest for run in plan.runs])
        tally = Tally(plan, cost, where.workers)
        command = command_line(file, settings, out, executor, workers, imports)
        try:
            with sweep_board(console, tally) as board:
                complete = train_runs(runs, log, where, board)
        except KeyboardInterrupt:
            say(console, f"{AT_ONCE}: {command}")
            return INTERRUPTED
        code = conclude(console, plan, tally, complete, command)
        to.emit(result_of(plan, list(tally.runs.values())) | {"complete": complete})
        return code


def read_points(file: Path, imports: tuple[str, ...], overrides: dict[str, str]) -> list[Point]:
    """The points of a sweep file in YAML or Python, after the user's code has been imported."""
    for name in imports:
        import_user_code(name)
    if file.suffix != ".py":
        return read_sweep(find_config(file, "sweep"), overrides)
    module = import_user_code(str(file), said=str(file))
    if not hasattr(module, "configs"):
        raise ValueError(f"{file} has no `configs`: it should hold configs = [...], a list of RunConfigs or mappings")
    return from_python(file, module.configs, overrides)


def conclude(console: Console, plan: Plan, tally: Tally, complete: bool, command: str) -> int:
    """Print how the sweep ended and what to type next. Returns the exit code."""
    for run in tally.failed:
        say(console, f"failed: {run} ({run.folder}): {run.error}")
    if cut := [run for run in plan.runs if any(line["type"] == OUT_OF_MEMORY for line in lines_so_far(run.folder))]:
        runs = f"{len(cut)} run{'s' * (len(cut) > 1)}"
        say(console, f"out of GPU memory: {runs} continued with fewer sequences at once, the same batch")
    say(console, f"{tally.summary()}; {plan.folder}")
    if not complete:
        say(console, f"interrupted, saved; continue with: {command}")
        return INTERRUPTED
    if tally.failed:
        say(console, f"try the failed runs again with: {command} --retry-failed")
        return SOME_FAILED
    return 0


def command_line(
    file: Path,
    settings: tuple[str, ...],
    out: Path | None,
    executor: str,
    workers: int | None,
    imports: tuple[str, ...],
) -> str:
    """The command that starts or resumes this sweep."""
    words = ["rebased", "sweep", str(file), *settings]
    words += ["--out", str(out)] if out else []
    words += ["--executor", executor] if executor != "local" else []
    words += ["--workers", str(workers)] if workers else []
    words += [word for name in imports for word in ("--import", name)]
    return shlex.join(words)


def result_of(plan: Plan, runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """The runs of a sweep as JSON data, with the score of each that is done."""

    def describe(run: PlannedRun) -> dict[str, Any]:
        done = run.status in ("done", "diverged")
        return {
            "digest": run.digest,
            "folder": run.folder,
            "model": run.model,
            "task": run.task,
            "d_model": run.config.model.d_model,
            "lr": run.config.train.lr,
            "seed": run.config.train.seed,
            "status": run.status,
            run.config.metric: score_of(read_record(run.folder)[-1]) if done else None,
            "error": run.error,
        }

    return {"folder": plan.folder, "runs": [describe(run) for run in runs]}
