"""The explorer's HTTP application: its page, and questions about models that the page asks."""

import asyncio
from collections.abc import Callable
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel

from rebased.serve.bodies import read_body
from rebased.serve.errors import ApiError, add_error_handlers
from rebased.serve.explorer.schema import BODY_BYTES, AttentionBody, CurveBody, RecallBody, SequenceBody, TextBody
from rebased.serve.explorer.workbench import Workbench
from rebased.serve.hosts import AllowedHosts, allowed_names

MAX_WAITING = 32
"""Requests that wait for their turn. Beyond, they get the status 429."""
SECURITY = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src data:"
FILES = {
    "/": ("page.html", "text/html"),
    "/panel.js": ("panel.js", "text/javascript"),
    "/explorer.js": ("explorer.js", "text/javascript"),
    "/explorer.css": ("explorer.css", "text/css"),
}

Body = TypeVar("Body", bound=BaseModel)


class Turns:
    """One computation at a time: models are hooked while their attention is read, and the cores are few."""

    def __init__(self) -> None:
        self._lock, self._waiting = asyncio.Lock(), 0

    async def run(self, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns, called in another thread when it is its turn."""
        if self._waiting >= MAX_WAITING:
            raise ApiError(429, "too many requests wait already; try again later", kind="rate_limit_error")
        self._waiting += 1
        try:
            async with self._lock:
                return await asyncio.to_thread(compute)
        finally:
            self._waiting -= 1


def build_explorer(workbench: Workbench, hosts: frozenset[str] | None = None) -> FastAPI:
    """Return the application. It answers to the host names `hosts`, by default those of this machine alone."""
    app = FastAPI(title="rebased explore", openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(AllowedHosts, names=allowed_names() if hosts is None else hosts)
    turns = Turns()

    def answer(path: str, schema: type[Body], compute: Callable[[Body], Any]) -> None:
        async def handle(request: Request) -> Any:
            body = await read_body(request, schema, BODY_BYTES)
            return await turns.run(lambda: compute(body))

        app.post(path)(handle)

    answer("/api/sequence", SequenceBody, workbench.draw)
    answer("/api/recall", RecallBody, workbench.recall)
    answer("/api/readout", RecallBody, workbench.readout)
    answer("/api/curve", CurveBody, workbench.curve)
    answer("/api/text", TextBody, workbench.text)
    answer("/api/attention", AttentionBody, workbench.attention)

    @app.get("/api/models")
    async def models() -> dict[str, Any]:
        return workbench.about()

    for path, (name, kind) in FILES.items():
        content = (files("rebased.serve.explorer") / name).read_bytes()
        page = Response(content, media_type=kind, headers={"Content-Security-Policy": SECURITY})
        app.add_route(path, page, methods=["GET"])
    add_error_handlers(app)
    return app
