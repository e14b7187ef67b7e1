"""WKV's kernels against its formula in fp64: odd shapes, gradients, and memory that starts as NaN."""

import pytest
import torch

from ops.wkv_cases import assert_matches, by_path, wkv_inputs
from rebased.ops import wkv
from rebased.ops.backend import triton_interpreted
from rebased.ops.rwkv import gpu
from tolerances import assert_near

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.recorded("rwkv")]


@pytest.mark.parametrize(
    ("shape", "chunks", "dtype"),
    [
        ((2, 1, 3), 1, torch.float32),
        ((2, 19, 33), 1, torch.float32),
        ((1, 40, 5), 3, torch.float32),
        ((1, 9, 4), 4, torch.float32),  # the fourth chunk is empty
        ((1, 17, 6), 2, torch.float16),
    ],
)
def test_kernels(shape: tuple[int, int, int], chunks: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_interpreted()
    monkeypatch.setattr(gpu, "count_chunks", lambda *_: chunks)
    assert_matches(wkv_inputs(*shape, dtype=dtype), by_path("triton"))


def test_exponents_beyond_any_float(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "count_chunks", lambda *_: 2)
    assert_matches(wkv_inputs(1, 24, 5, spread=60.0), by_path("triton"))


def test_compiles_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """aot_eager: tracing and its fake tensors, without the minute that generating code takes."""
    monkeypatch.setattr(gpu, "count_chunks", lambda *_: 1)
    inputs = [each.requires_grad_() for each in list(wkv_inputs(1, 3, 2).values())[:4]]
    compiled = torch.compile(wkv, backend="aot_eager", fullgraph=True)
    gradients = [torch.autograd.grad(run(*inputs, backend="triton").sum(), inputs) for run in (wkv, compiled)]
    for expected, actual in zip(*gradients, strict=True):
        assert_near(actual, expected, 3)
