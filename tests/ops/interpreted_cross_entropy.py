"""The head's loss on a GPU against fp64: rows of one block and of several, memory that starts as NaN."""

import math

import pytest
import torch

from ops.cross_entropy_cases import assert_is_the_law, case
from rebased.ops import linear_cross_entropy, use_backend
from rebased.ops.backend import triton_interpreted
from rebased.ops.cross_entropy import gpu
from rebased.train.precision import matmul_precision
from tolerances import assert_near

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [7, 32, 33, 100])
def test_kernel(vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_interpreted()
    monkeypatch.setattr(gpu, "MAX_TILE", 32)
    monkeypatch.setattr(gpu, "LONG_ROW_TILE", 16)
    with use_backend("triton"):
        assert_is_the_law(*case(9, 6, vocab, dtype))


def test_tf32_is_fp16() -> None:
    with use_backend("triton"), matmul_precision("tf32"):
        assert_is_the_law(*case(9, 6, 33, torch.float32), rounded_to=torch.float16)


def test_tf32_keeps_gradients_that_fp16_could_not_tell_from_zero() -> None:
    """Two tokens, the other of which has probability e^-18."""
    hidden, weight = torch.full((4, 1), -18.0).requires_grad_(), torch.tensor([[0.0], [1.0]])
    with use_backend("triton"), matmul_precision("tf32"):
        loss = linear_cross_entropy(hidden, weight, torch.zeros(4, dtype=torch.long))
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert_near(gradient, torch.full((4, 1), math.exp(-18)), 4, dtype=torch.float16)  # TF32 has as many digits


def test_a_target_outside_of_the_vocabulary_is_seen() -> None:
    hidden, weight, targets = case(9, 6, 20, torch.float32)
    targets[0] = 20
    with use_backend("triton"):
        assert math.isnan(linear_cross_entropy(hidden, weight, targets).item())
