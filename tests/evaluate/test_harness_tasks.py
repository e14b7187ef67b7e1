"""Our tasks for lm-evaluation-harness, without the harness: what they ask, and that it can be answered."""

import json
import re
from pathlib import Path

import pytest

from rebased.evaluate.facts.sources import read_facts
from rebased.evaluate.harness.tasks import (
    ADJECTIVES,
    LINES,
    NOUNS,
    build_task,
    facts_in_context,
    mqar_in_words,
)


@pytest.mark.parametrize("lines", LINES)
def test_names_differ_and_the_answer_stands_in_the_context(lines: int) -> None:
    examples = mqar_in_words(lines)
    assert len(examples) == 500
    for context, question, answer in examples:
        found = dict(re.findall(r"^(\w+ \w+):( \d{7})$", context, re.MULTILINE))
        assert len(found) == lines == context.count("\n")
        assert found[question.removesuffix(":")] == answer
    assert len({example.answer for example in examples}) > 490
    assert mqar_in_words(lines) == examples  # the seed decides
    assert mqar_in_words(lines, count=3) == examples[:3]
    assert mqar_in_words(lines, seed=1) != examples


def test_words_are_different_and_plain() -> None:
    for words in (ADJECTIVES, NOUNS):
        assert len(set(words)) == len(words) == 64
        assert all(re.fullmatch("[a-z]+", word) for word in words)


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    path = tmp_path / "facts.jsonl"
    rows = [{"context": f"The capital of land {i} is", "continuation": f"town {i}"} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_facts_hold_their_answer(facts: Path) -> None:
    examples = facts_in_context(read_facts(facts), 16)
    assert len(examples) == 40
    for context, question, answer in examples:
        assert question + answer in context
        assert context.count("The capital") == 16
    with pytest.raises(ValueError, match="41 facts of different texts are needed"):
        facts_in_context(read_facts(facts), 41)


def test_twice_reads_the_context_twice(facts: Path) -> None:
    for name in ("rebased_facts", "rebased_mqar_words_8"):
        once, twice = (build_task(name + form, facts=facts)["custom_dataset"]()["test"] for form in ("", "_twice"))
        for a, b in zip(once, twice, strict=True):
            assert a["target"] == b["target"]
            question = b["text"].removeprefix(b["text"][: len(b["text"]) - len(a["text"])])
            assert question == a["text"]
            assert len(a["text"]) < len(b["text"]) < 2 * len(a["text"])


def test_what_a_task_lacks_is_said() -> None:
    with pytest.raises(ValueError, match="did you mean 'rebased_mqar_words_16'"):
        build_task("rebased_mqar_word_16")
    with pytest.raises(ValueError, match="needs a file; give it with --squad"):
        build_task("rebased_squad_twice")
