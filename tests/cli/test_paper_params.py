"""`rebased paper --params`, as a user types it and as a script reads it."""

import json
import logging
from functools import partial

import pytest

from command_line import rebased
from rebased.cli import paper as paper_command

run = partial(rebased, "paper", "--params")


def test_prints_all_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    printed = capsys.readouterr()
    assert printed.err == ""  # the presets' warnings about 12 heads are one note here
    assert printed.out.count("✓") == 31
    assert printed.out.count("156,992,256") == 2
    assert "145,453,824" in printed.out
    assert printed.out.splitlines()[-1] == "all 31 cells exact"


def test_json_and_logging_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    level = logging.getLogger("rebased").level
    assert run("--json") == 0
    assert logging.getLogger("rebased").level == level
    printed = json.loads(capsys.readouterr().out)
    assert {size["preset"] for size in printed["at_one_length"]} >= {"rebased", "mamba", "rwkv", "hyena"}
    cells = printed["cells"]
    assert len(cells) == 31
    assert sum(cell["table"] == 4 for cell in cells) == 28
    assert all(cell["exact"] and cell["ours"] == cell["paper"] for cell in cells)
    assert {cell["table"] for cell in cells} == {4, 9}


def test_a_cell_that_differs_is_an_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = paper_command.TABLE_4[0]._replace(parameters=623_743)
    monkeypatch.setattr(paper_command, "TABLE_4", (wrong, paper_command.TABLE_4[1]))
    assert run() == 1
    printed = capsys.readouterr().out
    assert "✗ +1" in printed
    assert printed.splitlines()[-1] == f"1 of {2 + len(paper_command.TABLE_9)} differ"
    assert run("--json") == 1


def test_it_reads_no_records(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("records.jsonl.gz") == 2
    assert "--params counts parameters and reads no records" in capsys.readouterr().err
