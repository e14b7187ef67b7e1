"""Several runs side by side, a process of one thread each: small models use two cores far better so than one by one."""

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rebased.train.config import RunConfig
from rebased.train.interrupt import stop_request
from rebased.train.loop import RunResult, train
from rebased.train.sinks import RunStart, Sink, StepReport


class Job(NamedTuple):
    config: RunConfig
    folder: Path
    sink: Sink  # hears of the run in the process that called


def train_all(jobs: Sequence[Job], workers: int) -> list[RunResult | None]:
    """Train or resume every job, so many at a time; the results in the order of the jobs.

    Ctrl-C or SIGTERM saves the runs under way: their results have the status "interrupted", and those that had not
    begun are None. If one run fails, the others are saved and its error is raised.
    """
    results: list[RunResult | None] = [None] * len(jobs)
    waiting, running = list(range(len(jobs))), dict[Connection, _Running]()
    with stop_request() as stop:
        try:
            while running or (waiting and not stop.asked):
                while waiting and len(running) < workers and not stop.asked:
                    started = _start(jobs[waiting[0]], waiting.pop(0))
                    running[started.connection] = started
                if stop.asked:
                    _ask_to_stop(running)
                for connection in wait(list(running), timeout=0.2):
                    assert isinstance(connection, Connection)
                    job, process = jobs[running[connection].index], running[connection].process
                    try:
                        event, content = connection.recv()
                    except EOFError:
                        index = running.pop(connection).index
                        process.join()
                        if results[index] is None and not stop.asked:
                            raise _died(job, process) from None
                        continue
                    if event == "failed":
                        raise content
                    if event == "result":
                        results[running[connection].index] = content
                    else:
                        getattr(job.sink, event)(content)
        finally:  # whatever happened, nothing goes on behind the caller's back
            _ask_to_stop(running)
            for started in running.values():
                started.process.join()
    return results


class _Running:
    """A process that trains, and the pipe through which it tells of it."""

    def __init__(self, index: int, process: ForkServerProcess, connection: Connection) -> None:
        self.index, self.process, self.connection = index, process, connection
        self.asked = False  # to stop; asked twice, a run ends without saving


def _start(job: Job, index: int) -> _Running:
    context = multiprocessing.get_context("forkserver")  # a server imports torch once and forks each run in a moment
    context.set_forkserver_preload(["rebased.train.parallel", "torch._dynamo"])  # which the optimiser imports
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(job.config, job.folder, theirs))
    process.start()
    theirs.close()  # so that the pipe ends when the process does
    return _Running(index, process, ours)


def _ask_to_stop(running: dict[Connection, _Running]) -> None:
    for started in running.values():
        if not started.asked:
            started.process.terminate()  # SIGTERM, upon which a run saves itself
            started.asked = True


def _died(job: Job, process: ForkServerProcess) -> ValueError:
    return ValueError(
        f"the process that trained {job.folder} ended with exit code {process.exitcode} "
        "(-9 often means too little memory); run the same command again to go on"
    )


class _Relay(Sink):
    """Tells the process that waits at the other end of a pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def start(self, run: RunStart) -> None:
        self._connection.send(("start", run))

    def step(self, report: StepReport) -> None:
        self._connection.send(("step", report))

    def epoch(self, line: dict[str, Any]) -> None:
        self._connection.send(("epoch", line))

    def end(self, line: dict[str, Any]) -> None:
        self._connection.send(("end", line))


def _work(config: RunConfig, folder: Path, connection: Connection) -> None:
    os.setpgrp()  # Ctrl-C in a terminal reaches the caller alone, which asks every run to stop, once
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # on ARM its small batched products take up to 60 times as long
    with contextlib.suppress(BrokenPipeError):  # the caller was killed: end too; the last checkpoint is there
        try:
            result = train(config, folder, resume=True, sinks=[_Relay(connection)])
        except BrokenPipeError:
            raise
        except Exception as error:
            connection.send(("failed", error))
        else:
            connection.send(("result", result))
