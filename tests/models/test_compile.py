"""torch.compile over layers and the loss: one graph, no warning, the same numbers and gradients."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rebased.models import IGNORE, LanguageModel, LMConfig
from rebased.models.block import build_mixer

VOCAB, B, T, D = 50, 2, 33, 48


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    torch.compiler.reset()


def compiled_without_warning(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """The result of the compiled function; a graph break or a warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # torch's own: its compiler instantiates every autograd.Function, which torch deprecates.
        warnings.filterwarnings("ignore", ".*should not be instantiated")
        # The cache of rebased.ops.polynomial's pair indices, which the compiler traces through.
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
        return torch.compile(function, fullgraph=True, backend="aot_eager")(*arguments)


def assert_same(module: nn.Module, compiled: Tensor, eager: Tensor) -> None:
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
    parameters = list(module.parameters())
    gradients = (torch.autograd.grad(each.square().sum(), parameters) for each in (compiled, eager))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "rebased",
        "based",
        "attention",
        "short_conv",
        "sliding_window",
        "hyena",
    ],
)
def test_a_mixer_is_one_graph(name: str) -> None:
    mixer = build_mixer(LMConfig(d_model=D, max_len=64, mixers=(name,)), layer=1).eval()
    x = torch.randn(B, T, D)
    assert_same(mixer, compiled_without_warning(mixer, x), mixer(x))


@pytest.mark.parametrize("mlp_ratio", [0, 4])
def test_the_loss_is_one_graph(mlp_ratio: int) -> None:
    model = LanguageModel(LMConfig(vocab_size=VOCAB, d_model=D, max_len=64, mlp_ratio=mlp_ratio)).eval()
    tokens = torch.randint(VOCAB, (B, T))
    labels = torch.where(torch.rand(B, T) < 0.5, tokens, IGNORE)
    assert_same(model, compiled_without_warning(model.loss, tokens, labels), model.loss(tokens, labels))
