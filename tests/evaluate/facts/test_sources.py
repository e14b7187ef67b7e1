"""Facts are read from files, and errors name the line that is not a fact."""

import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest

from rebased.evaluate.facts.sources import Fact, read_facts, read_squad

LINES = [
    {"context": "The capital of Norland is", "continuation": "Farhaven"},
    {"context": "The capital of Sudland is ", "continuation": "Porto Sole"},
    {"context": "The capital of Norland is", "continuation": "Nearhaven"},
]
PASSAGE = "Norland lies far up. Its capital is Farhaven (founded 1312). Farhaven has an old port."


def write_lines(path: Path, lines: list[dict[str, str]]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    return path


def squad(path: Path, answers: list[tuple[str, int | None]]) -> Path:
    def question(answer: str, start: int | None) -> dict[str, Any]:
        place = PASSAGE.index(answer) if start is None else start
        return {"question": "?", "id": "0", "answers": [{"text": answer, "answer_start": place}]}

    unanswerable = {"question": "?", "id": "1", "answers": [], "is_impossible": True}
    qas = [*(question(*answer) for answer in answers), unanswerable]
    path.write_text(json.dumps({"version": "v2.0", "data": [{"paragraphs": [{"context": PASSAGE, "qas": qas}]}]}))
    return path


def test_one_line_facts(tmp_path: Path) -> None:
    facts = read_facts(write_lines(tmp_path / "facts.jsonl", LINES))
    assert facts == [
        Fact("", "The capital of Norland is", " Farhaven", ".\n", ".\n", 0),
        Fact("", "The capital of Sudland is", " Porto Sole", ".\n", ".\n", 1),
    ]


@pytest.mark.parametrize("pack", [lzma, gzip])
def test_packed_files(tmp_path: Path, pack: Any) -> None:
    plain = write_lines(tmp_path / "facts.jsonl", LINES)
    packed = tmp_path / ("facts.jsonl.xz" if pack is lzma else "facts.jsonl.gz")
    packed.write_bytes(pack.compress(plain.read_bytes()))
    assert read_facts(packed) == read_facts(plain)


def test_squad_as_a_cloze(tmp_path: Path) -> None:
    # "Norland" begins its sentence; two questions ask for Farhaven.
    answers = [("Norland", None), ("Farhaven", None), ("Farhaven", None), ("1312", None), ("an old port", None)]
    facts = read_squad(squad(tmp_path / "dev.json", answers))
    assert [(fact.cue, fact.answer, fact.end) for fact in facts] == [
        (" Its capital is", " Farhaven", "\n"),
        (" Its capital is Farhaven (founded", " 1312", "\n"),
    ]
    assert all(fact.before + fact.cue + fact.answer + fact.after == f"{PASSAGE}\n" for fact in facts)
    assert {fact.group for fact in facts} == {0}


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"facts.jsonl, line 2: not a fact; each line should be"):
        read_facts(write_lines(tmp_path / "facts.jsonl", [LINES[0], {"prompt": "x"}]))
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl has no fact"):
        read_facts(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)))
    with pytest.raises(ValueError, match=r"binary\.jsonl is not text"):
        read_facts(tmp_path / "binary.jsonl")
    (tmp_path / "not.xz").write_text("{}")
    with pytest.raises(ValueError, match=r"not\.xz cannot be unpacked"):
        read_facts(tmp_path / "not.xz")
    with pytest.raises(ValueError, match="not in the format of SQuAD"):
        read_squad(write_lines(tmp_path / "facts.jsonl", LINES[:1]))
    with pytest.raises(ValueError, match="'Farhaven' is not at character 3"):
        read_squad(squad(tmp_path / "dev.json", [("Farhaven", 3)]))


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    """Nobody may ever write into it."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="give a regular file"):
        read_facts(tmp_path / "pipe")
