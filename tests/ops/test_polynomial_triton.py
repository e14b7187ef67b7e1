"""backend="triton" where there is no GPU: one clear ValueError, and plain torch stays as it is.

The kernels themselves run in interpreted/polynomial*.py (test_interpreted.py), are built for GPUs in
test_polynomial_aot.py, and are held against fp64 on one in test_polynomial_gpu.py.
"""

import pytest
import torch

from polynomial_inputs import Shape, inputs
from rebased.ops import REBASED, init_poly_state, poly_attention, poly_attention_extend, use_backend
from rebased.ops.polynomial import api

SHAPE = Shape(B=1, T=6, H=2, K=4, V=3)


def test_cpu_tensors() -> None:
    q, k, v, _ = inputs(SHAPE, dtype=torch.float32)
    with pytest.raises(ValueError, match="needs CUDA tensors; these are on cpu"):
        poly_attention(q, k, v, coefficients=REBASED, backend="triton")
    with pytest.raises(ValueError, match="needs CUDA tensors; these are on cpu"):
        poly_attention_extend(q, k, v, init_poly_state(1, 2, 4, 3, REBASED), coefficients=REBASED, backend="triton")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "has_triton", lambda: False)
    q, k, v, _ = inputs(SHAPE, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"needs Triton 3\.5 or newer: install it, or use 'auto' or 'chunked'"):
        poly_attention(q, k, v, coefficients=REBASED, backend="triton")


@pytest.mark.parametrize(("K", "dtype"), [(4, torch.float64), (129, torch.float32)])
def test_auto_leaves_what_kernels_do_not_take_to_the_chunked_path(K: int, dtype: torch.dtype) -> None:
    """As it is on a GPU, where "auto" means "triton"."""
    q, k, v, _ = inputs(SHAPE._replace(K=K), dtype=dtype)
    with use_backend("triton"):
        o = poly_attention(q, k, v, coefficients=REBASED)
    assert torch.equal(o, poly_attention(q, k, v, coefficients=REBASED, backend="chunked"))
