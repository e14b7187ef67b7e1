"""Map a function over items in several processes. Results come in order, and only a few items are read ahead.

Processes share nothing: each has a pipe of its own to this one. A lock or a queue that they shared could be held for
ever by a process that is killed.
"""

import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext  # Windows has none

AHEAD = 3  # items in flight per process: enough to keep it busy, few enough to need little memory

Item = TypeVar("Item")
Result = TypeVar("Result")


class LostWorker(ValueError):
    """A worker process has ended before its work was done."""

    def __init__(self, exit_code: int | None) -> None:
        signals = signal.valid_signals()
        by = f" by {signal.Signals(-exit_code).name}" if exit_code and -exit_code in signals else ""
        super().__init__(
            f"a worker process was killed{by}, often because memory ran out; the shards finished so far are kept: "
            "run the same command with --resume, and with fewer --workers if that was the cause"
        )


@contextmanager
def ordered_pool(
    make: Callable[..., Callable[[Item], Result]], arguments: tuple[Any, ...], workers: int
) -> Iterator[Callable[[Iterable[Item]], Iterator[tuple[Item, Result]]]]:
    """A function that maps items to (item, result) pairs in order, computed by `workers` processes.

    Each process calls function = make(*arguments) once, and then function(item) for each of its items. With one worker,
    and on Windows, everything runs in this process. What function raises is raised here. LostWorker is raised as soon
    as a process has ended in any other way, such as by a signal.
    """
    if workers == 1 or "forkserver" not in multiprocessing.get_all_start_methods():
        function = make(*arguments)
        yield lambda items: ((item, function(item)) for item in items)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([make.__module__])  # imports torch once, not once per process
    pool: list[_Worker] = []
    try:
        for _ in range(workers):
            pool.append(_Worker(context, make, arguments))
        yield lambda items: _in_order(pool, items)
    finally:
        for worker in pool:
            worker.end()


class _Call:
    """An item that a worker has been given, and its result when it is there."""

    def __init__(self, item: Any) -> None:
        self.item = item
        self.is_done = False
        self.result: Any = None


class _Worker:
    """A worker process, the pipe to it, and the calls whose results it has not sent yet, oldest first."""

    def __init__(self, context: "ForkServerContext", make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self.connection, theirs = context.Pipe()
        self.calls: deque[_Call] = deque()
        self.process = context.Process(target=_work, args=(theirs, make, arguments), daemon=True)
        try:
            self.process.start()
        except (OSError, EOFError) as error:  # the process, or the server that forks it, was killed meanwhile
            self.connection.close()
            raise LostWorker(None) from error
        finally:
            theirs.close()  # so that the pipe ends when the process does

    def send(self, call: _Call) -> None:
        """Give the worker an item. It always reads, also while it computes, so this never waits for long."""
        try:
            self.connection.send(call.item)
        except OSError as error:
            raise self._lost() from error
        self.calls.append(call)

    def receive(self) -> None:
        """Read one result, and raise what the worker has raised."""
        try:
            result, error = self.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError) as broken:
            raise self._lost() from broken
        if error is not None:
            raise error
        call = self.calls.popleft()
        call.result, call.is_done = result, True

    def _lost(self) -> LostWorker:
        self.process.join(5)
        return LostWorker(self.process.exitcode)

    def end(self) -> None:
        """Kill the process, which holds nothing that could be lost."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.connection.close()


def _in_order(pool: list[_Worker], items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    waiting: deque[_Call] = deque()
    for item in items:
        call = _Call(item)
        min(pool, key=lambda worker: len(worker.calls)).send(call)
        waiting.append(call)
        _receive(pool, block=False)
        while len(waiting) >= AHEAD * len(pool):
            yield _next(pool, waiting)
    while waiting:
        yield _next(pool, waiting)


def _next(pool: list[_Worker], waiting: deque[_Call]) -> tuple[Any, Any]:
    """The oldest waiting item and its result."""
    while not waiting[0].is_done:
        _receive(pool, block=True)
    call = waiting.popleft()
    return call.item, call.result


def _receive(pool: list[_Worker], *, block: bool) -> None:
    """Read what the workers have sent; with `block`, wait until one has sent something. Raises LostWorker."""
    busy = {worker.connection: worker for worker in pool}
    ends = {worker.process.sentinel: worker for worker in pool}
    ready = wait([*busy, *ends], None if block else 0)
    for connection in ready:
        if isinstance(connection, Connection):
            busy[connection].receive()
    for sentinel in ready:
        # A worker that has ended may have sent results, or an error, before: those are read first.
        if isinstance(sentinel, int) and not ends[sentinel].connection.poll():
            raise ends[sentinel]._lost()


def _work(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The code of a worker process: results go back in the order of the items."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is enough
    items: SimpleQueue[Any] = SimpleQueue()
    Thread(target=_read, args=(connection, items), daemon=True).start()
    try:
        function = make(*arguments)
        while True:
            result = function(items.get())
            _send(connection, (result, None))
    except Exception as error:
        _send(connection, (None, _sendable(error)))


def _send(connection: Connection, answer: tuple[Any, Exception | None]) -> None:
    try:
        connection.send(answer)
    except OSError:  # the parent has ended
        os._exit(1)


def _read(connection: Connection, items: "SimpleQueue[Any]") -> None:
    """Read items as they come. When the parent has ended, in any way, the pipe ends, and so does this process."""
    try:
        while True:
            items.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)


def _sendable(error: Exception) -> Exception:
    """The error, or one of the same text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
