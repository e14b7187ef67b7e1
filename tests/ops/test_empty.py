"""Batches without rows (B = 0) and sequences without tokens (T = 0) pass through every operator, with gradients."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rebased.ops import (
    BASED,
    Backend,
    PolyState,
    WKVState,
    embed,
    init_poly_state,
    layer_norm,
    linear_argmax,
    linear_cross_entropy,
    long_conv,
    long_conv_extend,
    poly_attention,
    poly_attention_extend,
    poly_state,
    rms_norm,
    selective_scan_extend,
    short_conv_extend,
    token_shift,
    wkv_extend,
)

H, K, V, D, N = 2, 4, 3, 5, 3
SIZES = pytest.mark.parametrize(("B", "T"), [(0, 6), (2, 0), (0, 0)])
BACKENDS = pytest.mark.parametrize("backend", ["auto", "reference", "recurrent", "chunked"])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch.device(request.param):
        yield


def leaf(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


def check(function: Callable[..., Any], inputs: list[Tensor], *shapes: tuple[int, ...]) -> list[Tensor]:
    """Outputs have these shapes, and gradients those of the inputs, without a NaN; returns the gradients."""
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    assert [tuple(x.shape) for x in outputs] == list(shapes)
    gradients = torch.autograd.grad(sum(x.sum() for x in outputs), inputs)
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient.shape == x.shape
        assert gradient.isfinite().all()
    return list(gradients)


@SIZES
@BACKENDS
def test_poly_attention(B: int, T: int, backend: Backend) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return poly_attention(q, k, v, coefficients=BASED, backend=backend)

    def extend(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        o, after = poly_attention_extend(q, k, v, PolyState(kv, z), coefficients=BASED, backend=backend)
        return o, *after

    inputs = [leaf(B, T, H, K), leaf(B, T, H, K), leaf(B, T, H, V)]
    check(attend, inputs, (B, T, H, V))
    shapes = [tuple(x.shape) for x in init_poly_state(B, H, K, V, BASED)]
    gradients = check(extend, [*inputs, *(leaf(*shape) for shape in shapes)], (B, T, H, V), *shapes)
    if T == 0:
        assert all((gradient == 1).all() for gradient in gradients[3:])  # the state passes as it is
    check(lambda k, v: poly_state(k, v, coefficients=BASED), inputs[1:], *shapes)


@BACKENDS
def test_documents_without_tokens(backend: Backend) -> None:
    inputs = [leaf(1, 0, H, K), leaf(1, 0, H, K), leaf(1, 0, H, V)]
    bounds = torch.tensor([0, 0, 0])
    check(lambda q, k, v: poly_attention(q, k, v, coefficients=BASED, cu_seqlens=bounds, backend=backend), inputs,
          (1, 0, H, V))  # fmt: skip


@SIZES
@BACKENDS
def test_recurrences(B: int, T: int, backend: Backend) -> None:
    def scan(x: Tensor, dt: Tensor, A: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor) -> Any:
        return selective_scan_extend(x, dt, -A, b, c, skip, state, backend=backend)

    inputs = [leaf(B, T, D), leaf(B, T, D), leaf(D, N), leaf(B, T, N), leaf(B, T, N), leaf(D), leaf(B, D, N)]
    gradients = check(scan, inputs, (B, T, D), (B, D, N))
    assert (gradients[2] == 0).all()

    def average(k: Tensor, v: Tensor, w: Tensor, u: Tensor, num: Tensor, den: Tensor) -> Any:
        y, after = wkv_extend(k, v, w, u, WKVState(num, den, torch.zeros(B, D)), backend=backend)
        return y, after.num, after.den

    gradients = check(
        average, [leaf(B, T, D), leaf(B, T, D), leaf(D), leaf(D), leaf(B, D), leaf(B, D)], (B, T, D), (B, D), (B, D)
    )
    assert (gradients[2] == 0).all()


@SIZES
@BACKENDS
def test_convolutions(B: int, T: int, backend: Backend) -> None:
    def short(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Any:
        return short_conv_extend(x, weight, bias, state, backend=backend)

    check(short, [leaf(B, T, D), leaf(D, 4), leaf(D), leaf(B, 3, D)], (B, T, D), (B, 3, D))
    inputs = [leaf(B, T, D), leaf(8, D), leaf(D)]
    check(lambda x, taps, skip: long_conv(x, taps, skip, backend=backend), inputs, (B, T, D))
    check(lambda x, taps, skip, past: long_conv_extend(x, taps, skip, past, backend=backend),
          [*inputs, leaf(B, 2, D)], (B, T, D), (B, 2 + T, D))  # fmt: skip


@SIZES
@BACKENDS
def test_token_shift(B: int, T: int, backend: Backend) -> None:
    inputs = [leaf(B, T, D), leaf(B, D), leaf(3, D)]
    gradients = check(lambda *x: token_shift(*x, backend=backend), inputs, *[(B, T, D)] * 3)
    assert (gradients[2] == 0).all()


@SIZES
def test_norms_and_embeddings(B: int, T: int) -> None:
    check(layer_norm, [leaf(B, T, D), leaf(D), leaf(D)], (B, T, D))
    check(rms_norm, [leaf(B, T, D), leaf(D)], (B, T, D))
    check(lambda weight: embed(torch.zeros(B, T, dtype=torch.long), weight), [leaf(7, D)], (B, T, D))


def test_loss_of_no_rows() -> None:
    targets = torch.zeros(0, dtype=torch.long)
    check(lambda hidden, weight: linear_cross_entropy(hidden, weight, targets), [leaf(0, D), leaf(7, D)], ())
    assert linear_argmax(torch.ones(0, D), torch.ones(7, D)).shape == (0,)
