"""Reading the body of a request: JSON of a bounded size, in a bounded time, of a given schema."""

import asyncio
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from rebased.serve.errors import ApiError

Body = TypeVar("Body", bound=BaseModel)
BODY_SECONDS = 30.0  # in which a body must arrive, unless told otherwise


async def read_body(request: Request, schema: type[Body], limit: int, seconds: float = BODY_SECONDS) -> Body:
    """Return the body of a request, checked. Raises ApiError if it has more bytes than `limit`, does not arrive within
    `seconds`, or is wrong."""
    # Without the header too: a page of another site may send a body of no type, or of some others, without being asked.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON; send the header Content-Type: application/json")
    try:
        async with asyncio.timeout(seconds):
            content = await _read_bytes(request, limit)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} seconds") from None
    except ClientDisconnect:
        raise ApiError(499, "the client left before its body had arrived") from None  # nobody reads it
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"][:3])
        message = first["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{where}: {message}" if where else message, param=where or None) from error


async def _read_bytes(request: Request, limit: int) -> bytes:
    content = bytearray()
    too_large = ApiError(413, f"the body is larger than {limit:,} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    async for piece in request.stream():
        content += piece
        if len(content) > limit:
            raise too_large
    return bytes(content)
