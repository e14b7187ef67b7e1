"""The limits of tolerances.py reject what is less exact than they allow, and what is wrong."""

import pytest
import torch
from torch import Tensor

from polynomial_inputs import Shape, inputs
from rebased.ops import BASED, REBASED, Coefficients, poly_attention
from tolerances import (
    KERNEL_ERRORS,
    assert_close,
    assert_near,
    assert_small_error,
    largest_error,
    limit,
    relative_error,
)

SHAPE = Shape(B=1, T=300, H=2, K=8, V=5)
NAMES = ("o", "dq", "dk", "dv")


def to_tf32(x: Tensor) -> Tensor:
    """fp32 rounded to the ten digits behind the point that TF32 has."""
    bits = x.detach().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def to_bf16(x: Tensor) -> Tensor:
    return x.detach().bfloat16().float()


def without_a_chunk(x: Tensor) -> Tensor:
    """64 tokens of 300 are not there."""
    return torch.cat([x[:, :128], torch.zeros_like(x[:, 128:192]), x[:, 192:]], dim=1).detach()


def attend(tensors: list[Tensor], coefficients: Coefficients) -> list[Tensor]:
    q, k, v, do = (x.detach().requires_grad_() for x in tensors)
    o = poly_attention(q, k, v, coefficients=coefficients, backend="chunked")
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


@pytest.mark.parametrize("coefficients", [REBASED, BASED], ids=str)
@pytest.mark.parametrize("degrade", [to_bf16, to_tf32, without_a_chunk])
def test_a_degraded_computation_is_rejected(degrade: object, coefficients: Coefficients) -> None:
    """Every one of the four results by itself, with keys alone degraded; and none of them as it is."""
    q, k, v, do = inputs(SHAPE, dtype=torch.float32)
    want = [x.float() for x in attend([x.double() for x in (q, k, v, do)], coefficients)]
    good, bad = attend([q, k, v, do], coefficients), attend([q, degrade(k), v, do], coefficients)  # type: ignore[operator]
    assert_close(good, want, NAMES)
    assert_small_error(good, want, NAMES, torch.float32)
    for name, a, b in zip(NAMES, bad, want, strict=True):
        with pytest.raises(AssertionError, match=f"{name} is off by"):
            assert_close([a], [b], [name])
        assert relative_error(a, b) > 3 * KERNEL_ERRORS[torch.float32]


def one_by_one(x: Tensor) -> Tensor:
    """The sum over the first axis, in the dtype of x, with one accumulator."""
    total = x[0].clone()
    for row in x[1:]:
        total += row
    return total


def test_half_precision_is_allowed_its_last_rounding() -> None:
    """A sum of 1,000 numbers may be rounded to bf16, and may not be kept in bf16."""
    x = torch.rand(1000, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = x.double().sum(0)
    assert_near(x.float().sum(0).bfloat16(), want, 1000)
    with pytest.raises(AssertionError, match="is off by"):
        assert_near(one_by_one(x), want, 1000)


@pytest.mark.parametrize("n", [16, 1024, 16_384])
def test_a_sum_in_any_order_is_within_the_limit(n: int) -> None:
    """torch's own order, one accumulator, vectors of 4 and of 16; the worst is not below a fiftieth of the limit."""
    x = torch.rand(n, 200, generator=torch.Generator().manual_seed(0))
    want = x.double().sum(0)
    found = [x.sum(0), one_by_one(x), *(one_by_one(x.view(-1, lanes, 200)).sum(0) for lanes in (4, 16))]
    for each in found:
        assert_near(each, want, n)
    assert max(largest_error(each, want) for each in found) > limit(torch.float32, n) / 50


def test_what_is_not_finite_or_of_another_shape_is_rejected() -> None:
    x = torch.ones(3)
    with pytest.raises(AssertionError, match="not finite"):
        assert_near(torch.tensor([1.0, float("nan"), 1.0]), x, 10)
    with pytest.raises(AssertionError, match=r"\[1\] is not \[3\]"):
        assert_near(x[:1], x, 10)
