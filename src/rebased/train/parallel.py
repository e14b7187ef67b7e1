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
    """Train or resume every job, so many at a time. A run that is done is left as it is.

    Ctrl-C or SIGTERM saves the runs under way: their results have the status "interrupted", and those that had not
    begun are None. If one run fails, the others are saved and its error is raised.
    """
    processes = multiprocessing.get_context("forkserver")  # imports torch once; each run is then forked in a moment
    processes.set_forkserver_preload(["rebased.train.parallel", "torch._dynamo"])  # which the optimiser imports
    results: dict[int, RunResult] = {}
    waiting, running = list(range(len(jobs))), dict[Connection, tuple[int, ForkServerProcess]]()
    with stop_request() as stop:
        try:
            told = False
            while running or (waiting and not stop.asked):
                while waiting and len(running) < workers and not stop.asked:
                    i = waiting.pop(0)
                    ours, theirs = processes.Pipe(duplex=False)
                    process = processes.Process(target=_work, args=(jobs[i].config, jobs[i].folder, theirs))
                    process.start()
                    theirs.close()  # so that the pipe ends when the process does
                    running[ours] = i, process
                if stop.asked and not told:
                    _ask_to_stop(running)
                    told = True
                for connection in wait(list(running), timeout=0.2):
                    assert isinstance(connection, Connection)
                    i, process = running[connection]
                    try:
                        event, content = connection.recv()
                    except EOFError:
                        process.join()
                        del running[connection]
                        if i not in results and not stop.asked:
                            raise ValueError(
                                f"the process that trained {jobs[i].folder} ended with exit code {process.exitcode} "
                                "(-9 often means too little memory); run the same command again to go on"
                            ) from None
                        continue
                    if event == "failed":
                        raise content
                    if event == "result":
                        results[i] = content
                    else:
                        getattr(jobs[i].sink, event)(content)
        finally:  # whatever happened, nothing keeps running behind the user's back
            _ask_to_stop(running)
            for _, process in running.values():
                process.join()
    return [results.get(i) for i in range(len(jobs))]


def _ask_to_stop(running: dict[Connection, tuple[int, ForkServerProcess]]) -> None:
    for _, process in running.values():
        process.terminate()  # SIGTERM, upon which a run saves itself


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
    with contextlib.suppress(BrokenPipeError):  # the caller was killed: end too; the last checkpoint is there
        try:
            result = train(config, folder, resume=True, sinks=[_Relay(connection)])
        except BrokenPipeError:
            raise
        except Exception as error:
            connection.send(("failed", error))
        else:
            connection.send(("result", result))
