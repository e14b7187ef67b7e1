"""Gamma and beta in the record of a run: what is counted, and that a model without them has none."""

from pathlib import Path

import pytest
import torch

from rebased.evaluate.norms import norm_statistics
from rebased.mixers import ReBased
from rebased.models import LanguageModel, LMConfig
from rebased.runs.record import read_record
from rebased.train import train
from tiny_lm_run import tiny as tiny_lm
from tiny_lm_run import write_text
from tiny_run import tiny


def build(**arguments: object) -> LanguageModel:
    mixer = {"name": "rebased", "n_heads": 2, "key_width": 4, **arguments}
    return LanguageModel(LMConfig(vocab_size=16, d_model=8, mixers=("short_conv", mixer)))


def test_statistics_are_those_of_the_weights() -> None:
    model = build()
    mixer = model.blocks[1].mixer
    with torch.no_grad():
        mixer.ln_q.weight.copy_(torch.arange(8.0))
    (layer,) = (found := norm_statistics(model))
    assert layer == "1"
    assert sorted(found["1"]) == ["k.beta", "k.gamma", "q.beta", "q.gamma"]
    gamma = found["1"]["q.gamma"]
    assert gamma["mean"] == 3.5
    assert gamma["sd"] == pytest.approx(torch.arange(8.0).std(correction=0).item(), rel=1e-5)
    assert found["1"]["k.beta"] == {"mean": 0.0, "sd": 0.0}


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"qk_transform": "none"}, []),
        ({"qk_transform": "norm"}, []),
        ({"qk_transform": "scale"}, ["q.gamma", "k.gamma"]),
        ({"norm_axis": "per_head"}, ["qk.gamma", "qk.beta"]),
    ],
)
def test_only_what_is_there_is_named(arguments: dict[str, str], names: list[str]) -> None:
    mixer = build(**arguments).blocks[1].mixer
    assert isinstance(mixer, ReBased)
    assert list(mixer.qk_parameters()) == names
    assert norm_statistics(build(**arguments)).keys() == ({"1"} if names else set())


def test_every_evaluation_of_a_run_has_them(tmp_path: Path) -> None:
    train(tiny(), tmp_path / "run")
    epochs = [line for line in read_record(tmp_path / "run") if line["type"] == "epoch"]
    assert [line["norms"]["1"]["q.gamma"]["mean"] != 1 for line in epochs] == [True] * 3
    train(tiny({"model": {"mixers": {1: "attention"}}}), tmp_path / "none")
    assert not any("norms" in line for line in read_record(tmp_path / "none"))
    train(tiny_lm(write_text(tmp_path / "text")), tmp_path / "lm")
    lines = [line for line in read_record(tmp_path / "lm") if line["type"] == "eval"]
    assert len(lines) == 2
    assert all("k.beta" in line["norms"]["1"] for line in lines)
