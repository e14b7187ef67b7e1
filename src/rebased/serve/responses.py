"""Responses: JSON, and streams of server-sent events. Written for many short chunks: each costs little."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson
from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

_log = logging.getLogger("rebased")

HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"connection", b"keep-alive"),
    (b"x-accel-buffering", b"no"),  # nginx
]


class JSON(JSONResponse):
    """A response in JSON."""

    def render(self, content: Any) -> bytes:
        """Return content as JSON."""
        return orjson.dumps(content)


class Stream(Response):
    """A stream of server-sent events, one per item of `events`.

    It ends with `on_end()`: when the events are over, the client leaves, or it takes nothing for `send_seconds`. After
    `ping_seconds` without an event a comment is sent, so that nobody between takes the stream for dead.
    """

    def __init__(
        self, events: AsyncIterator[bytes], on_end: Callable[[], None], send_seconds: float, ping_seconds: float
    ) -> None:
        super().__init__()
        self._events, self._on_end = events, on_end
        self._send_seconds, self._ping_seconds = send_seconds, ping_seconds
        self._sent = 0  # messages
        self._is_sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(client_leaves(receive))
        try:
            while not sending.done() and not leaving.done():
                sent, seconds = self._sent, self._send_seconds if self._is_sending else self._ping_seconds
                await asyncio.wait({sending, leaving}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                if self._sent > sent or sending.done() or leaving.done():
                    continue
                if not self._is_sending:
                    async with asyncio.timeout(self._send_seconds):
                        await send({"type": "http.response.body", "body": b": ping\n\n", "more_body": True})
                elif seconds == self._send_seconds:
                    raise TimeoutError
            if sending.done():
                sending.result()
        except TimeoutError:
            _log.warning("a client did not read its stream for %g seconds; it was cut off", self._send_seconds)
        finally:
            sending.cancel()
            leaving.cancel()
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        async for event in self._events:
            self._is_sending = True
            await send({"type": "http.response.body", "body": b"data: %b\n\n" % event, "more_body": True})
            self._sent, self._is_sending = self._sent + 1, False
        await send({"type": "http.response.body", "body": b""})


async def client_leaves(receive: Receive) -> None:
    """Return when the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
