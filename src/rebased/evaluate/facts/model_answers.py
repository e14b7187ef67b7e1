"""How many of the facts in its context a model can say again."""

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
    progress: Callable[[int], None] | None = None,
) -> list[Answer]:
    """One pass a context, with the right tokens before each one that is asked for: an answer whose every token is the
    most likely one is what greedy decoding would have said. The model is left in the mode it was in.

    dtype: compute the layers in this precision (autocast); the head is fp32.
    progress: called with the number of contexts read so far.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    # Contexts of like length side by side: less of a batch is filling.
    order = sorted(range(len(episodes)), key=lambda i: len(episodes[i].tokens))
    found: dict[int, list[Answer]] = {}
    with eval_mode(model):
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            found |= zip(rows, _answer(model, [episodes[i] for i in rows], dtype), strict=True)
            if progress is not None:
                progress(min(first + batch_size, len(order)))
    return [answer for i in range(len(episodes)) for answer in found[i]]


def _answer(model: LanguageModel, episodes: Sequence[Episode], dtype: torch.dtype | None) -> list[list[Answer]]:
    weight = model.embedding.weight
    length = max(len(episode.tokens) for episode in episodes) - 1  # nothing comes after the last token
    tokens = torch.zeros(len(episodes), length, dtype=torch.long)  # what fills a row comes last, where nobody looks
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
