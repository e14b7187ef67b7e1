"""Losses that are read later are the same losses, and a run with a NaN loss ends in the same way."""

from pathlib import Path

import pytest
import torch

from rebased.runs.record import read_record
from rebased.train import Diverged, train
from rebased.train.deferred_losses import STEPS_BETWEEN_READS, DeferredLosses
from rebased.train.world import World
from tiny_run import AtStep, everything, tiny


def test_what_is_read_is_what_was_added() -> None:
    log = DeferredLosses(World(0, 1, torch.device("cpu")), columns=2, capacity=5)
    assert not log.is_due
    for i in range(5):
        assert len(log) == i
        log.add(torch.tensor([i + 0.5, 2.0]), tokens=i)
        assert log.is_due  # until the time per step is known, every step is read
    losses, seconds = log.read()
    assert losses == [([i + 0.5, 2.0], i) for i in range(5)]
    assert seconds > 0
    log.add(torch.zeros(2), tokens=1)
    assert not log.is_due  # a step takes less than half a second


def test_a_run_is_the_same_however_seldom_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tiny(), tmp_path / "each")
    monkeypatch.setitem(STEPS_BETWEEN_READS, "cpu", 5)
    reported: list[int] = []

    class Steps(AtStep):
        def step(self, report: object) -> None:
            reported.append(report.step)  # type: ignore[attr-defined]

    train(tiny(), tmp_path / "seldom", sinks=[Steps(0, lambda: None)])
    assert everything(tmp_path / "seldom") == everything(tmp_path / "each")
    assert reported == list(range(1, 25))


def test_divergence_names_the_step_it_happened_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = []
    for name, at_most in (("each", 1), ("seldom", 5)):
        monkeypatch.setitem(STEPS_BETWEEN_READS, "cpu", at_most)
        with pytest.raises(Diverged, match="the loss became nan at step") as caught:
            train(tiny({"train": {"lr": 1e18}}), tmp_path / name)
        messages.append(str(caught.value))
        assert read_record(tmp_path / name)[-1]["step"] < 8
    assert messages[0] == messages[1]
