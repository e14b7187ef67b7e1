"""The language model: its block written out, its head, its loss, and extend."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from rebased.mixers import register_mixer
from rebased.models import IGNORE, LanguageModel, LMConfig, LMState, check_causality, preset
from tolerances import assert_near

VOCAB, D, B, T = 50, 24, 2, 13
LINEAR = {"name": "rebased", "n_heads": 3, "key_width": 4}
SUMS = (D, D, T, D, D, 2 * D) * 2 + (D, D)
"""Of two layers and the head: a norm, projections, tokens, a projection, a norm, an MLP; the last norm, the logits."""
PATTERNS = [("short_conv", LINEAR), ("short_conv", {**LINEAR, "name": "based"}), ("attention",)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build(**changes: Any) -> LanguageModel:
    """Return a small model in fp64 and eval mode, with all weights random, norms and biases too."""
    shape: dict[str, Any] = {"vocab_size": VOCAB, "d_model": D, "max_len": 16, "mixers": ("short_conv", LINEAR)}
    model = LanguageModel(LMConfig(**{**shape, **changes})).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def tokens(length: int = T) -> Tensor:
    return torch.randint(VOCAB, (B, length))


def labels() -> Tensor:
    return torch.where(torch.rand(B, T) < 0.3, torch.randint(VOCAB, (B, T)), IGNORE)


def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight + layer.bias


@pytest.mark.parametrize("mlp_ratio", [0, 4])
def test_is_the_block_written_out(mlp_ratio: int) -> None:
    model, ids = build(mlp_ratio=mlp_ratio), tokens()
    x = model.embedding.weight[ids] + model.positions.weight[:T]
    for block in model.blocks:
        u = x + block.mixer(norm(x, block.norm1))
        y = norm(u, block.norm2)
        if mlp_ratio:
            y = y @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
            y = y * (1 + torch.erf(y / math.sqrt(2))) / 2  # the exact GELU
            y = y @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
        x = u + y  # without an MLP this is u + LN2(u)
    expected = norm(x, model.norm) @ model.embedding.weight.T
    assert_near(model(ids), expected, *SUMS)


def test_mixers_are_tiled() -> None:
    model = build(n_layers=5, mixers=("short_conv", LINEAR))
    assert [type(block.mixer).__name__ for block in model.blocks] == ["ShortConv", "ReBased"] * 2 + ["ShortConv"]


def test_a_mixer_is_told_what_it_asks_for() -> None:
    @register_mixer("curious")
    class Curious(nn.Module):
        def __init__(self, d_model: int, layer: int, n_layers: int, max_len: int, *, extra: int = 7) -> None:
            super().__init__()
            self.told = (d_model, layer, n_layers, max_len, extra)

    told = [block.mixer.told for block in build(n_layers=2, mixers=({"name": "curious", "extra": 9},)).blocks]
    assert told == [(D, 0, 2, 16, 9), (D, 1, 2, 16, 9)]


def test_the_head_is_the_embedding() -> None:
    model = build()
    assert not [name for name, _ in model.named_parameters() if "head" in name]
    assert sum(p.shape == (VOCAB, D) for p in model.parameters()) == 1
    assert model.logits(torch.eye(D).double()).equal(model.embedding.weight.T)


def test_dropout_is_on_the_embedding_sum_alone() -> None:
    model = build(embed_dropout=0.5, mixers=("short_conv", LINEAR), mlp_ratio=4)
    assert [name for name, part in model.named_modules() if isinstance(part, nn.Dropout)] == ["dropout"]
    ids, seen = tokens(), []
    model.dropout.register_forward_hook(lambda _, given, made: seen.append((given[0], made)))
    model.train()
    assert not torch.equal(model(ids), model(ids))
    given, made = seen[0]
    assert_near(given, model.embedding.weight[ids] + model.positions.weight[:T], 2)
    assert torch.all((made == 0) | torch.isclose(made, 2 * given))
    assert 0.3 < (made == 0).double().mean() < 0.7
    assert torch.equal(model.eval()(ids), model(ids))


@pytest.mark.parametrize(
    "mixers", [("short_conv", LINEAR), ("attention",), ("short_conv", {**LINEAR, "name": "based"})]
)
def test_never_looks_ahead(mixers: tuple[Any, ...]) -> None:
    model, ids = build(mixers=mixers, mlp_ratio=2), tokens()
    for t in range(1, T):
        changed = ids.clone()
        changed[:, t:] = (changed[:, t:] + 1 + torch.randint(VOCAB - 1, (B, T - t))) % VOCAB
        before, after = model(ids), model(changed)
        assert_near(after[:, :t], before[:, :t], *SUMS)
        assert not torch.allclose(after[:, t], before[:, t])


def test_loss_is_cross_entropy_over_labelled_positions() -> None:
    model, ids, asked = build(), tokens(), labels()
    expected = functional.cross_entropy(model(ids).flatten(0, 1), asked.flatten(), ignore_index=IGNORE)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    loss = model.loss(ids, asked)
    assert_near(loss, expected, *SUMS, VOCAB)
    for ours, theirs in zip(torch.autograd.grad(loss, list(model.parameters())), wanted, strict=True):
        assert_near(ours, theirs, *SUMS, *SUMS, B * T)  # forth and back
    with pytest.raises(ValueError, match=r"tokens \[2, 13\] and labels \[2, 12\]"):
        model.loss(ids, asked[:, 1:])


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that is made while it is active, backward pass included."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def test_all_logits_are_never_built_in_training() -> None:
    model = build(vocab_size=4000)
    ids, asked = tokens(), torch.full((B, T), IGNORE)
    asked[:, -1] = 3
    with Largest() as largest:
        model.loss(ids, asked).backward()
    assert largest.numbers == 4000 * D  # the embedding's gradient
    with Largest() as largest:
        model(ids)
    assert largest.numbers == B * T * 4000  # forward does hold all logits: the mode sees them


@pytest.mark.parametrize("pieces", [[13], [1] * 13, [12, 1], [1, 12], [4, 5, 1, 3]], ids=str)
@pytest.mark.parametrize("mixers", PATTERNS, ids=["rebased", "based", "attention"])
def test_extend_is_hidden_in_pieces(pieces: list[int], mixers: tuple[Any, ...]) -> None:
    model, ids = build(mixers=mixers, mlp_ratio=2), tokens()
    state, hidden = model.init_state(B), []
    for piece in ids.split(pieces, dim=1):
        h, state = model.extend(piece, state)
        hidden.append(h)
    assert_near(torch.cat(hidden, 1), model.hidden(ids), *SUMS)
    assert state.position == T


def test_state_size_is_that_of_all_layers() -> None:
    rebased, attention = (LanguageModel(preset(name, d_model=48, vocab_size=64)) for name in ("rebased", "attention"))
    assert rebased.state_size(1) == rebased.state_size(1000) == 2 * 48 + 12 * 136 * (4 + 1)
    assert attention.state_size(100) == 2 * (2 * 100 * 48)


def test_more_tokens_than_positions() -> None:
    model = build()
    with pytest.raises(ValueError, match=r"17 tokens are more than the 16 learned positions.*max_len >= 17"):
        model(tokens(17))
    _, state = model.extend(tokens(16), model.init_state(B))
    with pytest.raises(ValueError, match="17 tokens are more than the 16 learned positions"):
        model.extend(tokens(1), state)
    with pytest.raises(ValueError, match=r"tokens must be \[B, T\]; their shape is \[3\]"):
        model(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"tokens are torch.float32; use int64 or int32, for example tokens.long\(\)"):
        model(tokens().float())
    with pytest.raises(ValueError, match="tokens are on meta and the model is on cpu"):
        model(tokens().to("meta"))


def test_without_positions_a_sequence_may_be_longer_than_max_len() -> None:
    model = build(positions="none", mlp_ratio=2)
    assert not [name for name, _ in model.named_parameters() if "positions" in name]
    assert model.config.length_limit is None
    ids = tokens(40)
    state, hidden = model.init_state(B), []
    for piece in ids.split([16, 20, 1, 3], dim=1):
        h, state = model.extend(piece, state)
        hidden.append(h)
    assert_near(torch.cat(hidden, 1), model.hidden(ids), *SUMS, 40)
    bounds = torch.tensor([0, 25, 40, 80])
    alone = torch.cat([model.hidden(ids.flatten()[None, i:j]) for i, j in pairwise(bounds.tolist())], 1)
    assert_near(model.hidden(ids, bounds).view(1, 80, D), alone, *SUMS, 40)
    check_causality(model)
    model.loss(ids[:, :-1], ids[:, 1:]).backward()


def test_a_filter_of_fixed_length_bounds_a_model_without_positions() -> None:
    model = build(positions="none", mixers=("short_conv", "hyena"))
    assert model.config.length_limit == 16
    with pytest.raises(ValueError, match="17 tokens are more than the 16 that Hyena's filter was built for"):
        model(tokens(17))


def test_a_foreign_state_is_refused() -> None:
    model = build()
    with pytest.raises(ValueError, match="a state of 1 layers does not fit a model of 2"):
        model.extend(tokens(), LMState(0, (None,)))
    with pytest.raises(ValueError, match="this state is of another shape"):
        model.extend(tokens(), build(mixers=("short_conv", {**LINEAR, "key_width": 5})).init_state(B))


def test_a_mixer_without_extend_is_named() -> None:
    @register_mixer("forward_only")
    class ForwardOnly(nn.Identity):
        def __init__(self, d_model: int) -> None:
            super().__init__()

    model = build(mixers=("forward_only",))
    assert model(tokens()).shape == (B, T, VOCAB)
    with pytest.raises(ValueError, match="mixer 'forward_only' has no init_state, extend and state_size"):
        model.init_state(B)


@pytest.mark.parametrize("shape", [(0, T), (B, 0), (0, 0)], ids=str)
def test_empty_batches_pass_through(shape: tuple[int, int]) -> None:
    mixers = ("short_conv", LINEAR, "attention", "mamba", "rwkv", "hyena")
    model = build(mixers=mixers, n_layers=6, mlp_ratio=2)
    ids = torch.zeros(shape, dtype=torch.long)
    assert model(ids).shape == (*shape, VOCAB)
    model.hidden(ids).sum().backward()
    assert all(not p.grad.any() for name, p in model.named_parameters() if p.grad is not None)
    assert all(p.grad is not None for name, p in model.named_parameters() if name != "positions.weight")
    hidden, state = model.extend(ids, model.init_state(shape[0]))
    assert hidden.shape == (*shape, D)
    assert state.position == shape[1]
    bounds = torch.tensor([0, *(n * shape[1] for n in range(1, shape[0] + 1))] if shape[0] else [0, 0])
    assert model.hidden(ids, bounds).shape == (*shape, D)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_are_made_on_the_given_device_in_the_given_dtype(dtype: torch.dtype) -> None:
    @register_mixer("weighted")
    class Weighted(nn.Identity):
        def __init__(self, d_model: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(d_model))

    config = LMConfig(vocab_size=VOCAB, d_model=D, n_layers=3, mixers=("short_conv", "mamba", "weighted"))
    model = LanguageModel(config, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    model = LanguageModel(config.model_copy(update={"mlp_ratio": 2}), device="meta")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    torch.manual_seed(3)
    plain = LanguageModel(config).state_dict()
    torch.manual_seed(3)
    explicit = LanguageModel(config, device="cpu", dtype=torch.float32).state_dict()
    assert all(torch.equal(value, explicit[key]) for key, value in plain.items())


def test_print_shows_the_mixers_arguments() -> None:
    text = repr(build(mlp_ratio=2))
    assert "n_heads=3, key_width=4, value_width=8" in text
    assert "qk_transform='norm_affine'" in text
    assert "d_model=24, width=3" in text
