"""An estimate of how long a sweep will take: the work of each run, times measured seconds per unit of work.

Work is counted in multiply-adds. A sequence of T tokens costs T times (weights outside of the embeddings + numbers in
the mixers' states), and per labelled position the head, D times the vocabulary. Training costs three forward passes.
The seconds per multiply-add come from records, of this folder and of known runs, if they are from the same model of GPU
or CPU as this machine's. Without such records a few steps of each model are timed, in a worker of the executor.
"""

import json
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from rebased.config import plural
from rebased.mixers import can_extend, check_state_size
from rebased.models import LMConfig, shape_of
from rebased.ops.backend import has_gpu
from rebased.runs.configs import parse_run
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.provenance import describe_machine, processor_name
from rebased.runs.record import read_record
from rebased.runs.run_config import RunConfig
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.tasks import IGNORE, Task
from rebased.train.executors import Executor
from rebased.train.executors.jobs import nothing
from rebased.train.executors.worker import one_line
from rebased.train.lifecycle import train
from rebased.train.lm.corpus import open_corpus
from rebased.train.sweep.plan import PlannedRun

CPU_WORK = 3e8  # multiply-adds of one timed step on a CPU: about a tenth of a second, unless one sequence needs more
SHORTEST = 64  # tokens of a sequence to which a timed step on a CPU cuts a text
PATIENCE = 30  # seconds for the timed steps of one model on a CPU
LABELLED_ROWS = 256  # examples over which labels are averaged: their number can differ from row to row
Pattern = tuple[str, ...]
STEPS, EPOCHS = 3, 3  # only the last epoch is timed: before it kernels are compiled and graphs captured


class Rate(NamedTuple):
    """How fast runs of one kind of model are computed."""

    per_work: float  # seconds per multiply-add
    start: float  # seconds before a run's first step
    work: float  # multiply-adds of the timed step, or of the recorded run
    measured: bool  # True: steps were timed for this plan; False: computed from records


class Estimate(NamedTuple):
    """How long the runs of a sweep will take."""

    seconds: dict[str, float]  # per run that is to be trained, by digest, if it does not stop early
    total: float | None  # seconds on the clock, with as many runs at once as the executor has workers; None: not known
    basis: str  # where the numbers come from, and how far to trust them; or why there are none
    work: Mapping[str, float] = MappingProxyType({})  # multiply-adds that `seconds` are for, by digest


def sequence_work(model: LMConfig, seq_len: int, labels: float) -> float:
    """Multiply-adds of a forward pass over one sequence, of which `labels` positions are labelled."""
    body, states = _numbers(model, seq_len)
    return seq_len * (body + states) + labels * model.d_model * model.vocab_size


@cache
def _labels_per_row(cls: type[Task], settings: str) -> float:
    """The mean number of labelled positions per example of the task with these settings (JSON)."""
    labels = cls.model_validate_json(settings).build(LABELLED_ROWS, seed=0).labels
    return int((labels != IGNORE).sum()) / LABELLED_ROWS


@cache
def _numbers(model: LMConfig, seq_len: int) -> tuple[int, int]:
    """The number of weights outside of the embeddings, and of numbers in the states after seq_len tokens."""
    shape = shape_of(model)
    tables = sum(table.weight.numel() for table in (shape.embedding, shape.positions) if table is not None)
    states = sum(check_state_size(block.mixer, seq_len) for block in shape.blocks if can_extend(block.mixer))
    return shape.num_parameters() - tables, states


def task_work(model: LMConfig, task: Task) -> float:
    """Multiply-adds of a forward pass over one sequence of a synthetic task."""
    return sequence_work(model, task.seq_len, _labels_per_row(type(task), task.model_dump_json()))


def run_work(config: RunConfig) -> float:
    """Multiply-adds of the whole run, evaluations included, if it does not stop early."""
    if isinstance(config, SyntheticRunConfig):
        return config.train.epochs * epoch_work(config)
    assert isinstance(config, LMRunConfig)
    train, window = config.train, sequence_work(config.model, config.data.seq_len, config.data.seq_len)
    evaluations = -(-train.steps // train.eval_every) if train.eval_every else 1
    windows = evaluations * _windows(config, "valid", train.eval_windows)
    windows += sum(_windows(config, split, train.final_windows) for split in ("valid", "test"))
    return train.steps * step_work(config) + windows * window


def step_work(config: RunConfig) -> float:
    """Multiply-adds of a training step; for a synthetic run, of a step on its first segment."""
    if isinstance(config, SyntheticRunConfig):
        return 3 * config.train.batch_size * task_work(config.model, config.task.task(config.task.train[0]))
    assert isinstance(config, LMRunConfig)
    T = config.data.seq_len
    return 3 * config.train.batch_size * sequence_work(config.model, T, T)


def epoch_work(config: SyntheticRunConfig) -> float:
    """Multiply-adds of an epoch: training, test and held-out evaluation."""
    task, model = config.task, config.model
    training, testing = (
        sum(segment.examples * task_work(model, task.task(segment)) for segment in segments)
        for segments in (task.train, (*task.test, *task.held_out))
    )
    return 3 * training + testing


def _windows(config: LMRunConfig, split: str, limit: int | None) -> int:
    """The number of windows of a split that are evaluated: all of them, or at most `limit`."""
    corpus = open_corpus(config, verify=False)
    count = len(corpus.windows(split, config.data.seq_len)) if split in corpus.splits else 0
    return count if limit is None else min(count, limit)


def recorded_work(config: RunConfig, lines: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(multiply-adds, seconds) of the work in a record. Lines without their seconds are not counted."""
    if isinstance(config, SyntheticRunConfig):
        seconds = [
            line["seconds"] + line["test_seconds"] for line in lines if {"seconds", "test_seconds"} <= line.keys()
        ]
        return len(seconds) * epoch_work(config), median(seconds) * len(seconds) if seconds else 0.0
    steps = [line for line in lines if line["type"] == "step" and "seconds" in line]
    return (steps[-1]["step"] * step_work(config) if steps else 0.0), sum(line["seconds"] for line in steps)


def estimate(
    runs: Sequence[PlannedRun],
    all_runs: Sequence[PlannedRun],
    executor: Executor,
    share: Callable[[PlannedRun], float] = lambda run: 1.0,
) -> Estimate:
    """The estimate for `runs`, which are to be trained. The records of `all_runs` of the sweep give the rates.

    `share(run)` is the probability that a run will be trained at all: it weighs the run's time in the total.
    """
    known_work = work_by_settings(all_runs)
    rates: dict[Pattern, Rate] = {}
    untimed: dict[str, list[str]] = {}  # models by the reason why they have no rate
    seconds = dict.fromkeys([run.digest for run in runs], 0.0)
    expected: dict[str, float] = {}
    processors: dict[str, str] = {}  # by `train.device`; a call takes seconds on a GPU
    for pattern in dict.fromkeys(map(pattern_of, runs)):
        group = [run for run in runs if pattern_of(run) == pattern]
        try:
            records = [run for run in all_runs if pattern_of(run) == pattern and run.lines]
            device = group[0].config.train.device
            if records and device not in processors:
                processors[device] = executor.call(processor_of, device)
            known = [rate for run in records if (rate := _recorded_rate(run, processors[device]))]
            if not known and not any(rate.measured for rate in rates.values()):
                executor.call(nothing)  # the first call is slow, so it is not timed
            rate = _mean_rate(known) if known else _timed_rate(group, executor)
            for run in group:
                done, work = recorded_work(run.config, run.lines)[0], run_work(run.config)
                likely = known_work.get(but_for_the_seed(run), work)
                left = max(0.0, likely - done if likely > done else work - done)
                seconds[run.digest], expected[run.digest] = rate.start + left * rate.per_work, left
            rates[pattern] = rate
        except Exception as error:  # its runs will fail too, and the sweep reports them then
            untimed.setdefault(one_line(str(error)), []).append(group[0].model)
    wanted = [run for run in runs if share(run) > 0]
    timed = [run for run in wanted if pattern_of(run) in rates]
    basis = list(_basis(timed, rates, any(run.known for run in all_runs)))
    for why, models in untimed.items():
        left_out = f" and {'is' if len(models) == 1 else 'are'} left out" if timed else ""
        basis.append(f"{', '.join(models)} could not be timed{left_out} ({why})")
    longest = max((seconds[run.digest] for run in wanted), default=0.0)
    total = max(sum(seconds[run.digest] * share(run) for run in runs) / executor.workers, longest)
    return Estimate(seconds, total if timed or not wanted else None, "; ".join(basis), expected)


def but_for_the_seed(run: PlannedRun) -> str:
    """A key that runs share if they differ in the seed alone."""
    settings = run.config.model_dump(mode="json")
    return json.dumps(settings | {"train": settings["train"] | {"seed": None}}, sort_keys=True)


def work_by_settings(runs: Sequence[PlannedRun]) -> dict[str, float]:
    """The most multiply-adds that a done run needed, by its settings but for the seed: some stop early."""
    work: dict[str, float] = {}
    for run in runs:
        if run.status == "done":
            key = but_for_the_seed(run)
            work[key] = max(work.get(key, 0.0), recorded_work(run.config, run.lines)[0])
    return {key: most for key, most in work.items() if most}


def pattern_of(run: PlannedRun) -> Pattern:
    """The names of a run's mixers. Runs with the same mixers have the same rate, but different amounts of work."""
    return tuple(mixer.name for mixer in run.config.model.mixers)


def processor_of(device: str) -> str:
    """The model of the GPU or CPU that runs with this `train.device` compute on, on the machine that calls this."""
    return processor_name(describe_machine(torch.device("cuda" if computes_on_gpu(device) else "cpu")))


def _recorded_rate(run: PlannedRun, processor: str) -> Rate | None:
    """The rate of a run by its record; None if it has no times yet, or another model of GPU or CPU took part."""
    if any(processor_name(line["machine"]) != processor for line in run.lines if line["type"] in ("run", "resume")):
        return None
    work, seconds = recorded_work(run.config, run.lines)
    return Rate(seconds / work, 0.0, work, measured=False) if work else None


def _mean_rate(known: Sequence[Rate]) -> Rate:
    """The mean rate, weighted by work: larger runs matter more for the total."""
    work = sum(rate.work for rate in known)
    return Rate(sum(rate.per_work * rate.work for rate in known) / work, 0.0, work / len(known), measured=False)


def _timed_rate(runs: Sequence[PlannedRun], executor: Executor) -> Rate:
    """The rate of one model, timed with the run whose work is the median of `runs`."""
    middle = sorted(runs, key=lambda run: run_work(run.config))[len(runs) // 2].config
    started = time.perf_counter()
    per_work, steps, work = executor.call(time_steps, middle.model_dump())
    sharing = max(1.0, executor.workers / executor.gpus) if executor.gpus else 1.0  # runs that share a GPU
    return Rate(per_work * sharing, time.perf_counter() - started - steps, work, measured=True)


def time_steps(tree: dict[str, Any]) -> tuple[float, float, float]:
    """Train a shortened run and time its steps. `tree` is the config of the run as plain data.

    Returns (seconds per multiply-add, seconds spent on steps, multiply-adds of a step).
    """
    short = _short_run(tree)
    folder = Path(tempfile.mkdtemp(prefix="rebased-timing-"))
    try:
        with nullcontext() if computes_on_gpu(short.train.device) else no_longer_than(PATIENCE):
            train(short, folder)
        lines = read_record(folder)
    finally:
        shutil.rmtree(folder)
    seconds = [line["seconds"] for line in lines if line["type"] in ("epoch", "step")]
    done = STEPS * step_work(short)
    return seconds[-1] / done, EPOCHS * seconds[-1], done / STEPS


class TooSlow(Exception):
    """The steps that are timed take too long."""


@contextmanager
def no_longer_than(seconds: int) -> Iterator[None]:
    """Raise TooSlow when the time is up. Without effect on Windows and outside of the main thread: it needs signals."""

    def ring(*_: object) -> None:
        raise TooSlow(f"{EPOCHS * STEPS} short steps take more than {seconds} s here")

    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return
    former = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def computes_on_gpu(device: str) -> bool:
    """True if this machine would train a run with this `train.device` on a GPU."""
    return device == "cuda" or (device == "auto" and has_gpu())


def _short_run(tree: dict[str, Any]) -> RunConfig:
    """The config with the same model and EPOCHS times STEPS steps; on a CPU with fewer sequences per step, and of a
    text with shorter ones."""
    config = parse_run(tree)
    per_sequence = step_work(config) / config.train.batch_size
    on_gpu = computes_on_gpu(config.train.device)
    rows = config.train.batch_size if on_gpu else max(1, min(config.train.batch_size, int(CPU_WORK / per_sequence)))
    if isinstance(config, SyntheticRunConfig):
        few = config.task.train[0].settings()
        task = {"train": [few | {"examples": STEPS * rows}], "test": [few | {"examples": 1}], "held_out": []}
        train = {"epochs": EPOCHS, "stop_above": 1.0, "give_up": None, "protocol": "paper", "checkpoint_seconds": 1e6}
        return SyntheticRunConfig.model_validate(
            {"task": tree["task"] | task, "model": tree["model"], "train": tree["train"] | train | {"batch_size": rows}}
        )
    steps = EPOCHS * STEPS
    train = {"steps": steps, "warmup_steps": 0, "log_every": STEPS, "eval_every": None, "checkpoint_every": steps}
    train |= {"eval_windows": 1, "final_windows": 1, "parallel": "none", "batch_size": rows}
    length = tree["data"]["seq_len"]
    if not on_gpu:
        length = min(length, max(SHORTEST, int(length * CPU_WORK / per_sequence)))
        train["compile"] = "none"  # it would take longer than the steps, and hardly changes them
    return parse_run({**tree, "data": tree["data"] | {"seq_len": length}, "train": tree["train"] | train})


def _basis(runs: Sequence[PlannedRun], rates: dict[Pattern, Rate], known: bool) -> Iterator[str]:
    """Where the numbers of an estimate come from, in words; nothing if there are no runs."""
    if not runs:
        return
    timed = sum(rate.measured for rate in rates.values())
    parts = []
    if timed:
        models = "each model" if timed == len(rates) else plural(timed, "model")
        parts.append(f"{STEPS} steps of {models}, timed just now")
    if timed < len(rates):
        parts.append("the records of this folder" + " and of known runs" * known)
    spread = max(_times_more(run, rates[pattern_of(run)]) for run in runs)
    scaled = f", scaled to up to {spread:.0f} times as much work" if spread >= 1.5 else ""
    yield (
        f"from {' and '.join(parts)}{scaled}: may be off by a factor of {2 if spread <= 30 else 4} even if nothing "
        "else runs here; less where runs stop early"
    )


def _times_more(run: PlannedRun, rate: Rate) -> float:
    """How many times more, or less, work the run is than what its rate was measured on: 1 or more."""
    unit = step_work(run.config) if rate.measured else run_work(run.config)
    return max(unit / rate.work, rate.work / unit)
