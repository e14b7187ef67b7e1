"""What a model's state holds of the pairs it has read: each key is put to a fork of the state, after any token."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rebased.analysis.intervals import wilson
from rebased.evaluate.accuracy import count_correct, predict
from rebased.mixers import has_rows, map_tensors
from rebased.models import IGNORE, LanguageModel, LMState
from rebased.tasks import MQAR, find_questions

UNREAD = -1
"""The rank of a pair that is not read yet."""


class Pair(NamedTuple):
    """A key and its value."""

    key: int
    value: int
    position: int  # of the value; the key stands before it


class Question(NamedTuple):
    """A key that comes again without a value: the model should predict its last value."""

    position: int
    key: int
    answer: int  # the value
    answer_position: int


class RecallSequence(NamedTuple):
    """What a sequence of tokens says and asks."""

    pairs: list[Pair]
    questions: list[Question]


def read_pairs(tokens: Sequence[int], first_value: int) -> RecallSequence:
    """Return the pairs and the questions of a sequence, whoever composed it.

    Keys are 1 .. first_value - 1, values the tokens from first_value on. A key with a value after it is a pair; it
    replaces an earlier pair of this key. A key without one is a question if it has a value already.
    """
    pairs: list[Pair] = []
    questions: list[Question] = []
    known: dict[int, Pair] = {}
    position = 0
    while position < len(tokens):
        key, step = tokens[position], 1
        if 0 < key < first_value:
            if position + 1 < len(tokens) and tokens[position + 1] >= first_value:
                known[key] = Pair(key, tokens[position + 1], position + 1)
                pairs.append(known[key])
                step = 2
            elif key in known:
                questions.append(Question(position, key, known[key].value, known[key].position))
        position += step
    return RecallSequence(pairs, questions)


class Readout(NamedTuple):
    """How well each key can be read out of the state. Rows are moments, columns keys in the order of `keys`."""

    after: list[int]  # how many tokens were read
    keys: list[int]
    probability: Tensor  # [A,n] of the key's last value; 0 where it has none yet
    rank: Tensor  # [A,n] int64, 0 for the likeliest token; UNREAD where the key has no value yet


@torch.no_grad()
def read_out(model: LanguageModel, tokens: Sequence[int], pairs: Sequence[Pair], after: Sequence[int]) -> Readout:
    """Return what the state holds after so many tokens: each key is put to a fork of it, which is then dropped.

    `after` rises, from 1 to len(tokens) at most. The model is in eval mode. A question is one more token: the model
    must have a position for it. Raises ValueError if a mixer has no state.
    """
    keys = list(dict.fromkeys(pair.key for pair in pairs))
    if not keys or not after:
        return Readout(list(after), keys, torch.zeros(len(after), len(keys)), torch.zeros(len(after), len(keys)).long())
    device = model.embedding.weight.device
    state = model.init_state(1)
    alike = all(has_rows(block.mixer) for block in model.blocks)  # then one row is read, and forked into n
    if not alike:
        state = model.init_state(len(keys))
    text = torch.tensor(tokens, device=device).expand(1 if alike else len(keys), -1)  # [1,T], or [n,T]
    asked, read = torch.tensor(keys, device=device).unsqueeze(1), 0  # [n,1]
    probabilities, ranks = [], []
    for moment in after:
        _, state = model.extend(text[:, read:moment], state)
        read = moment
        fork = state
        if alike:
            rows = map_tensors(lambda each: each.expand(len(keys), *each.shape[1:]), state.layers)
            fork = LMState(state.position, rows)
        hidden, _ = model.extend(asked, fork)  # `state` itself is not changed
        likely = model.logits(hidden[:, 0]).float().softmax(-1)  # [n,vocab]
        last = {pair.key: pair.value for pair in pairs if pair.position < moment}
        known = torch.tensor([key in last for key in keys], device=device)
        right = torch.tensor([last.get(key, 0) for key in keys], device=device).unsqueeze(1)
        found = likely.gather(1, right)  # [n,1]
        probabilities.append(torch.where(known, found[:, 0], 0.0))
        ranks.append(torch.where(known, (likely > found).sum(1), UNREAD))
    return Readout(list(after), keys, torch.stack(probabilities).cpu(), torch.stack(ranks).cpu())


class Recalled(NamedTuple):
    """How many questions of some examples were answered, and the 95 % interval of the accuracy."""

    correct: int
    asked: int
    accuracy: float
    low: float
    high: float


@torch.no_grad()
def measure_recall(model: LanguageModel, task: MQAR, examples: int, seed: int, batch_size: int = 64) -> Recalled:
    """Return the accuracy on so many examples of a task. The interval takes questions as independent (Wilson)."""
    device = model.embedding.weight.device
    questions = find_questions(task.build(examples, seed, device, "test"))
    correct, asked, _ = count_correct(predict(model, questions, batch_size), questions, {})
    return Recalled(correct, asked, correct / asked, *wilson(correct, asked))


class Predictions(NamedTuple):
    """One row per position: what is predicted there."""

    tokens: Tensor  # [T,k] int64, likeliest first
    probabilities: Tensor  # [T,k] fp32
    target: Tensor  # [T] fp32, the probability of the label; nan where there is none
    rank: Tensor  # [T] int64, how many tokens are likelier than the label; -1 where there is none


@torch.no_grad()
def predict_next(model: LanguageModel, tokens: Sequence[int], labels: Sequence[int], top: int = 5) -> Predictions:
    """Return the `top` likeliest tokens at each position, and how likely the label there is (IGNORE: no label).

    The label of a position stands at the position itself, as in training. The model is in eval mode.
    """
    device = model.embedding.weight.device
    likely = model(torch.tensor([tokens], device=device))[0].float().softmax(-1)  # [T,vocab]
    wanted = torch.tensor(labels, device=device)
    best = likely.topk(min(top, likely.shape[1]), dim=-1)
    of_label = likely.gather(1, wanted.clamp(min=0).unsqueeze(1))  # [T,1]
    has_label = wanted != IGNORE
    rank = (likely > of_label).sum(1)
    return Predictions(
        best.indices.cpu(),
        best.values.cpu(),
        torch.where(has_label, of_label[:, 0], torch.nan).cpu(),
        torch.where(has_label, rank, -1).cpu(),
    )
