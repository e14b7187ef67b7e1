"""The engine in a process of its own: HTTP, text and JSON do not share an interpreter with it."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue

import torch

from rebased.serve.engine import About, Close, Command, Engine, Update
from rebased.serve.log_rate import limited_log

END_SECONDS = 10.0  # in which the engine must end
SWITCH_SECONDS = 0.0005  # after which a thread lets another one go on: a step may take less than the usual 5 ms


class EngineProcess:
    """A process with an engine. `build`, a function that can be pickled, is called there and returns the engine.

    The process ends with this one, however that ends: the engine notices that the pipe is closed.

    Raises:
        ValueError: with the engine's message, if it cannot be built.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, build), name="rebased-engine", daemon=True)
        self._process.start()
        theirs.close()
        self._outbox: SimpleQueue[Command] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closing = False
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            answer = None
        except BaseException:  # Ctrl-C while it loads
            self._process.kill()
            raise
        if not isinstance(answer, About):
            self._process.join(END_SECONDS)
            raise ValueError(answer or f"the engine did not start; {self._how_it_ended()}")
        self.about = answer

    def __enter__(self) -> "EngineProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def open(self, arrived: Callable[[Update], None], lost: Callable[[str], None]) -> None:
        """Begin: call `arrived` with each update, and `lost` with a reason if the engine ends by itself."""

        def read() -> None:
            with suppress(EOFError, OSError):
                while True:
                    arrived(self._pipe.recv())
            if not self._closing:
                self._process.join(END_SECONDS)
                lost(f"the engine ended by itself; {self._how_it_ended()}")

        def write() -> None:
            with suppress(OSError):
                while True:
                    command = self._outbox.get()
                    self._pipe.send(command)
                    if isinstance(command, Close):
                        return

        self._threads = [threading.Thread(target=each, daemon=True) for each in (read, write)]
        for thread in self._threads:
            thread.start()

    def send(self, command: Command) -> None:
        """Send a command. A thread writes it: a pipe may be full while the engine computes."""
        self._closing = self._closing or isinstance(command, Close)
        self._outbox.put(command)

    def close(self) -> None:
        """End the process."""
        self._closing = True
        if self._threads:
            self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
        self._process.join(END_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether the engine runs."""
        return self._process.is_alive()

    def _how_it_ended(self) -> str:
        code = self._process.exitcode
        if code is None:
            return "its process hangs"
        if code >= 0:
            return f"its process returned {code}; its messages are above"
        return f"its process was killed by {signal.Signals(-code).name}"


def _serve(pipe: Connection, build: Callable[[], Engine]) -> None:
    """The engine's process: build the engine, and serve until the pipe is closed or says so."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches both processes; the front end decides
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() - 1))  # one core is the front end's
    try:
        engine = build()
    except (ValueError, OSError, ImportError) as error:  # whoever started it shows the message
        pipe.send(str(error))
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    engine.post = pipe.send
    pipe.send(engine.about())

    def read() -> None:
        with suppress(EOFError, OSError):
            while True:
                engine.obey(pipe.recv())
        engine.obey(Close())

    sys.setswitchinterval(SWITCH_SECONDS)  # a job that arrives is not kept waiting
    threading.Thread(target=read, daemon=True).start()
    with limited_log("rebased"), suppress(BrokenPipeError, ConnectionResetError):
        engine.run()
