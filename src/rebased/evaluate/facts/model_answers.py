"""Ask a model the questions of episodes."""

from collections.abc import Callable, Sequence

import torch

from rebased.evaluate.facts import Answer, Episode
from rebased.evaluate.text import eval_mode
from rebased.models import IGNORE, LanguageModel


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


def _answer(model: LanguageModel, episodes: Sequence[Episode], dtype: torch.dtype | None) -> list[list[Answer]]:
    weight = model.embedding.weight
    length = max(len(episode.tokens) for episode in episodes) - 1  # the last token predicts nothing
    tokens = torch.zeros(len(episodes), length, dtype=torch.long)  # padding comes last, so it changes nothing
    labels = torch.full_like(tokens, IGNORE)
    for row, episode in enumerate(episodes):
        ids = torch.tensor(episode.tokens)
        tokens[row, : len(ids) - 1] = ids[:-1]
        for asked in episode.asked:
            labels[row, asked.begin - 1 : asked.end - 1] = ids[asked.begin : asked.end]
    tokens, labels = tokens.to(weight.device), labels.to(weight.device)
    with torch.autocast(weight.device.type, dtype=dtype, enabled=dtype is not None):
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
