"""The kernels of an embedding against torch: chunks full, short and none; memory that starts as NaN."""

import pytest
import torch

from ops.embedding_cases import assert_adds_positions, assert_is_the_law, mostly_filler
from rebased.ops import use_backend
from rebased.ops.backend import triton_interpreted
from rebased.ops.embedding import gpu

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.recorded("embedding")]


@pytest.mark.parametrize(("shape", "vocab", "D"), [((5, 13), 11, 6), ((64,), 40, 16), ((1,), 3, 33), ((2, 8), 1, 4)])
def test_kernels(shape: tuple[int, ...], vocab: int, D: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_interpreted()
    monkeypatch.setattr(gpu, "CHUNK", 8)
    monkeypatch.setattr(gpu, "TILE", 64)
    with use_backend("triton"):
        assert_is_the_law(mostly_filler(shape, vocab), vocab, D)
        assert_adds_positions(mostly_filler(shape, vocab), vocab, D)
        assert_adds_positions(mostly_filler(shape, vocab).int(), vocab, D, torch.float16)  # it cuts off bf16


def test_chunks_that_end_where_a_token_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CHUNK", 8)
    with use_backend("triton"):
        assert_is_the_law(torch.tensor([2] * 16 + [5] * 8 + [6] * 7), 9, 4)
