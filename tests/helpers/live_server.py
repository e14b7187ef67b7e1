"""A server over a small model, in a thread of the test's process, on a free port."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from fastapi import FastAPI

from local_engine import LocalEngine
from rebased.models import LanguageModel
from rebased.serve.api import build_app
from rebased.serve.server import Server, open_socket
from rebased.serve.service import Limits, Service


class Live(NamedTuple):
    """A server that runs."""

    url: str
    engine: LocalEngine
    server: Server
    thread: threading.Thread
    app: FastAPI


@contextmanager
def live_server(
    model: LanguageModel,
    *,
    slots: int = 4,
    context: int = 4096,
    limits: Limits | None = None,
    api_key: str | None = None,
    hosts: frozenset[str] | None = None,
    max_connections: int = 4096,
    header_seconds: float = 10.0,
    **options: Any,
) -> Iterator[Live]:
    """Serve `model` as "tiny" until the block ends."""
    engine = LocalEngine(model, slots=slots, context=context, **options)
    service = Service("tiny", engine, limits or Limits(), api_key)
    ready = threading.Event()
    app = build_app(service, hosts)
    server = Server(
        app,
        grace_seconds=20,
        on_ready=ready.set,
        engine=engine,
        max_connections=max_connections,
        header_seconds=header_seconds,
    )
    with open_socket("127.0.0.1", 0) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert ready.wait(60)
            yield Live(url, engine, server, thread, app)
        finally:
            server.should_exit = True
            thread.join(60)
    assert not thread.is_alive()
    assert not engine.alive
