"""The norms' kernels against their formulas: odd widths, more tiles than programs, memory that starts as NaN."""

import pytest
import torch

from ops.norm_cases import KINDS, assert_is_the_law, assert_linear_norm_is_the_law
from rebased.ops import layer_norm, use_backend
from rebased.ops.backend import triton_interpreted
from rebased.ops.norm import gpu, linear_gpu
from rebased.train.precision import matmul_precision

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.recorded("norm")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(11, 24), (2, 9, 33), (1, 5)], ids=str)
@pytest.mark.parametrize(("dtype", "out"), [(torch.float32, torch.float32), (torch.float16, torch.float32)], ids=str)
def test_kernels(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, out: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert triton_interpreted()
    monkeypatch.setattr(gpu, "TILE", 128)
    monkeypatch.setattr(gpu, "PROGRAMS", 2)
    with use_backend("triton"):
        assert_is_the_law(kind, shape, dtype, out)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("rows", "D", "N"), [((150,), 24, 40), ((2, 9), 16, 32), ((1,), 3, 5)], ids=str)
def test_of_a_projection(rows: tuple[int, ...], D: int, N: int, affine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than programs, the last of them not full. The interpreter multiplies in fp32 where a GPU has TF32."""
    seen, original = [], linear_gpu.linear_norm
    monkeypatch.setattr(linear_gpu, "linear_norm", lambda *args: seen.append(1) or original(*args))
    monkeypatch.setattr(linear_gpu, "PROGRAMS", 2)
    with use_backend("triton"), matmul_precision("tf32"):
        assert_linear_norm_is_the_law(rows, D, N, torch.float32, affine)
    assert seen
    with use_backend("triton"):  # in fp32, one after the other
        assert_linear_norm_is_the_law(rows, D, N, torch.float32, affine)
    assert len(seen) == 1


def test_there_is_no_second_derivative() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    with use_backend("triton"):
        gradient = torch.autograd.grad(layer_norm(x, weight, weight).square().sum(), x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match=r"rebased\.norm_backward.*no autograd formula"):
            gradient.sum().backward()
