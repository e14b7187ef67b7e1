"""The process: a socket, uvicorn on it, and a shutdown that lets running requests end."""

import errno
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI
from sse_starlette.sse import AppStatus

SWITCH_SECONDS = (
    0.0005  # after which the event loop lets the engine's thread go on: a step may take less than the usual 5 ms
)


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; port 0 takes any free one. Raises ValueError with a remedy."""
    if not 0 <= port < 2**16:
        raise ValueError(f"port {port} is out of range; give 1 to 65535, or 0 for any free one")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(2048)  # here, not later: another server could bind the same port in between
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} on {host} is in use; give another one with --port, or 0 for any") from error
        raise ValueError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return sock


class Server(uvicorn.Server):
    """uvicorn, with calls when it is ready and when it is told to end."""

    def __init__(
        self,
        app: FastAPI,
        *,
        grace_seconds: float,
        on_ready: Callable[[], None],
        on_signal: Callable[[], None] = lambda: None,
    ) -> None:
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=max(1, round(grace_seconds)),
            lifespan="on",
        )
        super().__init__(config)
        self._on_ready, self._on_signal = on_ready, on_signal
        AppStatus.disable_automatic_graceful_drain()  # otherwise streams are cut off at once

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and say so."""
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Let running requests end and refuse new ones; a second signal ends at once."""
        self._on_signal()
        super().handle_exit(sig, frame)


def serve(
    app: FastAPI,
    sock: socket.socket,
    *,
    grace_seconds: float = 30.0,
    on_ready: Callable[[], None] = lambda: None,
    on_signal: Callable[[], None] = lambda: None,
) -> None:
    """Serve on a socket until a signal comes (SIGINT, SIGTERM), and call `on_signal` then; running requests end."""
    server = Server(app, grace_seconds=grace_seconds, on_ready=on_ready, on_signal=on_signal)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(min(interval, SWITCH_SECONDS))
    before = {}
    if threading.current_thread() is threading.main_thread():
        # at the end uvicorn raises the signal again, for the handlers that it found; an orderly end is no failure
        before = {each: signal.signal(each, lambda *_: None) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[sock])
    finally:
        sys.setswitchinterval(interval)
        for each, handler in before.items():
            signal.signal(each, handler)
