"""Packed documents in a model: each gives what it gives alone, with every mixer."""

import logging
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rebased.mixers import documents, register_mixer
from rebased.models import IGNORE, LanguageModel, LMConfig
from tolerances import assert_near

VOCAB, B, T = 40, 2, 40
BOUNDS = [0, 1, 3, 40, 52, 52, 80]
SUMS = (24, 24, T, 24, 24, 48) * 2 + (24,)
"""Of two layers: a norm, projections, tokens, a projection, a norm, an MLP; and of the last norm."""
LINEAR = {"n_heads": 3, "key_width": 4}
PATTERNS: dict[str, tuple[Any, ...]] = {
    "rebased": ("short_conv", {"name": "rebased", **LINEAR}),
    "based": ({"name": "short_conv", "width": 5}, {"name": "based", **LINEAR}),
    "attention": ("attention", {"name": "sliding_window", "window": 7, "rotary": True}),
    "mamba and rwkv": ("mamba", "rwkv"),
}


def build(mixers: tuple[Any, ...]) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(LMConfig(vocab_size=VOCAB, d_model=24, max_len=T, mixers=mixers, mlp_ratio=2)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def cu_seqlens(bounds: list[int] = BOUNDS) -> Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


@pytest.mark.parametrize("name", PATTERNS)
def test_packed_is_each_alone(name: str) -> None:
    model, tokens = build(PATTERNS[name]), torch.randint(VOCAB, (B, T))
    packed = model.hidden(tokens, cu_seqlens())
    alone = [model.hidden(tokens.view(1, -1)[:, i:j]) for i, j in pairwise(BOUNDS) if i < j]
    assert_near(packed.view(1, B * T, -1), torch.cat(alone, dim=1), *SUMS)
    assert not torch.allclose(packed[:, 4:], model.hidden(tokens)[:, 4:])  # or there was nothing to keep apart


def test_one_document_a_row_is_no_isolation_at_all() -> None:
    model, tokens = build(PATTERNS["rebased"]), torch.randint(VOCAB, (B, T))
    labels = torch.where(torch.rand(B, T) < 0.3, tokens, IGNORE)
    assert_near(model.loss(tokens, labels, cu_seqlens([0, T, 2 * T])), model.loss(tokens, labels), *SUMS, VOCAB)


def test_a_mixer_of_ones_own_reads_them_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    @register_mixer("running_sum")
    class RunningSum(nn.Module):
        def __init__(self, d_model: int) -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(1)

    documents._warn_once.cache_clear()
    model, tokens = build(("running_sum",)), torch.randint(VOCAB, (B, T))
    with caplog.at_level(logging.WARNING, logger="rebased"):
        packed = model.hidden(tokens, cu_seqlens())
        model.hidden(tokens, cu_seqlens())
    alone = [model.hidden(tokens.view(1, -1)[:, i:j]) for i, j in pairwise(BOUNDS) if i < j]
    assert_near(packed.view(1, B * T, -1), torch.cat(alone, dim=1), *SUMS)
    assert [r.getMessage() for r in caplog.records] == [
        "mixer 'running_sum' has no forward_documents: it reads documents one by one, slowly where many are short"
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.tensor([[0, 80]]), r"whole numbers .* it is torch.int64 of shape \[1, 2\]"),
        (torch.tensor([0.0, 80.0]), "it is torch.float32"),
        (torch.tensor([0]), r"of shape \[1\]"),
        (torch.tensor([0, 40, 79]), "must rise from 0 to B\\*T = 80; it is .* 79"),
        (torch.tensor([0, 50, 40, 80]), "must rise from 0 to"),
        (torch.tensor([0, 30, 80]), "every row begins a document, so cu_seqlens must hold 40"),
        (torch.tensor([0, 40, 80], device="meta"), "cu_seqlens is on meta and the tokens are on cpu"),
    ],
)
def test_wrong_bounds_are_named(wrong: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(PATTERNS["rebased"]).hidden(torch.zeros(B, T, dtype=torch.long), wrong)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("isolated", [False, True])
def test_compiles_as_one_graph(isolated: bool) -> None:
    """With documents, polynomial attention on a CPU loops over them, which is not one graph; other mixers are."""
    model = build(("short_conv", "attention") if isolated else PATTERNS["rebased"])
    tokens, bounds = torch.randint(VOCAB, (B, T)), cu_seqlens() if isolated else None
    compiled = torch.compile(model.hidden, fullgraph=True, backend="eager")
    assert_near(compiled(tokens, bounds), model.hidden(tokens, bounds), *SUMS)
