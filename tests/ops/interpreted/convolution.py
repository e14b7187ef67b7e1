"""The short convolution's kernels against plain torch in fp64: odd shapes, gradients, memory that starts as NaN."""

import functools
from typing import Literal

import pytest
import torch

from ops.test_convolution_triton import assert_matches_torch
from rebased.ops import short_conv
from rebased.ops.backend import triton_interpreted
from rebased.ops.convolution import gpu
from tolerances import assert_near

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.recorded("convolution")]


@pytest.mark.parametrize(
    ("shape", "width", "dtype"),
    [
        ((2, 1, 3), 4, torch.float32),
        ((2, 70, 66), 4, torch.float32),
        ((1, 64, 5), 1, torch.float32),
        ((1, 2, 3), 6, torch.float32),  # fewer tokens than taps
        ((2, 37, 33), 3, torch.float16),
    ],
)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_kernels(
    shape: tuple[int, int, int], width: int, dtype: torch.dtype, activation: Literal["silu"] | None
) -> None:
    assert triton_interpreted()
    assert_matches_torch(shape, width, dtype, "cpu", activation)


def test_silu_after_many_taps() -> None:
    """The kernels leave it to torch."""
    assert gpu.MOST_TAPS < 9
    assert_matches_torch((1, 11, 2), 9, torch.float32, "cpu", "silu")


def test_tokens_of_any_strides() -> None:
    x, weight = torch.randn(4, 6, 3).transpose(0, 2), torch.randn(4, 2)
    assert_near(short_conv(x, weight, backend="triton"), short_conv(x.double(), weight.double()), 2)


def test_compiles_as_one_graph() -> None:
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((1, 3, 2), (2, 3), (2,))]
    run = functools.partial(short_conv, activation="silu", backend="triton")
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    gradients = [torch.autograd.grad(each(*inputs).sum(), inputs) for each in (run, compiled)]
    for expected, actual in zip(*gradients, strict=True):
        assert_near(actual, expected, 3)
