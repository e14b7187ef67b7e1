"""Attention matrices of mixers: the equation written out, sums of rows, and the error of mixers without one."""

import pytest
import torch

from rebased.mixers import Based, Mamba, PreviousToken, ReBased, ShortConv, SlidingWindow, SoftmaxAttention
from rebased.mixers.attention_maps import attention_map
from tolerances import FIRST_TOKEN, assert_near

B, T, D, H, K = 2, 13, 24, 3, 4
SUMS = (D, H * K, K, T, D)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("eps", [1e-12, 0.3])
@pytest.mark.parametrize("cls", [ReBased, Based])
def test_rows_sum_to_den_over_den_plus_eps(cls: type[ReBased] | type[Based], eps: float) -> None:
    mixer = cls(D, n_heads=H, key_width=K, eps=eps).double()
    x = torch.randn(B, T, D, dtype=torch.float64)
    A, sim = mixer.attention_map(x), mixer.similarity(mixer.attention_scores(x)).tril()
    den = sim.sum(-1, keepdim=True)
    assert_near(A, sim / (den + eps), *SUMS, condition=FIRST_TOKEN)
    assert_near(A.sum(-1), (den / (den + eps)).squeeze(-1), *SUMS, condition=FIRST_TOKEN)
    assert (A >= 0).all()


@pytest.mark.parametrize("rotary", [False, True])
def test_a_window_sees_its_own_tokens_alone(rotary: bool) -> None:
    mixer = SlidingWindow(D, window=4, n_heads=H, rotary=rotary).double().eval()
    x = torch.randn(B, T, D, dtype=torch.float64)
    A = mixer.attention_map(x)
    assert (A.tril(-4) == 0).all()
    assert (A.triu(1) == 0).all()
    assert_near(A.sum(-1), torch.ones(B, H, T, dtype=torch.float64), *SUMS, condition=FIRST_TOKEN)
    assert_near(mixer.apply_attention(A, x), mixer(x), *SUMS, condition=FIRST_TOKEN)


def test_dropout_does_not_change_the_matrix() -> None:
    mixer = SoftmaxAttention(D, n_heads=H, dropout=0.5).train()
    x = torch.randn(B, T, D)
    assert torch.equal(mixer.attention_map(x), mixer.attention_map(x))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # from CPUs without bf16, which then compute anyway
def test_half_precision_gives_fp32() -> None:
    x = torch.randn(B, T, D).bfloat16()
    for mixer in (ReBased(D, n_heads=H, key_width=K), SoftmaxAttention(D, n_heads=H)):
        assert mixer.bfloat16().attention_map(x).dtype == torch.float32


@pytest.mark.parametrize("norm_axis", ["joint", "per_head"])
def test_raw_scores_are_those_without_gamma_and_beta(norm_axis: str) -> None:
    mixer = ReBased(D, n_heads=H, key_width=K, norm_axis=norm_axis).double()  # type: ignore[arg-type]
    x = torch.randn(B, T, D, dtype=torch.float64)
    assert_near(mixer.raw_scores(x), mixer.attention_scores(x), *SUMS)  # gamma is 1 and beta 0
    with torch.no_grad():
        before = mixer.raw_scores(x)
        for parameter in mixer.ln_q.parameters():
            parameter.normal_()
    assert torch.equal(mixer.raw_scores(x), before)
    assert not torch.allclose(mixer.attention_scores(x), before)


def test_a_mixer_without_a_matrix_says_so() -> None:
    with pytest.raises(ValueError, match=r"mixer 'mamba' .class Mamba .* has no attention matrix"):
        attention_map(Mamba(D), torch.randn(B, T, D))


def test_the_previous_token_is_a_short_convolution_with_fixed_weights() -> None:
    conv = ShortConv(D).double()
    with torch.no_grad():
        conv.conv.weight.copy_(torch.tensor([0.0, 1.0, 0.0]))
        conv.conv.bias.zero_()
        conv.projection.weight.zero_()
        conv.projection.bias.fill_(1.0)
    x = torch.randn(B, T, D, dtype=torch.float64)
    assert_near(PreviousToken(D, dtype=torch.float64)(x), conv(x), *SUMS, condition=FIRST_TOKEN)
    assert list(PreviousToken(D).parameters()) == []
