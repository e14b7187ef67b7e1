"""The three perplexities follow from the same sums."""

import math

import pytest
import torch

from rebased.analysis.text_scores import ALL, AR, NON_AR, TextScores, perplexity


def some_scores(windows: int = 40, seq_len: int = 300) -> TextScores:
    generator = torch.Generator().manual_seed(1)
    losses = torch.rand(windows, seq_len, generator=generator) * 12
    distances = torch.randint(-200, 300, losses.shape, generator=generator).clamp(min=0)
    return TextScores.of(losses, distances, torch.rand(losses.shape, generator=generator) < 0.9)


def test_the_three_perplexities_are_one_identity() -> None:
    scores = some_scores()
    f = scores.ar_share
    assert 0.4 < f < 0.7
    parts = f * math.log(perplexity(scores.mean(AR))) + (1 - f) * math.log(perplexity(scores.mean(NON_AR)))
    assert parts == pytest.approx(math.log(perplexity(scores.mean(ALL))), rel=1e-14)
    assert scores.tokens(AR) + scores.tokens(NON_AR) == scores.tokens(ALL)


def test_classes_of_distances() -> None:
    distances = torch.tensor([[0, 1, 2, 3, 4, 7, 8, 5]])
    losses = torch.tensor([[9.0, 1.0, 2.0, 4.0, 1.0, 2.0, 5.0, 100.0]])
    asked = torch.tensor([[True] * 7 + [False]])
    scores = TextScores.of(losses, distances, asked)
    assert scores.counts.tolist() == [[1, 1, 2, 2, 1]]
    assert scores.nats.tolist() == [[9.0, 1.0, 6.0, 3.0, 5.0]]
    assert (scores.mean(NON_AR), scores.tokens(NON_AR)) == (9.0, 1)
    assert scores.mean(AR) == 15 / 6


def test_batches_join_to_the_whole() -> None:
    whole = some_scores()
    parts = [TextScores(whole.nats[i:j], whole.counts[i:j]) for i, j in ((0, 7), (7, 8), (8, 40))]
    near = TextScores.of(torch.ones(2, 3), torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool))
    joined = TextScores.join([*parts, near])  # of fewer classes of distances than the others
    assert torch.equal(joined.nats[:40], whole.nats)
    assert joined.tokens() == whole.tokens() + 6
    with pytest.raises(ValueError, match="no window was scored"):
        TextScores.join([])


def test_sums_are_fp64() -> None:
    losses = torch.full((1, 2**16), 1.1)
    losses[0, 0] = 3e7  # in fp32 what is added to this number is lost
    scores = TextScores.of(
        losses, torch.zeros_like(losses, dtype=torch.long), torch.ones_like(losses, dtype=torch.bool)
    )
    assert float(scores.nats.sum()) == pytest.approx(3e7 + (2**16 - 1) * float(losses[0, 1]), rel=1e-13)


def test_where_there_is_nothing() -> None:
    none = TextScores.of(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, dtype=torch.bool))
    assert none.tokens() == 0
    assert [math.isnan(value) for value in (none.mean(), none.ar_share)] == [True, True]
    new = TextScores.of(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool))
    assert math.isnan(perplexity(new.mean(AR)))
    assert new.ar_share == 0
    assert perplexity(1e4) == math.inf
