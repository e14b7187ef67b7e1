"""Map a function over items in several processes. Results come in order, and only a few items are read ahead."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

AHEAD = 3  # items in flight per process: enough to keep it busy, few enough to need little memory

Item = TypeVar("Item")
Result = TypeVar("Result")
_function: Callable[[Any], Any]  # of a worker process


@contextmanager
def ordered_pool(
    make: Callable[..., Callable[[Item], Result]], arguments: tuple[Any, ...], workers: int
) -> Iterator[Callable[[Iterable[Item]], Iterator[tuple[Item, Result]]]]:
    """A function that maps items to (item, result) pairs in order, computed by `workers` processes.

    Each process calls function = make(*arguments) once, and then function(item) for each of its items. With one worker
    everything runs in this process.
    """
    if workers == 1:
        function = make(*arguments)
        yield lambda items: ((item, function(item)) for item in items)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([make.__module__])  # imports torch once, not once per process
    executor = ProcessPoolExecutor(workers, context, _begin, (make, arguments))
    try:
        yield lambda items: _in_order(executor, items, AHEAD * workers)
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process was killed, often because memory ran out; the shards finished so far are kept: "
            "run the same command with --resume, and with fewer --workers if that was the cause"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _in_order(executor: ProcessPoolExecutor, items: Iterable[Item], ahead: int) -> Iterator[tuple[Item, Any]]:
    waiting: deque[tuple[Item, Future[Any]]] = deque()
    for item in items:
        waiting.append((item, executor.submit(_call, item)))
        if len(waiting) >= ahead:
            first, future = waiting.popleft()
            yield first, future.result()
    for item, future in waiting:
        yield item, future.result()


def _begin(make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is enough
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _function = make(*arguments)


def _end_with_parent() -> None:
    """End this process when its parent ends: a parent that was killed cannot shut the pool down."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(item: Any) -> Any:
    return _function(item)
