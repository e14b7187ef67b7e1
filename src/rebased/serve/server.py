"""The process: a socket, uvicorn on it, and a shutdown that lets running requests end.

Connections are bounded in number and in the time that they may be without a request. uvicorn bounds neither: a client
that never ends its headers would keep a connection for ever, and some hundred such clients all descriptors.
"""

import asyncio
import errno
import functools
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rebased.config import plural
from rebased.serve.client import EngineClient
from rebased.serve.errors import error_body
from rebased.serve.log_rate import limited_log
from rebased.serve.process import SWITCH_SECONDS

DESCRIPTORS = 64  # of the process that connections do not take


class Connections:
    """What the connections of a server share: their limits, and those without a request, the oldest first."""

    def __init__(self, limit: int, header_seconds: float) -> None:
        self.limit, self.header_seconds, self.idle = limit, header_seconds, dict[Connection, None]()
        with suppress(ImportError):  # on Windows there is no such limit
            import resource

            files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            self.limit = limit if files < 0 else max(1, min(limit, files - DESCRIPTORS))


class Connection(HttpToolsProtocol):
    """One connection. It is idle from its beginning, or from the end of an answer, until it has the next headers.

    It ends when it was idle for `header_seconds`. If there are too many connections, a new one takes the place of the
    oldest idle one; it gets status 503 if none is idle.
    """

    def __init__(self, *given: Any, shared: Connections, **named: Any) -> None:
        super().__init__(*given, **named)
        self._shared = shared
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin, if there is room."""
        super().connection_made(transport)
        if len(self.connections) > self._shared.limit:
            if not self._shared.idle:
                return self._refuse()
            next(iter(self._shared.idle)).end()
        self._note_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        super().connection_lost(exc)
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        super().data_received(data)
        self._note_request()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._note_request()

    def end(self) -> None:
        """End an idle connection. Its place is free at once."""
        self._stop_timer()
        self.connections.discard(self)
        self.transport.abort()

    def _note_request(self) -> None:
        """Start the timer if the connection is idle, and stop it if it is not."""
        if self.transport.is_closing() or (self.cycle is not None and not self.cycle.response_complete):
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._shared.header_seconds, self.end)
            self._shared.idle[self] = None

    def _stop_timer(self) -> None:
        self._shared.idle.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self) -> None:
        body = json.dumps(error_body("too many connections; try again later", "server_error", code="server_full"))
        head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}retry-after: 1\r\nconnection: close\r\n\r\n{body}".encode())
        self.transport.close()


QUEUED = 2048  # connections that the system holds until they are accepted
ACCEPTED_AT_ONCE = 4  # so that idle connections are closed before descriptors are used up
LAST_SECONDS = 2.0  # in which a client must take the error that ends its request

_log = logging.getLogger("rebased")


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; port 0 takes any free one. Raises ValueError with a remedy."""
    if not 0 <= port < 2**16:
        raise ValueError(f"port {port} is out of range; give 1 to 65535, or 0 for any free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(QUEUED)  # here, not later: another server could bind the same port in between
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} on {host} is in use; give another one with --port, or 0 for any") from error
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return sock


class Server(uvicorn.Server):
    """uvicorn with bounded connections and logs, and with a call when it is ready.

    When it is told to end, `engine` refuses new jobs. It is closed `grace_seconds` later, which ends those under way
    with an error; connections that are left then are cut. The headers of a request must arrive in `header_seconds`.
    """

    def __init__(
        self,
        app: FastAPI,
        *,
        grace_seconds: float,
        on_ready: Callable[[], None],
        engine: EngineClient | None = None,
        max_connections: int = 4096,
        header_seconds: float = 10.0,
    ) -> None:
        protocol: Any = functools.partial(Connection, shared=Connections(max_connections, header_seconds))
        config = uvicorn.Config(
            app,
            http=protocol,
            loop="asyncio",  # what is said above of accepting holds for no other
            ws="none",
            backlog=ACCEPTED_AT_ONCE,
            log_level="warning",
            access_log=False,
            lifespan="on",
        )
        super().__init__(config)
        self._on_ready, self._engine, self._grace = on_ready, engine, grace_seconds
        self._hurry = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and say so."""
        await super().startup(sockets)
        for sock in sockets or []:
            sock.listen(QUEUED)  # again: uvicorn takes one number for this and for how many it accepts at once
        if self.started:
            self._on_ready()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the end."""
        with limited_log("uvicorn.error", "asyncio", "rebased"):
            await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests end."""
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_requests(self) -> None:
        """End the requests that are still under way after the grace period, or after a second Ctrl-C."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self._grace)
        if left := len(self.server_state.tasks):
            _log.warning("stopped with %s under way", plural(left, "request"))
        if self._engine is not None:
            self._engine.close()
        await asyncio.sleep(LAST_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let running requests end and refuse new ones; a second Ctrl-C ends at once."""
        if self.should_exit and sig == signal.SIGINT:
            self._hurry.set()
        else:
            if self._engine is not None:
                self._engine.drain()
            super().handle_exit(sig, frame)


def serve(
    app: FastAPI,
    sock: socket.socket,
    *,
    grace_seconds: float = 30.0,
    on_ready: Callable[[], None] = lambda: None,
    engine: EngineClient | None = None,
) -> None:
    """Serve on a socket until a signal comes (SIGINT, SIGTERM); running requests end. Arguments as of Server."""
    server = Server(app, grace_seconds=grace_seconds, on_ready=on_ready, engine=engine)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, SWITCH_SECONDS))
    # at the end uvicorn raises the signal again, for the handlers that it found; an orderly end is no failure
    before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[sock])
    finally:
        sys.setswitchinterval(interval)
        for each, handler in before.items():
            signal.signal(each, handler)
