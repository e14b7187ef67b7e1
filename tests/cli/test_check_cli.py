"""`rebased check`: one line per check, and exit codes, over fake suites."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rebased.cli.check
from rebased.cli import main
from rebased.evaluate.checks import CheckResult

OWN = """
import fake_suites
fake_suites.mixers.append("leaky")
"""


def checks(name: str, settings: Mapping[str, Any] | None = None) -> Iterator[CheckResult]:
    if settings:
        yield CheckResult(f"takes {settings}", "passed")
    yield CheckResult("keeps shapes", "passed")
    if name == "leaky":
        yield CheckResult("never looks ahead", "failed", "y[:, 3] changed\nwith x[:, 4]")
    else:
        yield CheckResult("never looks ahead", "passed")
    if name != "mqar":
        yield CheckResult("extends", "skipped", "it has no extend")


@pytest.fixture(autouse=True)
def _fake_suites(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mixers, tasks = ["rebased", "shared"], ["mqar", "shared"]
    fake = SimpleNamespace(mixers=mixers)
    monkeypatch.setitem(sys.modules, "fake_suites", fake)
    suites = {"mixer": (lambda: mixers, checks), "task": (lambda: tasks, checks)}
    monkeypatch.setattr(rebased.cli.check, "SUITES", suites)
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(OWN)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(["check", *words])
    return int(left.value.code or 0)


def test_one_line_per_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mqar") == 0
    assert capsys.readouterr().out.splitlines() == [
        "✓ keeps shapes",
        "✓ never looks ahead",
        "task mqar: all 2 checks passed",
    ]


def test_a_message_is_printed_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(name: str) -> Iterator[CheckResult]:
        yield CheckResult("draws rows", "failed", "draw returned [4, 7]")
        yield CheckResult("is made again", "failed", "draw returned [4, 7]")
        yield CheckResult("counts", "passed")
        yield CheckResult("guesses", "passed")

    monkeypatch.setattr(rebased.cli.check, "SUITES", {"task": (lambda: ["mqar"], wrong)})
    assert run("mqar", "--json", "checks.json") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["✗ draws rows: draw returned [4, 7]", "✗ is made again: as above", "✓ counts", "✓ guesses"]
    assert [each["message"] for each in json.loads(Path("checks.json").read_text())["checks"]][:2] == 2 * [
        "draw returned [4, 7]"
    ]


def test_a_skipped_check_is_no_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("rebased") == 0
    *_, line, last = capsys.readouterr().out.splitlines()
    assert line == "- extends: skipped: it has no extend"
    assert last == "mixer rebased: 2 checks passed, 1 skipped"
    assert run("rebased", "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["passed"], answer["skipped"]) == (True, 1)
    assert answer["checks"][-1] == {
        "kind": "mixer",
        "check": "extends",
        "ok": True,
        "outcome": "skipped",
        "message": "it has no extend",
    }


def test_a_failed_check_is_named_and_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mine.py:leaky") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "✗ never looks ahead: y[:, 3] changed with x[:, 4]"
    assert lines[-1] == "mixer leaky: 1 of 3 checks failed, 1 skipped"


def test_a_name_in_both_registers_is_checked_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("shared") == 0
    text = capsys.readouterr().out
    assert "mixer shared: 2 checks passed, 1 skipped" in text
    assert "task shared: 2 checks passed, 1 skipped" in text


def test_a_task_is_checked_with_the_fields_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mqar", "--task.seq_len", "32", "--task.weights=[1, 2]") == 0
    assert capsys.readouterr().out.startswith("✓ takes {'seq_len': 32, 'weights': [1, 2]}\n✓ keeps shapes\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("mqar", "--seq_len", "32"), "unknown option '--seq_len'; did you mean '--task.seq_len'?"),
        (("mqar", "--train.lr", "1"), "--train.lr: the fields of a task are set with --task.KEY VALUE"),
        (("rebased", "--task.seq_len", "32"), "--task.seq_len: 'rebased' is a mixer; only tasks take settings here"),
        (("mqar", "mine.py:leaky"), "unexpected word 'mine.py:leaky'"),
    ],
)
def test_bad_settings_are_named(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert run(*words) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.py:x", "nowhere.py: there is no such file"),
        ("no.such.module:x", "no.such.module failed: ModuleNotFoundError"),
        ("mine.py:laeky", "mine.py registers neither a mixer nor a task named 'laeky'; did you mean 'leaky'?"),
        ("mine.py:other", "mine.py registers neither a mixer nor a task named 'other'; known: leaky"),
        ("mqra", "there is neither a mixer nor a task named 'mqra'; did you mean 'mqar'?"),
        ("mine.py", "mine.py: which mixer or task in this file? write mine.py:NAME"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], target: str, message: str) -> None:
    assert run(target) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""
