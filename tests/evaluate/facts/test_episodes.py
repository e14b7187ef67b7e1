"""Contexts contain the facts that are asked for, at the stated distance; the controls do not contain them."""

import pytest

from rebased.evaluate.facts.episodes import CONDITIONS, Episode, build_recall
from rebased.evaluate.facts.sources import Fact


def encode(text: str) -> list[int]:
    return list(text.encode())


def invent(n: int) -> list[Fact]:
    return [Fact("", f"The number of town {i} is", f" {i * 7919 % 997}", ".\n", ".\n", i) for i in range(n)]


FACTS = invent(60)


def text(episode: Episode) -> str:
    return bytes(episode.tokens).decode()


def test_the_same_questions_under_each_condition() -> None:
    recall = build_recall(FACTS, encode, length=400, questions=30)
    asked = {
        name: [asked.fact for episode in episodes for asked in episode.asked]
        for name, episodes in recall.episodes.items()
    }
    assert tuple(asked) == CONDITIONS
    assert asked["present"] == asked["absent"] == asked["alone"]
    assert len(set(asked["present"])) == len(asked["present"]) == 30
    assert {len(episode.asked) for episode in recall.episodes["alone"]} == {1}
    assert max(len(episode.asked) for episode in recall.episodes["present"]) == 4


def test_the_answer_stands_where_it_is_said_to() -> None:
    recall = build_recall(FACTS, encode, length=400, questions=60)
    for episode in recall.episodes["present"]:
        for fact, begin, end, distance in episode.asked:
            for place in (0, distance):
                assert bytes(episode.tokens[begin - place : end - place]).decode() == FACTS[fact].answer
                assert bytes(episode.tokens[: begin - place]).decode().endswith(FACTS[fact].cue)
            assert text(episode).count(FACTS[fact].cue) == 2
    distances = [asked.distance for episode in recall.episodes["present"] for asked in episode.asked]
    assert min(distances) < 100 < 250 < max(distances)


def test_without_its_fact_a_context_is_as_long_and_says_nothing() -> None:
    recall = build_recall(FACTS, encode, length=400, questions=60)
    for present, absent in zip(recall.episodes["present"], recall.episodes["absent"], strict=True):
        assert 340 < len(present.tokens) <= 400
        assert 340 < len(absent.tokens) <= 400
        for asked in absent.asked:
            assert asked.distance == 0
            assert text(absent).count(FACTS[asked.fact].cue) == 1
    for alone in recall.episodes["alone"]:
        (asked,) = alone.asked
        assert text(alone) == FACTS[asked.fact].cue + FACTS[asked.fact].answer + ".\n"


def test_a_seed_is_an_order() -> None:
    first, again, other = (build_recall(FACTS, encode, length=300, questions=9, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_parts_of_one_text_do_not_meet() -> None:
    parts = [Fact("x" * i, f"part {i} of a", f" {i}", "y\n", "\n", i // 4) for i in range(40)]
    for episode in build_recall(parts, encode, length=200, questions=40).episodes["present"]:
        groups = [parts[asked.fact].group for asked in episode.asked]
        assert len(set(groups)) == len(groups)


def test_what_does_not_fit_is_counted() -> None:
    long = [Fact("x" * 300, "a long text about", f" {i}", "\n", "\n", 1000 + i) for i in range(5)]
    recall = build_recall([*FACTS, *long], encode, length=200, questions=100)
    assert recall.too_long == 5
    assert sum(len(episode.asked) for episode in recall.episodes["present"]) == 60
    assert max(len(episode.tokens) for episode in recall.episodes["present"]) <= 200


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="no fact fits into 20 tokens"):
        build_recall(FACTS, encode, length=20, questions=5)
    with pytest.raises(ValueError, match="questions 0 and"):
        build_recall(FACTS, encode, length=20, questions=0)
    with pytest.raises(ValueError, match="the tokenizer has no tokens for 'The number of town"):
        build_recall(FACTS, lambda text: [], length=200, questions=5)
