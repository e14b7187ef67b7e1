"""rebased explore: a real process that serves its page and ends, and one-line errors for what cannot be explored."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("uvicorn", reason="serving needs it: pip install 'rebased[serve]'")

from rebased.cli import main
from rebased.train import train
from tiny_run import tiny

COPYING = {
    "name": "copying",
    "vocab_size": 12,
    "train": [{"seq_len": 12, "min_length": 2, "max_length": 4, "examples": 16}],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    run = {"train": {"epochs": 1}}
    train(tiny(run), home / "run")
    task = COPYING | {"test": COPYING["train"]}
    copying = tiny(run).model_dump() | {"task": task, "model": {"d_model": 8, "mixers": ["short_conv", "short_conv"]}}
    train(type(tiny()).model_validate(copying), home / "copying")
    for name, cut in (("unfinished", ""), ("diverged", '{"type": "end", "status": "diverged"}\n')):
        (home / name).mkdir()
        lines = (home / "run" / "record.jsonl").read_text().splitlines(keepends=True)
        (home / name / "record.jsonl").write_text("".join(lines[:-1]) + cut)
    (home / "empty").mkdir()
    return home


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def test_it_serves_until_a_signal(home: Path) -> None:
    words = [sys.executable, "-m", "rebased", "explore", "run", "--port", "0"]
    environment = os.environ | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, cwd=home, env=environment, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "run\n"
        url = process.stdout.readline().split()[1]
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{url}api/models", timeout=60) as answer:
            about = json.loads(answer.read())
        assert (about["left"], about["right"]) == ("run", None)
        assert [each["name"] for each in about["models"]][:2] == ["run", "mqar/rebased"]
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "ended\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere does not exist, and no shipped model has this name; give a run's folder"),
        (["mqar/rebasd"], "did you mean 'mqar/rebased'?"),
        (["empty"], "empty is not a run's folder"),
        (["unfinished"], "unfinished has not ended, so it has no trained model yet; finish it with --resume"),
        (["diverged"], "diverged diverged and left no trained model; give another run"),
        (["copying"], "copying was trained on the task 'copying', which has no keys and values; give a run on mqar"),
        (
            ["run", "lm/stdlib-bytes"],
            "lm/stdlib-bytes was trained on text and run to recall; give two runs of one kind",
        ),
        (["run", "mqar/based"], "run and mqar/based have 24 and 160 tokens, so no sequence is for both"),
        (["run", "run", "run"], "two models stand side by side, and 3 runs were given"),
        (["--port", "70000"], "port 70000 is out of range"),
    ],
)
def test_what_cannot_be_explored_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    port = [] if "--port" in words else ["--port", "0"]
    with pytest.raises(SystemExit) as left:
        main(["explore", *words, *port])
    captured = capsys.readouterr().err
    assert left.value.code == 2
    assert captured.startswith("error: ")
    assert message in captured
    assert len(captured.splitlines()) == 1


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SystemExit) as left:
            main(["explore", "--port", str(port)])
    assert left.value.code == 2
    assert f"port {port} on 127.0.0.1 is in use; give another one with --port" in capsys.readouterr().err


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("rebased.serve")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(SystemExit) as left:
        main(["explore", "--port", "0"])
    assert left.value.code == 2
    assert "pip install 'rebased[serve,lab]'" in capsys.readouterr().err
