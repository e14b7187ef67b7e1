"""The selective scan's kernels against the loop in fp64: odd shapes, gradients, and memory that starts as NaN."""

import pytest
import torch

from mixers.test_mamba import assert_kernels_match
from ops.scan_cases import OPTIONS, assert_gradients_match, assert_step_sizes, scan, scan_inputs
from rebased.mixers import Mamba
from rebased.ops.backend import triton_interpreted
from rebased.ops.scan import gpu
from rebased.ops.scan.elementwise_gpu import apply_gate
from tolerances import assert_near

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.recorded("scan")]


@pytest.mark.parametrize(
    ("shape", "chunks", "options", "dtype"),
    [
        ((2, 1, 3, 1), 1, OPTIONS, torch.float32),
        ((1, 19, 17, 5), 1, (), torch.float32),
        ((2, 19, 17, 5), 1, OPTIONS, torch.float32),
        ((1, 32, 4, 16), 1, ("gate",), torch.float32),
        ((1, 53, 5, 3), 3, ("dt_bias",), torch.float32),
        ((1, 17, 3, 4), 2, (), torch.float16),
        ((1, 17, 3, 4), 2, OPTIONS, torch.float16),
        ((1, 18, 2, 2), 5, (), torch.float32),  # more chunks than intervals: some are empty
        ((2, 20, 1, 2), 1, OPTIONS, torch.float32),
        ((1, 21, 3, 20), 1, (), torch.float32),  # groups of two tokens
        ((1, 18, 3, 33), 1, (), torch.float32),  # and of one
        ((2, 16, 16, 4), 1, (), torch.float32),  # nothing to mask
        ((1, 48, 32, 2), 2, (), torch.float16),  # the same in chunks
    ],
)
def test_kernels(
    shape: tuple[int, int, int, int],
    chunks: int,
    options: tuple[str, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert triton_interpreted()
    monkeypatch.setattr(gpu, "count_chunks", lambda *_: chunks)
    assert_gradients_match(scan_inputs(*shape, options=options, dtype=dtype), "triton")


def test_every_step_size_is_accurate() -> None:
    assert_step_sizes("cpu")


def test_a_gate_of_any_strides() -> None:
    y, gate = torch.randn(5, 7, 6), torch.randn(6, 7, 5).transpose(0, 2)
    assert_near(apply_gate(y, gate), y.double() * torch.nn.functional.silu(gate.double()), 1)


def test_extreme_steps_neither_overflow_nor_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "count_chunks", lambda *_: 2)
    inputs = scan_inputs(1, 33, 2, 4)
    inputs["dt"] = torch.tensor([1e4, 1e-6]).repeat(17)[:33].reshape(1, 33, 1).expand(1, 33, 2).contiguous()
    assert_gradients_match(inputs, "triton")


def test_mamba_with_kernels() -> None:
    assert_kernels_match("cpu", B=1)


def test_mamba_calls_a_projection_with_a_hook() -> None:
    """Fused code reads the weights of dt_proj, which would pass a hook by."""
    mixer, x = Mamba(8, backend="triton"), torch.randn(1, 3, 8)
    expected = mixer(x)
    mixer.dt_proj.register_forward_hook(lambda module, inputs, output: output + 1)
    changed = mixer(x)
    assert not torch.equal(changed, expected)
    mixer.backend = "chunked"
    assert_near(changed, mixer(x), 8, 4, 16, 3, 16)


def test_compiles_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """aot_eager: tracing and its fake tensors, without the minute that generating code takes."""
    monkeypatch.setattr(gpu, "count_chunks", lambda *_: 1)
    inputs = {name: each.requires_grad_() for name, each in scan_inputs(1, 3, 2, 2, options=OPTIONS).items()}
    compiled = torch.compile(scan, backend="aot_eager", fullgraph=True)
    results = [run(inputs, "triton") for run in (scan, compiled)]
    gradients = [torch.autograd.grad(y.sum() + state.sum(), list(inputs.values())) for y, state in results]
    for expected, actual in zip(*gradients, strict=True):
        assert_near(actual, expected, 3)
