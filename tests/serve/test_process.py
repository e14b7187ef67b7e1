"""`rebased lm serve` as processes: answers are those of `generate`; neither process outlives the other."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("uvicorn", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("prometheus_client", reason="serving needs it: pip install 'rebased[serve]'")

from rebased.data.tokenizer import ByteTokenizer
from rebased.models import LanguageModel
from rebased.models.weights import save_model
from served_model import small_model

CLIENTS = 48


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageModel, Path]:
    model, folder = small_model(), tmp_path_factory.mktemp("tiny")
    save_model(model, folder)
    return model, folder


@contextmanager
def server(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """A server: its process, its address, and the id of its engine's process."""
    command = [sys.executable, "-m", "rebased", "lm", "serve", str(folder), "--tokenizer", "bytes", "--port", "0"]
    command += ["--device", "cpu", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            url = process.stdout.readline().split()[1].rstrip("/")
            yield process, url, engine_of(process.pid)
        finally:
            process.terminate()
            process.communicate(timeout=60)


def engine_of(pid: int) -> int:
    """The child of a process that is the engine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat, command = (folder / "stat").read_text(), (folder / "cmdline").read_text()
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == pid and "spawn_main" in command:
            found.append(int(folder.name))
    (engine,) = found
    return engine


def post(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of an answer: one, or those of a stream."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            content = answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            content = error.read().decode()
    lines = [line.removeprefix("data: ") for line in content.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def asked(number: int) -> dict[str, Any]:
    """What a client asks for: greedy or drawn, with and without stop strings, as a stream or whole."""
    settings: dict[str, Any] = (
        {"temperature": 0.0} if number % 3 else {"temperature": 0.9, "top_p": 0.9, "seed": number}
    )
    return {"prompt": f"client {number} " * (1 + number % 5), "max_tokens": 5 + number % 40, **settings,
            "stop": ["e", "xyz"] if number % 4 == 1 else []}  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("invariant", [False, True], ids=["together", "batch-invariant"])
def test_many_concurrent_requests_get_what_generate_gives(model: tuple[LanguageModel, Path], invariant: bool) -> None:
    answers: dict[int, list[dict[str, Any]]] = {}
    with server(model[1], "--slots", "16", *(["--batch-invariant"] if invariant else [])) as (_, url, _engine):
        body = {number: asked(number) | {"stream": number % 2 == 0, "logprobs": 0} for number in range(CLIENTS)}
        threads = [threading.Thread(target=lambda n=number: answers.update({n: post(url, body[n])})) for number in body]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    for number in range(CLIENTS):
        settings = asked(number)
        made = model[0].generate(
            settings.pop("prompt"), **settings, tokenizer=ByteTokenizer(), batch_invariant=invariant
        )
        choices = [each["choices"][0] for each in answers[number]]
        assert "".join(choice["text"] for choice in choices) == made.texts[0], number
        assert choices[-1]["finish_reason"] == made.finish_reasons[0]
        logprobs = [value for choice in choices for value in choice["logprobs"]["token_logprobs"]]
        assert len(logprobs) == len(made.tokens[0])
        if invariant:
            assert logprobs == made.logprobs[0]  # to the bit


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_engine_that_dies_is_an_error_for_all(model: tuple[LanguageModel, Path]) -> None:
    with server(model[1]) as (process, url, engine):
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
        answers: list[list[dict[str, Any]]] = []
        asking = [
            threading.Thread(target=lambda stream=stream: answers.append(post(url, body | {"stream": stream})))
            for stream in (True, False, True)
        ]
        for thread in asking:
            thread.start()
        while b"rebased_running 3.0" not in urllib.request.urlopen(f"{url}/metrics", timeout=60).read():
            time.sleep(0.01)
        os.kill(engine, signal.SIGKILL)
        for thread in asking:
            thread.join(30)
        _, said = process.communicate(timeout=60)
    assert [answer[-1]["error"]["message"] for answer in answers] == [
        "the engine ended by itself; its process was killed by SIGKILL"
    ] * 3
    assert process.returncode != 0
    assert "killed by SIGKILL" in said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_engine_ends_with_the_front_end(model: tuple[LanguageModel, Path]) -> None:
    with server(model[1]) as (process, _, engine):
        process.kill()
        for _ in range(600):
            if not Path(f"/proc/{engine}").exists():
                break
            time.sleep(0.05)
        assert not Path(f"/proc/{engine}").exists()
