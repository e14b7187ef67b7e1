"""A function over many things, in several processes, the results in order: map, but never far ahead of its reader."""

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

AHEAD = 3  # things given out a process: enough that none waits, few enough to stay small in memory

Given = TypeVar("Given")
Made = TypeVar("Made")
_function: Callable[[Any], Any]


@contextmanager
def ordered_pool(
    make: Callable[..., Callable[[Given], Made]], arguments: tuple[Any, ...], workers: int
) -> Iterator[Callable[[Iterable[Given]], Iterator[tuple[Given, Made]]]]:
    """Each process calls make(*arguments) once, then what that gave for each thing. One worker is this process."""
    if workers == 1:
        function = make(*arguments)
        yield lambda things: ((thing, function(thing)) for thing in things)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([make.__module__])  # imports torch once, not once a process
    executor = ProcessPoolExecutor(workers, context, _begin, (make, arguments))
    try:
        yield lambda things: _in_order(executor, things, AHEAD * workers)
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process was killed, often for want of memory; the shards finished so far are kept: "
            "run the same command with --resume, and with fewer --workers if that was it"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _in_order(executor: ProcessPoolExecutor, things: Iterable[Given], ahead: int) -> Iterator[tuple[Given, Any]]:
    waiting: deque[tuple[Given, Future[Any]]] = deque()
    for thing in things:
        waiting.append((thing, executor.submit(_call, thing)))
        if len(waiting) >= ahead:
            given, future = waiting.popleft()
            yield given, future.result()
    for given, future in waiting:
        yield given, future.result()


def _begin(make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _function
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process is one core
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _function = make(*arguments)


def _end_with_parent() -> None:
    """A caller that was killed cannot tell its processes to end; without this they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(thing: Any) -> Any:
    return _function(thing)
