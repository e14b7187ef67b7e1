"""Softmax attention against its formula written out, in fp64."""

import copy

import pytest
import torch

from rebased.mixers import KVCache, SoftmaxAttention, extend_documents
from rebased.mixers.attention import packed_attention
from tolerances import assert_near

B, T, D = 2, 9, 12


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("n_heads", [1, 3])
@pytest.mark.parametrize("qkv_bias", [True, False])
def test_is_softmax_attention(n_heads: int, qkv_bias: bool) -> None:
    mixer = SoftmaxAttention(D, n_heads=n_heads, qkv_bias=qkv_bias).double().eval()
    x = torch.randn(B, T, D, dtype=torch.float64)
    qkv = x @ mixer.qkv.weight.T + (mixer.qkv.bias if qkv_bias else 0)
    heads = []
    for q, k, v in zip(*(part.chunk(n_heads, -1) for part in qkv.chunk(3, -1)), strict=True):
        scores = q @ k.transpose(1, 2) / (D // n_heads) ** 0.5
        future = torch.ones(T, T, dtype=torch.bool).triu(1)
        heads.append(torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v)
    expected = torch.cat(heads, -1) @ mixer.out_proj.weight.T + mixer.out_proj.bias
    assert_near(mixer(x), expected, D, D, T, D)


def test_parameters() -> None:
    assert sum(p.numel() for p in SoftmaxAttention(D).parameters()) == 4 * D * D + 4 * D
    assert sum(p.numel() for p in SoftmaxAttention(D, qkv_bias=False).parameters()) == 4 * D * D + D


def test_dropout_acts_in_training_alone() -> None:
    mixer, x = SoftmaxAttention(D, dropout=0.5), torch.randn(B, T, D)
    assert not torch.equal(mixer(x), mixer(x))
    assert torch.equal(mixer.eval()(x), mixer(x))
    quiet = SoftmaxAttention(D, dropout=0.0)
    assert torch.equal(quiet(x), quiet(x))


def test_the_cache_grows() -> None:
    mixer = SoftmaxAttention(D, n_heads=3)
    assert [mixer.state_size(t) for t in (0, 1, 10)] == [0, 24, 240]
    _, state = mixer.extend(torch.randn(B, T, D), mixer.init_state(B))
    assert isinstance(state, KVCache)
    assert state.k.shape == state.v.shape == (B, T, 3, 4)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="d_model 12 is not divisible by n_heads 5"):
        SoftmaxAttention(D, n_heads=5)
    with pytest.raises(ValueError, match=r"dropout 1\.5 is not a probability"):
        SoftmaxAttention(D, dropout=1.5)


@pytest.mark.parametrize("foreign", [(torch.zeros(1),), KVCache(torch.zeros(1, 0, 1, D), torch.zeros(1, 0, 1, D))])
def test_a_foreign_state_is_refused(foreign: object) -> None:
    with pytest.raises(ValueError, match="this state is of another shape"):
        SoftmaxAttention(D).extend(torch.randn(B, T, D), foreign)


@pytest.mark.gpu
@pytest.mark.parametrize("rotary", [False, True])
def test_a_gpu_reads_packed_prompts_without_a_mask(rotary: bool) -> None:
    assert packed_attention() is not None, "this torch has no attention to packed documents"
    mixer = SoftmaxAttention(128, n_heads=2, rotary=rotary, device="cuda", dtype=torch.bfloat16).eval()
    exact = copy.deepcopy(mixer).double()
    lengths, before = (70, 1, 300), (5, 0, 129)
    with torch.no_grad():
        pasts = [torch.randn(1, n, 128, device="cuda", dtype=torch.bfloat16) for n in before]
        pieces = [torch.randn(1, n, 128, device="cuda", dtype=torch.bfloat16) for n in lengths]
        states = [mixer.extend(past, mixer.init_state(1))[1] for past in pasts]
        packed, caches = extend_documents(mixer, torch.cat(pieces, dim=1), lengths, states)
        alone = [mixer.extend(piece, state)[0] for piece, state in zip(pieces, states, strict=True)]
        for y, cache, own, piece, past in zip(packed.split(lengths, dim=1), caches, alone, pieces, pasts, strict=True):
            expected = exact(torch.cat([past, piece], dim=1).double())[:, past.shape[1] :]
            assert cache.k.shape[1] == past.shape[1] + piece.shape[1]
            assert_near(y, expected, 128, 128, 429, 128, roundings=5)  # q and k, rotated, weights, heads, y
            assert_near(own, expected, 128, 128, 429, 128, roundings=5)
