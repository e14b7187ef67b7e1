"""fp32 over 65,536 tokens of very different scales, against fp64: values and gradients, one kind of scale per head."""

import pytest
import torch
from torch import Tensor

from rebased.ops import BASED, REBASED, Coefficients, feature_count, poly_attention
from rebased.ops.polynomial.chunk_plan import TILE
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


@pytest.mark.parametrize("case", ["value", "late gradient", "range"])
def test_sums_that_cancel_stay_accurate(case: str) -> None:
    """Inputs that a state in fp32 gets wrong by many times the limit, or as NaN: queries at right angles to
    a large key whose value is large, or of which only the last token has a gradient; features that fp32 cannot hold."""
    T, K = 1024, 16
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, T, 1, w, generator=generator) for w in (K, K, V, V))
    if case == "range":
        q, k = q / 3e18, k * 3e18
    else:
        direction = k[:, 5:6] / k[:, 5:6].norm(dim=-1, keepdim=True)
        q -= (q * direction).sum(-1, keepdim=True) * direction
        k[:, 5] *= 6 if case == "value" else 200
        v[:, 5] *= 1e4 if case == "value" else 1
        do[:, : -1 if case == "late gradient" else 0] = 0
    got = attend([q, k, v, do], REBASED, torch.float32)
    want = attend([q, k, v, do], REBASED, torch.float64)
    allowed = limit(torch.float32, K, TILE, T // TILE, feature_count(K, REBASED))
    for n in (0, 3):  # o and dv
        assert largest_error(got[n], want[n]) < allowed
