"""rebased lm serve: a real process that serves and ends, and one-line errors for what cannot be served."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("uvicorn", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("prometheus_client", reason="serving needs it: pip install 'rebased[serve]'")

from data.small_tokenizer import write_small_tokenizer
from rebased.cli import main
from rebased.models.weights import save_model
from served_model import small_model

BYTES = ("--tokenizer", "bytes")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    (home / "tiny").mkdir()
    save_model(small_model(), home / "tiny")
    (home / "half").mkdir()
    whole = (home / "tiny" / "model.safetensors").read_bytes()
    (home / "half" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (home / "empty").mkdir()
    (home / "key").write_text("sesame\n")
    (home / "no-key").write_text(" \n")
    write_small_tokenizer(home / "tokenizer.json")
    return home


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.delenv("REBASED_API_KEY", raising=False)


def post(url: str, body: dict[str, object], key: str) -> dict[str, object]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_it_serves_until_a_signal_and_ends_what_it_began(home: Path) -> None:
    words = [sys.executable, "-m", "rebased", "lm", "serve", "tiny", *BYTES, "--port", "0", "--device", "cpu"]
    words += ["--api-key-file", "key", "--context", "3000", "--batch-invariant"]
    environment = os.environ | {"COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, cwd=home, env=environment, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        about, where = process.stdout.readline(), process.stdout.readline()
        assert about.startswith("tiny: ")
        assert "32 slots of 3,000 tokens" in about
        url = where.split()[1].rstrip("/")
        assert post(url, {"prompt": "x", "max_tokens": 2, "model": "tiny"}, "sesame")["usage"]
        answers: list[dict[str, object]] = []
        long = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
        asking = threading.Thread(target=lambda: answers.append(post(url, long, "sesame")))
        asking.start()
        while b"rebased_running 1.0" not in urllib.request.urlopen(f"{url}/metrics", timeout=60).read():
            assert asking.is_alive()
        process.send_signal(signal.SIGTERM)
        asking.join(60)
        rest, _ = process.communicate(timeout=60)
    assert answers[0]["usage"]["completion_tokens"] == 500  # type: ignore[index]
    assert (process.returncode, rest) == (0, "ended\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere does not exist, and no shipped model has this name; give a run's folder"),
        (["empty"], "empty is not a run's folder"),
        (["half", *BYTES], "half/model.safetensors is damaged"),
        (["tiny"], "tiny: it does not say which tokenizer"),
        (["tiny", "--tokenizer", "tokenizer.json"], "tokenizer.json has"),
        (["tiny", *BYTES, "--port", "70000"], "port 70000 is out of range"),
        (["tiny", *BYTES, "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["tiny", *BYTES, "--api-key-file", "no-key"], "--api-key-file no-key: a key is one or more"),
        (["tiny", *BYTES, "--api-key-file", "missing"], "missing: No such file or directory"),
        (["tiny", *BYTES, "--allow-host", "http://a.example/"], "--allow-host 'http://a.example/': give a host name"),
        (["tiny", *BYTES, "--slots", "0"], "--slots 0 is out of range"),
        (["tiny", *BYTES, "--slots", "1000000000000"], "--slots 1000000000000 is out of range; give 1 to 65536"),
        (["tiny", *BYTES, "--cache-mb", "-1"], "--cache-mb -1 is out of range"),
        (["tiny", *BYTES, "--seconds", "nan"], "--seconds nan is out of range"),
    ],
)
def test_what_cannot_be_served_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    port = [] if "--port" in words else ["--port", "0"]
    with pytest.raises(SystemExit) as left:
        main(["lm", "serve", *words, *port, "--device", "cpu"])
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
            main(["lm", "serve", "tiny", *BYTES, "--port", str(port), "--device", "cpu"])
    assert left.value.code == 2
    assert f"port {port} on 127.0.0.1 is in use; give another one with --port" in capsys.readouterr().err


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("rebased.serve.") or name == "uvicorn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as left:
        main(["lm", "serve", "tiny", *BYTES, "--port", "0"])
    assert left.value.code == 2
    assert "pip install 'rebased[serve]'" in capsys.readouterr().err
