"""Build contexts of facts with questions about some of them, and the same questions without their facts as controls."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, NamedTuple, get_args

import numpy as np

from rebased.evaluate.facts.sources import Fact
from rebased.tasks.draws import mix_seed

Condition = Literal["present", "absent", "alone"]
"""What comes before a question: its fact among others ("present"), other facts only ("absent"), or nothing ("alone").
An answer that is correct without its fact was known from training or guessed."""
CONDITIONS: tuple[Condition, ...] = get_args(Condition)
MISSES = 50  # a context counts as full after so many facts in a row that do not fit


class Asked(NamedTuple):
    """A question in an episode. Its answer is tokens[begin:end]."""

    fact: int  # index of the fact
    begin: int
    end: int
    distance: int  # tokens from the answer in the context to this one; 0 if the context lacks the fact


class Episode(NamedTuple):
    """A context with its questions, as one sequence of tokens."""

    tokens: list[int]
    asked: list[Asked]


class Recall(NamedTuple):
    """The same questions in the same order under each condition."""

    episodes: dict[Condition, list[Episode]]
    too_long: int  # facts left out because they and their question do not fit into the length


class _Tokens(NamedTuple):
    """A fact as tokens."""

    text: list[int]
    answer_at: int  # where the answer begins in the text
    cue: list[int]
    answer: list[int]
    end: list[int]

    @property
    def question(self) -> int:
        """How many tokens the question has, with its answer."""
        return len(self.cue) + len(self.answer) + len(self.end)


def build_recall(
    facts: Sequence[Fact],
    encode: Callable[[str], list[int]],
    *,
    length: int,
    questions: int,
    together: int = 4,
    seed: int = 0,
) -> Recall:
    """Contexts of up to `length` tokens with `questions` questions in total, fewer if there are not enough facts.

    Up to `together` questions follow one context. No fact is asked for twice. The seed decides which facts are asked
    for and which fill the contexts. `encode` is the tokenizer.
    """
    if min(length, questions, together) < 1:
        raise ValueError(
            f"length {length}, questions {questions} and questions together {together} must be at least 1 each"
        )

    @cache
    def tokens_of(fact: int) -> _Tokens:
        before, cue, answer, after, end = (encode(part) if part else [] for part in facts[fact][:5])
        if not (cue and answer):
            raise ValueError(f"the tokenizer has no tokens for {facts[fact].cue + facts[fact].answer!r}")
        return _Tokens([*before, *cue, *answer, *after], len(before) + len(cue), cue, answer, end)

    def fits(fact: int) -> bool:
        return len(tokens_of(fact).text) + tokens_of(fact).question <= length

    order = np.random.default_rng(mix_seed(seed)).permutation(len(facts)).tolist()
    waiting = deque[int]()
    too_long = 0
    for fact in order:  # only the facts that will be asked for are tokenized
        if len(waiting) == questions:
            break
        if fits(fact):
            waiting.append(fact)
        else:
            too_long += 1
    if not waiting:
        raise ValueError(f"no fact fits into {length} tokens together with its question; give a greater length")
    fillers = list({fact.group: i for i, fact in enumerate(facts)}.values())  # one fact per text, to fill contexts with
    episodes: dict[Condition, list[Episode]] = {condition: [] for condition in CONDITIONS}
    while waiting:
        rng = np.random.default_rng(mix_seed(seed, len(episodes["present"]) + 1))
        chosen = _choose(waiting, facts, tokens_of, length, together)
        groups = {facts[fact].group for fact in chosen}
        room = length - sum(tokens_of(fact).question for fact in chosen)
        others = _fill(rng, facts, fillers, tokens_of, room, groups)
        # Both conditions use the same fillers: "present" takes as many of the first ones as still fit.
        used = sum(len(tokens_of(fact).text) for fact in chosen)
        ends = np.cumsum([len(tokens_of(fact).text) for fact in others]).tolist()
        beside = [fact for fact, end in zip(others, ends, strict=True) if end <= room - used]
        mixed = rng.permutation([*chosen, *beside]).tolist()
        asked = rng.permutation(chosen).tolist()
        episodes["present"].append(_episode(mixed, asked, tokens_of))
        episodes["absent"].append(_episode(others, asked, tokens_of))
        episodes["alone"] += [_episode([], [fact], tokens_of) for fact in asked]
    return Recall(episodes, too_long)


def _choose(
    waiting: deque[int], facts: Sequence[Fact], tokens_of: Callable[[int], _Tokens], length: int, together: int
) -> list[int]:
    """Take facts of different groups from the queue, up to `together` and as many as fit with their questions."""
    chosen: list[int] = []
    groups: set[int] = set()
    later, used = deque[int](), 0
    while waiting and len(chosen) < together and len(later) < MISSES:
        fact = waiting.popleft()
        size = len(tokens_of(fact).text) + tokens_of(fact).question
        if facts[fact].group in groups or used + size > length:
            later.append(fact)
            continue
        chosen.append(fact)
        groups.add(facts[fact].group)
        used += size
    waiting.extendleft(reversed(later))
    return chosen


def _fill(
    rng: np.random.Generator,
    facts: Sequence[Fact],
    fillers: Sequence[int],
    tokens_of: Callable[[int], _Tokens],
    room: int,
    groups: set[int],
) -> list[int]:
    """Random facts of other groups than `groups`, until no more fit into `room` tokens."""
    others: list[int] = []
    groups, misses = set(groups), 0
    while misses < MISSES:
        fact = fillers[int(rng.integers(len(fillers)))]
        size = len(tokens_of(fact).text)
        if facts[fact].group in groups or size > room:
            misses += 1
            continue
        others.append(fact)
        groups.add(facts[fact].group)
        room, misses = room - size, 0
    return others


def _episode(context: list[int], asked: list[int], tokens_of: Callable[[int], _Tokens]) -> Episode:
    tokens: list[int] = []
    answer_at: dict[int, int] = {}  # by fact: where its answer begins
    for fact in context:
        answer_at[fact] = len(tokens) + tokens_of(fact).answer_at
        tokens += tokens_of(fact).text
    questions = []
    for fact in asked:
        _, _, cue, answer, end = tokens_of(fact)
        begin = len(tokens) + len(cue)
        distance = begin - answer_at[fact] if fact in answer_at else 0
        questions.append(Asked(fact, begin, begin + len(answer), distance))
        tokens += [*cue, *answer, *end]
    return Episode(tokens, questions)
