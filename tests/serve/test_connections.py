"""Clients that hold connections: slow headers, slow bodies, too many, no descriptors; and a log that stays short."""

import http.client
import json
import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("uvicorn", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("prometheus_client", reason="serving needs it: pip install 'rebased[serve]'")

from live_server import Live, live_server
from rebased.models.weights import save_model
from rebased.serve import log_rate
from rebased.serve.service import Limits
from served_model import small_model

HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def connect(url: str, sent: bytes = b"") -> socket.socket:
    parts = urlsplit(url)
    sock = socket.create_connection((parts.hostname, parts.port), timeout=20)
    sock.sendall(sent)
    return sock


def health(url: str) -> int:
    with urllib.request.urlopen(f"{url}/health", timeout=20) as answer:
        return answer.status


def drip(sock: socket.socket, piece: bytes) -> float:
    """Send a piece every 50 ms until the server ends the connection. Returns how long it was."""
    began = time.monotonic()
    sock.settimeout(0.05)
    while time.monotonic() - began < 20:
        try:
            sock.sendall(piece)
            if sock.recv(1000) == b"":
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - began


@pytest.fixture
def live() -> Iterator[Live]:
    with live_server(small_model(), max_connections=10, header_seconds=0.5) as live:
        yield live


@pytest.mark.parametrize(
    ("sent", "piece"),
    [
        (HEAD, b"X: 1\r\n"),
        (b"", b"\r\n"),
        (HEAD + b"Content-Length: 1000000\r\n\r\n", b"x"),  # a body that nobody reads
        (HEAD + b"\r\n", b"\r\n"),  # after an answer
    ],
    ids=["headers", "blank lines", "an unread body", "after an answer"],
)
def test_a_connection_without_a_request_ends(live: Live, sent: bytes, piece: bytes) -> None:
    with connect(live.url, sent) as sock:
        assert drip(sock, piece) < 5
    assert health(live.url) == 200


def test_a_connection_with_requests_stays(live: Live) -> None:
    parts = urlsplit(live.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=20)
    connection.connect()
    first = connection.sock
    for _ in range(10):
        connection.request("GET", "/health")
        assert connection.getresponse().read()
        time.sleep(0.2)
    assert connection.sock is first
    connection.close()


def test_a_slow_body_gets_an_error() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with (
        live_server(small_model(), limits=Limits(body_seconds=0.3)) as live,
        connect(live.url, head + b"Content-Length: 100\r\n\r\n{") as sock,
    ):
        assert b"408 Request Timeout" in sock.recv(10_000)


def test_a_client_that_does_not_read_its_stream_is_cut_off(caplog: pytest.LogCaptureFixture) -> None:
    body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True, "n": 16, "logprobs": 20}
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with live_server(small_model(), limits=Limits(send_seconds=0.5, ping_seconds=0.2)) as live:
        with connect(live.url, head + b"Content-Length: %d\r\n\r\n" % len(content) + content):
            wait_for(lambda: live.engine.busy)
            wait_for(lambda: not live.engine.busy)
        assert "a client did not read its stream for 0.5 seconds; it was cut off" in caplog.messages
        assert health(live.url) == 200


def test_new_connections_take_the_place_of_idle_ones(live: Live) -> None:
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(connect(live.url, HEAD))
            assert health(live.url) == 200
            assert len(live.server.server_state.connections) <= 10


def test_too_many_requests_at_once_are_refused(live: Live) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    request = head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    with ExitStack() as stack:
        for _ in range(10):
            assert b"200 OK" in stack.enter_context(connect(live.url, request)).recv(100)
        with pytest.raises(urllib.error.HTTPError) as refused:
            health(live.url)
        assert refused.value.code == 503
        assert json.load(refused.value)["error"]["code"] == "server_full"
    wait_for(lambda: not live.server.server_state.connections)
    assert health(live.url) == 200


def test_the_log_of_many_bad_requests_is_short(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(50):
        with connect(live.url, b"no HTTP at all\r\n\r\n") as sock:
            assert b"400 Bad Request" in sock.recv(1000)
    assert sum("Invalid HTTP request" in record.message for record in caplog.records) == log_rate.MESSAGES


def test_a_message_says_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    with log_rate.limited_log("rebased", period=0.1):
        for number in range(log_rate.MESSAGES + 8):
            if number == log_rate.MESSAGES + 7:
                time.sleep(0.1)
            logging.getLogger("rebased").warning("number %d", number)
    assert len(caplog.messages) == log_rate.MESSAGES + 1
    assert caplog.messages[-1] == f"number {log_rate.MESSAGES + 7} (7 like this were left out before)"


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextmanager
def process(folder: Path, *options: str, descriptors: int = 1024) -> Iterator[tuple[str, Any, Path]]:
    """`rebased lm serve` in a process of its own, which may open so many files: address, process and its stderr."""
    save_model(small_model(), folder)
    words = ["lm", "serve", str(folder), "--name", "tiny", "--tokenizer", "bytes", "--port", "0", "--device", "cpu"]
    log, environment = folder / "stderr", os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "rebased", *words, *options],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=errors,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors)),
        ) as child,
    ):
        try:
            assert child.stdout is not None
            child.stdout.readline()
            yield child.stdout.readline().split()[1].rstrip("/"), child, log
        finally:
            child.terminate()
            child.communicate(timeout=60)


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors as Linux has them")
@pytest.mark.parametrize(("descriptors", "count"), [(256, 1500), (36, 60)], ids=["few", "too few"])
def test_few_descriptors_and_many_connections(tmp_path: Path, descriptors: int, count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        with process(tmp_path, descriptors=descriptors) as (url, child, log), ExitStack() as stack:
            for _ in range(count):
                stack.enter_context(connect(url, HEAD))
            for _ in range(5):
                assert health(url) == 200
            assert len(list(Path(f"/proc/{child.pid}/fd").iterdir())) <= descriptors
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert child.returncode == 0
    assert log.stat().st_size < 20_000


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT] * 2], ids=["the grace is over", "Ctrl-C twice"])
def test_requests_that_outlast_the_grace_get_an_error(tmp_path: Path, signals: list[signal.Signals]) -> None:
    answers: dict[str, tuple[int, str]] = {}

    def ask(url: str, name: str, **more: Any) -> None:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "n": 16} | more
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answers[name] = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            answers[name] = error.code, error.read().decode()

    head = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    with (
        process(tmp_path, "--slots", "8", "--grace", "2" if len(signals) == 1 else "60") as (url, child, log),
        connect(url, head) as slow,
    ):
        threads = [
            threading.Thread(target=ask, args=(url, "whole")),
            threading.Thread(target=ask, args=(url, "stream"), kwargs={"stream": True}),
        ]
        for thread in threads:
            thread.start()
        running = re.compile(rb"rebased_waiting 24\.0")  # of 32 sequences: both requests are there
        wait_for(lambda: bool(running.search(urllib.request.urlopen(f"{url}/metrics", timeout=60).read())))
        for each in signals:
            child.send_signal(each)
            time.sleep(0.3)
        for thread in threads:
            thread.join(60)
        with suppress(ConnectionResetError):
            assert slow.recv(10_000) == b""  # its body has not arrived: there is nothing to answer
        assert child.wait(60) == 0
    status, content = answers["whole"]
    assert (status, json.loads(content)["error"]["code"]) == (503, "shutting_down")
    status, content = answers["stream"]
    last = content.strip().splitlines()[-1].removeprefix("data: ")
    assert (status, json.loads(last)["error"]["code"]) == (200, "shutting_down")
    (line,) = log.read_text().splitlines()
    assert line == "stopped with 3 requests under way"
