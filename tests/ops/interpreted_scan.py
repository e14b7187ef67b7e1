"""The selective scan's kernels against the loop in fp64: odd shapes, gradients, and memory that starts as NaN."""

import pytest
import torch

from ops.scan_cases import assert_gradients_match, scan_inputs
from rebased.ops import selective_scan_extend
from rebased.ops.backend import triton_interpreted
from rebased.ops.scan import gpu
from tolerances import assert_near

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize(
    ("shape", "chunks", "dtype"),
    [
        ((2, 1, 3, 1), 1, torch.float32),
        ((2, 19, 33, 5), 1, torch.float32),
        ((1, 32, 4, 16), 1, torch.float32),
        ((1, 53, 5, 3), 3, torch.float32),
        ((1, 21, 3, 20), 1, torch.float32),  # groups of two tokens
        ((1, 18, 3, 33), 1, torch.float32),  # and of one
        ((1, 17, 3, 4), 2, torch.float16),
        ((1, 18, 2, 2), 5, torch.float32),  # more chunks than intervals: some are empty
    ],
)
def test_kernels(
    shape: tuple[int, int, int, int], chunks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert triton_interpreted()
    monkeypatch.setattr(gpu, "count_chunks", lambda *_: chunks)
    assert_gradients_match(scan_inputs(*shape, dtype=dtype), "triton")


def test_extreme_steps_neither_overflow_nor_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "count_chunks", lambda *_: 2)
    inputs = scan_inputs(1, 33, 2, 4)
    inputs["dt"] = torch.tensor([1e4, 1e-6]).repeat(17)[:33].reshape(1, 33, 1).expand(1, 33, 2).contiguous()
    assert_gradients_match(inputs, "triton")


def test_compiles_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """aot_eager: tracing and its fake tensors, without the minute that generating code takes."""
    monkeypatch.setattr(gpu, "count_chunks", lambda *_: 1)
    inputs = [each.requires_grad_() for each in scan_inputs(1, 3, 2, 2).values()]
    compiled = torch.compile(selective_scan_extend, backend="aot_eager", fullgraph=True)
    results = [run(*inputs, backend="triton") for run in (selective_scan_extend, compiled)]
    gradients = [torch.autograd.grad(y.sum() + state.sum(), inputs) for y, state in results]
    for expected, actual in zip(*gradients, strict=True):
        assert_near(actual, expected, 3)
