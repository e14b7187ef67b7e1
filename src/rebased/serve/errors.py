"""Errors over HTTP, in OpenAI's shape: the exception, its body, and how an application answers with it."""

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException


class ApiError(Exception):
    """An error with an HTTP status, in OpenAI's shape."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: Any = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind, param, code)


def error_body(message: str, kind: str, param: str | None = None, code: Any = None) -> dict[str, Any]:
    """Return the body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


OUR_ERROR = error_body("an error inside the server", "server_error")


def add_error_handlers(app: FastAPI) -> None:
    """Let an application answer every error with a body in OpenAI's shape."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        return JSONResponse(error.body, status_code=error.status, headers=headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        return JSONResponse(error_body(message, "invalid_request_error"), status_code=error.status_code)

    @app.exception_handler(Exception)
    async def our_error(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(OUR_ERROR, status_code=500)
