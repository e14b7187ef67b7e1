"""An executor that trains runs in processes of this machine: by default one per GPU, or one per CPU core."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from rebased.config import plural
from rebased.ops.backend import gpu_count
from rebased.train.executors.jobs import (
    MAX_LOSSES,
    Ended,
    Executor,
    Failed,
    InOrder,
    Job,
    Outcome,
    Prepare,
    Queue,
    Stopping,
    noop,
)
from rebased.train.executors.worker import answer, work
from rebased.train.interrupt import stop_request
from rebased.train.sinks import Sink

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess  # Windows has none


class LocalExecutor(Executor):
    """Trains each run in a process of its own on this machine. Workers beyond the number of GPUs share them evenly."""

    def __init__(self, workers: int | None = None, *, uses_gpu: bool = False, prepare: Prepare = noop) -> None:
        """`workers` is the number of runs at once; the default is one per GPU if `uses_gpu`, else one per CPU core."""
        if "forkserver" not in multiprocessing.get_all_start_methods():
            raise ValueError(
                "Windows cannot fork processes to train in: use `rebased train`, one run at a time, or WSL"
            )
        self.gpus = gpu_count() if uses_gpu else 0
        self.workers = workers or self.gpus or usable_cores()
        self.prepare = prepare

    @property
    def where(self) -> str:
        on = f" on {plural(self.gpus, 'GPU')}" if self.gpus else ", one CPU thread each"
        return f"{self.workers} process{'es' * (self.workers > 1)} of this machine{on}"

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        process, connection = self._process(0, _answer, self.prepare, function, arguments)
        try:
            wait([connection, process.sentinel])
            result = _receive(connection, process)
        except WorkerEnded:
            process.join()
            raise ValueError(
                f"a worker process ended with exit code {process.exitcode} before it returned a result"
            ) from None
        except BaseException:  # Ctrl-C
            process.terminate()
            raise
        process.join()
        if isinstance(result, Exception):
            raise result
        return result

    def run(
        self, jobs: Sequence[Job], ended: Ended, stopping: Stopping = noop, queue: Queue | None = None
    ) -> list[Outcome | None]:
        outcomes: list[Outcome | None] = [None] * len(jobs)
        queue = queue or InOrder(len(jobs))
        lost_jobs, running = list[int](), dict[Connection, _Running]()
        lost = [0] * len(jobs)
        later, postponed = list[int](), set[int]()  # found too little GPU memory beside others; each is postponed once

        def finish(index: int, outcome: Outcome) -> None:
            if isinstance(outcome, Failed) and outcome.memory and len(running) > 1 and index not in postponed:
                later.append(index)
                postponed.add(index)
                return
            outcomes[index] = outcome
            ended(index, outcome)

        def lose(index: int, exit_code: int | None) -> None:
            if outcomes[index] is None and index not in later and not stop.asked:
                lost[index] += 1
                if lost[index] < MAX_LOSSES:
                    lost_jobs.append(index)
                else:
                    died = f"the process that trained {jobs[index].folder} ended {MAX_LOSSES} times, the last time with"
                    hint = "-9 often means too little memory; fewer runs at once need less"
                    finish(index, Failed(f"{died} exit code {exit_code} ({hint})"))

        with stop_request() as stop:
            try:
                while True:
                    if queue.is_time_up():
                        stop.asked = True
                    while len(running) < self.workers and not stop.asked:
                        index = lost_jobs.pop() if lost_jobs else queue.next()
                        if index is None and later and not running:  # alone
                            index = later.pop(0)
                        if index is None:
                            break
                        slot = min(set(range(self.workers)) - {other.slot for other in running.values()})
                        arguments = self.prepare, jobs[index].config.model_dump(), jobs[index].folder
                        try:
                            process, pipe = self._process(slot, _work, *arguments)
                        except WorkerEnded:
                            lose(index, None)
                            continue
                        running[pipe] = _Running(index, slot, process)
                    if not running:
                        break
                    if stop.asked and _ask_to_stop(running):
                        stopping(len(running))
                    ends = {started.process.sentinel: connection for connection, started in running.items()}
                    ready = wait([*running, *ends], timeout=0.2)
                    for connection in {ends[one] if isinstance(one, int) else one for one in ready}:
                        assert isinstance(connection, Connection)
                        index, process = running[connection].index, running[connection].process
                        try:
                            event, content = _receive(connection, process)
                        except WorkerEnded:
                            del running[connection]
                            process.join()
                            lose(index, process.exitcode)
                            continue
                        if event == "outcome":
                            finish(index, content)
                        else:
                            getattr(jobs[index].sink, event)(content)
            except KeyboardInterrupt:  # the second Ctrl-C
                _kill(running)
                raise
            finally:  # no process outlives this call
                _ask_to_stop(running)
                _join(running)
        return outcomes

    def close(self) -> None:
        """Does nothing: every process ends with its run."""

    def _process(
        self, slot: int, function: Callable[..., None], *arguments: Any
    ) -> tuple["ForkServerProcess", Connection]:
        """A started process and the reading end of its pipe. The process calls `function(*arguments, writing end)`."""
        context = multiprocessing.get_context("forkserver")  # one server imports torch once, then forks quickly
        context.set_forkserver_preload([__name__, "torch._dynamo"])  # optimisers import torch._dynamo
        _start_server()
        reader, writer = context.Pipe(duplex=False)
        gpu = slot % self.gpus if self.gpus else None
        process = context.Process(target=_begin, args=(gpu, function, *arguments, writer))
        try:
            process.start()
        except (OSError, EOFError) as error:  # the process, or the server that forks it, was killed meanwhile
            raise WorkerEnded from error
        finally:
            writer.close()  # so that the pipe ends when the process does
        return process, reader


def _start_server() -> None:
    """Start the fork server, if it is not running yet, with SIGINT blocked.

    Ctrl-C in a terminal reaches every process there. A server that is still importing torch would die with a traceback.
    """
    resource_tracker.ensure_running()  # the server needs it; starting it unblocks SIGINT, so it comes first
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def usable_cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpu(index: int) -> str:
    """The name of torch's GPU number `index`: an entry of CUDA_VISIBLE_DEVICES if that is set, else the number."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed.split(",")[index] if listed else str(index)


@dataclass
class _Running:
    """A process that trains a run."""

    index: int
    slot: int
    process: "ForkServerProcess"
    asked: bool = False  # to stop; a run that is asked twice ends without saving


def _ask_to_stop(running: dict[Connection, _Running]) -> bool:
    """Ask every run to stop that has not been asked before. Returns True if there was one."""
    unasked = [started for started in running.values() if not started.asked]
    for started in unasked:
        started.process.terminate()  # SIGTERM: the run saves itself and ends
        started.asked = True
    return bool(unasked)


def _kill(running: dict[Connection, _Running]) -> None:
    """Kill the processes at once. Records and the last checkpoints survive that, as they survive a power cut."""
    for started in running.values():
        started.asked = True
        started.process.kill()


def _join(running: dict[Connection, _Running]) -> None:
    """Wait for all processes. Ctrl-C kills them."""
    try:
        for started in running.values():
            started.process.join()
    except KeyboardInterrupt:
        _kill(running)
        raise


class WorkerEnded(Exception):
    """A worker process has ended without a result."""


def _receive(connection: Connection, process: "ForkServerProcess") -> Any:
    """What a process has sent. Raises WorkerEnded if it has ended and there is no more.

    The pipe alone does not tell: what the process has started may hold it open.
    """
    if not connection.poll() and not process.is_alive() and not connection.poll():
        raise WorkerEnded
    try:
        return connection.recv()
    except (EOFError, OSError) as error:
        raise WorkerEnded from error


class _Relay(Sink):
    """Sends every event to the process at the other end of a pipe."""

    def __init__(self, connection: Connection) -> None:
        for event in ("start", "step", "line", "saved", "end"):
            setattr(self, event, lambda content, event=event: connection.send((event, content)))


def _begin(gpu: int | None, function: Callable[..., None], *arguments: Any) -> None:
    os.setpgrp()  # Ctrl-C in a terminal now reaches the caller alone, which asks every run to stop once
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the fork server blocked it
    if gpu is not None:  # must be set before CUDA is initialised
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpu(gpu)
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):  # the caller is gone: end too, without a word
        function(*arguments)


def _work(prepare: Prepare, config: dict[str, Any], folder: Path, connection: Connection) -> None:
    connection.send(("outcome", work(prepare, config, folder, [_Relay(connection)])))


def _answer(prepare: Prepare, function: Callable[..., Any], arguments: tuple[Any, ...], connection: Connection) -> None:
    Thread(target=_watch_caller, daemon=True).start()
    try:
        result = answer(prepare, function, arguments)
    except Exception as error:
        result = error
    connection.send(result)


def _watch_caller() -> None:
    """Interrupt this process, as Ctrl-C does, once the caller is gone: nobody will read the answer."""
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os.kill(os.getpid(), signal.SIGINT)
