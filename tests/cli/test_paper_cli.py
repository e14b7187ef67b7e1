"""`rebased paper`, as a user types it: the package's records, a user's own, and input that is none."""

import json
from pathlib import Path

import pytest

from command_line import rebased
from fake_records import fake_run
from paper_records import paper_run
from rebased.runs.collect import write_bundle


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REBASED_TRACEBACK", raising=False)


def test_the_packages_records_in_the_terminal_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased("paper", "--json", "found.json") == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for name in ("Table 1 ", "Table 9 ", "Figure 10 "):
        assert name in printed.out
    found = json.loads(Path("found.json").read_text())
    verdicts = {finding["name"]: finding["verdict"] for finding in found["findings"]}
    assert len(verdicts) == 14
    assert verdicts["Table 4"] == verdicts["Table 9"] == "reproduced"
    assert found["counts"] in printed.out
    assert len(found["answers"]) == 5
    assert printed.out.startswith("1. Does ReBased recall more than Based?")


def test_a_page_of_a_users_own_records(capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle([paper_run("rebased", 0.6, pairs=32, seed=seed) for seed in (42, 43)], Path("my.jsonl.gz"))
    assert rebased("paper", "my.jsonl.gz", "-o", "paper.html") == 0
    assert capsys.readouterr().out.endswith("wrote paper.html\n")
    page = Path("paper.html").read_text()
    assert "From the records that were given: 2 runs, 0 probes." in page
    assert "rebased paper my.jsonl.gz -o paper.html" in page
    assert "Records: my.jsonl.gz." in page
    first = Path("paper.html").read_bytes()
    assert rebased("paper", "my.jsonl.gz", "-o", "paper.html", "--quiet") == 0  # an older page gives way
    assert Path("paper.html").read_bytes() == first
    assert capsys.readouterr().out == ""


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def error(*words: str) -> str:
        assert rebased("paper", *words) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        return printed.err

    assert error("nowhere.jsonl.gz") == "error: nowhere.jsonl.gz: there is no such file or folder\n"
    Path("torn.jsonl.gz").write_bytes(b"\x1f\x8b\x08\x00 not what it says")
    assert "there is no record of a run or a probe in torn.jsonl.gz; 1 file read: " in error("torn.jsonl.gz")
    Path("notes.txt").write_text("notes")
    assert "notes.txt is not a record" in error("notes.txt")
    Path("other.json").write_text('{"type": "probes", "records": [{"type": "probe"}]}')
    assert "other.json is damaged, or of other code: probe 1: kind" in error("other.json")
    Path("any.json").write_text("{}")
    assert "any.json is not the record of a probe" in error("any.json")
    Path("torn.json").write_text('{"type": "prob')
    assert "torn.json is not JSON" in error("torn.json")
    write_bundle([fake_run(seed=seed) for seed in (42, 43)], Path("small.jsonl.gz"))
    assert "no record is a finished run of one of the paper's experiments" in error("small.jsonl.gz")
    Path("mine.html").write_text("<p>mine</p>")
    assert "mine.html is not a page that rebased has written" in error("-o", "mine.html")
    assert Path("mine.html").read_text() == "<p>mine</p>"
    assert "the page is HTML" in error("-o", "paper.pdf")


def test_a_damaged_record_among_others_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    Path("all").mkdir()
    write_bundle([paper_run("rebased", 0.6, pairs=32)], Path("all/my.jsonl.gz"))
    Path("all/torn.json").write_text('{"type": "prob')
    Path("all/checkpoint.json").write_text("{}")  # no probe, and says so
    assert rebased("paper", "all") == 0
    err = capsys.readouterr().err
    assert err.count("warning:") == 1
    assert "torn.json is not JSON" in err


def test_a_plan_judges_runs(capsys: pytest.CaptureFixture[str]) -> None:
    test = "{name: more, value: held_out, a: {model: ReBased}, b: {model: Based}, margin: 0.1, runs: 3}"
    Path("plan.md").write_text(f"# Plan\n\n```yaml\ncorrect: none\ntests:\n  - {test}\n```\n")
    runs = [
        paper_run(preset, level + seed / 1e3, pairs=32, seed=seed)
        for preset, level in (("rebased", 0.6), ("based", 0.4))
        for seed in (1, 2, 3)
    ]
    write_bundle(runs, Path("my.jsonl.gz"))
    assert rebased("paper", "--plan", "plan.md", "my.jsonl.gz", "--json", "found.json") == 0
    (outcome,) = json.loads(Path("found.json").read_text())["outcomes"]
    assert (outcome["test"], outcome["answer"]) == ("more", "holds")
    Path("none.md").write_text("no tests")
    assert rebased("paper", "--plan", "none.md", "my.jsonl.gz") == 2
    assert "none.md has no block of YAML" in capsys.readouterr().err
