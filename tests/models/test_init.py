"""The initial weights of a model, by kind of layer."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rebased.models import LanguageModel, LMConfig

D, LAYERS = 192, 8
RESIDUAL = 0.02 / math.sqrt(2 * LAYERS)


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    mixers: tuple[Any, ...] = ("short_conv", "rebased", "based", "attention")
    config = LMConfig(vocab_size=1000, d_model=D, n_layers=LAYERS, max_len=512, mixers=mixers, mlp_ratio=4)
    return LanguageModel(config)


def named(model: LanguageModel, ending: str) -> list[Tensor]:
    found = [parameter.detach() for name, parameter in model.named_parameters() if name.endswith(ending)]
    assert found, ending
    return found


@pytest.mark.parametrize(
    ("ending", "std"),
    [
        ("embedding.weight", 0.02),
        ("positions.weight", 0.02),
        ("mixer.projection.weight", 0.02),
        ("proj_q.weight", 0.02),
        ("proj_k.weight", 0.02),
        ("proj_v.weight", 0.02),
        ("proj_o.weight", 0.02),  # not scaled down, unlike attention's
        ("qkv.weight", 0.02),
        ("mlp.fc1.weight", 0.02),
        ("out_proj.weight", RESIDUAL),
        ("mlp.fc2.weight", RESIDUAL),
    ],
)
def test_matrices_are_normal(model: LanguageModel, ending: str, std: float) -> None:
    for weight in named(model, ending):
        n = weight.numel()
        assert float(weight.std()) == pytest.approx(std, rel=5 / math.sqrt(2 * n))  # five standard errors
        assert abs(float(weight.mean())) < 5 * std / math.sqrt(n)
        kurtosis = float(weight.double().pow(4).mean() / weight.double().square().mean() ** 2)
        assert kurtosis == pytest.approx(3, abs=5 * math.sqrt(24 / n))  # normal, not uniform: that has 1.8


@pytest.mark.parametrize("ending", ["projection.bias", "qkv.bias", "out_proj.bias", "fc1.bias", "fc2.bias"])
def test_biases_are_zero(model: LanguageModel, ending: str) -> None:
    assert not any(bias.any() for bias in named(model, ending))


@pytest.mark.parametrize("norm", ["norm1", "norm2", "norm", "ln_q", "ln_k"])
def test_norms_are_the_identity(model: LanguageModel, norm: str) -> None:
    assert all(torch.equal(weight, torch.ones_like(weight)) for weight in named(model, f"{norm}.weight"))
    assert not any(bias.any() for bias in named(model, f"{norm}.bias"))


def test_convolution_keeps_torchs_own(model: LanguageModel) -> None:
    bound = 1 / math.sqrt(3)
    for part in (*named(model, "conv.weight"), *named(model, "conv.bias")):
        assert float(part.abs().max()) <= bound
        assert float(part.std()) == pytest.approx(bound / math.sqrt(3), rel=0.2)


def test_nothing_was_forgotten(model: LanguageModel) -> None:
    weights = ("embedding", "positions", "projection", "proj_q", "proj_k", "proj_v", "proj_o", "qkv", "fc1", "fc2")
    known = {*weights, "out_proj", "norm1", "norm2", "norm", "ln_q", "ln_k", "conv"}
    assert {name.split(".")[-2] for name, _ in model.named_parameters()} == known
