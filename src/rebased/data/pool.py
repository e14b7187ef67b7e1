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
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext  # Windows has none

AHEAD = 3  # items per process that are read before the oldest result is taken

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
    pool, free = list[_Worker](), SimpleQueue[_Worker]()

    def compute(item: Item) -> Result:
        worker = free.get()
        try:
            return worker(item)
        finally:
            free.put(worker)

    threads = ThreadPoolExecutor(workers)
    try:
        for _ in range(workers):
            pool.append(_Worker(context, make, arguments))
            free.put(pool[-1])
        yield lambda items: _in_order(lambda item: threads.submit(compute, item), items, AHEAD * workers)
    finally:
        for worker in pool:
            worker.end()
        threads.shutdown(cancel_futures=True)


class _Worker:
    """A worker process and the pipe to it. A thread of this process calls it."""

    def __init__(self, context: "ForkServerContext", make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, make, arguments), daemon=True)
        try:
            self._process.start()
        except (OSError, EOFError) as error:  # the process, or the server that forks it, was killed meanwhile
            raise LostWorker(None) from error
        finally:
            theirs.close()  # so that the pipe ends when the process does

    def __call__(self, item: Any) -> Any:
        """The result of an item. Raises what the worker has raised, and LostWorker if it has ended."""
        try:
            self._connection.send(item)
            result, error = self._connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError) as broken:
            self._process.join(5)
            raise LostWorker(self._process.exitcode) from broken
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        """Kill the process, which holds nothing that could be lost."""
        self._process.kill()
        self._process.join()


def _in_order(compute: Callable[[Any], "Future[Any]"], items: Iterable[Any], ahead: int) -> Iterator[tuple[Any, Any]]:
    waiting: deque[tuple[Any, Future[Any]]] = deque()
    for item in items:
        waiting.append((item, compute(item)))
        while len(waiting) >= ahead:
            yield _next(waiting)
    while waiting:
        yield _next(waiting)


def _next(waiting: "deque[tuple[Any, Future[Any]]]") -> tuple[Any, Any]:
    """The oldest waiting item and its result. An error of a later one is raised as soon as it is known."""
    while not waiting[0][1].done():
        wait([future for _, future in waiting if not future.done()], return_when=FIRST_COMPLETED)
        for _, future in waiting:
            if future.done():
                future.result()
    item, future = waiting.popleft()
    return item, future.result()


def _work(connection: "Connection", make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """The code of a worker process. When the parent has ended, in any way, the pipe ends, and so does this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is enough
    function: Callable[[Any], Any] | None = None
    with suppress(EOFError, OSError):
        while True:
            item = connection.recv()
            try:
                function = function or make(*arguments)
                answer: tuple[Any, Exception | None] = function(item), None
            except Exception as error:
                answer = None, _sendable(error)
            connection.send(answer)


def _sendable(error: Exception) -> Exception:
    """The error, or one of the same text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
