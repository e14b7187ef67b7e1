"""Recall of facts in real text: a context holds facts, then questions ask for some of them."""

from rebased.evaluate.facts.episodes import CONDITIONS, Asked, Condition, Episode, Recall, build_recall
from rebased.evaluate.facts.model_answers import Answer, Tally, tally, tally_by_distance
from rebased.evaluate.facts.sources import Fact, read_facts, read_squad

__all__ = [
    "CONDITIONS",
    "Answer",
    "Asked",
    "Condition",
    "Episode",
    "Fact",
    "Recall",
    "Tally",
    "build_recall",
    "read_facts",
    "read_squad",
    "tally",
    "tally_by_distance",
]
