"""The HTTP application: OpenAI's endpoints, /health, /metrics and the page."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from rebased.serve.errors import add_error_handlers
from rebased.serve.hosts import AllowedHosts, allowed_names
from rebased.serve.metrics import Measured
from rebased.serve.service import Service

PATHS = (
    *("/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions"),
    *("/tokenize", "/detokenize"),
)
SECURITY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


def build_app(service: Service, hosts: frozenset[str] | None = None) -> FastAPI:
    """Return the application. Its lifespan starts and ends the engine.

    It answers to the host names `hosts`, by default those of this machine alone.
    """
    engine = service.engine

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start(asyncio.get_running_loop())
        yield
        engine.close()

    app = FastAPI(title="rebased", openapi_url=None, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(AllowedHosts, names=allowed_names() if hosts is None else hosts)
    app.add_middleware(Measured, metrics=service.metrics, paths=PATHS)
    guarded = APIRouter(dependencies=[Depends(service.check_key)])
    guarded.get("/tokenizer_info")(service.tokenizer_info)

    @guarded.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.about()]}

    @guarded.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.about()

    app.include_router(guarded)

    def post(path: str, handler: Callable[[Request], Any]) -> None:
        async def handle(request: Request) -> Any:
            service.check_key(request)
            return await handler(request)

        app.add_route(path, handle, methods=["POST"])  # FastAPI's own routes take longer

    post("/v1/completions", service.complete)
    post("/v1/chat/completions", service.chat)
    post("/tokenize", service.tokenize)
    post("/detokenize", service.detokenize)

    @app.get("/health")
    async def health() -> JSONResponse:
        wrong = engine.broken or ("shutting down" if engine.closing else None if engine.alive else "not running")
        return JSONResponse({"status": wrong or "ok", "model": service.name}, status_code=503 if wrong else 200)

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    page = (files("rebased.serve") / "page.html").read_text(encoding="utf-8")
    app.add_route("/", HTMLResponse(page, headers={"Content-Security-Policy": SECURITY}), methods=["GET"])
    add_error_handlers(app)
    return app
