"""The norms' kernels against their formulas: odd widths, more tiles than programs, memory that starts as NaN."""

import pytest
import torch

from ops.norm_cases import KINDS, assert_is_the_law
from rebased.ops import layer_norm, use_backend
from rebased.ops.backend import triton_interpreted
from rebased.ops.norm import gpu

pytestmark = pytest.mark.usefixtures("poisoned_memory")


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


def test_there_is_no_second_derivative() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8)
    with use_backend("triton"):
        gradient = torch.autograd.grad(layer_norm(x, weight, weight).square().sum(), x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match=r"rebased\.norm_backward.*no autograd formula"):
            gradient.sum().backward()
