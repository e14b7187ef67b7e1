"""Connections of a server, bounded in number and in the time that they may be without a request.

uvicorn bounds neither: a client that never ends its headers would keep a connection for ever, and some hundred such
clients all descriptors of the process.
"""

import asyncio
import json
from typing import Any

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as Protocol
except ImportError:  # httptools is not installed; this one takes longer per chunk
    from uvicorn.protocols.http.h11_impl import H11Protocol as Protocol

from rebased.serve.errors import error_body

HEADER_SECONDS = 10.0  # in which the headers of a request must arrive
MAX_CONNECTIONS = 4096
DESCRIPTORS = 64  # of the process that connections do not take


def connection_limit() -> int:
    """Return how many connections a server holds: fewer than MAX_CONNECTIONS if it may open few files."""
    try:
        import resource
    except ImportError:  # Windows
        return MAX_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft < 0 else max(1, min(MAX_CONNECTIONS, soft - DESCRIPTORS))


class Connections:
    """What the connections of a server share: their limit, and those without a request, the oldest first."""

    def __init__(self) -> None:
        self.limit = connection_limit()
        self.idle: dict[Connection, None] = {}


class Connection(Protocol):
    """One connection. It is idle from its beginning, or from the end of an answer, until it has the next headers.

    It ends when it was idle for HEADER_SECONDS. If there are too many connections, a new one takes the place of the
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
        """End."""
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
            self._timer = self.loop.call_later(HEADER_SECONDS, self.end)
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
