"""fp32 over 65,536 tokens of very different scales, against fp64: values and gradients, one kind of scale per head."""

import pytest
import torch
from torch import Tensor

from rebased.ops import BASED, REBASED, Coefficients, feature_count, poly_attention
from rebased.ops.polynomial import chunked_passes
from rebased.ops.polynomial.chunk_plan import TILE
from rebased.ops.polynomial.similarity import Kernel
from tolerances import OUTLIER, largest_error, limit

T, V = 65_536, 4
HEADS = ("small", "large", "growing", "shrinking", "tokens", "channels", "outlier")


def scaled_inputs(K: int, seed: int = 0) -> list[Tensor]:
    """q, k, v, do [1,T,H,*] in fp32; head h is scaled as HEADS[h] says."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, T, len(HEADS), w, generator=generator) for w in (K, K, V, V))
    ramp = 10 ** torch.linspace(-3, 3, T).view(1, T, 1)
    at = {name: (slice(None), slice(None), h) for h, name in enumerate(HEADS)}
    for x in (q, k):
        x[at["small"]] *= 1e-3  # s^2 is then near eps
        x[at["large"]] *= 1e3
        x[at["tokens"]] *= 10 ** (6 * torch.rand(1, T, 1, generator=generator) - 3)
    k[at["growing"]] *= ramp
    k[at["shrinking"]] /= ramp
    q[at["channels"]] *= 10 ** torch.linspace(-2, 2, K)
    k[at["channels"]] *= 10 ** torch.linspace(2, -2, K)
    v[at["channels"]] *= 10 ** torch.linspace(-4, 4, V)
    k[0, 0, HEADS.index("outlier")] *= 1e4
    return [q, k, v, do]


def attend(tensors: list[Tensor], coefficients: Coefficients, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k, v, do = (x.to(dtype).requires_grad_() for x in tensors)
    o = poly_attention(q, k, v, coefficients=coefficients, backend="chunked")
    return o, *torch.autograd.grad(o, (q, k, v), do)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("coefficients", "K"),
    [(REBASED, 8), *(pytest.param(*each, marks=pytest.mark.release) for each in ((REBASED, 16), (BASED, 8)))],
    ids=str,
)
def test_fp32_stays_accurate(coefficients: Coefficients, K: int) -> None:
    """A score is a sum over K; a tile sums its tokens, a state the tiles before it, and its features are summed.

    Of "tokens", dk is off by u over the first key, and where that is by chance far smaller than the keys after it, by
    more than dk itself. With this seed it is not.
    """
    tensors = scaled_inputs(K)
    got = attend(tensors, coefficients, torch.float32)
    want = attend(tensors, coefficients, torch.float64)
    usual = limit(torch.float32, K, TILE, T // TILE, feature_count(K, coefficients))
    outlier = {name: limit(torch.float32, 1, condition=c) for name, c in OUTLIER.items()}  # of one key: no sum grows
    for name, a, b in zip(("o", "dq", "dk", "dv"), got, want, strict=True):
        assert a.isfinite().all()
        error = ((a - b).abs().amax(1) / b.abs().amax(1))[0].amax(-1)  # [H]: the worst channel of each head
        for head, e in zip(HEADS, error.tolist(), strict=True):
            allowed = outlier.get(name, usual) if head == "outlier" else usual
            assert e < allowed, f"{name} of the head {head!r} is off by {e:.1e}; the limit is {allowed:.1e}"


@pytest.mark.parametrize("coefficients", [REBASED, BASED], ids=str)
def test_a_sum_that_cancels_is_computed_in_fp64(coefficients: Coefficients, monkeypatch: pytest.MonkeyPatch) -> None:
    """One head has a key 10,000 times larger than all others. Its tokens from there on, and no others, change."""
    T, large, K = 1024, 300, 16
    generator = torch.Generator().manual_seed(0)
    usual = [torch.randn(2, T, 3, w, generator=generator) for w in (K, K, V, V)]
    q, k, v, do = usual
    with_outlier = [q, k.clone(), v, do]
    with_outlier[1][1, large, 2] *= 1e4
    want = attend(with_outlier, coefficients, torch.float64)
    got = attend(with_outlier, coefficients, torch.float32)
    before = attend(usual, coefficients, torch.float32)

    def errors(found: tuple[Tensor, ...]) -> list[float]:
        """Of o and dv of the head, over its largest number."""
        return [largest_error(found[n][1, :, 2], want[n][1, :, 2]) for n in (0, 3)]

    allowed = limit(torch.float32, K, TILE, T // TILE, feature_count(K, coefficients))
    assert max(errors(got)) < allowed
    assert torch.equal(got[0][1, :large, 2], before[0][1, :large, 2])
    for a, b in zip(got, before, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1, :, :2], b[1, :, :2])
    monkeypatch.setattr(chunked_passes, "CANCELLED", torch.inf)
    assert max(errors(attend(with_outlier, coefficients, torch.float32))) > allowed


@pytest.mark.parametrize("coefficients", [REBASED, BASED, (0.0, 1.0, 1.0), (1.0, -0.5, 0.25)], ids=str)
def test_terms_of_a_sum_are_bounded(coefficients: Coefficients) -> None:
    """Tokens that are called harmless have terms, feature by feature, that are at most CANCELLED times their sum."""
    T, K = 768, 16
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, 4, w, generator=generator) for w in (K, K, V))
    k[0, :, 1] += 3  # keys cluster
    k[0, 200, 2] *= 30
    q[0, :, 3] -= q[0, :, 3].mean(-1, keepdim=True)  # at right angles to keys that are nearly alike
    k[0, :, 3] = k[0, :, 3] / 20 + 1
    kernel = Kernel(coefficients, 0.3)
    s = 0.3 * torch.einsum("bihk,bjhk->bhij", q, k).double()
    sums = (coefficients[0] + coefficients[1] * s + coefficients[2] * s**2).tril().sum(3).transpose(1, 2)
    length = 0.3 * torch.einsum("bihk,bjhk->bhij", q.abs(), k.abs()).double()  # of the terms of s
    c0, c1, c2 = map(abs, coefficients)
    terms = (c0 + c1 * length + c2 * length**2).tril().sum(3).transpose(1, 2)
    found = chunked_passes.find_cancelled(q, k, v, sums.float().unsqueeze(3), kernel)
    worst = torch.where(found, 0.0, terms / sums.abs())[:, TILE:]
    assert float(worst.max()) <= chunked_passes.CANCELLED
    assert not found[:, :, 0].any()  # random keys
    assert found[:, -1, 3].all() or c0 != 0  # a constant keeps the sum large
