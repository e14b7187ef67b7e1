"""Out of GPU memory: the same batch is computed with fewer sequences at once, and the record says so."""

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rebased.mixers import register_mixer
from rebased.runs.record import read_record
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.train import train
from rebased.train.oom import half, update
from tiny_run import AtStep, tiny, without_timings
from tolerances import TRAINED

ROOM = {"training": 3, "testing": 99}


class Greedy(nn.Module):
    """A gain that runs out of memory on a batch with more sequences than ROOM allows."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > ROOM["training" if self.training else "testing"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return x * self.weight


@pytest.fixture
def config() -> SyntheticRunConfig:
    """Batches of 8, of which 3 fit."""
    register_mixer("test_greedy")(Greedy)
    return tiny({"model": {"n_layers": 1, "mixers": ["test_greedy"], "embed_dropout": 0.0}})


def test_a_run_goes_on_with_fewer_sequences_at_once(
    config: SyntheticRunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config, tmp_path / "small")
    first, *rest = read_record(tmp_path / "small")
    assert first["config"]["train"]["micro_batch"] is None
    assert first["digest"] == config.digest()
    assert rest[:2] == [
        {"type": "out_of_memory", "step": 0, "micro_batch": 4},
        {"type": "out_of_memory", "step": 0, "micro_batch": 2},
    ]
    assert not any(line["type"] == "out_of_memory" for line in rest[2:])  # later steps keep the smaller micro batch
    monkeypatch.setitem(ROOM, "training", 99)
    train(config, tmp_path / "large")
    small, large = (
        [line for line in read_record(tmp_path / name) if line["type"] == "epoch"] for name in ("small", "large")
    )
    assert [line["loss"] for line in small] == pytest.approx([line["loss"] for line in large], rel=TRAINED)
    assert [line["test"] for line in small] == [line["test"] for line in large]


def test_a_test_that_does_not_fit_is_cut_too(
    config: SyntheticRunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROOM, "training", 99)
    monkeypatch.setitem(ROOM, "testing", 5)
    train(config, tmp_path)
    assert read_record(tmp_path)[1] == {"type": "out_of_memory", "step": 8, "micro_batch": 4}


def test_a_resumed_run_does_not_try_the_large_one_again(config: SyntheticRunConfig, tmp_path: Path) -> None:
    train(config, tmp_path / "whole")
    interrupt = AtStep(10, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert train(config, tmp_path / "parts", sinks=[interrupt]).status == "interrupted"
    train(config, tmp_path / "parts", resume=True)
    assert without_timings(tmp_path / "parts") == without_timings(tmp_path / "whole")


def test_one_sequence_that_does_not_fit_is_an_error(
    config: SyntheticRunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ROOM, "training", 0)
    with pytest.raises(ValueError, match=r"memory is too small for one sequence at a time; use shorter"):
        train(config, tmp_path)
    assert [line["micro_batch"] for line in read_record(tmp_path)[1:]] == [4, 2, 1]
    assert [half(rows) for rows in (512, 7, 2)] == [256, 3, 1]


def test_an_update_that_does_not_fit_is_never_taken_twice() -> None:
    class Full(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            raise torch.OutOfMemoryError

    with pytest.raises(ValueError, match="too small for the optimiser's state"):
        update(Full([nn.Parameter(torch.ones(1))]))
