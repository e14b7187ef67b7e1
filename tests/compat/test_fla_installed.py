"""The drop-in beside the installed flash-linear-attention: its signatures, its naive form, its dispatcher, its layer.

Without a GPU its kernels do not run. What is tested here does not need them, unless a test says so.
"""

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from rebased.compat.fla import ReBasedLinearAttention, parallel_rebased, register
from tolerances import assert_near

B, T, H, K, V = 2, 150, 3, 8, 12
EPS = 1e-6  # of its naive form
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = {"feature_dim": K, "num_heads": 4, "num_key_value_heads": 4}


@pytest.fixture
def theirs() -> Iterator[ModuleType]:
    """fla.ops.rebased as installed. Afterwards the library is not registered."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where it finds no GPU
        module = pytest.importorskip("fla.ops.rebased")
    original = module.parallel_rebased
    yield module
    for name, each in [*sys.modules.items()]:
        if name.startswith("fla.") and hasattr(each, "parallel_rebased"):
            each.parallel_rebased = original  # type: ignore[attr-defined]


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: each.default for name, each in inspect.signature(function).parameters.items()}


def test_signatures_are_its_own(theirs: ModuleType) -> None:
    ours, expected = defaults(parallel_rebased), defaults(theirs.parallel_rebased)
    assert [*ours.items()][: len(expected)] == [*expected.items()]
    layers = pytest.importorskip("fla.layers")
    assert [*defaults(ReBasedLinearAttention).items()] == [*defaults(layers.ReBasedLinearAttention).items()]


def test_its_name_computes_its_naive_form_with_gradients(theirs: ModuleType) -> None:
    naive = importlib.import_module("fla.ops.rebased.naive").naive_parallel_rebased
    register()
    generator = torch.Generator().manual_seed(0)
    q, k, v, dy = (torch.randn(B, T, H, w, generator=generator).to(DEVICE) for w in (K, K, V, V))
    leaves = [[x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2)]
    o = theirs.parallel_rebased(*leaves[0], eps=EPS)
    want = naive(*(x.transpose(1, 2) for x in leaves[1])).transpose(1, 2)
    assert_near(o, want, T, K, K, condition=K)
    gradients = (torch.autograd.grad(each, x, dy) for each, x in zip((o, want), leaves, strict=True))
    for name, got, expected in zip("qkv", *gradients, strict=True):
        assert_near(got, expected, T, T, K, condition=32.0, name=f"d{name}")


def test_its_dispatcher_chooses_ours_and_a_variable_turns_it_off(
    theirs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parallel_rebased(*args: Any, **kwargs: Any) -> str:
        return "its own"

    monkeypatch.setattr(theirs, "parallel_rebased", parallel_rebased)
    register()
    chosen = theirs.parallel_rebased
    register()
    assert theirs.parallel_rebased is chosen
    x = torch.randn(B, 9, H, K, device=DEVICE)
    assert torch.is_tensor(chosen(q=x, k=x, v=x, eps=1e-5, use_scale=True, use_normalize=True))
    monkeypatch.setenv("FLA_REBASED", "0")
    assert chosen(x, x, x) == "its own"


@pytest.mark.parametrize("first", ["the layer", "register"])
def test_its_layer_computes_ours_and_weights_load_both_ways(theirs: ModuleType, first: str) -> None:
    if first == "register":
        register()
    layers = pytest.importorskip("fla.layers")
    register()
    options = {} if DEVICE == "cuda" else {"use_beta": False}  # with beta, its norm is a kernel
    torch.manual_seed(0)
    layer, ours = (
        each(32, **HEADS, **options).to(DEVICE) for each in (layers.ReBasedLinearAttention, ReBasedLinearAttention)
    )
    ours.load_state_dict(layer.state_dict())
    x = torch.randn(2, T, 32, device=DEVICE)
    assert_near(layer(x), ours(x), 32, K, T, 32, condition=8.0)
    layer.load_state_dict(ours.state_dict())


@pytest.mark.gpu
def test_its_kernels_compute_the_same_in_fp32(theirs: ModuleType) -> None:
    q, k, v = (torch.randn(B, T, H, w, device="cuda") for w in (K, K, V))
    assert_near(parallel_rebased(q, k, v), theirs.parallel_rebased(q, k, v), T, K, K, condition=K)
