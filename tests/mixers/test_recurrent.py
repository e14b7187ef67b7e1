"""Mixers that fade and overwrite, against their equations token by token, and against published counts."""

from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.evaluate.mixer_contract import run_mixer_contract
from rebased.mixers import (
    GLA,
    KDA,
    DeltaReBased,
    GatedBased,
    GatedDeltaNet,
    GatedLinearAttention,
    GatedReBased,
    LinearAttention,
    Mamba2,
    ReBased,
    forward_documents,
    recurrent,
    register_mixer,
)
from rebased.mixers.gated import LONG_MEMORY
from rebased.ops import delta_attention_extend
from tolerances import assert_near

D, T = 24, 70


def build(cls: type[nn.Module], **options: Any) -> Any:
    """A mixer in fp64 whose weights are large enough for every part to count."""
    torch.manual_seed(0)
    mixer = cls(D, **options).double()
    for name, parameter in mixer.named_parameters():
        if parameter.ndim > 1 and "conv" not in name:
            nn.init.normal_(parameter, std=D**-0.5)
    return mixer


def convolved(mixer: Any, x: Tensor) -> Tensor:
    """SiLU of the short convolution of the projections, one token after the other: [T, channels]."""
    qkv = x @ mixer.proj_qkv.weight.t()
    if mixer.conv is None:
        return qkv
    taps = mixer.conv.weight.squeeze(1)  # [channels, width]
    width = taps.shape[1]
    padded = torch.cat([qkv.new_zeros(width - 1, qkv.shape[1]), qkv])
    rows = [(padded[t : t + width] * taps.t()).sum(0) for t in range(len(qkv))]
    bias = 0 if mixer.conv.bias is None else mixer.conv.bias
    return functional.silu(torch.stack(rows) + bias)


def softplus_decay(mixer: Any, x: Tensor) -> Tensor:
    """The decay per head of Gated DeltaNet: [T, heads]."""
    step = functional.softplus(x @ mixer.proj_decay.weight.t() + mixer.time_step.dt_bias)
    return torch.exp(-mixer.time_step.A_log.exp() * step)


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def recur(q: Tensor, k: Tensor, v: Tensor, beta: Any, decay: Tensor) -> Tensor:
    """S' = diag(decay) S, S = S' + k (v - b S'^T k)^T w: one head, [T, .]; beta None adds."""
    S, outputs = q.new_zeros(q.shape[1], v.shape[1]), []
    for t in range(len(q)):
        S = decay[t].unsqueeze(-1) * S
        new = v[t] if beta is None else beta[t] * (v[t] - S.t() @ k[t])
        S = S + torch.outer(k[t], new)
        outputs.append(S.t() @ q[t])
    return torch.stack(outputs)


def squares(x: Tensor) -> Tensor:
    """All products of two numbers of x: their inner product is (x . y)^2."""
    return torch.einsum("ta,tb->tab", x, x).flatten(1)


def split_heads(mixer: Any, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    q, k, v = convolved(mixer, x).split(mixer.widths, dim=1)
    H = mixer.n_heads
    return list(zip(*(each.chunk(H, dim=1) for each in (q, k, v)), strict=True))


SIMILARITIES: dict[str, Any] = {"1": lambda s: s / 2, "2": lambda s: s**2, "2 centred": lambda s: (4 * s**2 - 1) / 3}
"""By degree, at a key width of 4. That of degree 1 is divided by its root, which matters to the norm's eps only."""


def sum_of_degree(degree: str, gate: bool) -> Any:
    options: dict[str, Any] = {"n_heads": 3, "key_width": 4, "value_width": 5, "delta": False, "gate": gate}
    if degree == "1":
        return build(GatedDeltaNet, **options, conv_width=0, output_gate="none")
    return build(DeltaReBased, **options, centred=degree == "2 centred")


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("degree", SIMILARITIES)
def test_a_sum_without_a_denominator(degree: str, gate: bool) -> None:
    """Values weighted by similarities and gates, then the norm; and the numbers it holds."""
    mixer, x = sum_of_degree(degree, gate), torch.randn(T, D, dtype=torch.float64)
    decay = torch.ones(T, 3, dtype=x.dtype)
    if gate and degree == "1":
        step = functional.softplus(x @ mixer.proj_decay.weight.t() + mixer.time_step.dt_bias)
        decay = torch.exp(-mixer.time_step.A_log.exp() * step)
    elif gate:
        decay = torch.sigmoid(x @ mixer.forget.weight.t() + mixer.forget.bias)
    heads = []
    for h, (q, k, v) in enumerate(split_heads(mixer, x)):
        total = decay[:, h].log().cumsum(0)
        kept = (total[:, None] - total).tril().exp().tril()
        heads.append(rms((SIMILARITIES[degree](unit(q) @ unit(k).t()) * kept) @ v, mixer.head_norm.weight))
    want = torch.cat(heads, dim=1) @ mixer.proj_o.weight.t()
    assert_near(mixer(x.unsqueeze(0))[0], want, D, T, T, 16, D, condition=64.0)
    gates = {"1": 3 * D + 2 * 3}.get(degree, 3 * D + 3)
    assert count(mixer) == 2 * D * 12 + 2 * D * 15 + 5 + gate * gates
    assert mixer.state_size(9) == 3 * {"1": 4, "2": 10, "2 centred": 11}[degree] * 5


@pytest.mark.parametrize("options", [{}, {"gate": True, "centred": True}], ids=str)
def test_the_contract_of_a_sum(options: dict[str, Any]) -> None:
    class Sum(DeltaReBased):
        added_later = ()

        def __init__(self, d_model: int, *, device: Any = None, dtype: Any = None) -> None:
            super().__init__(d_model, n_heads=2, key_width=4, delta=False, **options, device=device, dtype=dtype)

    register_mixer("sum")(Sum)
    assert [result for result in run_mixer_contract("sum") if not result.ok] == []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": True},
        {"negative": True, "output_gate": "silu", "conv_width": 4},
        {"gate": True, "decay": "softplus"},
    ],
    ids=str,
)
def test_delta_rebased(options: dict[str, Any]) -> None:
    mixer = build(DeltaReBased, n_heads=3, key_width=4, **options)
    x = torch.randn(T, D, dtype=torch.float64)
    beta = torch.sigmoid(x @ mixer.proj_beta.weight.t()) * (2 if options.get("negative") else 1)
    gate = torch.ones(T, 3, dtype=x.dtype)
    if "decay" in options:
        gate = softplus_decay(mixer, x)
    elif "gate" in options:
        gate = torch.sigmoid(x @ mixer.forget.weight.t() + mixer.forget.bias)
    heads = []
    for h, (q, k, v) in enumerate(split_heads(mixer, x)):
        o = recur(squares(unit(q)), squares(unit(k)), v, beta[:, h], gate[:, h : h + 1])
        heads.append(rms(o, mixer.head_norm.weight))
    o = torch.cat(heads, dim=1)
    if mixer.proj_gate is not None:
        o = o * functional.silu(x @ mixer.proj_gate.weight.t())
    assert_near(mixer(x.unsqueeze(0))[0], o @ mixer.proj_o.weight.t(), D, T, T, 16, D, condition=64.0)


def test_gated_delta_net() -> None:
    mixer = build(GatedDeltaNet, n_heads=2)
    x = torch.randn(T, D, dtype=torch.float64)
    beta = torch.sigmoid(x @ mixer.proj_beta.weight.t())
    decay = softplus_decay(mixer, x)
    heads = [
        rms(recur(unit(q), unit(k), v, beta[:, h], decay[:, h : h + 1]) / 12**0.5, mixer.head_norm.weight)
        for h, (q, k, v) in enumerate(split_heads(mixer, x))
    ]
    o = torch.cat(heads, dim=1) * functional.silu(x @ mixer.proj_gate.weight.t())
    assert_near(mixer(x.unsqueeze(0))[0], o @ mixer.proj_o.weight.t(), D, T, T, 16, D, condition=64.0)


def test_kda() -> None:
    mixer = build(KDA, n_heads=2, key_width=6)
    x = torch.randn(T, D, dtype=torch.float64)
    beta = torch.sigmoid(x @ mixer.proj_beta.weight.t())
    first, second = mixer.proj_decay
    step = functional.softplus(x @ first.weight.t() @ second.weight.t() + mixer.time_step.dt_bias).view(T, 2, 6)
    decay = torch.exp(-mixer.time_step.A_log.exp().view(1, 2, 1) * step)
    heads = [
        rms(recur(unit(q), unit(k), v, beta[:, h], decay[:, h]) / 6**0.5, mixer.head_norm.weight)
        for h, (q, k, v) in enumerate(split_heads(mixer, x))
    ]
    first, second = mixer.proj_gate
    o = torch.cat(heads, dim=1) * torch.sigmoid(x @ first.weight.t() @ second.weight.t() + second.bias)
    assert_near(mixer(x.unsqueeze(0))[0], o @ mixer.proj_o.weight.t(), D, T, T, 16, D, condition=64.0)


def test_gla() -> None:
    mixer = build(GLA, n_heads=2)
    x = torch.randn(T, D, dtype=torch.float64)
    first, second = mixer.proj_decay
    decay = torch.sigmoid(x @ first.weight.t() @ second.weight.t() + second.bias).pow(1 / 16).view(T, 2, 6)
    heads = [
        rms(recur(q / 6**0.5, k, v, None, decay[:, h]), mixer.head_norm.weight)
        for h, (q, k, v) in enumerate(split_heads(mixer, x))
    ]
    o = torch.cat(heads, dim=1) * functional.silu(x @ mixer.proj_gate.weight.t())
    assert_near(mixer(x.unsqueeze(0))[0], o @ mixer.proj_o.weight.t(), D, T, T, 16, D, condition=64.0)


def test_mamba2() -> None:
    mixer = build(Mamba2, d_state=5, head_width=16)
    x = torch.randn(T, D, dtype=torch.float64)
    C, B, v = convolved(mixer, x).split(mixer.widths, dim=1)
    dt = functional.softplus(x @ mixer.proj_decay.weight.t() + mixer.time_step.dt_bias)  # [T, 3]
    decay = torch.exp(-mixer.time_step.A_log.exp() * dt)
    heads = [
        recur(C, B, u * dt[:, h : h + 1], None, decay[:, h : h + 1]) + mixer.skip[h] * u
        for h, u in enumerate(v.chunk(3, dim=1))
    ]
    o = rms(torch.cat(heads, dim=1) * functional.silu(x @ mixer.proj_gate.weight.t()), mixer.head_norm.weight)
    assert_near(mixer(x.unsqueeze(0))[0], o @ mixer.proj_o.weight.t(), D, T, 16, D, condition=64.0)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_weights_and_states_have_the_sizes_of_the_formulas() -> None:
    """Formulas made by hand; those of mixers that public libraries have were held against theirs."""
    D, H, N, K, k = 96, 4, 16, 24, 8
    V, heads, wide = D // H, 2 * D // 64, {"n_heads": H, "key_width": K}
    squares, series, narrow = k * (k + 1) // 2, (k + 1) * (k + 2) // 2, {"n_heads": H, "key_width": k}
    qkv = 2 * H * k + D
    options = {"gate": True, "centred": True, "conv_width": 4, "output_gate": "silu"}
    net = GatedDeltaNet(D, n_heads=H, value_width=V, gate=False, output_gate="none")
    table: list[tuple[Any, int, int]] = [  # mixer, weights, numbers in the state
        (net, 4 * D**2 + D * H + 12 * D + V, D**2 // H + 3 * 3 * D),
        (
            GatedDeltaNet(D, **wide),
            8 * D * H * K + 2 * D * H + 2 * H + 16 * H * K + 2 * K,
            2 * H * K * K + 3 * 4 * H * K,
        ),
        (
            KDA(D, **wide),
            4 * D * H * K + 2 * D * K + 2 * H * K**2 + D * H + 14 * H * K + H + K,
            H * K**2 + 3 * 3 * H * K,
        ),
        (GLA(D, n_heads=H), 4 * D**2 + 49 * D // 2 + V, D // 2 * V),
        (
            Mamba2(D, d_state=N),
            6 * D**2 + 2 * N * D + heads * D + 12 * D + 10 * N + 3 * heads,
            2 * D * N + 3 * (2 * D + 2 * N),
        ),
        (DeltaReBased(D, **narrow), D * qkv + D * H + V + D**2, H * squares * V),
        (
            DeltaReBased(D, **narrow, **options),
            D * qkv + D * H + V + D**2 + (D * H + H) + 4 * qkv + D**2,
            H * (squares + 1) * V + 3 * qkv,
        ),
        (GatedReBased(D, **narrow), D * qkv + D**2 + 4 * H * k + (D * H + H), H * squares * (V + 1)),
        (GatedBased(D, **narrow), D * qkv + D**2 + (D * H + H), H * series * (V + 1)),
        (GatedLinearAttention(D, **narrow), D * qkv + D**2 + (D * H + H), H * k * (V + 1)),
    ]
    for mixer, weights, state in table:
        assert count(mixer) == weights, mixer
        assert mixer.state_size(9) == state, mixer


@pytest.mark.parametrize(("with_gate", "without"), [(GatedReBased, ReBased), (GatedLinearAttention, LinearAttention)])
def test_a_gated_mixer_without_decay_is_the_mixer(with_gate: type[nn.Module], without: type[nn.Module]) -> None:
    torch.manual_seed(0)
    gated: Any = with_gate(D, n_heads=2).double()
    plain = without(D, n_heads=2).double()
    plain.load_state_dict({name: x for name, x in gated.state_dict().items() if not name.startswith("forget")})
    x = torch.randn(2, T, D, dtype=torch.float64)
    assert float(gated.gates(x)["log_decay"].detach().exp().mean()) == pytest.approx(0.999, abs=1e-3)
    nn.init.zeros_(gated.forget.weight)
    nn.init.constant_(gated.forget.bias, 100.0)
    assert_near(gated(x), plain(x), D, T, 136, D, condition=32.0)


def test_memory_is_long_in_a_fresh_model() -> None:
    from rebased.models import LanguageModel, LMConfig

    for mixer in (GatedReBased, GatedBased):
        name = {GatedReBased: "gated_rebased", GatedBased: "gated_based"}[mixer]
        model = LanguageModel(LMConfig(d_model=D, vocab_size=11, mixers=(name,), n_layers=1))
        assert (model.blocks[0].mixer.forget.bias == LONG_MEMORY).all()


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (GatedReBased, {"kernel": "learned"}, "does not go with a gate"),
        (DeltaReBased, {"n_heads": 5}, "not divisible by n_heads 5"),
        (DeltaReBased, {"conv_width": -1}, "conv_width -1"),
        (DeltaReBased, {"output_gate": "relu"}, "output_gate 'relu' is unknown"),
        (DeltaReBased, {"centred": True, "key_width": 1}, "only squares of keys"),
        (DeltaReBased, {"decay": "softplus"}, "set gate: true"),
        (
            DeltaReBased,
            {"gate": True, "decay": "softmax"},
            "decay 'softmax' is unknown; choose one of sigmoid, softplus",
        ),
        (GatedDeltaNet, {"delta": False, "negative": True}, "a sum .* does not have"),
        (GLA, {"n_heads": 5}, "2 n_heads = 10"),
        (Mamba2, {"head_width": 7}, "head_width 7 does not divide"),
    ],
)
def test_bad_options(cls: type[nn.Module], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cls(D, **options)


def test_operations_between_tokens() -> None:
    from rebased.models import LMConfig
    from rebased.train.lm.flops import flops_per_token

    def per_token(name: str, **options: Any) -> int:
        shape: dict[str, Any] = {"d_model": D, "vocab_size": 11, "n_layers": 1, "mlp_ratio": 1}
        return flops_per_token(LMConfig(**shape, mixers=({"name": name, **options},)), 64)

    one, two = (per_token("delta_rebased", n_heads=2, key_width=4, value_width=w) for w in (5, 6))
    assert two - one == 3 * (2 * 2 * 2 * D + 6 * 2 * 10)  # of v and of the output; of the memory
    sizes = {"n_heads": 2, "key_width": 4, "value_width": 5}
    rule, total = (per_token("delta_rebased", **sizes, delta=delta) for delta in (True, False))
    assert rule - total == 3 * (2 * 2 * D + 2 * 2 * 10 * 5)  # the projection to beta; what the state returns for a key
    assert per_token("gated_based") - per_token("based") == 3 * 2 * 12 * D


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (DeltaReBased, {"n_heads": 2, "key_width": 4}),
        (DeltaReBased, {"n_heads": 2, "key_width": 4, "gate": True, "centred": True, "conv_width": 4}),
        (DeltaReBased, {"n_heads": 2, "key_width": 4, "delta": False}),
        (GatedDeltaNet, {"n_heads": 2}),
        (KDA, {"n_heads": 2}),
        (GLA, {"n_heads": 2}),
        (Mamba2, {"d_state": 8, "head_width": 8}),
    ],
)
def test_packed_documents_are_apart(cls: type[nn.Module], options: dict[str, Any]) -> None:
    """Also short ones, many in a chunk, and one without tokens. No document is called by itself."""
    mixer, x = build(cls, **options), torch.randn(2, T, D, dtype=torch.float64)
    starts = [0, 1, 2, 9, 9, 30, T, T + 33, 2 * T]
    alone = [mixer(x.reshape(1, -1, D)[:, i:j]) for i, j in pairwise(starts) if i < j]
    with patch.object(mixer, "forward", side_effect=AssertionError("called")):
        y = forward_documents(mixer, x, torch.tensor(starts))
    assert_near(y.flatten(0, 1), torch.cat(alone, dim=1)[0], T, condition=6 * 746)


def test_packed_documents_in_fp32() -> None:
    """32 documents begin in each chunk; without a gate all sums of decays are exact."""
    torch.manual_seed(0)
    x, starts = torch.randn(1, 128, D), torch.arange(0, 129, 2)
    for gate, condition in ((False, 1.0), (True, 32 * 104)):
        mixer = DeltaReBased(D, n_heads=2, key_width=4, gate=gate)
        want = mixer(x.view(64, 2, D)).reshape(1, 128, D)
        assert_near(mixer.forward_documents(x, starts), want, 64, condition=condition)


@pytest.mark.parametrize("packs", [False, True])
def test_documents_of_a_training_step_are_one_call(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take them packed; plain torch reads the rows, and forgets where documents begin."""
    calls: list[tuple[int, bool]] = []

    def extend(q: Tensor, *args: Any, cu_seqlens: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        calls.append((len(q), cu_seqlens is not None))
        return delta_attention_extend(q, *args, cu_seqlens=cu_seqlens, **options)

    monkeypatch.setattr(recurrent, "delta_packs", lambda *tensors, **options: packs)
    monkeypatch.setattr(recurrent, "delta_attention_extend", extend)
    mixer, x = build(GatedDeltaNet, n_heads=2), torch.randn(2, T, D, dtype=torch.float64)
    starts = [0, 9, T, T, T + 33, 2 * T]
    y = mixer.forward_documents(x, torch.tensor(starts))
    assert calls == [(1, True) if packs else (2, False)]
    alone = [mixer(x.reshape(1, -1, D)[:, i:j]) for i, j in pairwise(starts) if i < j]
    assert_near(y.flatten(0, 1), torch.cat(alone, dim=1)[0], T, condition=6 * 746)


@pytest.mark.parametrize("cls", [DeltaReBased, GatedDeltaNet, KDA, GLA, Mamba2])
def test_a_step_overwrites_the_state(cls: type[nn.Module]) -> None:
    mixer = build(cls)
    x, states = torch.randn(2, 5, D, dtype=torch.float64), [mixer.init_state(2)] * 2
    states[1] = type(states[0])(*(each.clone() for each in states[0]))
    for token in x.split(1, dim=1):
        want, states[0] = mixer.extend(token, states[0])
        assert torch.equal(mixer.extend_(token, states[1]), want)
    for after, wanted in zip(states[1], states[0], strict=True):
        assert torch.equal(after, wanted)
