"""rebased sweep: train all runs of a grid, several at once. The same command resumes it."""

import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.console import Console

from rebased import cli
from rebased.cli import INTERRUPTED
from rebased.cli.imports import Imports, import_all, import_user_code
from rebased.cli.output import OPTIONS as OUTPUT
from rebased.cli.output import OUT_OPTION, TO_TERMINAL, Output, each_warning_once, say
from rebased.cli.overrides import parse_overrides
from rebased.cli.sweep_board import ENDED, LineBoard, LiveBoard, Tally, describe_plan, duration, plan_table
from rebased.cli.sweep_files import DEFAULT_SWEEP, SweepFiles, SweepOptions
from rebased.config import plural
from rebased.files import NotSaved
from rebased.runs.record import RECORD, lines_so_far, read_record
from rebased.runs.shipped import find_config
from rebased.runs.sweep_log import LOG, SweepLog, check_folder, sweep_folder
from rebased.runs.synthetic_config import SyntheticTrainConfig
from rebased.train.executors.jobs import Executor
from rebased.train.executors.local import LocalExecutor
from rebased.train.executors.mps import mps_daemon
from rebased.train.executors.ray_cluster import RayExecutor
from rebased.train.oom import OUT_OF_MEMORY
from rebased.train.sweep.cost import Estimate, estimate
from rebased.train.sweep.grid import Sweep, from_python, load_sweep
from rebased.train.sweep.plan import Plan, PlannedRun
from rebased.train.sweep.queue import Ending, SweepQueue, TimeBudget, train_runs
from rebased.train.sweep.stages import Stages

OWN = "out dry-run executor workers jobs mps import retry-failed known bundle for carry-unfinished carry-mib help"
OPTIONS = (
    *(f"--{name}" for name in OWN.split()),
    *OUTPUT,
    *(f"--train.{k}" for k in SyntheticTrainConfig.model_fields),
)
SOME_FAILED = 1
TIME_UP = 75  # "try again later" (EX_TEMPFAIL): the same command goes on


def sweep(
    file: Path,
    /,
    *settings: Annotated[str, Parameter(allow_leading_hyphen=True, show=False)],
    out: Annotated[Path | None, OUT_OPTION] = None,
    executor: Literal["local", "ray"] = "local",
    imports: Imports = (),
    retry_failed: Annotated[bool, Parameter(negative="")] = False,
    options: SweepOptions = DEFAULT_SWEEP,
    to: Output = TO_TERMINAL,
) -> int:
    """Train every run of a grid. The same command resumes a stopped sweep; runs that are done are not repeated.

    The exit code is 1 if a run has failed or a file could not be written, 75 if the time was up before all runs were
    done, and 130 if the sweep was interrupted.

    Parameters
    ----------
    file
        YAML file with a base run and a grid, or the name of a shipped one, such as table1-cpu (`rebased list configs`
        lists them), or Python file with `configs = [...]`. Options change a setting of every run, --train.epochs 8, an
        axis of the grid, --grid.train.seed "[42]", or the stages, --select.seeds 3
    out
        Folder for the runs, one subfolder per run, named by its digest. Default: runs/ and the file's name.
    executor
        local: processes of this machine, one per GPU or one per core. ray: the Ray cluster at RAY_ADDRESS, or one
        started here; its nodes must share the file system with the folder.
    imports
        Python file or module with mixers or tasks of your own (@register_mixer, @register_task). Can be given
        several times.
    retry_failed
        Also train the runs that failed before.
    """
    to.check(resumes=True)
    command = Command(file, settings, out, SweepFiles(options), imports, executor)
    code, result = run_sweep(command, to, retry_failed=retry_failed)
    if result is not None:
        to.emit(result)
    return code


def run_sweep(command: "Command", to: Output, *, retry_failed: bool) -> tuple[int, dict[str, Any] | None]:
    """Plan the sweep of a command, show the plan, and train it unless it is a dry run. Returns the exit code, and the
    runs as JSON data; None after a second Ctrl-C."""
    console, folder, files, options = to.console(), command.folder, command.files, command.files.options
    with each_warning_once(console):
        points, select, by_task = command.read()
    check_folder(folder)  # after a misspelt name of a sweep, whose folder may be that of something else
    with ExitStack() as stack:
        if options.mps and not options.dry_run:
            stack.enter_context(mps_daemon())
        where = command.make_executor(uses_gpu=any(point.config.train.device != "cpu" for point in points))
        stack.callback(where.close)
        log = SweepLog(folder) if options.dry_run else stack.enter_context(sweep_folder(folder))
        plan = files.plan(points, folder, log, command.file, on_gpu=where.gpus > 0, dry_run=options.dry_run)
        runs, stages = plan.to_do(retry_failed), Stages(select, plan.runs) if select else None
        cost = show_plan(console, plan, log, files, where, stages, retry_failed=retry_failed)
        if options.dry_run:
            found = {"estimated_seconds": cost.total, "estimated_range": [cost.least, cost.most]}
            return 0, result_of(plan, plan.runs) | found
        limit, budget = options.time_limit, None
        if limit is not None:
            may_break_off = options.carry_unfinished is not None
            budget = TimeBudget(limit.total_seconds(), cost, may_break_off=may_break_off, started=cli.began)
        queue = SweepQueue(runs, stages, budget, plan.runs, by_task=by_task)
        tally, shown = Tally(plan, cost, where.workers, stages), LiveBoard if console.is_terminal else LineBoard

        def again(seconds: float | None = None) -> str:
            return same_sweep(retry_failed=bool(tally.failed) and not retry_failed, seconds=seconds)

        try:
            with shown(console, tally, files.keep(plan)) as board:
                ending = train_runs(queue, log, where, board)
        except KeyboardInterrupt:
            say(console, f"ended at once; resume the runs in progress from their last checkpoints with: {again()}")
            return INTERRUPTED, None
        except NotSaved as error:
            raise NotSaved(f"{error}; continue with: {again()}") from error
        code = conclude(console, plan, tally, queue, ending, files, again)
        result = result_of(plan, list(tally.runs.values())) | {"complete": ending == "complete"}
        return SOME_FAILED if files.unwritten else code, result


def show_plan(
    console: Console,
    plan: Plan,
    log: SweepLog,
    files: SweepFiles,
    where: Executor,
    stages: Stages | None,
    *,
    retry_failed: bool,
) -> Estimate:
    """Print the plan and an estimate of the time, which is returned."""
    runs = plan.to_do(retry_failed)
    console.print(plan_table(plan))
    if log.damaged:
        lines = plural(log.damaged, "damaged line")
        say(console, f"skipped {lines} of {plan.folder / LOG}: runs that failed there are trained again")
    for line in files.describe(plan):
        say(console, line)
    if runs and not console.is_terminal:  # a log shows no status
        say(console, "estimating the time ...")
    with console.status("timing a few steps of each model ..."):
        cost = estimate(runs, plan.runs, where, stages.share if stages else lambda run: 1.0)
    for line in describe_plan(plan, runs, cost, where, retry_failed, stages):
        say(console, line)
    return cost


def conclude(
    console: Console,
    plan: Plan,
    tally: Tally,
    queue: SweepQueue,
    ending: Ending,
    files: SweepFiles,
    again: Callable[..., str],
) -> int:
    """Write what leaves this machine, print how the sweep ended and what to type next. Returns the exit code."""
    for run in tally.failed:
        say(console, f"failed: {run} ({run.folder}): {run.error}")
    if cut := [run for run in plan.runs if any(line["type"] == OUT_OF_MEMORY for line in lines_so_far(run.folder))]:
        runs = plural(len(cut), "run")
        say(console, f"out of GPU memory: {runs} continued with fewer sequences at once, the same batch")
    for line in files.write(plan):
        say(console, line)
    left_out = f", {len(queue.left_out)} left out by the choice" if queue.left_out else ""
    say(console, f"{tally.summary()}{left_out}; {plan.folder}")
    if ending == "out_of_time" and (budget := queue.budget):
        left = plural(tally.expected() - tally.count(*ENDED), "run")
        enough, seconds = budget.enough_for(queue.not_begun), None
        more = f", about {duration(tally.seconds_left())}"
        if enough > budget.total:  # the same command would train nothing
            seconds = enough
            more = (
                f", and none fits into --for {duration(budget.total)}: the shortest takes about "
                f"{duration(min(map(budget.seconds, queue.not_begun)))}. Give more time, or --carry-unfinished FOLDER, "
                "with which unfinished runs go on elsewhere"
            )
        say(console, f"time is up with {left} left{more}; go on with: {again(seconds=seconds)}")
        return SOME_FAILED if tally.failed else TIME_UP
    if ending == "interrupted":
        say(console, f"interrupted, saved; continue with: {again()}")
        return INTERRUPTED
    if queue.not_begun:
        waiting = plural(len(queue.not_begun), "run")
        say(console, f"{waiting} not begun: their value is chosen by other runs, and all of those failed")
    if tally.failed:
        say(console, f"try the failed runs again with: {again()}")
        return SOME_FAILED
    return 0


@dataclass(frozen=True)
class Command:
    """The runs of a sweep, where they are kept, and how they are trained."""

    file: Path
    settings: tuple[str, ...]
    out: Path | None
    files: SweepFiles
    imports: tuple[str, ...] = ()
    executor: str = "local"

    @property
    def folder(self) -> Path:
        """Where the runs are written."""
        return self.out or Path("runs") / self.file.stem

    def read(self) -> Sweep:
        """The runs in a file in YAML or Python, after the user's code has been imported."""
        overrides = parse_overrides(self.settings, OPTIONS)
        import_all(self.imports)
        if self.file.suffix != ".py":
            return load_sweep(find_config(self.file, "sweep"), overrides)
        module = import_user_code(str(self.file), said=str(self.file))
        if not hasattr(module, "configs"):
            raise ValueError(
                f"{self.file} has no `configs`: it should hold configs = [...], a list of RunConfigs or mappings"
            )
        return Sweep(from_python(self.file, module.configs, overrides))

    def make_executor(self, *, uses_gpu: bool) -> Executor:
        """The executor that the options ask for. Its workers import the user's code; their working directory may be
        another one."""
        names = [*self.imports, *([str(self.file)] if self.file.suffix == ".py" else [])]
        names = [str(Path(name).absolute()) if name.endswith(".py") else name for name in names]
        chosen = LocalExecutor if self.executor == "local" else RayExecutor
        return chosen(self.files.options.workers, uses_gpu=uses_gpu, prepare=partial(import_all, tuple(names)))


def same_sweep(*, retry_failed: bool = False, seconds: float | None = None) -> str:
    """The command that was typed; with --retry-failed, or with more time, if it needs that to go on."""
    words = [*cli.typed, *(["--retry-failed"] if retry_failed else [])]
    if seconds is not None:
        at = next(n for n, word in enumerate(words) if word.partition("=")[0] == "--for")
        words[at : at + (1 if "=" in words[at] else 2)] = ["--for", f"{ceil(seconds)}s"]
    return shlex.join(["rebased", *words])


def result_of(plan: Plan, runs: Sequence[PlannedRun]) -> dict[str, Any]:
    """The runs of a sweep as JSON data, with the score of each that is done."""

    def describe(run: PlannedRun) -> dict[str, Any]:
        done = run.status in ("done", "diverged") and (run.folder / RECORD).exists()  # a known run may have no folder
        return {
            "digest": run.digest,
            "folder": run.folder,
            "model": run.model,
            "task": run.task,
            "d_model": run.config.model.d_model,
            "lr": run.config.train.lr,
            "seed": run.config.train.seed,
            "status": run.status,
            run.config.metric: run.config.result(read_record(run.folder)[-1]) if done else None,
            "error": run.error,
        }

    return {"folder": plan.folder, "runs": [describe(run) for run in runs]}
