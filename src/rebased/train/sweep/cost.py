"""An estimate of how long a sweep will take: the work of each run, times measured seconds per unit of work.

The seconds per multiply-add come from records, of this folder and of known runs, if they are from the same model of GPU
or CPU as this machine's. Without such records a few steps of each model are timed, in a worker of the executor.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from rebased.config import plural
from rebased.ops.backend import has_gpu
from rebased.runs.configs import parse_run
from rebased.runs.provenance import describe_machine, processor_name
from rebased.runs.record import read_record
from rebased.runs.run_config import RunConfig
from rebased.train.executors.jobs import Executor
from rebased.train.executors.worker import one_line
from rebased.train.kinds import workload_of
from rebased.train.lifecycle import train
from rebased.train.sweep.plan import PlannedRun

CPU_WORK = 3e8  # multiply-adds of one timed step on a CPU: about a tenth of a second, unless one sequence needs more
STEPS, LINES = 3, 6  # the first line of the record does not count: kernels are compiled and graphs captured in it


class Estimate(NamedTuple):
    """How long the runs of a sweep will take."""

    seconds: dict[str, float]  # per run that is to be trained, by digest, if it does not stop early
    total: float | None  # seconds on the clock, with as many runs at once as the executor has workers; None: not known
    basis: str  # where the numbers come from, and how far to trust them; or why there are none
    work: Mapping[str, float] = MappingProxyType({})  # multiply-adds that `seconds` are for, by digest
    least: float = 0.0  # `total` if every model is as fast as the fastest time that was measured of it
    most: float = 0.0  # and as slow as the slowest


class _Rate(NamedTuple):
    """Seconds per multiply-add: the fastest that was measured, a typical one, the slowest."""

    least: float
    typical: float
    most: float


def estimate(
    runs: Sequence[PlannedRun],
    all_runs: Sequence[PlannedRun],
    executor: Executor,
    share: Callable[[PlannedRun], float] = lambda run: 1.0,
) -> Estimate:
    """The estimate for `runs`, which are to be trained. The records of `all_runs` of the sweep give the rates.

    Runs with the same mixers have the same rate. `share(run)` is the probability that a run will be trained at all: it
    weighs the run's time in the total.
    """
    seconds = dict.fromkeys([run.digest for run in runs], _Rate(0.0, 0.0, 0.0))
    work: dict[str, float] = {}
    sources: Counter[str] = Counter()  # models by where their rates come from
    untimed: dict[str, list[str]] = {}  # models by the reason why they have no rate
    processor = cache(lambda device: executor.call(processor_of, device))  # by `train.device`; takes seconds on a GPU
    for pattern in dict.fromkeys(map(_pattern, runs)):
        group = [run for run in runs if _pattern(run) == pattern]
        records = [run for run in all_runs if _pattern(run) == pattern and run.lines]
        try:
            recorded = _recorded_rate(records, processor(group[0].config.train.device)) if records else None
            rate = recorded or _timed_rate(group, executor)
            sources["recorded" if recorded else "timed"] += 1
            for run in group:
                kind = workload_of(run.config)
                left = max(0.0, kind.run_work(run.config) - kind.recorded_work(run.config, run.lines)[0])
                seconds[run.digest], work[run.digest] = _Rate(*(left * each for each in rate)), left
        except Exception as error:  # its runs will fail too, and the sweep reports them then
            untimed.setdefault(one_line(str(error)), []).append(group[0].model)
    wanted = [run for run in runs if share(run) > 0]
    timed = any(run.digest in work for run in wanted)
    basis = [_basis(sources, all_runs)] if timed else []
    for why, models in untimed.items():
        left_out = f" and {'is' if len(models) == 1 else 'are'} left out" if timed else ""
        basis.append(f"{', '.join(models)} could not be timed{left_out} ({why})")
    least, total, most = (
        max(
            sum(seconds[run.digest][i] * share(run) for run in runs) / executor.workers,
            max((seconds[run.digest][i] for run in wanted), default=0.0),
        )
        for i in range(3)
    )
    typical = {digest: each.typical for digest, each in seconds.items()}
    return Estimate(typical, total if timed or not wanted else None, "; ".join(basis), work, least, most)


def _recorded_rate(records: Sequence[PlannedRun], processor: str) -> _Rate | None:
    """The mean rate of records from this model of GPU or CPU, weighted by work; None if there are none."""
    measured = []
    for run in records:
        machines = [line["machine"] for line in run.lines if line["type"] in ("run", "resume")]
        if all(processor_name(machine) == processor for machine in machines):
            measured.append(workload_of(run.config).recorded_work(run.config, run.lines))
    rates = [seconds / work for work, seconds in measured if work]
    if not rates:
        return None
    return _Rate(min(rates), sum(each[1] for each in measured) / sum(each[0] for each in measured), max(rates))


def _timed_rate(runs: Sequence[PlannedRun], executor: Executor) -> _Rate:
    """The rate at which a few steps of a run of middling size are trained, beside others on the same GPU."""
    ordered = sorted((run.config for run in runs), key=lambda config: workload_of(config).run_work(config))
    times = executor.call(time_steps, ordered[len(ordered) // 2].model_dump())
    at_once = max(1.0, executor.workers / (executor.gpus or executor.workers))
    return _Rate(*(at_once * each for each in (min(times), median(times), max(times))))


def _basis(sources: Counter[str], all_runs: Sequence[PlannedRun]) -> str:
    """Where the rates come from, in words."""
    said = []
    if sources["timed"]:
        models = plural(sources["timed"], "model") if sources["recorded"] else "each model"
        said.append(f"{STEPS} steps of {models}, timed just now")
    if sources["recorded"]:
        known = " and of known runs" if any(run.known for run in all_runs) else ""
        said.append(f"the records of this folder{known}")
    return (
        f"from {' and '.join(said)} (fastest to slowest); longer if other programs run here, shorter if runs stop early"
    )


def _pattern(run: PlannedRun) -> tuple[str, ...]:
    """The names of a run's mixers."""
    return tuple(mixer.name for mixer in run.config.model.mixers)


def processor_of(device: str) -> str:
    """The model of the GPU or CPU that runs with this `train.device` compute on, on the machine that calls this."""
    return processor_name(describe_machine(torch.device("cuda" if _computes_on_gpu(device) else "cpu")))


def time_steps(tree: dict[str, Any]) -> list[float]:
    """Train a shortened run, whose config is given as plain data. Returns seconds per multiply-add, measured often."""
    short = short_run(parse_run(tree))
    with tempfile.TemporaryDirectory(prefix="rebased-timing-") as folder:
        train(short, folder)
        lines = read_record(folder)
    seconds = [line["seconds"] for line in lines if line["type"] in ("epoch", "step")]
    return [each / (STEPS * workload_of(short).step_work(short)) for each in seconds[1:]]


def short_run(config: RunConfig) -> RunConfig:
    """The config with the same model and a few steps; on a CPU with fewer and shorter sequences per step."""
    kind, rows = workload_of(config), config.train.batch_size
    if _computes_on_gpu(config.train.device):
        return kind.shorten(config, rows, LINES, STEPS)
    sequences = CPU_WORK * rows / kind.step_work(config)
    return kind.shorten(config, max(1, min(rows, int(sequences))), LINES, STEPS, sequences)


def _computes_on_gpu(device: str) -> bool:
    """True if this machine would train a run with this `train.device` on a GPU."""
    return device == "cuda" or (device == "auto" and has_gpu())
