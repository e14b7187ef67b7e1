"""Facts out of files: one-line facts (jsonl), and the sentences of SQuAD that hold an answer."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from rebased.data.sources import open_text

SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s")
LEAST_CUE = 3  # words: fewer do not say which sentence is meant


class Fact(NamedTuple):
    """A text that holds an answer: before + cue + answer + after. The question is the cue alone.

    The parts are turned into tokens one by one, so that the words of a question and its answer are the same tokens as
    in the text."""

    before: str
    cue: str  # the words that lead to the answer
    answer: str  # with the space before it
    after: str
    end: str  # what closes the answer to a question
    group: int  # facts of one group are parts of one text, which stands in a context once at most


def read_facts(path: Path | str) -> list[Fact]:
    """A fact a line: {"context": "The native language of X is", "continuation": "French"}.

    Of two lines with one context the first counts: a question must have one answer."""
    path = Path(path)
    facts: dict[str, Fact] = {}
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            cue, answer = entry["context"].strip(), entry["continuation"].strip()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'{path}, line {number}: not a fact; each line should be {{"context": "...", "continuation": "..."}}'
            ) from error
        if cue and answer:
            facts.setdefault(cue, Fact("", cue, f" {answer}", ".\n", ".\n", len(facts)))
    return _not_empty(list(facts.values()), path)


def read_squad(path: Path | str) -> list[Fact]:
    """SQuAD (versions 1.1 and 2.0) as a cloze: a passage, then one of its sentences again up to an answer.

    Each answer counts once, however many questions ask for it; an answer with fewer than three words before it in its
    sentence is left out."""
    path = Path(path)
    try:
        passages = [passage for article in json.loads(_read_text(path))["data"] for passage in article["paragraphs"]]
        spans = [(passage["context"], _answers(passage)) for passage in passages]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not in the format of SQuAD: {error!r}; give a dev-v2.0.json") from error
    facts = []
    for group, (text, answers) in enumerate(spans):
        for start, answer in sorted(answers):
            if text[start : start + len(answer)] != answer:
                raise ValueError(f"{path}: the answer {answer!r} does not stand at character {start} of its passage")
            facts += _cloze(text, start, answer, group)
    return _not_empty(facts, path)


def _answers(passage: dict[str, Any]) -> set[tuple[int, str]]:
    """(start, text) of the first answer that people gave to each question that has one."""
    answers = [question["answers"][0] for question in passage["qas"] if question["answers"]]
    return {(answer["answer_start"], answer["text"]) for answer in answers}


def _cloze(text: str, start: int, answer: str, group: int) -> list[Fact]:
    """One fact, or none. Spaces go with the word after them, as tokenizers of bytes have it."""
    ends = [match.end() - 1 for match in SENTENCE_END.finditer(text, 0, start)]
    sentence = ends[-1] if ends else 0
    cue = text[sentence:start].rstrip()
    if len(cue.split()) < LEAST_CUE:
        return []
    gap = text[sentence + len(cue) : start]
    return [Fact(text[:sentence], cue, gap + answer, f"{text[start + len(answer) :]}\n", "\n", group)]


def _read_text(path: Path) -> str:
    with open_text(path) as (stream, _):
        content = stream.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}; give a .json or .jsonl, as it is or packed") from error


def _not_empty(facts: list[Fact], path: Path) -> list[Fact]:
    if not facts:
        raise ValueError(f"{path} holds no fact that can be asked for")
    return facts
