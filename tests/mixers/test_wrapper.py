"""A short convolution and an output gate around every mixer: the contract, the equation, counts, and old configs."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from rebased.evaluate import mixer_cases
from rebased.evaluate.checks import NotApplicable
from rebased.evaluate.mixer_checks import CHECKS, Check
from rebased.mixers import FusedSlots, WrappedMixer, init_slots, mixer_class, mixer_name, mixer_names, unwrap
from rebased.mixers.documents import ExtendsDocuments
from rebased.mixers.slots import HasStepHeads
from rebased.models import Decoder, LanguageModel, LMConfig, Sampling
from rebased.models.block import build_mixer
from rebased.models.config import mixer_schema
from tolerances import assert_near

D, T = 24, 37
OPTIONS = {"conv_width": 3, "output_gate": "silu"}
OURS = [name for name in mixer_names() if mixer_class(name).__module__.startswith("rebased.")]
AROUND = {name: mixer_schema(name, mixer_class(name)).around for name in OURS}
WRAPPED = [name for name in OURS if AROUND[name]]


def with_options(name: str) -> dict[str, Any]:
    return {"name": name, **{key: OPTIONS[key] for key in AROUND[name]}}


def build(mixer: Any, **shape: Any) -> Any:
    torch.manual_seed(0)
    return build_mixer(LMConfig(d_model=D, mixers=(mixer,), **shape), layer=1).double().eval()


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.release] * (name in ("based", "gated_based"))) for name in WRAPPED]
)  # what is wrapped there differs from rebased and gated_rebased in its features alone
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_contract(name: str, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**fields: Any) -> LMConfig:
        return LMConfig(**fields | {"mixers": (with_options(name),)})

    monkeypatch.setattr(mixer_cases, "LMConfig", config)
    assert isinstance(mixer_cases.build(name), WrappedMixer)
    try:
        check.run(name)
    except NotApplicable as reason:
        pytest.skip(str(reason))


def test_every_mixer_has_both_or_brings_its_own() -> None:
    for name in OURS:
        fields = {*mixer_schema(name, mixer_class(name)).model_fields, *getattr(mixer_class(name), "built_in", ())}
        assert {"conv_width", "output_gate"} <= fields, name


@pytest.mark.parametrize(("name", "last"), [("rebased", "proj_o"), ("attention", "out_proj"), ("rwkv", None)])
def test_equation(name: str, last: str | None) -> None:
    """y = W_o (norm(o) gate(W x)), o the heads of the mixer for silu(conv(x)): the mixer's own weights, by hand."""
    settings = with_options(name) | ({"n_heads": 2} if last else {})
    mixer, x = build(settings), torch.randn(2, T, D, dtype=torch.float64)
    taps = mixer.conv.weight.squeeze(1)  # [D, 3]
    padded = functional.pad(x, (0, 0, 2, 0))
    u = functional.silu(sum(padded[:, w : w + T] * taps[:, w] for w in range(3)))
    plain = unwrap(mixer)
    y = plain(u)
    if last:  # y is what the heads return
        heads = y.unflatten(-1, (2, -1))
        heads = heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
        gate = x @ mixer.proj_gate.weight.t()
        y = mixer.proj_o(heads.flatten(-2) * gate * torch.sigmoid(gate))
    assert_near(mixer(x), y, D, 3, T, 136, D, condition=64.0)


@pytest.mark.parametrize("name", ["rebased", "gated_rebased", "gated_based", "attention", "short_conv"])
@pytest.mark.parametrize("options", [OPTIONS, {"conv_width": 3}, {"output_gate": "silu"}], ids=str)
def test_fused_steps_are_the_steps(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    heads = {} if name == "short_conv" else {"n_heads": 3}
    mixer = {"name": name, **heads, **{key: value for key, value in options.items() if key in AROUND[name]}}
    model = LanguageModel(LMConfig(d_model=D, vocab_size=11, n_layers=2, mixers=("short_conv", mixer))).eval()
    logits = []
    for fusion in ("none", "kernels"):
        decoder = Decoder(model, slots=2, capacity=16, fusion=fusion)  # type: ignore[arg-type]
        for slot, prompt in enumerate(([1, 2, 3], [4])):
            decoder.put(slot, prompt, decoder.prefill(prompt[:-1]), Sampling(temperature=0.0))
        for _ in range(4):
            decoder.step()
            logits.append(decoder.logits.clone())
    for plain, fused in zip(logits[:4], logits[4:], strict=True):
        assert_near(fused, plain, D, 16, 153, D, 2 * D, D, condition=64.0)


@pytest.mark.parametrize("name", WRAPPED)
def test_prompts_are_read_at_once_where_the_mixer_can(name: str) -> None:
    """The contract suite compares the numbers; here is that no mixer loses the ability by its options."""
    assert isinstance(build(with_options(name)), ExtendsDocuments) == isinstance(build(name), ExtendsDocuments)


def test_a_mixer_keeps_its_fused_slots() -> None:
    for name in ("rebased", "based", "gated_rebased", "gated_based"):
        mixer = build({"name": name, "n_heads": 3})
        assert isinstance(init_slots(mixer, 2, 8), FusedSlots)
        wrapped = build({**with_options(name), "n_heads": 3})
        assert isinstance(init_slots(unwrap(wrapped), 2, 8), HasStepHeads)
        mixer.proj_v.register_forward_hook(lambda *_: None)
        assert not isinstance(init_slots(mixer, 2, 8), FusedSlots)
    gated = build({"name": "gated_rebased", "n_heads": 3})
    gated.forget.register_forward_hook(lambda *_: None)
    assert not isinstance(init_slots(gated, 2, 8), FusedSlots)


def test_counts() -> None:
    for name in ("rebased", "attention", "sliding_window"):
        heads = {"n_heads": 2}
        plain, both = build({"name": name, **heads}), build({**with_options(name), **heads})
        V = D // 2
        assert count(both) - count(plain) == 3 * D + D * D + V  # taps, W, the norm of a head
        assert both.state_size(9) - plain.state_size(9) == 2 * D


def test_wide_heads_are_gated_before_the_last_projection() -> None:
    mixer = build({"name": "rebased", "n_heads": 3, "value_width": 5, "output_gate": "sigmoid"})
    assert mixer.proj_gate.weight.shape == (15, D)
    assert mixer(torch.randn(1, T, D, dtype=torch.float64)).shape == (1, T, D)


@pytest.mark.parametrize("name", ["rebased", "gated_rebased", "linear_attention"])
def test_packed_documents_with_heads_of_another_width_than_x(name: str) -> None:
    mixer = build({**with_options(name), "n_heads": 3, "value_width": 5})  # 15 numbers of heads, and D = 24
    x = torch.randn(2, T, D, dtype=torch.float64)
    bounds = [0, 9, 9, T, 2 * T]
    alone = [mixer(x.view(1, -1, D)[:, i:j]) for i, j in pairwise(bounds) if i < j]
    packed = mixer.forward_documents(x, torch.tensor(bounds))
    assert_near(packed, torch.cat(alone, dim=1).view_as(x), D, 3, T, 136, D, condition=64.0)


def test_a_mixer_without_options_is_not_wrapped() -> None:
    for name in OURS:
        assert not isinstance(build(name), WrappedMixer)
        config = LMConfig(d_model=D, mixers=(name,))
        assert not {"conv_width", "output_gate"} & {*config.mixers[0].arguments()} & {*AROUND[name]}


def test_digest_is_that_of_a_config_without_the_options() -> None:
    plain = LMConfig(d_model=D, mixers=("short_conv", "rebased"))
    written = LMConfig(d_model=D, mixers=("short_conv", {"name": "rebased", "conv_width": 0, "output_gate": "none"}))
    gated = LMConfig(d_model=D, mixers=("short_conv", {"name": "rebased", "output_gate": "silu"}))
    assert plain.digest() == written.digest() == "008bc57ca7ad"
    assert gated.digest() != plain.digest()


def test_initial_weights_know_what_is_inside() -> None:
    model = LanguageModel(LMConfig(d_model=256, vocab_size=11, n_layers=8, mixers=(with_options("attention"),)))
    mixer = model.blocks[0].mixer
    assert float(mixer.proj_o.weight.detach().std()) == pytest.approx(0.02 / 4, rel=0.05)  # it writes into the stream
    assert float(mixer.proj_gate.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert mixer_name(mixer) == "attention"
    gated = LanguageModel(LMConfig(d_model=D, vocab_size=11, mixers=(with_options("gated_rebased"),)))
    assert (unwrap(gated.blocks[0].mixer).forget.bias > 6).all()


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="conv_width -1"):
        build({"name": "rebased", "conv_width": -1})
    with pytest.raises(ValueError, match="output_gate"):
        build({"name": "rebased", "output_gate": "relu"})
    with pytest.raises(ValueError, match="unknown key 'output_gate'"):
        build({"name": "mamba", "output_gate": "silu"})
