"""Per-token losses and their sums, compared with the model's own logits and with a loop over tokens."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from rebased.analysis.text_scores import ALL, AR, NON_AR, TextScores
from rebased.data import TextBatch
from rebased.evaluate.ar import ARRule
from rebased.evaluate.text import evaluate_text, token_losses
from rebased.models import IGNORE, LanguageModel, LMConfig
from tolerances import assert_near, limit

VOCAB, LENGTH = 23, 16
SUMS = (16, 16, LENGTH, 16, 16) * 2 + (16, VOCAB)
"""Of two layers and the head: norm, projection, tokens, projection, norm; logits, the vocabulary."""


class Windows:
    """Windows over one stream. Each label is the next token; the last one of window 2 is missing."""

    def __init__(self, n: int) -> None:
        stream = torch.randint(0, VOCAB // 4, (n * LENGTH + 1,), generator=torch.Generator().manual_seed(5))
        self.tokens, self.labels = stream[:-1].view(n, LENGTH), stream[1:].view(n, LENGTH).clone()
        if n > 2:
            self.labels[2, -1] = IGNORE

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, rows: Sequence[int]) -> TextBatch:
        return TextBatch(self.tokens[list(rows)], self.labels[list(rows)], None)


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    mixers = ["short_conv", {"name": "rebased", "n_heads": 2, "key_width": 4}]
    model = LanguageModel(
        LMConfig.model_validate({"vocab_size": VOCAB, "d_model": 16, "max_len": LENGTH, "mixers": mixers})
    )
    with torch.no_grad():
        model.embedding.weight.mul_(40)  # losses far from ln 23, each one another
    return model


def test_losses_are_those_of_the_logits(model: LanguageModel) -> None:
    tokens, labels, _ = Windows(3).batch([0, 1, 2])
    model.eval()
    want = -model(tokens).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    want[2, -1] = 0
    for logits in (VOCAB, 5 * VOCAB, 2**25):  # one row at a time, five, all
        assert_near(token_losses(model, tokens, labels, logits_at_once=logits), want, *SUMS)


def test_logits_of_all_tokens_never_stand_in_memory(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    most, logits = [], model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: (most.append(hidden.shape[0]), logits(hidden))[1])
    tokens, labels, _ = Windows(3).batch([0, 1, 2])
    token_losses(model, tokens, labels, logits_at_once=4 * VOCAB)
    assert max(most) == 4
    assert sum(most) == 3 * LENGTH - 1


def test_sums_of_a_loop_over_tokens(model: LanguageModel) -> None:
    windows = Windows(5)
    scores = evaluate_text(model, windows, batch_size=2)
    model.eval()
    nats, counts = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for row in range(5):
        tokens, labels, _ = windows.batch([row])
        losses = token_losses(model, tokens, labels)[0].double().tolist()
        read = tokens[0].tolist()
        for t, label in enumerate(labels[0].tolist()):
            if label != IGNORE:
                past = list(pairwise(read[: t + 1]))  # the bigrams of tokens 0..t
                hit = (read[t], label) in past
                nats[hit] += losses[t]
                counts[hit] += 1
    assert min(counts.values()) > 10
    assert (scores.tokens(AR), scores.tokens(NON_AR)) == (counts[True], counts[False])
    assert scores.mean(AR) == pytest.approx(nats[True] / counts[True], rel=1e-12)
    assert scores.mean(NON_AR) == pytest.approx(nats[False] / counts[False], rel=1e-12)
    f = scores.ar_share
    assert f * scores.mean(AR) + (1 - f) * scores.mean(NON_AR) == pytest.approx(scores.mean(ALL), rel=1e-14)


def test_batches_and_processes_change_nothing(model: LanguageModel) -> None:
    windows = Windows(5)
    whole = evaluate_text(model, windows, batch_size=5)
    halves = [evaluate_text(model, windows, rows=rows, batch_size=3) for rows in (range(2), range(2, 5))]
    joined = whole.join(halves)
    assert torch.equal(joined.counts, whole.counts)
    assert_near(joined.nats, whole.nats, *SUMS, dtype=torch.float32)


def test_the_rule_is_the_callers(model: LanguageModel) -> None:
    windows = Windows(4)
    reset = int(windows.tokens[0, 3])
    scores = evaluate_text(model, windows, ar=ARRule(order=1, reset_token=reset))
    stream = torch.cat([windows.tokens, windows.labels[:, -1:].clamp(min=0)], 1)
    hits = (ARRule(1, reset).distances(stream) > 0)[:, 1:] & (windows.labels != IGNORE)
    assert scores.tokens(AR) == int(hits.sum())


def test_mode_and_progress(model: LanguageModel) -> None:
    seen: list[tuple[int, int]] = []
    model.train()
    evaluate_text(model, Windows(5), batch_size=2, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 5), (4, 5), (5, 5)]
    assert model.training
    dropout = evaluate_text(model, Windows(5)).mean()
    assert dropout == evaluate_text(model.eval(), Windows(5)).mean()
    assert not model.training


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_half_precision_is_near(model: LanguageModel) -> None:
    exact, half = (evaluate_text(model, Windows(5), dtype=dtype).mean() for dtype in (None, torch.bfloat16))
    assert half != exact
    assert half == pytest.approx(exact, rel=limit(torch.bfloat16, *SUMS, roundings=3))  # x, hidden states, logits


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "rel"), [(None, limit(torch.float32, *SUMS)), (torch.bfloat16, limit(torch.bfloat16, *SUMS, roundings=3))]
)
def test_the_same_on_a_gpu(model: LanguageModel, dtype: torch.dtype | None, rel: float) -> None:
    here, there = evaluate_text(model, Windows(5)), evaluate_text(model.cuda(), Windows(5), dtype=dtype)
    assert torch.equal(here.counts, there.counts)
    for columns in (ALL, AR, NON_AR):
        assert there.mean(columns) == pytest.approx(here.mean(columns), rel=rel)


def test_mistakes(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="no window to score"):
        evaluate_text(model, Windows(5), rows=[])
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        evaluate_text(model, Windows(5), batch_size=0)
    with pytest.raises(ValueError, match=r"tokens \[1, 3\] and labels \[1, 2\] must have one shape"):
        token_losses(model, torch.zeros(1, 3).long(), torch.zeros(1, 2).long())


def test_a_uniform_model_has_the_vocabulary_as_its_perplexity(model: LanguageModel) -> None:
    with torch.no_grad():
        model.norm.weight.zero_()
    assert evaluate_text(model, Windows(5)).mean() == pytest.approx(math.log(VOCAB), rel=limit(torch.float32, VOCAB))


def test_isolated_documents_are_as_if_each_were_alone(model: LanguageModel) -> None:
    """Documents packed into one window have the same losses and AR tokens as each document alone."""
    documents = ["abcabcab", "abab", "ccabab", "bcb"]
    digits = {letter: i for i, letter in enumerate("abc")}
    packed = torch.tensor([[digits[letter] for letter in "".join(documents)][:LENGTH]])  # the third ends with its ccab
    lengths = [8, 4, 4]
    cu_seqlens = torch.tensor([0, 8, 12, 16], dtype=torch.int32)
    labels = torch.full_like(packed, IGNORE)
    for begin, length in zip(cu_seqlens.tolist(), lengths, strict=False):
        labels[0, begin : begin + length - 1] = packed[0, begin + 1 : begin + length]
    together = scores_of(model, TextBatch(packed, labels, cu_seqlens))
    apart = zip(packed.split(lengths, dim=1), labels.split(lengths, dim=1), strict=True)
    alone = [scores_of(model, TextBatch(tokens, asked, None)) for tokens, asked in apart]
    assert together.tokens(AR) == sum(one.tokens(AR) for one in alone) == 5
    for columns in (AR, NON_AR):
        total = sum(one.mean(columns) * one.tokens(columns) for one in alone if one.tokens(columns))
        assert together.mean(columns) * together.tokens(columns) == pytest.approx(
            total, rel=limit(torch.float32, *SUMS)
        )
    assert together.mean() != scores_of(model, TextBatch(packed, labels, None)).mean()


def scores_of(model: LanguageModel, batch: TextBatch) -> TextScores:
    class One:
        def __len__(self) -> int:
            return 1

        def batch(self, rows: Sequence[int]) -> TextBatch:
            return batch

    return evaluate_text(model, One())
