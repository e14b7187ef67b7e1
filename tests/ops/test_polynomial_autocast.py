"""Autocast changes no number of polynomial attention; the recurrent path has exact gradients."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rebased.ops import (
    BASED,
    REBASED,
    Backend,
    Coefficients,
    PolyState,
    init_poly_state,
    poly_attention,
    poly_attention_at,
    poly_attention_extend,
    poly_attention_extend_,
    poly_attention_map,
    poly_state,
)

B, T, H, K, V = 2, 20, 2, 8, 6
BACKENDS = pytest.mark.parametrize("backend", ["reference", "recurrent", "chunked"])


def draw(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@contextmanager
def outside(backend: Backend) -> Iterator[None]:
    """Without autocast, as torch wants backward passes to be called; the chunked path does not mind."""
    with torch.autocast("cpu", torch.bfloat16, enabled=backend == "chunked" and torch.is_autocast_enabled("cpu")):
        yield


def attend(backend: Backend) -> list[Tensor]:
    q, k, v, do = (x.requires_grad_() for x in draw(0, (B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H, V)))
    o = poly_attention(q, k, v, coefficients=REBASED, backend=backend)
    with outside(backend):
        return [o, *torch.autograd.grad(o, (q, k, v), do)]


def extend(backend: Backend) -> list[Tensor]:
    q, k, v, do = (x.requires_grad_() for x in draw(1, (B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H, V)))
    state = poly_state(k.detach(), v.detach(), coefficients=BASED)
    o, after = poly_attention_extend(q, k, v, state, coefficients=BASED, backend=backend)
    with outside(backend):
        return [o, *after, *torch.autograd.grad(o, (q, k, v), do)]


def step(backend: Backend) -> list[Tensor]:
    q, k, v = draw(2, (B, 1, H, K), (B, 1, H, K), (B, 1, H, V))
    state = init_poly_state(B, H, K, V, REBASED)
    return [poly_attention_extend_(q, k, v, state, coefficients=REBASED, backend=backend), *state]


def at(backend: Backend) -> list[Tensor]:
    q, k, v = draw(3, (B, 3, H, K), (B, T, H, K), (B, T, H, V))
    positions = torch.tensor([[0, 5, T - 1]] * B)
    return [poly_attention_at(q, k, v, positions, coefficients=REBASED, backend=backend)]


def attention_map(backend: Backend) -> list[Tensor]:
    return [poly_attention_map(*draw(4, (B, T, H, K), (B, T, H, K)), coefficients=REBASED)]


@BACKENDS
@pytest.mark.parametrize("compute", [attend, extend, step, at, attention_map])
def test_autocast_changes_nothing(compute: Callable[[Backend], list[Tensor]], backend: Backend) -> None:
    want = compute(backend)
    with torch.autocast("cpu", torch.bfloat16):
        got = compute(backend)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("coefficients", [REBASED, BASED])
def test_the_recurrent_path_is_as_exact_as_its_dtype(coefficients: Coefficients) -> None:
    """Normal queries and keys: some are nearly orthogonal, and their gradients divide by nearly nothing."""

    def gradients(dtype: torch.dtype, backend: Backend, inputs: list[Tensor]) -> list[Tensor]:
        q, k, v, do = (x.to(dtype) for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        o = poly_attention(*leaves, coefficients=coefficients, backend=backend)
        return [o, *torch.autograd.grad(o, leaves, do)]

    for seed in range(5):
        inputs = draw(seed, (2, 64, 2, 16), (2, 64, 2, 16), (2, 64, 2, 16), (2, 64, 2, 16))
        got = gradients(torch.float32, "recurrent", inputs)
        want = gradients(torch.float64, "reference", inputs)
        for a, b in zip(got, want, strict=True):
            assert (
                float((a.double() - b).detach().norm() / b.detach().norm()) < 2**-23
            )  # one rounding to fp32, of 2^-24 at most


def test_a_state_keeps_its_dtype() -> None:
    q, k, v = draw(0, (B, T, H, K), (B, T, H, K), (B, T, H, V))
    _, after = poly_attention_extend(q, k, v, None, coefficients=REBASED, backend="recurrent")
    assert isinstance(after, PolyState)
    assert {x.dtype for x in after} == {torch.float32}


def test_a_layer_under_autocast_takes_half_precision() -> None:
    """Its projections are in autocast's dtype, and so is what it hands to the operator."""
    from rebased.mixers import ReBased

    layer, seen = ReBased(16, n_heads=2, key_width=4), []
    hook: Any = layer.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(1, 5, 16))
    hook.remove()
    assert seen == [torch.bfloat16]
