"""Host names that a server answers to: what is allowed, and what a page of another site gets."""

import socket

import pytest

pytest.importorskip("fastapi", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("uvicorn", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("httpx", reason="serving needs it: pip install openai httpx")

import httpx

from live_server import live_server
from rebased.serve.hosts import AllowedHosts, allowed_names, host_of
from served_model import small_model


async def nothing(*_: object) -> None:
    """An application that answers nothing."""


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8000", "localhost"),
        ("a.example.:80", "a.example"),
        ("127.0.0.1:8000", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[::1]", "::1"),
        ("::1", "::1"),
        ("", ""),
    ],
)
def test_the_name_in_a_header(header: str, name: str) -> None:
    assert host_of(header) == name


@pytest.mark.parametrize(
    ("listens_on", "also", "name", "allowed"),
    [
        ("127.0.0.1", (), "localhost", True),
        ("127.0.0.1", (), "127.0.0.1", True),
        ("127.0.0.1", (), "::1", True),
        ("127.0.0.1", (), "192.0.2.7", True),  # no name leads there: it was typed
        ("127.0.0.1", (), "evil.example", False),
        ("127.0.0.1", (), "127.0.0.1.evil.example", False),
        ("127.0.0.1", (), "localhost.evil.example", False),
        ("127.0.0.1", (), "", False),
        ("", (), "", False),
        ("::1", (), "::1", True),
        ("127.0.0.1", (), socket.gethostname().lower() + ".not-me", False),
        ("0.0.0.0", (), socket.gethostname().lower(), True),
        ("0.0.0.0", (), "evil.example", False),
        ("lab.example", (), "lab.example", True),
        ("0.0.0.0", ("API.example",), "api.example", True),
        ("0.0.0.0", ("*.example",), "a.b.example", True),
        ("0.0.0.0", ("*.example",), "example", False),
        ("0.0.0.0", ("*.example",), "evilexample", False),
        ("0.0.0.0", ("*",), "any.example", True),
    ],
)
def test_what_is_allowed(listens_on: str, also: tuple[str, ...], name: str, allowed: bool) -> None:
    assert AllowedHosts(nothing, allowed_names(listens_on, also)).allows(name) is allowed


@pytest.mark.parametrize("name", ["", "http://a.example", "a.example:80", "a/b", "**", "*.", "a b"])
def test_no_host_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"--allow-host .* give a host name without scheme and port"):
        allowed_names(also=[name])


def test_a_page_of_another_site_gets_nothing() -> None:
    """Its name leads here, so its Host header carries it; no path is answered, and the refusal is counted."""
    with live_server(small_model(), hosts=allowed_names(also=["lab.example"])) as live:
        for path in ("/", "/health", "/v1/models"):
            refused = httpx.get(f"{live.url}{path}", headers={"Host": "evil.example:8000"})
            assert refused.status_code == 403
            message = refused.json()["error"]["message"]
            assert message.startswith("this server does not answer to the host name 'evil.example'; ")
            assert message.endswith("--allow-host evil.example")
        assert httpx.get(f"{live.url}/health", headers={"Host": "lab.example"}).json()["status"] == "ok"
        assert 'path="/health",status="403"} 1.0' in httpx.get(f"{live.url}/metrics").text
