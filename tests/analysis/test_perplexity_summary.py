"""The summary agrees with the sums in the scores."""

import math

import pytest
import torch

from rebased.analysis.perplexity import summarise
from rebased.analysis.text_scores import ALL, AR, NON_AR, TextScores


def test_kinds_of_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    losses = torch.rand(30, 200, generator=generator) * 8
    distances = torch.randint(-100, 40, losses.shape, generator=generator).clamp(min=0)
    scores = TextScores.of(losses, distances, torch.rand(losses.shape, generator=generator) < 0.9)
    summary = summarise(scores)
    for kind, columns in ((summary.all, ALL), (summary.ar, AR), (summary.non_ar, NON_AR)):
        assert (kind.tokens, kind.nats) == (scores.tokens(columns), pytest.approx(scores.mean(columns), rel=1e-14))
        low, high = kind.perplexity_interval
        assert low < kind.perplexity < high
    assert summary.windows == 30
    assert [(near, far) for near, far, _ in summary.by_distance] == [
        (1, 1),
        (2, 3),
        (4, 7),
        (8, 15),
        (16, 31),
        (32, 63),
    ]
    assert sum(kind.tokens for _, _, kind in summary.by_distance) == summary.ar.tokens
    # More tokens of one window say less than as many of different ones: all 30 alike, and nothing is left to doubt.
    alike = TextScores(scores.nats[:1].expand(30, -1), scores.counts[:1].expand(30, -1))
    assert summarise(alike).all.interval == pytest.approx([float(scores.nats[0].sum() / scores.counts[0].sum())] * 2)


def test_bits_per_byte() -> None:
    scores = TextScores.of(torch.full((2, 4), 3.0), torch.zeros(2, 4).long(), torch.ones(2, 4).bool())
    assert summarise(scores).bits_per_byte(4.0) == pytest.approx(3 / math.log(2) / 4)
    assert math.isnan(summarise(scores).ar.perplexity)
