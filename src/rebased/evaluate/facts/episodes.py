"""Contexts full of facts with questions about some of them, and the same questions where nothing answers them."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, NamedTuple, get_args

import numpy as np

from rebased.evaluate.facts.sources import Fact
from rebased.tasks.seeds import mix_seed

Condition = Literal["present", "absent", "alone"]
"""What stands before a question: its fact among others; as many others without it; nothing at all. What a model says
without the fact it knows from training, or guesses."""
CONDITIONS: tuple[Condition, ...] = get_args(Condition)
MISSES = 50  # facts in a row that do not fit any more: the context counts as full


class Asked(NamedTuple):
    fact: int
    begin: int  # the answer is tokens[begin:end]
    end: int
    distance: int  # tokens between the answer in the context and this one; 0 where the context lacks it


class Episode(NamedTuple):
    tokens: list[int]
    asked: list[Asked]


class Recall(NamedTuple):
    """The same questions under each condition, in the same order."""

    episodes: dict[Condition, list[Episode]]
    too_long: int  # facts that do not fit into the length together with their question


class _Tokens(NamedTuple):
    """A fact as tokens."""

    text: list[int]
    answer_at: int  # in the text
    cue: list[int]
    answer: list[int]
    end: list[int]

    @property
    def question(self) -> int:
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
    """Ask `questions` questions (fewer where the facts run out), up to `together` of them after each context, in
    contexts filled to `length` tokens. No fact is asked for twice; which are, and what stands around them, follows from
    the seed."""
    if min(length, questions, together) < 1:
        raise ValueError(
            f"length {length}, questions {questions} and questions together {together} must be at least 1 each"
        )

    @cache
    def tokens_of(fact: int) -> _Tokens:
        before, cue, answer, after, end = (encode(part) if part else [] for part in facts[fact][:5])
        if not (cue and answer):
            raise ValueError(f"the tokenizer makes nothing of {facts[fact].cue + facts[fact].answer!r}")
        return _Tokens([*before, *cue, *answer, *after], len(before) + len(cue), cue, answer, end)

    def fits(fact: int) -> bool:
        return len(tokens_of(fact).text) + tokens_of(fact).question <= length

    order = np.random.default_rng(mix_seed(seed)).permutation(len(facts)).tolist()
    waiting = deque[int]()
    too_long = 0
    for fact in order:  # only as many as will be asked are turned into tokens
        if len(waiting) == questions:
            break
        if fits(fact):
            waiting.append(fact)
        else:
            too_long += 1
    if not waiting:
        raise ValueError(f"no fact fits into {length} tokens together with its question; give a greater length")
    fillers = list({fact.group: i for i, fact in enumerate(facts)}.values())  # one of each text, to fill contexts with
    episodes: dict[Condition, list[Episode]] = {condition: [] for condition in CONDITIONS}
    while waiting:
        rng = np.random.default_rng(mix_seed(seed, len(episodes["present"]) + 1))
        chosen = _choose(waiting, facts, tokens_of, length, together)
        groups = {facts[fact].group for fact in chosen}
        room = length - sum(tokens_of(fact).question for fact in chosen)
        others = _fill(rng, facts, fillers, tokens_of, room, groups)
        # What fills the context without the chosen facts begins with what fills it beside them.
        used = sum(len(tokens_of(fact).text) for fact in chosen)
        beside = _prefix(others, [len(tokens_of(fact).text) for fact in others], room - used)
        mixed = rng.permutation([*chosen, *beside]).tolist()
        asked = rng.permutation(chosen).tolist()
        episodes["present"].append(_episode(mixed, asked, tokens_of))
        episodes["absent"].append(_episode(others, asked, tokens_of))
        episodes["alone"] += [_episode([], [fact], tokens_of) for fact in asked]
    return Recall(episodes, too_long)


def _choose(
    waiting: deque[int], facts: Sequence[Fact], tokens_of: Callable[[int], _Tokens], length: int, together: int
) -> list[int]:
    """Take facts of different groups from the queue, as many as fit into one context with their questions."""
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
    """Facts of other groups, at random, until no more fit."""
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


def _prefix(items: list[int], sizes: list[int], room: int) -> list[int]:
    """As many of the first items as fit."""
    return [item for item, end in zip(items, np.cumsum(sizes).tolist(), strict=True) if end <= room]


def _episode(context: list[int], asked: list[int], tokens_of: Callable[[int], _Tokens]) -> Episode:
    tokens: list[int] = []
    told: dict[int, int] = {}  # where the answer of each fact stands
    for fact in context:
        told[fact] = len(tokens) + tokens_of(fact).answer_at
        tokens += tokens_of(fact).text
    questions = []
    for fact in asked:
        _, _, cue, answer, end = tokens_of(fact)
        begin = len(tokens) + len(cue)
        distance = begin - told[fact] if fact in told else 0
        questions.append(Asked(fact, begin, begin + len(answer), distance))
        tokens += [*cue, *answer, *end]
    return Episode(tokens, questions)
