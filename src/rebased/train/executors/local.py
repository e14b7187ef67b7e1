"""Runs side by side on this machine, a process each: one a GPU, or one a core."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from rebased.ops.backend import gpu_count
from rebased.train.executors.jobs import MAX_LOSSES, Ended, Failed, Job, Outcome, Prepare, Stopping, noop, nothing
from rebased.train.executors.worker import limit_threads, work
from rebased.train.interrupt import stop_request
from rebased.train.sinks import RunStart, Sink, StepReport


class LocalExecutor:
    def __init__(self, workers: int | None = None, *, uses_gpu: bool = False, prepare: Prepare = nothing) -> None:
        """`workers` runs at once; if there are more than GPUs, they share them evenly."""
        self.gpus = gpu_count() if uses_gpu else 0
        self.workers = workers or self.gpus or usable_cores()
        self.prepare = prepare

    @property
    def where(self) -> str:
        on = f" on {self.gpus} GPU{'s' * (self.gpus > 1)}" if self.gpus else ", one CPU thread each"
        return f"{self.workers} process{'es' * (self.workers > 1)} of this machine{on}"

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        process, connection = self._process(0, _answer, self.prepare, function, arguments)
        try:
            answer = connection.recv()
        except EOFError:
            process.join()
            raise ValueError(f"a process ended with exit code {process.exitcode} before it had answered") from None
        except BaseException:  # Ctrl-C
            process.terminate()
            raise
        process.join()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def run(self, jobs: Sequence[Job], ended: Ended, stopping: Stopping = noop) -> list[Outcome | None]:
        outcomes: list[Outcome | None] = [None] * len(jobs)
        waiting, running = list(range(len(jobs))), dict[Connection, _Running]()
        lost = [0] * len(jobs)

        def finish(index: int, outcome: Outcome) -> None:
            outcomes[index] = outcome
            ended(index, outcome)

        with stop_request() as stop:
            try:
                while running or (waiting and not stop.asked):
                    while waiting and len(running) < self.workers and not stop.asked:
                        index = waiting.pop(0)
                        slot = min(set(range(self.workers)) - {other.slot for other in running.values()})
                        started = self._start(jobs[index], index, slot)
                        running[started.connection] = started
                    if stop.asked and _ask_to_stop(running):
                        stopping(len(running))
                    for connection in wait(list(running), timeout=0.2):
                        assert isinstance(connection, Connection)
                        index, process = running[connection].index, running[connection].process
                        try:
                            event, content = connection.recv()
                        except EOFError:
                            del running[connection]
                            process.join()
                            if outcomes[index] is None and not stop.asked:
                                lost[index] += 1
                                if lost[index] < MAX_LOSSES:
                                    waiting.insert(0, index)
                                else:
                                    finish(index, _died(jobs[index], process))
                            continue
                        if event == "outcome":
                            finish(index, content)
                        else:
                            getattr(jobs[index].sink, event)(content)
            except KeyboardInterrupt:  # the second time of asking
                _kill(running)
                raise
            finally:  # whatever happened, nothing goes on behind the caller's back
                _ask_to_stop(running)
                _join(running)
        return outcomes

    def close(self) -> None:
        """Every process ends with its run."""

    def _start(self, job: Job, index: int, slot: int) -> "_Running":
        process, connection = self._process(slot, _work, self.prepare, job.config.model_dump(), job.folder)
        return _Running(index, slot, process, connection)

    def _process(
        self, slot: int, function: Callable[..., None], *arguments: Any
    ) -> tuple[ForkServerProcess, Connection]:
        """A process that calls the function with the arguments and, last, the end of a pipe that it may write to."""
        context = multiprocessing.get_context("forkserver")  # a server imports torch once and forks each run at once
        context.set_forkserver_preload([__name__, "torch._dynamo"])  # which the optimiser imports
        _start_server()
        ours, theirs = context.Pipe(duplex=False)
        gpu = slot % self.gpus if self.gpus else None
        process = context.Process(target=_begin, args=(gpu, function, *arguments, theirs))
        process.start()
        theirs.close()  # so that the pipe ends when the process does
        return process, ours


def _start_server() -> None:
    """If it does not run yet. Ctrl-C in a terminal reaches every process there, and while the server still imports
    torch it would die of it, aloud; so it never hears it."""
    resource_tracker.ensure_running()  # which the server needs, and which unblocks the signal on its way
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def visible_gpu(index: int) -> str:
    """The name of the GPU that torch counts as this one, among those that the user has left visible."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    return listed.split(",")[index] if listed else str(index)


class _Running:
    """A process that trains, and the pipe through which it tells of it."""

    def __init__(self, index: int, slot: int, process: ForkServerProcess, connection: Connection) -> None:
        self.index, self.slot, self.process, self.connection = index, slot, process, connection
        self.asked = False  # to stop; asked twice, a run ends without saving


def _ask_to_stop(running: dict[Connection, _Running]) -> bool:
    """Whether there was anyone to ask who had not been asked before."""
    unasked = [started for started in running.values() if not started.asked]
    for started in unasked:
        started.process.terminate()  # SIGTERM, upon which a run saves itself
        started.asked = True
    return bool(unasked)


def _kill(running: dict[Connection, _Running]) -> None:
    """At once, as a power cut would: checkpoints and records are made to outlive that."""
    for started in running.values():
        started.asked = True
        started.process.kill()


def _join(running: dict[Connection, _Running]) -> None:
    try:
        for started in running.values():
            started.process.join()
    except KeyboardInterrupt:
        _kill(running)
        raise


def _died(job: Job, process: ForkServerProcess) -> Failed:
    return Failed(
        f"the process that trained {job.folder} ended {MAX_LOSSES} times, the last time with exit code "
        f"{process.exitcode} (-9 often means too little memory); run the same command again to go on"
    )


class _Relay(Sink):
    """Sends every event to the process at the other end of a pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def start(self, run: RunStart) -> None:
        self._connection.send(("start", run))

    def step(self, report: StepReport) -> None:
        self._connection.send(("step", report))

    def line(self, line: dict[str, Any]) -> None:
        self._connection.send(("line", line))

    def saved(self, step: int) -> None:
        self._connection.send(("saved", step))

    def end(self, line: dict[str, Any]) -> None:
        self._connection.send(("end", line))


def _begin(gpu: int | None, function: Callable[..., None], *arguments: Any) -> None:
    os.setpgrp()  # Ctrl-C in a terminal reaches the caller alone, which asks every run to stop, once
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # as any process has it
    if gpu is not None:  # before anything has asked CUDA what there is
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpu(gpu)
    with contextlib.suppress(BrokenPipeError):  # the caller was killed: end too; the last checkpoint is there
        function(*arguments)


def _work(prepare: Prepare, config: dict[str, Any], folder: Path, connection: Connection) -> None:
    connection.send(("outcome", work(prepare, config, folder, [_Relay(connection)])))


def _answer(prepare: Prepare, function: Callable[..., Any], arguments: tuple[Any, ...], connection: Connection) -> None:
    limit_threads()
    try:
        prepare()
        answer = function(*arguments)
    except Exception as error:
        answer = error
    connection.send(answer)
