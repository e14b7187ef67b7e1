"""An executor that trains runs on a Ray cluster. All nodes must share the file system with the runs' folders.

Workers write records and checkpoints to that file system. So a run that loses its node is resumed on another one from
its checkpoint, and this process follows a run by reading its record.
"""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rebased.config import plural
from rebased.runs.record import lines_so_far
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
from rebased.train.executors.worker import answer, one_line, work
from rebased.train.interrupt import stop_request
from rebased.train.sinks import Sink

INSTALL = "pip install 'rebased[sweep]'"


class RayExecutor(Executor):
    """Trains runs as tasks of a Ray cluster, one CPU each, with an equal share of the GPUs if they are used."""

    def __init__(self, workers: int | None = None, *, uses_gpu: bool = False, prepare: Prepare = noop) -> None:
        """Connect to the cluster at RAY_ADDRESS, or to one on this machine; if there is none, start one here."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unless the user asks for it
        try:
            import ray
        except ImportError as error:
            raise ValueError(f"--executor ray needs Ray, which is not installed: {INSTALL}") from error
        self._ray: Any = ray  # Ray's types allow neither options in a dict nor references as keys
        self.prepare = prepare
        self._owner = not ray.is_initialized()
        if self._owner:
            quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
            address = os.environ.get("RAY_ADDRESS")
            try:
                check_address(address or "")
                ray.init(address=address, logging_level=logging.ERROR, **({} if address else quiet))
            except (OSError, RuntimeError) as error:
                raise ValueError(
                    f"no Ray cluster answers at RAY_ADDRESS={address}: {one_line(str(error))}; start one with "
                    "`ray start --head`, or unset RAY_ADDRESS to start one here"
                ) from error
        resources = ray.cluster_resources()
        self.gpus, cpus = int(resources.get("GPU", 0)) if uses_gpu else 0, int(resources.get("CPU", 1))
        self.workers = workers or self.gpus or cpus
        self.nodes = len([node for node in ray.nodes() if node["Alive"]])
        # Ray counts GPUs in fractions: if there are more workers than GPUs, each worker requests a fraction of one.
        share = min(1.0, 1 / -(-self.workers // self.gpus)) if self.gpus else 0.0
        self._options = {"num_cpus": 1, "num_gpus": share, "max_retries": MAX_LOSSES - 1}

    @property
    def where(self) -> str:
        on = plural(self.gpus, "GPU") if self.gpus else "one CPU thread each"
        return f"{self.workers} at a time on a Ray cluster of {plural(self.nodes, 'node')}, {on}"

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        remote = self._ray.remote(**self._options)(answer)
        return self._ray.get(remote.remote(self.prepare, function, arguments))

    def run(
        self, jobs: Sequence[Job], ended: Ended, stopping: Stopping = noop, queue: Queue | None = None
    ) -> list[Outcome | None]:
        ray = self._ray
        remote = ray.remote(**self._options)(work)
        outcomes: list[Outcome | None] = [None] * len(jobs)
        queue = queue or InOrder(len(jobs))
        running = dict[Any, _Followed]()  # by the reference of the Ray task
        with stop_request() as stop:
            try:
                while True:
                    if queue.is_time_up():
                        stop.asked = True
                    while len(running) < self.workers and not stop.asked:
                        index = queue.next()
                        if index is None:
                            break
                        job = jobs[index]
                        task = remote.remote(self.prepare, job.config.model_dump(), job.folder.absolute())
                        running[task] = _Followed(index, job.folder, job.sink)
                    if not running:
                        break
                    if stop.asked and self._ask_to_stop(running):
                        stopping(len(running))
                    ready, _ = ray.wait(list(running), timeout=0.5)
                    for followed in running.values():
                        followed.emit()
                    for task in ready:
                        index = running.pop(task).index
                        outcome = self._outcome(task, jobs[index])
                        if outcome is not None:
                            outcomes[index] = outcome
                            ended(index, outcome)
            except KeyboardInterrupt:  # the second Ctrl-C
                for task in running:
                    ray.cancel(task, force=True)
                running.clear()
                raise
            finally:
                self._ask_to_stop(running)
                if running:
                    ray.wait(list(running), num_returns=len(running), timeout=60)
        return outcomes

    def close(self) -> None:
        if self._owner:
            self._ray.shutdown()

    def _outcome(self, task: Any, job: Job) -> Outcome | None:
        """The outcome of a task that has ended; None if it was cancelled before it began."""
        exceptions = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(task)
            return outcome
        except exceptions.TaskCancelledError:
            return None
        except exceptions.RayError as error:
            return Failed(f"Ray lost the process that trained {job.folder} {MAX_LOSSES} times: {one_line(str(error))}")

    def _ask_to_stop(self, running: dict[Any, "_Followed"]) -> bool:
        """Ask every run to stop that has not been asked before. Returns True if there was one.

        A run that is asked twice ends without saving.
        """
        unasked = {task: followed for task, followed in running.items() if not followed.asked}
        for task, followed in unasked.items():
            self._ray.cancel(task)  # arrives as Ctrl-C: the run saves itself and ends
            followed.asked = True
        return bool(unasked)


def check_address(address: str) -> None:
    """Raise OSError if nothing listens at host:port. Ray itself would wait for minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdecimal():  # not "auto" or "local"
        socket.create_connection((host, int(port)), timeout=10).close()


class _Followed:
    """A run on the cluster. Its record tells how far it is."""

    def __init__(self, index: int, folder: Path, sink: Sink) -> None:
        self.index, self.folder, self.sink, self.asked = index, folder, sink, False
        self._last_sent = self._newest()

    def emit(self) -> None:
        """Send the newest line of the record to the sink, if it was not sent before."""
        newest = self._newest()
        if newest and newest != self._last_sent:
            (self.sink.end if newest["type"] == "end" else self.sink.line)(newest)
            self._last_sent = newest

    def _newest(self) -> dict[str, Any] | None:
        """The last line that tells how far the run is; None if there is none yet."""
        lines = [line for line in lines_so_far(self.folder) if line["type"] in ("epoch", "step", "eval", "end")]
        return lines[-1] if lines else None
