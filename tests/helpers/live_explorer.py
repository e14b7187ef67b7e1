"""An explorer over a workbench, in a thread of the test's process, on a free port."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from rebased.serve.explorer.api import build_explorer
from rebased.serve.explorer.workbench import Workbench
from rebased.serve.server import Server, open_socket


@contextmanager
def live_explorer(workbench: Workbench, change: Callable[[FastAPI], object] = lambda app: None) -> Iterator[str]:
    """Serve until the block ends; yields the address. `change` may add to the application."""
    ready, app = threading.Event(), build_explorer(workbench)
    change(app)
    server = Server(app, grace_seconds=5, on_ready=ready.set)
    with open_socket("127.0.0.1", 0) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert ready.wait(60)
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(60)
    assert not thread.is_alive()
