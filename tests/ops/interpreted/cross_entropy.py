"""The head's loss on a GPU against fp64: rows of one block and of several, memory that starts as NaN."""

import math

import pytest
import torch

from ops.cross_entropy_cases import assert_is_the_law, case
from rebased.ops import linear_cross_entropy, use_backend
from rebased.ops.backend import triton_interpreted
from rebased.ops.cross_entropy import gpu, narrow_gpu
from rebased.train.precision import matmul_precision
from tolerances import assert_near

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.recorded("cross_entropy")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocab", [7, 32, 33, 100])
def test_kernel(vocab: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_interpreted()
    monkeypatch.setattr(gpu, "MAX_TILE", 32)
    monkeypatch.setattr(gpu, "LONG_ROW_TILE", 16)
    monkeypatch.setattr(narrow_gpu, "MAX_WIDTH", 0)
    with use_backend("triton"):
        assert_is_the_law(*case(9, 6, vocab, dtype))


@pytest.mark.parametrize("shape", [(9, 6, 7), (16, 16, 32), (70, 24, 33), (130, 40, 100)], ids=str)
def test_narrow_head(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows and of tokens, the last of them not full; the gradient of weight in several parts."""
    monkeypatch.setattr(narrow_gpu, "ROWS", 16)
    monkeypatch.setattr(narrow_gpu, "TOKENS", 16)
    monkeypatch.setattr(narrow_gpu, "SPLITS_FOR", 12)
    with use_backend("triton"):
        assert_is_the_law(*case(*shape, torch.float16))


@pytest.mark.parametrize("frozen", [0, 1])
def test_narrow_head_gives_the_gradients_that_are_wanted(frozen: int) -> None:
    hidden, weight, targets = case(9, 4, 7, torch.float16)
    pair = [hidden, weight]
    with use_backend("triton"):
        wanted = torch.autograd.grad(linear_cross_entropy(*pair, targets), pair)[1 - frozen]
        pair[frozen] = pair[frozen].detach()
        got = torch.autograd.grad(linear_cross_entropy(*pair, targets), pair[1 - frozen])[0]
    assert torch.equal(got, wanted)


def test_narrow_head_that_is_sure_of_its_targets() -> None:
    """Probability 1 - e^-17.3 for the target: the small rest must not drown in the rounding of the 1."""
    hidden, weight = torch.full((4, 1), 18.0).requires_grad_(), torch.tensor([[0.0], [1.0], [0.0]]).requires_grad_()
    with use_backend("triton"), matmul_precision("tf32"):
        loss = linear_cross_entropy(hidden, weight, torch.ones(4, dtype=torch.long))
    rest = 2 * math.exp(-18)
    d_hidden, d_weight = torch.autograd.grad(loss, [hidden, weight])
    assert_near(d_hidden, torch.full((4, 1), -rest), 4, dtype=torch.float16)
    assert_near(d_weight[[0, 2]], torch.full((2, 1), 4 * 18 * rest / 2), 4, dtype=torch.float16)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_target_outside_of_the_vocabulary_is_seen(dtype: torch.dtype) -> None:
    hidden, weight, targets = case(9, 6, 20, dtype)
    targets[0] = 20
    with use_backend("triton"):
        assert math.isnan(linear_cross_entropy(hidden, weight, targets).item())
