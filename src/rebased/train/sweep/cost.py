"""How long a sweep will take: arithmetic that says how much more work one shape is than another, held against clocks.

The work of a sequence of T tokens is counted in multiply-adds: T times the weights outside of the embeddings and the
numbers of the mixers' states, and at each labelled position the head, D times the vocabulary. Training costs three
times a forward pass. The seconds that a unit of work takes come from the records of runs that this folder has, else
from a few steps of each model, taken where its runs would be.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rebased.mixers import can_extend
from rebased.models import LMConfig, shape_of
from rebased.ops.backend import has_gpu
from rebased.runs.base_config import BaseRunConfig
from rebased.runs.configs import parse_run
from rebased.runs.lm_config import TextRunConfig
from rebased.runs.record import lines_so_far, read_record
from rebased.runs.synthetic_config import RunConfig
from rebased.tasks import IGNORE, Task
from rebased.train.executors import Executor
from rebased.train.executors.jobs import nothing
from rebased.train.executors.worker import one_line
from rebased.train.lifecycle import train
from rebased.train.lm.corpus import open_corpus
from rebased.train.sweep.plan import PlannedRun

CPU_WORK = 3e8  # multiply-adds of one timed step on a CPU: a tenth of a second or so
LABELLED_ROWS = 256  # in which labels are counted: some tasks have more in one row than in another
Pattern = tuple[str, ...]
STEPS, EPOCHS = 3, 3  # timed are the steps of the last epoch: in the first kernels are compiled, then graphs captured


class Rate(NamedTuple):
    per_work: float  # seconds per multiply-add
    start: float  # seconds before a run's first step
    work: float  # of the step, or of the epoch, that was timed
    measured: bool  # by steps for this plan, rather than found in records


class Estimate(NamedTuple):
    seconds: dict[str, float]  # of each run that is to be trained, by digest, if it does not stop early
    total: float  # seconds on the clock, so many runs at once
    basis: str  # where the numbers come from, and how far to trust them


def sequence_work(model: LMConfig, seq_len: int, labels: float) -> float:
    """Multiply-adds of a forward pass over one sequence with so many labelled positions."""
    body, states = _numbers(model, seq_len)
    return seq_len * (body + states) + labels * model.d_model * model.vocab_size


@cache
def _labels_per_row(cls: type[Task], settings: str) -> float:
    """The mean number of labelled positions, over some training rows of the task with these settings (JSON)."""
    labels = cls.model_validate_json(settings).build(LABELLED_ROWS, seed=0).labels
    return int((labels != IGNORE).sum()) / LABELLED_ROWS


@cache
def _numbers(model: LMConfig, seq_len: int) -> tuple[int, int]:
    """Weights outside of the embeddings, and numbers in the states after seq_len tokens."""
    shape = shape_of(model)
    tables = shape.embedding.weight.numel() + shape.positions.weight.numel()
    states = sum(block.mixer.state_size(seq_len) for block in shape.blocks if can_extend(block.mixer))
    return shape.num_parameters() - tables, states


def task_work(model: LMConfig, task: Task) -> float:
    """Multiply-adds of a forward pass over one sequence of a synthetic task."""
    return sequence_work(model, task.seq_len, _labels_per_row(type(task), task.model_dump_json()))


def run_work(config: BaseRunConfig) -> float:
    """Multiply-adds of the whole run, evaluations included, if it does not stop early."""
    if isinstance(config, RunConfig):
        return config.train.epochs * epoch_work(config)
    assert isinstance(config, TextRunConfig)
    train, window = config.train, sequence_work(config.model, config.data.seq_len, config.data.seq_len)
    evaluations = -(-train.steps // train.eval_every) if train.eval_every else 1
    windows = evaluations * _windows(config, "valid", train.eval_windows)
    windows += sum(_windows(config, split, train.final_windows) for split in ("valid", "test"))
    return train.steps * step_work(config) + windows * window


def step_work(config: BaseRunConfig) -> float:
    """Multiply-adds of a training step, of a synthetic run one over its first segment."""
    if isinstance(config, RunConfig):
        return 3 * config.train.batch_size * task_work(config.model, config.task.task(config.task.train[0]))
    assert isinstance(config, TextRunConfig)
    T = config.data.seq_len
    return 3 * config.train.batch_size * sequence_work(config.model, T, T)


def epoch_work(config: RunConfig) -> float:
    """Multiply-adds of an epoch of training and its evaluations."""
    task, model = config.task, config.model
    training, testing = (
        sum(segment.examples * task_work(model, task.task(segment)) for segment in segments)
        for segments in (task.train, (*task.test, *task.held_out))
    )
    return 3 * training + testing


def _windows(config: TextRunConfig, split: str, most: int | None) -> int:
    corpus = open_corpus(config, verify=False)
    there = len(corpus.windows(split, config.data.seq_len)) if split in corpus.splits else 0
    return there if most is None else min(there, most)


def recorded_work(config: BaseRunConfig, lines: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(multiply-adds, seconds) of what a record tells of; lines that lack their seconds tell nothing."""
    if isinstance(config, RunConfig):
        seconds = [
            line["seconds"] + line["test_seconds"] for line in lines if {"seconds", "test_seconds"} <= line.keys()
        ]
        return len(seconds) * epoch_work(config), median(seconds) * len(seconds) if seconds else 0.0
    steps = [line for line in lines if line["type"] == "step" and "seconds" in line]
    return (steps[-1]["step"] * step_work(config) if steps else 0.0), sum(line["seconds"] for line in steps)


def estimate(runs: Sequence[PlannedRun], all_runs: Sequence[PlannedRun], executor: Executor) -> Estimate:
    """Of the runs that are to be trained; all runs of the folder may have records to learn from."""
    rates: dict[Pattern, Rate] = {}
    untimed: list[str] = []
    seconds = dict.fromkeys([run.digest for run in runs], 0.0)
    for pattern in dict.fromkeys(map(pattern_of, runs)):
        own = [run for run in runs if pattern_of(run) == pattern]
        try:
            known = [rate for run in all_runs if pattern_of(run) == pattern and (rate := _recorded_rate(run))]
            if not known and not any(rate.measured for rate in rates.values()):
                executor.call(nothing)  # the first call is slow and tells nothing of the others
            rate = _mean_rate(known) if known else _timed_rate(own, executor)
            for run in own:
                left = run_work(run.config) - recorded_work(run.config, lines_so_far(run.folder))[0]
                seconds[run.digest] = rate.start + max(0.0, left) * rate.per_work
            rates[pattern] = rate
        except Exception as error:  # such a model will fail in its runs, and be written down there
            untimed.append(f"{own[0].model} could not be timed and is left out ({one_line(str(error))})")
    timed = [run for run in runs if pattern_of(run) in rates]
    longest = max(seconds.values(), default=0.0)
    total = max(sum(seconds.values()) / executor.workers, longest)
    return Estimate(seconds, total, "; ".join([*_basis(timed, rates), *untimed]))


def pattern_of(run: PlannedRun) -> Pattern:
    """Models with the same mixers do the same kind of work, some more of it than others."""
    return tuple(mixer.name for mixer in run.config.model.mixers)


def _recorded_rate(run: PlannedRun) -> Rate | None:
    work, seconds = recorded_work(run.config, lines_so_far(run.folder))
    return Rate(seconds / work, 0.0, work, measured=False) if work else None


def _mean_rate(known: Sequence[Rate]) -> Rate:
    """Larger runs weigh more: it is their seconds that matter."""
    work = sum(rate.work for rate in known)
    return Rate(sum(rate.per_work * rate.work for rate in known) / work, 0.0, work / len(known), measured=False)


def _timed_rate(runs: Sequence[PlannedRun], executor: Executor) -> Rate:
    """From the run in the middle of those of one model, ordered by work."""
    middle = sorted(runs, key=lambda run: run_work(run.config))[len(runs) // 2].config
    started = time.perf_counter()
    per_work, steps, work = executor.call(time_steps, middle.model_dump())
    return Rate(per_work, time.perf_counter() - started - steps, work, measured=True)


def time_steps(tree: dict[str, Any]) -> tuple[float, float, float]:
    """Train a few batches of the run, in the same loop as any other run: seconds per multiply-add, seconds spent on
    steps, multiply-adds of a step."""
    short = _short_run(tree)
    folder = Path(tempfile.mkdtemp(prefix="rebased-timing-"))
    try:
        train(short, folder)
        lines = read_record(folder)
    finally:
        shutil.rmtree(folder)
    seconds = [line["seconds"] for line in lines if line["type"] in ("epoch", "step")]
    done = STEPS * step_work(short)
    return seconds[-1] / done, EPOCHS * seconds[-1], done / STEPS


def _short_run(tree: dict[str, Any]) -> BaseRunConfig:
    """The same model and batch over EPOCHS times STEPS steps; on a CPU with fewer sequences per step."""
    config = parse_run(tree)
    per_sequence = step_work(config) / config.train.batch_size
    on_gpu = config.train.device == "cuda" or (config.train.device == "auto" and has_gpu())
    rows = config.train.batch_size if on_gpu else max(1, min(config.train.batch_size, int(CPU_WORK / per_sequence)))
    if isinstance(config, RunConfig):
        few = config.task.train[0].settings()
        task = {"train": [few | {"examples": STEPS * rows}], "test": [few | {"examples": 1}], "held_out": []}
        train = {"epochs": EPOCHS, "stop_above": 1.0, "protocol": "paper", "checkpoint_seconds": 1e6}
        return RunConfig.model_validate(
            {"task": tree["task"] | task, "model": tree["model"], "train": tree["train"] | train | {"batch_size": rows}}
        )
    steps = EPOCHS * STEPS
    train = {"steps": steps, "warmup_steps": 0, "log_every": STEPS, "eval_every": None, "checkpoint_every": steps}
    train |= {"eval_windows": 1, "final_windows": 1, "parallel": "none", "batch_size": rows}
    return parse_run({**tree, "train": tree["train"] | train})


def _basis(runs: Sequence[PlannedRun], rates: dict[Pattern, Rate]) -> Iterator[str]:
    if not runs:
        return
    timed = sum(rate.measured for rate in rates.values())
    parts = []
    if timed:
        parts.append(f"{STEPS} steps of {'each model' if timed == len(rates) else f'{timed} models'}, timed just now")
    if timed < len(rates):
        parts.append("the records of this folder")
    spread = max(_times_more(run, rates[pattern_of(run)]) for run in runs)
    scaled = f", scaled to up to {spread:.0f} times as much work" if spread >= 1.5 else ""
    yield (
        f"from {' and '.join(parts)}{scaled}: may be off by a factor of {2 if spread <= 30 else 4} even if nothing "
        "else runs here; less where runs stop early"
    )


def _times_more(run: PlannedRun, rate: Rate) -> float:
    """How far the arithmetic has to reach: from one step to another, or from one run's records to another run."""
    unit = step_work(run.config) if rate.measured else run_work(run.config)
    return max(unit / rate.work, rate.work / unit)
