"""A stand-in for Ray on one machine: tasks are processes, killed ones start again, cancelled ones get Ctrl-C.

It has what RayExecutor calls, so the executor is tested where Ray is not installed.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_connections
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")


class exceptions:
    class RayError(Exception):
        pass

    class TaskCancelledError(RayError):
        pass


class Task:
    """One call in a process of its own; started again when the process dies, up to max_retries times."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], max_retries: int) -> None:
        self._call, self._retries = (function, arguments), max_retries
        self.cancelled, self.over = False, False
        self.value: Any = None
        self.error: Exception | None = None
        self._start()

    def _start(self) -> None:
        self.reader, writer = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=_answer, args=(writer, *self._call))
        self.process.start()
        writer.close()  # so that the reader sees the end when the process dies

    def poll(self) -> bool:
        """Return True if the task is over."""
        if self.over or not self.reader.poll():
            return self.over
        try:
            self.value = self.reader.recv()
        except EOFError:
            self.process.join()
            if self._retries and not self.cancelled:
                self._retries -= 1
                self._start()
                return False
            lost = exceptions.RayError("the process died")
            self.error = exceptions.TaskCancelledError() if self.cancelled else lost
        self.over = True
        self.process.join()
        return True


def _answer(writer: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the local executor's fork server blocks it
    writer.send(function(*arguments))


class _Remote:
    def __init__(self, function: Callable[..., Any], max_retries: int) -> None:
        self._function, self._max_retries = function, max_retries

    def remote(self, *arguments: Any) -> Task:
        return Task(self._function, arguments, self._max_retries)


def remote(*, num_cpus: int, num_gpus: float, max_retries: int) -> Callable[[Callable[..., Any]], _Remote]:
    return lambda function: _Remote(function, max_retries)


def wait(tasks: Sequence[Task], *, num_returns: int = 1, timeout: float | None = None) -> tuple[list[Task], list[Task]]:
    """Return the tasks that are over, as soon as num_returns are or the time has passed, and the others."""
    deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
    while True:
        over = [task for task in tasks if task.poll()]
        if len(over) >= num_returns or time.monotonic() >= deadline:
            return over, [task for task in tasks if not task.over]
        wait_for_connections([task.reader for task in tasks if not task.over], min(0.5, deadline - time.monotonic()))


def get(task: Task) -> Any:
    wait([task])
    if task.error:
        raise task.error
    return task.value


def cancel(task: Task, *, force: bool = False) -> None:
    task.cancelled = True
    if not task.over and task.process.pid is not None:
        os.kill(task.process.pid, signal.SIGKILL if force else signal.SIGINT)


def is_initialized() -> bool:
    return False


def init(
    *, address: str | None, logging_level: int, include_dashboard: bool = True, log_to_driver: bool = True
) -> None:
    assert address is None, "only a cluster on this machine"


def shutdown() -> None:
    pass


def cluster_resources() -> dict[str, float]:
    return {"CPU": 2.0}


def nodes() -> list[dict[str, bool]]:
    return [{"Alive": True}, {"Alive": False}]
