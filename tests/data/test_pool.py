"""Processes that map a function: in order, and a process that is killed at any moment is noticed at once."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest

from rebased.data.pool import LostWorker, ordered_pool

LARGE = 10**7  # bytes: more than a pipe holds, so that whoever writes them waits for a reader


@pytest.fixture(autouse=True)
def at_most_a_minute() -> Iterator[None]:
    """A pool that hangs fails its test."""

    def fail(*_: object) -> None:
        raise TimeoutError("the pool hangs")

    former = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


def make_function(kind: str) -> Callable[[int], object]:
    """The function of a worker."""
    if kind == "killed at once":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"square": square, "large": large, "busy": busy, "wrong": wrong, "odd": odd}[kind]


def square(item: int) -> int:
    time.sleep(0.01 * (item % 3))  # so that results are ready in another order
    return item**2


def large(item: int) -> bytes:
    return bytes(LARGE)


def busy(item: int) -> int:
    time.sleep(100)
    return item


def wrong(item: int) -> int:
    raise ValueError(f"item {item} is wrong")


class OddError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def odd(item: int) -> int:
    raise OddError("cannot be", "unpickled")


def test_results_come_in_order_and_few_are_read_ahead() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for item in range(40):
            read.append(item)
            yield item

    with ordered_pool(make_function, ("square",), 2) as apply:
        for n, found in enumerate(apply(items())):
            assert found == (n, n**2)
            assert len(read) <= n + 6  # AHEAD per process
        assert [result for _, result in apply(iter([5, 3]))] == [25, 9]  # again, with the same processes
    assert not multiprocessing.active_children()


def test_errors_arrive() -> None:
    with ordered_pool(make_function, ("wrong",), 2) as apply, pytest.raises(ValueError, match="item 0 is wrong"):
        list(apply(range(1)))
    with ordered_pool(make_function, ("odd",), 2) as apply, pytest.raises(RuntimeError, match="OddError: cannot be"):
        list(apply(range(1)))


@pytest.mark.parametrize("killed", [1, 2])
@pytest.mark.parametrize("kind", ["large", "busy", "square"])
def test_a_killed_worker_is_noticed(kind: str, killed: int) -> None:
    """The parent waits for a result, for the rest of one, or to write an item."""
    with ordered_pool(make_function, (kind,), 2) as apply:

        def items() -> Iterator[int]:
            for n in count():
                if n == 2:  # both have an item: one is computed, or written to a pipe that nobody reads
                    time.sleep(0.1)
                    for process in multiprocessing.active_children()[:killed]:
                        os.kill(process.pid or 0, signal.SIGKILL)
                yield n

        with pytest.raises(LostWorker, match=r"killed( by SIGKILL)?, often because memory ran out.*--resume"):
            list(apply(items()))
    assert not multiprocessing.active_children()


def test_a_worker_that_is_killed_at_its_start_is_noticed() -> None:
    with (
        pytest.raises(LostWorker, match="a worker process was killed"),
        ordered_pool(make_function, ("killed at once",), 2) as apply,
    ):
        list(apply(range(3)))
    assert not multiprocessing.active_children()
