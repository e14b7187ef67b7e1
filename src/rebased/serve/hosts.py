"""Requests under an unknown host name are refused (DNS rebinding).

A browser lets a page read answers from the name that the page came from. A site can make its own name lead to this
machine (DNS rebinding), and its page could then ask a server that listens here. Such a request carries the site's name
in its Host header. It can never carry an IP address there, so requests under any IP address are answered.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from rebased.serve.errors import error_body

ANY = "*"
NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]{0,252})")


def allowed_names(listens_on: str = "127.0.0.1", also: Iterable[str] = ()) -> frozenset[str]:
    """Return the names that a server answers to: localhost, the one it listens on, its machine's, and those in `also`.

    `*.example.org` allows all names below example.org, `*` any name. The machine's name is left out of a server that
    only this machine can reach. Raises ValueError if one of `also` is no host name.
    """
    names = {"localhost", _plain(listens_on)}
    if not _is_loopback(listens_on):
        names.add(_plain(socket.gethostname()))
    for given in also:
        name = _plain(given)
        if given != ANY and not NAME.fullmatch(name) and not _is_address(name):
            raise ValueError(
                f"--allow-host {given!r}: give a host name without scheme and port, for example api.example.org; "
                "*.example.org for all names below it, or * for any name"
            )
        names.add(name)
    return frozenset(name for name in names if name and not _is_address(name))  # addresses are allowed anyway


def host_of(header: str) -> str:
    """Return the name or address in a Host header, without the port, in lower case."""
    name = re.sub(r":\d*$", "", header) if header.count(":") == 1 or header.startswith("[") else header
    return _plain(name.removeprefix("[").removesuffix("]"))


class AllowedHosts:
    """An ASGI middleware that answers 403 to requests under a host name that is not allowed."""

    def __init__(self, app: ASGIApp, names: frozenset[str]) -> None:
        self.app, self.names = app, names

    def allows(self, name: str) -> bool:
        """Return whether requests under this name are answered."""
        if ANY in self.names or name in self.names or _is_address(name):
            return True
        return any(each.startswith("*.") and name.endswith(each[1:]) for each in self.names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        name = host_of(Headers(scope=scope).get("host", ""))
        if self.allows(name):
            return await self.app(scope, receive, send)
        message = f"this server does not answer to the host name {name[:100]!r}"
        remedy = f"whoever started it can allow the name with --allow-host {name[:100] or 'NAME'}"
        body = error_body(f"{message}; {remedy}", "invalid_request_error", code="host_not_allowed")
        await JSONResponse(body, status_code=403)(scope, receive, send)


def _plain(name: str) -> str:
    return name.lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    return name == "localhost" or (_is_address(name) and ipaddress.ip_address(name).is_loopback)
