"""A run of at most a second, and how to start it in another process, where tests can kill it."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rebased.config import merge
from rebased.runs.record import read_record
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.train import Sink, StepReport, train

TIMINGS = ("seconds", "test_seconds", "tokens_per_second")

TINY: dict[str, Any] = {
    "task": {
        "vocab_size": 24,
        "train": [{"seq_len": 12, "kv_pairs": 2, "examples": 40}, {"seq_len": 16, "kv_pairs": 3, "examples": 20}],
        "test": [{"seq_len": 12, "kv_pairs": 2, "examples": 20}, {"seq_len": 16, "kv_pairs": 4, "examples": 10}],
    },
    "model": {"d_model": 8, "mixers": ["short_conv", {"name": "rebased", "n_heads": 2, "key_width": 4}]},
    "train": {"epochs": 3, "batch_size": 8, "lr": 0.01, "device": "cpu"},
}


def tiny(changes: dict[str, Any] | None = None) -> SyntheticRunConfig:
    """The config TINY with changes."""
    return SyntheticRunConfig.model_validate(merge(TINY, changes or {}))


def without_timings(folder: Path) -> list[dict[str, Any]]:
    """The record without times and without the code's version, which a commit changes while tests run."""
    lines = [line for line in read_record(folder) if line["type"] != "resume"]
    return [{key: value for key, value in line.items() if key not in (*TIMINGS, "code")} for line in lines]


def everything(folder: Path) -> tuple[list[dict[str, Any]], bytes]:
    """The record without times, and the weights: equal for two runs that are the same."""
    return without_timings(folder), (folder / "model.safetensors").read_bytes()


class AtStep(Sink):
    """A sink that calls `action` after a given step."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.at, self.action = step, action

    def step(self, report: StepReport) -> None:
        if report.step == self.at:
            self.action()


def known_times(tree: dict[str, Any]) -> list[float]:
    """Stands in for the steps that a sweep times of each model: seconds per multiply-add."""
    return [1e-9, 1e-9, 2e-9]


# The fork server has imported torch but never computed with it, so it starts processes in milliseconds (conftest.py).
_processes = multiprocessing.get_context("forkserver")


def in_process(function: Callable[..., Any], *arguments: Any) -> int:
    """Call the function in another process. Returns its exit code, negative if a signal ended it."""
    process = _processes.Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def run(config: SyntheticRunConfig, folder: Path, resume: bool) -> None:
    train(config, folder, resume=resume)
