"""ReBased and Based against their formulas written out, in fp64."""

import pytest
import torch
from torch import Tensor, nn

from rebased.mixers import Based, LinearAttention, PolynomialAttention, ReBased
from tolerances import FIRST_TOKEN, assert_near

B, T, D, H, K = 2, 11, 24, 3, 4
V = D // H
SUMS = (D, H * K, K, T, D)
"""A projection, the norm, a score, tokens, a projection."""
TRANSFORMS = ["none", "norm", "scale", "affine", "norm_affine"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def randomised(mixer: PolynomialAttention) -> PolynomialAttention:
    """Return the mixer in fp64, with random gamma and beta."""
    for parameter in mixer.double().parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter)
    return mixer


def attend(mixer: PolynomialAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return o_i = sum_j sim_ij v_j / (sum_j sim_ij + eps), one head and query after the other.

    q, k [B,T,H*K], v [B,T,H*V].
    """
    heads = []
    for q_h, k_h, v_h in zip(q.chunk(H, -1), k.chunk(H, -1), v.chunk(H, -1), strict=True):
        rows = []
        for i in range(T):
            s = (q_h[:, i : i + 1] * k_h[:, : i + 1]).sum(-1) / K**0.5  # [B,i+1]
            sim = s**2 if isinstance(mixer, ReBased) else 1 + s + s**2 / 2
            rows.append((sim[..., None] * v_h[:, : i + 1]).sum(1) / (sim.sum(1, keepdim=True) + 1e-12))
        heads.append(torch.stack(rows, dim=1))
    return torch.cat(heads, dim=-1) @ mixer.proj_o.weight.T


def projected(mixer: PolynomialAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x @ mixer.proj_q.weight.T, x @ mixer.proj_k.weight.T, x @ mixer.proj_v.weight.T


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()


@pytest.mark.parametrize("row", TRANSFORMS)
def test_rebased_is_the_row_of_table_1(row: str) -> None:
    mixer = randomised(ReBased(D, n_heads=H, key_width=K, qk_transform=row))
    x = torch.randn(B, T, D, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    if row in ("norm", "norm_affine"):
        q, k = standardised(q), standardised(k)  # over all heads' features jointly
    if row in ("scale", "affine", "norm_affine"):
        q, k = q * mixer.ln_q.weight, k * mixer.ln_k.weight
    if row in ("affine", "norm_affine"):
        q, k = q + mixer.ln_q.bias, k + mixer.ln_k.bias
    assert_near(mixer(x), attend(mixer, q, k, v), *SUMS, condition=FIRST_TOKEN)


def test_per_head_norm_shares_one_gamma_and_beta() -> None:
    mixer = randomised(ReBased(D, n_heads=H, key_width=K, norm_axis="per_head"))
    x = torch.randn(B, T, D, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    gamma, beta = mixer.ln_q.weight, mixer.ln_q.bias
    q, k = (torch.cat([gamma * standardised(head) + beta for head in y.chunk(H, -1)], -1) for y in (q, k))
    assert_near(mixer(x), attend(mixer, q, k, v), *SUMS, condition=FIRST_TOKEN)


def test_based_is_its_taylor_series() -> None:
    mixer = randomised(Based(D, n_heads=H, key_width=K))
    x = torch.randn(B, T, D, dtype=torch.float64)
    assert_near(mixer(x), attend(mixer, *projected(mixer, x)), *SUMS)


def test_linear_attention_is_its_feature_map() -> None:
    """phi(x) = x + 1 above zero and exp(x) below; o_i = phi(q_i) sum_j phi(k_j) v_j, divided by the same without v."""
    mixer = randomised(LinearAttention(D, n_heads=H, key_width=K))
    x = torch.randn(B, T, D, dtype=torch.float64)
    q, k, v = projected(mixer, x)
    q, k = (torch.where(y > 0, y + 1, y.exp()).unflatten(-1, (H, K)) for y in (q, k))  # [B,T,H,K]
    v = v.unflatten(-1, (H, V))
    kv, z = torch.einsum("bthk,bthv->bthkv", k, v).cumsum(1), k.cumsum(1)
    o = torch.einsum("bthk,bthkv->bthv", q, kv) / ((q * z).sum(-1, keepdim=True) + 1e-12)
    assert_near(mixer(x), o.flatten(-2) @ mixer.proj_o.weight.T, *SUMS)
    positions = torch.tensor([[0, 3], [T - 1, 5]])
    assert_near(mixer.forward_at(x, positions), mixer(x)[torch.arange(B)[:, None], positions], *SUMS)
    assert mixer.state_size(T) == mixer.state_size(2 * T) == H * K * (V + 1)
    assert sum(weight.numel() for weight in mixer.parameters()) == 2 * H * K * D + 2 * H * V * D


@pytest.mark.parametrize(
    ("arguments", "of_the_norm"),
    [
        ({}, 768),  # gamma and beta for q and for k, over 12 x 16 features
        ({"norm_axis": "per_head"}, 32),
        ({"qk_transform": "none"}, 0),
        ({"qk_transform": "norm"}, 0),
        ({"qk_transform": "scale"}, 384),
        ({"qk_transform": "affine"}, 768),
    ],
)
@pytest.mark.parametrize("d_model", [48, 96])
def test_parameters_of_the_norm_do_not_depend_on_d(arguments: dict[str, str], of_the_norm: int, d_model: int) -> None:
    def count(mixer: nn.Module) -> int:
        return sum(parameter.numel() for parameter in mixer.parameters())

    assert count(Based(d_model)) == 2 * 192 * d_model + 2 * d_model * d_model
    assert count(ReBased(d_model, **arguments)) == count(Based(d_model)) + of_the_norm


@pytest.mark.parametrize("factor", [0.5, 30.0])
def test_scaling_wq_changes_nothing_but_through_eps(factor: float) -> None:
    x = torch.randn(B, T, D, dtype=torch.float64)
    rebased, based = (randomised(cls(D, n_heads=H, key_width=K)) for cls in (ReBased, Based))
    with torch.no_grad():
        rebased.proj_q.weight *= 100  # eps is then small compared with the variance
        before = rebased(x), based(x)
        for mixer in (rebased, based):
            mixer.proj_q.weight *= factor
        torch.testing.assert_close(rebased(x), before[0], rtol=0, atol=1e-6)  # eps over the variance, not rounding
        assert not torch.allclose(based(x), before[1], atol=1e-3)  # Based has a scale of its own


def test_first_output_is_the_first_value() -> None:
    mixer = randomised(ReBased(D, n_heads=H, key_width=K))
    x = torch.randn(B, T, D, dtype=torch.float64)
    first = mixer.proj_o(mixer.proj_v(x[:, 0]))
    torch.testing.assert_close(mixer(x)[:, 0], first, rtol=0, atol=1e-8)  # eps over s^2, not rounding


@pytest.mark.parametrize("cls", [ReBased, Based])
def test_a_width_that_heads_do_not_divide_is_refused(cls: type[PolynomialAttention]) -> None:
    with pytest.raises(ValueError, match=r"d_model 64 is not divisible by n_heads 12.*value_width.*the floor, 5, .*4 "):
        cls(64)
    mixer = cls(64, value_width=5)
    assert mixer.proj_o.weight.shape == (64, 60)
    assert mixer(torch.randn(B, T, 64)).shape == (B, T, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"qk_transform": "nrom"}, "qk_transform 'nrom' is unknown"),
        ({"norm_axis": "heads"}, "norm_axis 'heads' is unknown"),
        ({"key_width": 0}, "key_width 0"),
        ({"backend": "cuda"}, "backend 'cuda' is unknown"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReBased(24, **arguments)(torch.randn(1, 2, 24))


@pytest.mark.parametrize("cls", [ReBased, Based])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_autocast(cls: type[PolynomialAttention]) -> None:
    mixer = cls(48)
    x = torch.randn(B, T, 48, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = mixer(x)
        pieces, state = [], mixer.init_state(B)
        for piece in x.split(4, dim=1):
            out, state = mixer.extend(piece, state)
            pieces.append(out)
    assert y.dtype == torch.bfloat16
    assert state.kv.dtype == torch.float32
    exact = mixer(x)
    for got in (y, torch.cat(pieces, 1)):  # x, weights, q and k (twice in a similarity), v, o, and the result
        assert_near(got, exact, *SUMS, roundings=8, size=1.0)
    y.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in mixer.parameters())


def test_a_foreign_state_is_refused() -> None:
    x = torch.randn(B, T, 48)
    with pytest.raises(ValueError, match="this state is of another shape"):
        ReBased(48).extend(x, Based(48).init_state(B))
    with pytest.raises(ValueError, match="this state is of another shape"):
        ReBased(48).extend(x, ReBased(48).init_state(B + 1))
