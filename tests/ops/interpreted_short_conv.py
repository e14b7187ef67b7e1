"""The short convolution's kernels against plain torch in fp64: odd shapes, gradients, memory that starts as NaN."""

import pytest
import torch

from ops.test_short_conv_triton import assert_matches_torch
from rebased.ops import short_conv
from rebased.ops.backend import triton_interpreted
from tolerances import assert_near

pytestmark = pytest.mark.usefixtures("poisoned_memory")


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
def test_kernels(shape: tuple[int, int, int], width: int, dtype: torch.dtype) -> None:
    assert triton_interpreted()
    assert_matches_torch(shape, width, dtype, "cpu")


def test_compiles_as_one_graph() -> None:
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((1, 3, 2), (2, 3), (2,))]
    compiled = torch.compile(short_conv, backend="aot_eager", fullgraph=True)
    gradients = [torch.autograd.grad(run(*inputs, backend="triton").sum(), inputs) for run in (short_conv, compiled)]
    for expected, actual in zip(*gradients, strict=True):
        assert_near(actual, expected, 3)
