"""What a run does and reports, and how it ends when it diverges."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rebased.evaluate.accuracy import evaluate
from rebased.mixers import register_mixer
from rebased.models.weights import load_model
from rebased.runs.record import read_record
from rebased.runs.synthetic_config import reported
from rebased.train import Diverged, RunStart, Sink, StepReport, train
from tiny_run import AtStep, tiny, without_timings
from tolerances import TRAINED


def test_the_record_says_what_ran_and_what_came_of_it(tmp_path: Path) -> None:
    config = tiny()
    result = train(config, tmp_path / "run")
    first, *epochs, end = read_record(tmp_path / "run")
    assert first["digest"] == config.digest()
    assert first["config"] == config.model_dump(mode="json")
    assert first["code"].keys() == {"version", "commit", "dirty"}
    assert first["machine"]["torch"] == torch.__version__
    assert first["machine"]["cores"] == os.cpu_count()
    assert [line["epoch"] for line in epochs] == [1, 2, 3]
    assert [line["step"] for line in epochs] == [8, 16, 24]  # 40 / 8 + ceil(20 / 8)
    assert [line["lr"] for line in epochs] == pytest.approx([0.01, 0.0075, 0.0025])
    for line in epochs:
        assert line["test"].keys() == {"accuracy", "by_pairs", "by_length"}
        assert line["test"]["by_pairs"].keys() == {"2", "4"}
        assert line["test"]["by_length"].keys() == {"12", "16"}
        assert line["seconds"] > 0
        assert line["tokens_per_second"] == pytest.approx((40 * 12 + 20 * 16) / line["seconds"])
    best = max(line["test"]["accuracy"] for line in epochs)
    assert end == {"type": "end", "status": "done", "accuracy": best, "epoch": result.epoch, "step": 24}
    assert result.accuracy == best


def test_the_loss_goes_down_and_the_model_learns(tmp_path: Path) -> None:
    easy = {"seq_len": 8, "kv_pairs": 1}
    task = {"train": [{**easy, "examples": 600}], "test": [{**easy, "examples": 100}]}
    config = tiny({"task": task, "train": {"epochs": 8, "batch_size": 32}, "model": {"d_model": 16}})
    train(config, tmp_path)
    losses = [line["loss"] for line in read_record(tmp_path) if line["type"] == "epoch"]
    assert losses[-1] < 0.8 * losses[0]


def test_the_trained_model_is_the_one_that_was_measured(tmp_path: Path) -> None:
    config = tiny()
    train(config, tmp_path)
    data = config.task.build(config.train.seed)
    found = evaluate(load_model(tmp_path), config.task.test, data.test, batch_size=7)
    assert found == read_record(tmp_path)[-2]["test"]


def test_a_run_stops_above_its_mark(tmp_path: Path) -> None:
    train(tiny({"train": {"stop_above": 0.0}}), tmp_path)
    assert [line["type"] for line in read_record(tmp_path)] == ["run", "epoch", "end"]


def test_a_run_that_does_not_learn_ends_by_its_own_rule_alone(tmp_path: Path) -> None:
    rule = {"below": 0.9, "after_epoch": 2}
    given_up = tiny({"train": {"epochs": 5, "stop_above": 1, "give_up": rule}})
    train(given_up, tmp_path / "a")
    *_, last, end = read_record(tmp_path / "a")
    assert (last["epoch"], end["status"], end["gave_up"]) == (2, "done", True)
    assert train(given_up, tmp_path / "a", resume=True).status == "already_done"
    patient = tiny({"train": {"epochs": 3, "stop_above": 1, "give_up": rule | {"below": 1e-9}}})
    train(patient, tmp_path / "b")
    *_, last, end = read_record(tmp_path / "b")
    assert (last["epoch"], "gave_up" in end) == (3, False)
    assert tiny().digest() == tiny({"train": {"give_up": None}}).digest() != patient.digest()


def test_held_out_reports_the_epoch_that_the_test_split_chose(tmp_path: Path) -> None:
    held_out = [{"seq_len": 12, "kv_pairs": 2, "examples": 30}]
    result = train(tiny({"task": {"held_out": held_out}, "train": {"protocol": "held_out"}}), tmp_path)
    epochs = [line for line in read_record(tmp_path) if line["type"] == "epoch"]
    best = max(epochs, key=lambda line: line["test"]["accuracy"])
    assert (result.accuracy, result.epoch) == (best["held_out"]["accuracy"], best["epoch"])


def test_reported_takes_the_first_of_equally_good_epochs() -> None:
    lines: list[dict[str, Any]] = [
        {"epoch": i, "test": {"accuracy": test}, "held_out": {"accuracy": held_out}}
        for i, (test, held_out) in enumerate([(0.1, 0.9), (0.7, 0.2), (0.7, 0.3)], start=1)
    ]
    assert reported(lines, "paper") == (0.7, 2)
    assert reported(lines, "held_out") == (0.2, 2)
    with pytest.raises(ValueError, match="first epoch"):
        reported([], "paper")
    with pytest.raises(ValueError, match=r"without task\.held_out"):
        reported([{"epoch": 1, "test": {"accuracy": 1.0}}], "held_out")


def test_accumulation_leaves_the_curve_what_it_was(tmp_path: Path) -> None:
    still = {"model": {"embed_dropout": 0.0}}
    train(tiny(still), tmp_path / "whole")
    train(tiny({**still, "train": {"micro_batch": 3}}), tmp_path / "cut")
    whole, cut = ([line["loss"] for line in read_record(tmp_path / name)[1:-1]] for name in ("whole", "cut"))
    assert whole == pytest.approx(cut, rel=TRAINED)


def test_a_run_depends_on_no_global_state_and_leaves_it_alone(tmp_path: Path) -> None:
    torch.manual_seed(1)
    train(tiny(), tmp_path / "a")
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(3))
    train(tiny(), tmp_path / "b")
    assert without_timings(tmp_path / "a") == without_timings(tmp_path / "b")


def test_a_cpu_without_bf16_changes_nothing_for_the_next_run(tmp_path: Path) -> None:
    """On such a CPU torch turns oneDNN off at the first bf16 product, and leaves it off."""
    train(tiny(), tmp_path, sinks=[AtStep(1, partial(torch.backends.mkldnn.set_flags, False))])
    assert torch.backends.mkldnn.enabled


def test_sinks_hear_everything(tmp_path: Path) -> None:
    events: list[Any] = []

    class Listener(Sink):
        start = step = line = end = events.append  # type: ignore[assignment]

    interrupt = AtStep(10, lambda: os.kill(os.getpid(), signal.SIGINT))
    train(tiny(), tmp_path, sinks=[Listener(), interrupt])
    assert isinstance(events[0], RunStart)
    assert (events[0].step, events[0].steps) == (0, 24)
    assert [line["type"] for line in events if isinstance(line, dict)] == ["epoch"]
    assert [report.step for report in events if isinstance(report, StepReport)] == list(range(1, 11))
    events.clear()
    train(tiny(), tmp_path, resume=True, sinks=[Listener()])
    assert events[0].step == 10
    assert [line["type"] for line in events[0].lines] == ["run", "epoch"]
    assert [report.step for report in events if isinstance(report, StepReport)] == list(range(11, 25))
    assert events[-1] == read_record(tmp_path)[-1]


class Bomb(nn.Module):
    """A gain that in one training step returns NaN or has an infinite gradient."""

    calls = 0

    def __init__(self, d_model: int, *, at: int = 0, gradient_only: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_model))
        self.at, self.gradient_only = at, gradient_only

    def forward(self, x: Tensor) -> Tensor:
        Bomb.calls += self.training
        if not self.training or Bomb.calls != self.at:
            return x * self.weight
        if self.gradient_only:  # value 0, gradient infinite
            return x * self.weight + (self.weight * 0).sqrt()
        return x * self.weight * torch.nan


@pytest.mark.parametrize(("at", "gradient_only", "saved"), [(3, False, None), (13, False, 8), (16, True, 8)])
def test_divergence_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, gradient_only: bool, saved: int | None
) -> None:
    """At step 16, the last of its epoch, only the gradient is bad: the weights must be checked before saving."""
    monkeypatch.setattr(Bomb, "calls", 0)
    register_mixer("test_bomb")(Bomb)
    bomb = {"name": "test_bomb", "at": at, "gradient_only": gradient_only}
    config = tiny({"model": {"n_layers": 1, "mixers": [bomb]}})
    with pytest.raises(Diverged, match=f"at step {at}, where lr was .*--train.lr 0.003") as caught:
        train(config, tmp_path / "run")
    end = read_record(tmp_path / "run")[-1]
    assert (end["type"], end["status"], end["step"]) == ("end", "diverged", at)
    assert end["reason"] == str(caught.value)
    assert (
        str(tmp_path) not in (tmp_path / "run" / "record.jsonl").read_text()
    )  # records contain no paths of this machine
    files = [path.name for path in (tmp_path / "run").glob("checkpoint-*")]
    assert files == ([] if saved is None else [f"checkpoint-{saved}.pt"])
    assert not (tmp_path / "run" / "model.safetensors").exists()
    with pytest.raises(ValueError, match=f"went no further.*at step {at}"):
        train(config, tmp_path / "run", resume=True)


def test_the_rate_is_not_blamed_for_the_first_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bomb, "calls", 0)
    register_mixer("test_bomb")(Bomb)
    config = tiny({"model": {"n_layers": 1, "mixers": [{"name": "test_bomb", "at": 1}]}})
    with pytest.raises(Diverged, match=r"the loss became nan at step 1, .*so the rate is not the cause"):
        train(config, tmp_path / "run")


def test_a_device_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="sees no GPU here; use cpu"):
        train(tiny({"train": {"device": "cuda"}}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_built_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="d_model 8 is not divisible by n_heads 3"):
        train(tiny({"model": {"mixers": {"1": {"n_heads": 3}}}}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
