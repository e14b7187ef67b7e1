"""The Transformer of today as options of the one model class: against plain torch, in pieces, decoded and exported."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rebased.mixers import SlidingWindow, SoftmaxAttention, init_slots
from rebased.models import LanguageModel, LMConfig, preset, preset_names
from rebased.models.authors_checkpoint import authors_layout
from rebased.models.fused_step import can_fuse, fused_step_
from rebased.models.presets import MODERN_ATTENTION, MODERN_MODEL
from tolerances import assert_near

B, T, D, H, VOCAB, LAYERS = 2, 17, 24, 3, 40, 2
ROUNDINGS = (D, D, T, D) * (2 * LAYERS) + (D,)


def modern(**changes: Any) -> LanguageModel:
    torch.manual_seed(0)
    attention = {"name": "attention", "n_heads": H, **MODERN_ATTENTION}
    shape: dict[str, Any] = {"vocab_size": VOCAB, "d_model": D, "n_layers": LAYERS, "mlp_ratio": 4, "embed_dropout": 0}
    model = LanguageModel(LMConfig(**{"mixers": (attention,)} | shape | MODERN_MODEL | changes)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # gains are 1 at first, and weights so small that little else is seen
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim > 1 else 0.1) + (parameter.ndim == 1))
    return model


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def rope(x: Tensor) -> Tensor:
    """x [B,T,W] as complex numbers, multiplied by exp(i position rate)."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * torch.arange(x.shape[1])[:, None] * rates)
    return torch.cat([turned.real, turned.imag], dim=-1)


def plainly(model: LanguageModel, tokens: Tensor) -> Tensor:
    """The logits, written out one head at a time."""
    weights = dict(model.named_parameters())
    x = weights["embedding.weight"][tokens]
    for layer in range(LAYERS):
        w = {name.removeprefix(f"blocks.{layer}."): p for name, p in weights.items() if f"blocks.{layer}." in name}
        y, heads = rms(x, w["norm1.weight"]), []
        parts = (part.chunk(H, -1) for part in (y @ w["mixer.qkv.weight"].T).chunk(3, -1))
        for q, k, v in zip(*parts, strict=True):
            q, k = rope(rms(q, w["mixer.q_norm.weight"])), rope(rms(k, w["mixer.k_norm.weight"]))
            scores = q @ k.mT / math.sqrt(D // H)
            heads.append(scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ w["mixer.out_proj.weight"].T
        gate, value = (rms(x, w["norm2.weight"]) @ w["mlp.fc1.weight"].T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * value) @ w["mlp.fc2.weight"].T
    return rms(x, weights["norm.weight"]) @ weights["embedding.weight"].T


def test_computes_what_a_few_lines_of_torch_compute() -> None:
    model, tokens = modern(), torch.randint(VOCAB, (B, T))
    assert_near(model(tokens), plainly(model, tokens), *ROUNDINGS)


def test_parameters_by_formula() -> None:
    hidden = 64  # two thirds of 4 x 24
    layer = 4 * D * D + 2 * (D // H) + 3 * D * hidden + 2 * D
    model = modern()
    assert model.num_parameters() == VOCAB * D + LAYERS * layer + D
    assert not any("bias" in name for name, _ in model.named_parameters())


def test_swiglu_has_as_many_weights_as_gelu() -> None:
    sizes = [preset(name, d_model=384, vocab_size=2).model_dump() for name in ("lm-modern", "lm-attention")]
    counts = []
    for fields in sizes:
        block = LanguageModel(LMConfig(**fields | {"n_layers": 1, "max_len": 8})).blocks[0]
        counts.append(sum(weight.numel() for weight in block.mlp.parameters() if weight.ndim == 2))
    assert counts[0] == counts[1] == 8 * 384**2


def test_reads_in_pieces_and_decodes_what_it_reads_at_once() -> None:
    model, tokens = modern(), torch.randint(VOCAB, (B, T))
    whole, state, outputs = model.hidden(tokens), model.init_state(B), []
    for piece in tokens.split([1, 6, 2, 8], dim=1):
        hidden, state = model.extend(piece, state)
        outputs.append(hidden)
    assert_near(torch.cat(outputs, dim=1), whole, *ROUNDINGS)
    slots = [init_slots(block.mixer, B, T) for block in model.blocks]
    for t in range(T):
        made = model.step(tokens[:, t], slots, torch.full((B,), t), t + 1)
        assert_near(made, whole[:, t], *ROUNDINGS)


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_a_fused_step_computes_the_same(rotary: bool, mlp: str) -> None:
    """Attention without rotation and norms has a fused step of its own: with an RMSNorm and no biases here."""
    options = MODERN_ATTENTION | {"rotary": rotary, "qk_norm": rotary}
    model = modern(mlp=mlp, mixers=({"name": "attention", "n_heads": H, **options},)).float()
    assert can_fuse(model)
    tokens, logits = torch.randint(VOCAB, (B, 3)), torch.empty(B, VOCAB)
    slots = [init_slots(block.mixer, B, T) for block in model.blocks]
    for t in range(3):
        fused_step_(model, tokens[:, t], slots, torch.full((B,), t), t + 1, logits)
        assert_near(logits, model(tokens)[:, t], *ROUNDINGS, condition=8.0)


def test_generates_the_most_likely_tokens_of_forward() -> None:
    model = modern()
    written = list(model.generate([[1, 2, 3]], max_tokens=6, temperature=0, ignore_end_of_text=True).tokens[0])
    tokens = [1, 2, 3]
    for token in written:
        assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
        tokens.append(token)
    assert len(written) == 6


def test_packed_documents_are_computed_as_if_they_were_alone() -> None:
    model, tokens = modern(), torch.randint(VOCAB, (1, T))
    packed = model.hidden(tokens, torch.tensor([0, 5, 11, T], dtype=torch.int32))
    alone = [model.hidden(part) for part in tokens.split([5, 6, 6], dim=1)]
    assert_near(packed, torch.cat(alone, dim=1), *ROUNDINGS)


def test_rotary_attention_depends_on_distances_alone() -> None:
    """Without it, and without learned positions, the order of earlier tokens would not matter."""
    tokens = torch.randint(VOCAB, (1, T))
    swapped = tokens.clone()
    swapped[0, [0, 1]] = tokens[0, [1, 0]] if tokens[0, 0] != tokens[0, 1] else torch.tensor([0, 1])
    model = modern()
    assert not torch.allclose(model(tokens)[0, -1], model(swapped)[0, -1])
    attention = model.blocks[0].mixer
    assert isinstance(attention, SoftmaxAttention)
    x = torch.randn(1, T, D, dtype=torch.float64)
    _, past = attention.extend(x, attention.init_state(1, dtype=torch.float64))
    later = attention.extend(x[:, :1], past)[0]
    assert_near(later, attention(torch.cat([x, x[:, :1]], dim=1))[:, -1:], D, D, T, D)


@pytest.mark.parametrize("mixer", ["rebased", "short_conv", "mamba"])
def test_every_mixer_can_have_the_norm_and_the_mlp(mixer: str) -> None:
    model = modern(mixers=(mixer,))
    tokens = torch.randint(VOCAB, (B, T))
    hidden, _ = model.extend(tokens, model.init_state(B))
    assert_near(hidden, model.hidden(tokens), *ROUNDINGS)
    assert {type(module).__name__ for module in (model.norm, model.blocks[0].norm1)} == {"RMSNorm"}


def test_without_an_mlp_the_second_line_is_the_norm_itself() -> None:
    model = modern(mlp_ratio=0)
    u = torch.randn(B, T, D, dtype=torch.float64)
    norm = model.blocks[0].norm2
    assert norm is not None
    assert_near(model.blocks[0].feed(u), u + rms(u, norm.weight), D)


def test_a_window_takes_the_norm_of_q_and_k() -> None:
    """A window as wide as the text is attention to all of it."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"n_heads": H, "rotary": True, "qk_norm": True, "out_bias": False, "dropout": 0.0}
    everywhere = SoftmaxAttention(D, **options).double()
    window = SlidingWindow(D, window=T, **options).double()
    window.load_state_dict(everywhere.state_dict())
    x = torch.randn(B, T, D, dtype=torch.float64)
    assert_near(window(x), everywhere(x), D, D, T, D)
    assert_near(everywhere.apply_attention(everywhere.attention_map(x), x), everywhere(x), D, D, T, D)


def test_the_preset() -> None:
    config = preset("lm-modern")
    assert "lm-modern" in preset_names()
    assert (config.norm, config.mlp, config.positions, config.length_limit) == ("rms", "swiglu", "none", None)
    assert config.mixers[0].arguments() == {"n_heads": 12, **MODERN_ATTENTION}


def test_the_authors_layout_refuses_it() -> None:
    model = LanguageModel(LMConfig(vocab_size=VOCAB, d_model=D, mixers=("rebased",), norm="rms"))
    with pytest.raises(
        ValueError, match=r"no block 'double_norm' with norm 'rms' and mlp 'gelu'; it has two LayerNorms"
    ):
        authors_layout(model)


def test_an_odd_head_cannot_be_rotated() -> None:
    with pytest.raises(ValueError, match="a head of 9 is odd"):
        SoftmaxAttention(27, n_heads=3, rotary=True)


def test_the_defaults_are_no_part_of_a_digest() -> None:
    assert LMConfig().digest() == LMConfig(norm="layer", mlp="gelu").digest() != LMConfig(norm="rms").digest()
