"""Read facts from files: one fact per line (.jsonl), or the sentences of SQuAD that contain an answer."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from rebased.data.sources import open_text
from rebased.files import parse_json, refuse_pipe

SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s")
SHORTEST_CUE = 3  # words; fewer do not identify a sentence
FACT_BYTES = 2**29  # of a file, unpacked; SQuAD has 40 MB


class Fact(NamedTuple):
    """A text that contains an answer: before + cue + answer + after. The question repeats the cue.

    Each field is tokenized separately, so that cue and answer are the same tokens in the text and in the question.
    """

    before: str
    cue: str  # the words before the answer
    answer: str  # with the space before it
    after: str
    end: str  # follows the answer to a question
    group: int  # facts of one group share one text, which occurs in a context at most once


def read_facts(path: Path | str) -> list[Fact]:
    """One fact per line: {"context": "The native language of X is", "continuation": "French"}. Also .gz, .xz or .zst.

    Of lines with the same context the first counts, because a question must have one answer.
    """
    path = Path(path)
    facts: dict[str, Fact] = {}
    for number, line in enumerate(_read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line, f"{path}, line {number}")
            cue, answer = entry["context"].strip(), entry["continuation"].strip()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f'{path}, line {number}: not a fact; each line should be {{"context": "...", "continuation": "..."}}'
            ) from error
        if cue and answer:
            facts.setdefault(cue, Fact("", cue, f" {answer}", ".\n", ".\n", len(facts)))
    return _not_empty(list(facts.values()), path)


def read_squad(path: Path | str) -> list[Fact]:
    """The facts of a SQuAD file (version 1.1 or 2.0), as cloze questions.

    The text of a fact is a passage, its cue one of the passage's sentences up to an answer.

    Each answer counts once, however many questions ask for it. Answers with fewer than three words before them in their
    sentence are left out.
    """
    path = Path(path)
    try:
        passages = [
            passage for article in parse_json(_read_text(path), str(path))["data"] for passage in article["paragraphs"]
        ]
        spans = [(str(passage["context"]), _answers(passage)) for passage in passages]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"{path} is not in the format of SQuAD ({type(error).__name__}: {error}); give a dev-v2.0.json"
        ) from error
    facts = []
    for group, (text, answers) in enumerate(spans):
        for start, answer in sorted(answers):
            if text[start : start + len(answer)] != answer:
                raise ValueError(f"{path}: the answer {answer!r} is not at character {start} of its passage")
            facts += _cloze(text, start, answer, group)
    return _not_empty(facts, path)


def _answers(passage: dict[str, Any]) -> set[tuple[int, str]]:
    """(start, text) of the first answer of each question that has one."""
    answers = [question["answers"][0] for question in passage["qas"] if question["answers"]]
    found = {(answer["answer_start"], answer["text"]) for answer in answers}
    if not all(isinstance(start, int) and isinstance(text, str) for start, text in found):
        raise TypeError("an answer is a text and the number of its first character")
    return found


def _cloze(text: str, start: int, answer: str, group: int) -> list[Fact]:
    """The fact of one answer; empty if its cue is too short. Spaces belong to the next word, as in byte-level BPE."""
    ends = [match.end() - 1 for match in SENTENCE_END.finditer(text, 0, start)]
    sentence = ends[-1] if ends else 0
    cue = text[sentence:start].rstrip()
    if len(cue.split()) < SHORTEST_CUE:
        return []
    gap = text[sentence + len(cue) : start]
    return [Fact(text[:sentence], cue, gap + answer, f"{text[start + len(answer) :]}\n", "\n", group)]


def _read_text(path: Path) -> str:
    refuse_pipe(path)
    with open_text(path) as (stream, _):
        content = stream.read(FACT_BYTES + 1)
    if len(content) > FACT_BYTES:
        raise ValueError(f"{path} has more than {FACT_BYTES:,} bytes of text; give a smaller file")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text: {error}; give a .json or .jsonl, compressed or not") from error


def _not_empty(facts: list[Fact], path: Path) -> list[Fact]:
    if not facts:
        raise ValueError(f"{path} has no fact that can be asked for; give a file with facts")
    return facts
