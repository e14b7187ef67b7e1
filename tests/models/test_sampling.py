"""Choosing tokens: each filter against its definition, and draws that follow the distribution and nothing else."""

import math

import pytest
import torch
from torch import Tensor

from rebased.models.sampling import Sampling, SamplingSlots, SlotSampling, draw, lowest_score, stream_key, uniform

VOCAB = 12
CPU = torch.device("cpu")


def scores(rows: int = 3, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def chosen(logits: Tensor, sampling: Sampling, draws: int = 1, seen: tuple[int, ...] = (0,)) -> list[int]:
    """The first tokens of one sequence whose logits [V] never change."""
    slots = SamplingSlots(1, VOCAB, CPU)
    slots.put([0], [SlotSampling(sampling, seen, sequence=0)])
    tokens = []
    for _ in range(draws):
        token = slots.choose(logits.unsqueeze(0), slots.mode)
        slots.drawn.add_(1)  # without `advance`: the penalty must not change from draw to draw
        tokens.append(int(token))
    return tokens


def allowed(logits: Tensor, sampling: Sampling, draws: int = 400) -> set[int]:
    """The tokens that many sequences draw from logits [V]."""
    slots = SamplingSlots(draws, VOCAB, CPU)
    slots.put([0], [SlotSampling(sampling, [0], sequence=0)])
    for setting in (slots.temperature, slots.top_k, slots.top_p, slots.min_p):
        setting.fill_(setting[0])
    slots.key.copy_(torch.tensor([stream_key(0, sequence) for sequence in range(draws)]))
    return set(slots.choose(logits.expand(draws, VOCAB), slots.mode).tolist())


def test_greedy_takes_the_most_probable_token() -> None:
    for row in scores():
        assert chosen(row, Sampling(temperature=0.0), 3) == [int(row.argmax())] * 3
        assert chosen(row, Sampling(temperature=1e-9)) == [int(row.argmax())]
        assert chosen(row, Sampling(top_k=1), 3) == [int(row.argmax())] * 3


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    (row,) = scores(1)
    n = 20_000
    slots = SamplingSlots(n, VOCAB, CPU)
    slots.key.copy_(torch.tensor([stream_key(7, slot) for slot in range(n)]))
    slots.temperature.fill_(temperature)
    counts = torch.bincount(slots.choose(row.expand(n, VOCAB), "draw"), minlength=VOCAB)
    p = (row / temperature).softmax(-1)
    deviations = (counts - n * p) / (n * p * (1 - p)).sqrt()
    assert deviations.abs().max() < 4.5  # of twelve normal numbers: beyond it once in ten thousand seeds; this is one


def test_streams_are_uniform_and_differ() -> None:
    key = torch.tensor([stream_key(0, 0), stream_key(0, 1), stream_key(1, 0)])
    u = uniform(key, torch.arange(4096).unsqueeze(1))  # [4096,3]
    assert ((u >= 0) & (u < 1)).all()
    assert (u.mean(0) - 0.5).abs().max() < 5 * math.sqrt(1 / 12 / 4096)
    assert torch.corrcoef(u.T).triu(1).abs().max() < 5 / math.sqrt(4096)
    assert u.unique().numel() == u.numel()


def test_random_numbers_are_those_of_splitmix64() -> None:
    """The first three of seed 1234567, as its reference implementation prints them."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    key = torch.tensor([1234567] * 3)
    assert uniform(key, torch.arange(3)).tolist() == [(x >> 11) * 2.0**-53 for x in known]


def test_a_draw_is_the_place_in_the_order_of_tokens() -> None:
    p = torch.tensor([0.1, 0.0, 0.4, 0.5, 0.0])
    for u, token in ((0.0, 0), (0.0999, 0), (0.1001, 2), (0.4999, 2), (0.5001, 3), (1 - 2**-53, 3)):
        assert draw(p.log().unsqueeze(0), torch.tensor([u], dtype=torch.float64)).tolist() == [token]


def test_top_k_leaves_the_k_most_probable() -> None:
    for row in scores():
        for k in (1, 3, VOCAB, 99):
            best = set(row.topk(min(k, VOCAB)).indices.tolist())
            assert allowed(row, Sampling(temperature=5.0, top_k=k)) == best


def test_top_p_leaves_the_fewest_that_reach_it() -> None:
    p = torch.tensor([0.05, 0.4, 0.0, 0.3, 0.25, *[0.0] * 7])
    every = {0, 1, 3, 4}
    for top_p, left in ((0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {1, 3, 4}), (0.96, every), (1.0, every)):
        assert allowed(p.log(), Sampling(top_p=top_p)) == left
    assert allowed(p.log(), Sampling(top_p=1e-46)) == {1}  # zero in fp32


def test_min_p_is_a_share_of_the_largest() -> None:
    p = torch.tensor([0.05, 0.4, 0.0, 0.3, 0.25, *[0.0] * 7])
    for min_p, left in ((0.9, {1}), (0.7, {1, 3}), (0.6, {1, 3, 4}), (0.1, {0, 1, 3, 4}), (1.0, {1})):
        assert allowed(p.log(), Sampling(min_p=min_p)) == left


def test_filters_follow_each_other() -> None:
    """top-k first: top-p is then a share of what is left."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1, *[0.0] * 8]).log()
    assert allowed(p, Sampling(top_k=2, top_p=0.5)) == {0}  # 0.4 / 0.7 is above a half
    assert allowed(p, Sampling(top_p=0.5)) == {0, 1}


def test_ties_stay_together() -> None:
    tied = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    lowest = lowest_score(tied, torch.tensor([1]), torch.ones(1), torch.zeros(1))
    assert lowest.tolist() == [2.0]


def test_the_repetition_penalty_makes_seen_tokens_less_probable() -> None:
    row = torch.tensor([2.0, 1.9, -0.1, -0.11, *[-9.0] * 8])
    assert chosen(row, Sampling(temperature=0.0, repetition_penalty=1.5), seen=(0,)) == [1]
    assert chosen(row, Sampling(temperature=0.0, repetition_penalty=1.5), seen=(0, 1)) == [0]
    negative = row.clone()
    negative[:2] = -5.0
    assert chosen(negative, Sampling(temperature=0.0, repetition_penalty=1.5), seen=(2,)) == [3]
    slots = SamplingSlots(2, VOCAB, CPU)
    for slot in range(2):
        slots.put([slot], [SlotSampling(Sampling(temperature=0.0, repetition_penalty=1.5), [5], sequence=0)])
    slots.advance(torch.tensor([0, 0]), torch.tensor([True, False]))
    assert slots.choose(row.expand(2, VOCAB), slots.mode).tolist() == [1, 0]
    assert slots.drawn.tolist() == [1, 0]


def test_what_a_row_gets_does_not_depend_on_the_others() -> None:
    logits = scores(3)
    kinds = [Sampling(seed=5), Sampling(temperature=0.0), Sampling(top_p=0.5, top_k=4, min_p=0.1, seed=6)]
    together = SamplingSlots(3, VOCAB, CPU)
    for slot, sampling in enumerate(kinds):
        together.put([slot], [SlotSampling(sampling, [1], sequence=slot)])
    together.drawn.fill_(9)
    assert together.mode == "filter"
    alone = []
    for slot, sampling in enumerate(kinds):
        one = SamplingSlots(1, VOCAB, CPU)
        one.put([0], [SlotSampling(sampling, [1], sequence=slot)])
        one.drawn.fill_(9)
        alone.append(int(one.choose(logits[slot : slot + 1], one.mode)))
    assert together.choose(logits, together.mode).tolist() == alone


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature -1.0 is out of range; give 0"),
        ({"temperature": math.nan}, "temperature nan is not a number"),
        ({"top_k": -1}, "top_k -1 is out of range"),
        ({"top_k": 2.5}, "top_k 2.5 is not a whole number"),
        ({"top_p": 0.0}, "top_p 0.0 is out of range; give a probability above 0"),
        ({"top_p": 1.5}, "top_p 1.5 is out of range"),
        ({"min_p": 2.0}, "min_p 2.0 is out of range"),
        ({"repetition_penalty": 0.0}, "repetition_penalty 0.0 is out of range"),
        ({"seed": -1}, "seed -1 is out of range"),
        ({"seed": True}, "seed True is not a whole number"),
    ],
    ids=str,
)
def test_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)  # type: ignore[arg-type]
