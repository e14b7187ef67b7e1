"""Ask a model the questions of episodes, and count its answers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rebased.config import grouped
from rebased.evaluate.facts.episodes import Episode
from rebased.mixers import eval_mode
from rebased.models import IGNORE, LanguageModel
from rebased.ops.backend import autocast


class Answer(NamedTuple):
    """The answer of a model to one question."""

    fact: int  # index of the fact
    distance: int  # tokens since the answer in the context; 0 if the context lacks the fact
    correct: bool  # every token of the answer is the most likely one after those before it
    nats: float  # -ln p of the whole answer
    tokens: int  # how many the answer has


class Tally(NamedTuple):
    """Counts over several answers."""

    asked: int
    correct: int
    nats: float  # mean of -ln p over answers
    nearest: int  # smallest and largest distance, both included
    farthest: int

    @property
    def accuracy(self) -> float:
        """correct / asked."""
        return self.correct / self.asked


def tally(answers: Sequence[Answer]) -> Tally:
    """The counts over one or more answers."""
    if not answers:
        raise ValueError("there is no answer to count; ask at least one question")
    distances = [answer.distance for answer in answers]
    nats = sum(answer.nats for answer in answers) / len(answers)
    right = sum(answer.correct for answer in answers)
    return Tally(len(answers), right, nats, min(distances), max(distances))


def tally_by_distance(answers: Sequence[Answer]) -> list[Tally]:
    """One tally per class of distances 2^i to 2^(i+1) - 1 that has answers, nearest first. Distance 0 is left out."""
    classes = grouped(answers, lambda answer: answer.distance.bit_length())
    return [
        tally(classes[bits])._replace(nearest=2 ** (bits - 1), farthest=2**bits - 1) for bits in sorted(classes) if bits
    ]


@torch.no_grad()
def answer_questions(
    model: LanguageModel,
    episodes: Sequence[Episode],
    *,
    batch_size: int = 8,
    dtype: torch.dtype | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Answer]:
    """The model's answers to all questions, in order.

    Each episode takes one forward pass over the correct tokens. An answer is correct if each of its tokens is the most
    likely one: greedy decoding would then give the same answer.

    batch_size: episodes per forward pass.
    dtype: precision of the layers (autocast). Default: that of the weights.
    on_progress: called as on_progress(done, total) after each batch, with numbers of episodes.

    The model's training or eval mode is restored afterwards.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    # Episodes of similar length share a batch, so that less of it is padding.
    order = sorted(range(len(episodes)), key=lambda i: len(episodes[i].tokens))
    found: dict[int, list[Answer]] = {}
    with eval_mode(model):
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            found |= zip(rows, _answer(model, [episodes[i] for i in rows], dtype), strict=True)
            on_progress(min(first + batch_size, len(order)), len(order))
    return [answer for i in range(len(episodes)) for answer in found[i]]


def to_batch(episodes: Sequence[Episode], device: torch.device) -> tuple[Tensor, Tensor]:
    """(tokens, labels), both [B,T] int64: the label of a position is the next token, where that is of an answer."""
    length = max(len(episode.tokens) for episode in episodes) - 1  # the last token predicts nothing
    tokens = torch.zeros(len(episodes), length, dtype=torch.long)  # padding comes last, so it changes nothing
    labels = torch.full_like(tokens, IGNORE)
    for row, episode in enumerate(episodes):
        ids = torch.tensor(episode.tokens)
        tokens[row, : len(ids) - 1] = ids[:-1]
        for asked in episode.asked:
            labels[row, asked.begin - 1 : asked.end - 1] = ids[asked.begin : asked.end]
    return tokens.to(device), labels.to(device)


def _answer(model: LanguageModel, episodes: Sequence[Episode], dtype: torch.dtype | None) -> list[list[Answer]]:
    weight = model.embedding.weight
    tokens, labels = to_batch(episodes, weight.device)
    with autocast(dtype, weight.device):
        hidden = model.hidden(tokens)  # [B,T,D]
    at = labels != IGNORE
    logits = model.logits(hidden[at].to(weight.dtype))  # [n,vocab]: few positions are asked about
    targets = labels[at]
    nats = -logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0].cpu()  # [n], row by row, in order
    right = (logits.argmax(-1) == targets).cpu()
    answers: list[list[Answer]] = []
    place = 0
    for episode in episodes:
        answers.append([])
        for fact, begin, end, distance in episode.asked:
            here = slice(place, place + end - begin)
            answers[-1].append(Answer(fact, distance, bool(right[here].all()), float(nats[here].sum()), end - begin))
            place = here.stop
    return answers
