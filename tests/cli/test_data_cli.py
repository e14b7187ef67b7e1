"""The command rebased data."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import rebased
from forked_python import COMMAND
from rebased.data import Corpus


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REBASED_TRACEBACK", raising=False)
    Path("story.txt").write_text("once upon a time.\n" * 500)
    return tmp_path


def test_prepare_and_check(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data", "prepare", "story.txt", "-o", "out", "--split", "train=8kB,valid=500B,test=500B"]
    assert rebased(*words) == 0
    lines = capsys.readouterr().out
    assert re.search(r"out: bytes, 257 tokens, uint16", lines)
    assert re.search(r"train +1 +8,000 +8,001 +1\.000 +1", lines)
    assert re.search(r"wrote out in \d+\.\d s", lines)
    assert Corpus("out").splits["valid"].text_bytes == 500
    assert rebased(*words, "--resume") == 0
    assert capsys.readouterr().out.endswith("out was done already\n")
    assert rebased("data", "verify", "out") == 0
    assert "every checksum is right" in capsys.readouterr().out
    Path("out/test-00000.bin").write_bytes(bytes(501 * 2))
    assert rebased("data", "verify", "out") == 2
    assert capsys.readouterr().err.startswith("error: out/test-00000.bin is damaged")
    Path("out/valid-00000.bin").write_bytes(bytes(501 * 2))
    assert rebased("data", "verify", "out", "--json") == 2
    captured = capsys.readouterr()
    assert "2 of 6 files are damaged: out/valid-00000.bin is damaged" in captured.err
    found = json.loads(captured.out)
    assert (found["files"], len(found["damaged"]), found["splits"]["valid"]["tokens"]) == (6, 2, 501)


def test_what_was_wrong_with_the_text_is_said(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad").mkdir()
    Path("bad/latin.txt").write_bytes(b"caf\xe9")
    Path("bad/empty.txt").touch()
    assert rebased("data", "prepare", "bad", "-o", "out", "--split", "train=1") == 0
    out = capsys.readouterr().out
    assert "not UTF-8 and replaced by U+FFFD: 1 (--invalid-utf8 stop shows where)" in out
    assert "left out, empty or binary: 1 file" in out
    assert rebased("data", "prepare", "bad", "-o", "out2", "--split", "train=1", "--invalid-utf8", "stop") == 2
    assert "bad/latin.txt: not UTF-8: b'\\xe9' after 'caf'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.txt", "-o", "out"], "there is no file or folder nowhere.txt"),
        (["story.txt"], "--out"),
        (["story.txt", "-o", "story.txt"], "story.txt is a file; choose a folder (-o)"),
        (["story.txt", "-o", "."], ". is not empty and was not begun by this command"),
        (["story.txt", "-o", "out", "--shard-size", "10"], "'10' is not a size above 0 with a unit"),
        (["story.txt", "-o", "out", "--split", "train"], "--split 'train' is not NAME=VALUE"),
        (["story.txt", "-o", "out", "--workers", "-1"], "workers must be 1 or more, got -1"),
        (["story.txt", "-o", "out", "--tokenizer", "story.json"], "there is no tokenizer file story.json"),
    ],
)
def test_bad_input_is_one_line(here: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert rebased("data", "prepare", *words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert os.listdir() == ["story.txt"]


def test_in_a_terminal_there_is_a_bar(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    assert rebased("data", "prepare", "story.txt", "-o", "out") == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert re.search(r"shard 1 ━+ 100% 0\.0 MB +[\d.]+ MB/s +9,003 tokens", shown)


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("long.txt").write_text("a line of a longer story\n" * 200_000)
    words = ["data", "prepare", "long.txt", "-o", "out", "--shard-size", "20kB"]
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pipesize=4096,
    )  # a pipe that is full long before the text is done: nobody reads on until the signal is sent
    assert process.stdout is not None
    while not process.stdout.readline().startswith("shard 2 is written"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err == ""
    last = out.splitlines()[-1]
    assert last.startswith("interrupted; finished shards are kept; continue with: rebased data prepare long.txt -o out")
    assert rebased(*shlex.split(last.partition("rebased ")[2])) == 0
    assert Corpus("out", verify=True).splits["train"].text_bytes == 4_500_000
