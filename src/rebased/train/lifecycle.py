"""The life of a run, whatever is trained: it begins, is saved, stopped and resumed, and ends.

A run is a folder with config.yaml, record.jsonl, a checkpoint and, in the end, model.safetensors. What differs between
kinds of training is a Workload (workload.py).
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from rebased.models import check_causality
from rebased.runs.folder import run_folder
from rebased.runs.own_code import KEY, changed_code, own_code
from rebased.runs.provenance import describe_code, describe_machine
from rebased.runs.record import RECORD, Record
from rebased.runs.run_config import RunConfig
from rebased.train.checkpoint import (
    collect_state,
    delete_others,
    find_checkpoint,
    read_pointer,
    restore_state,
    save_checkpoint,
)
from rebased.train.cuda_graph import own_stream
from rebased.train.interrupt import Stopped, StopRequest, stop_request
from rebased.train.kinds import check_run_fits, workload_of
from rebased.train.oom import OUT_OF_MEMORY
from rebased.train.precision import choose_precision, matmul_precision, onednn_restored
from rebased.train.sinks import RunStart, Sink
from rebased.train.workload import NotFinite, Output, Progress, Workload
from rebased.train.world import World, join_world

_log = logging.getLogger("rebased")

Status = Literal["done", "already_done", "interrupted"]


class RunResult(NamedTuple):
    """How a call of `train` ended."""

    status: Status
    folder: Path
    step: int
    accuracy: float | None = None  # of a synthetic run, by its protocol; None while no epoch has ended
    epoch: int | None = None  # the one it was reached in
    perplexity: float | None = None  # of a language model, on the valid split; None before the first evaluation
    is_rank_zero: bool = True  # False in all but one of several processes: one message is enough

    @property
    def score(self) -> float | None:
        """What the run is judged by: its accuracy or its perplexity."""
        return self.perplexity if self.accuracy is None else self.accuracy


class Diverged(ValueError):
    """The loss or the weights are no longer finite numbers."""


def train(config: RunConfig, folder: Path | str, *, resume: bool = False, sinks: Sequence[Sink] = ()) -> RunResult:
    """Train as the config says; leave config, record, checkpoint and model in the folder.

    A language model is trained together with the other processes that torchrun has started, if any.

    Ctrl-C or SIGTERM saves the run and returns with status "interrupted". With `resume` a run continues from its last
    checkpoint, on a CPU bit for bit as if it had never been stopped; a run that is done is left as it is. On a GPU a
    resumed run sees the same batches and the same dropout; its sums differ by as much as those of two equal runs do.

    Raises Diverged when the loss or the weights are no longer finite, and ValueError or OSError, with the remedy, for
    what a user can mend.
    """
    folder = Path(folder)
    processes = workload_of(config).processes(config)
    with join_world(config.train.device, processes) as world:
        gpus = [world.device] if world.device.type == "cuda" else []
        with torch.random.fork_rng(devices=gpus):
            return _train_in(world, config, folder, resume, sinks if world.is_rank_zero else ())


def _train_in(world: World, config: RunConfig, folder: Path, resume: bool, sinks: Sequence[Sink]) -> RunResult:
    """`train` between joining the world and leaving it. A function of its own, so that the workload is gone before the
    world is left: torch waits forever if a DistributedDataParallel is the last to hold the processes' group."""
    check_run_fits(config, world.device, world.size)
    # Before there is a folder: a model that cannot be built leaves none.
    workload = workload_of(config)(config, world)
    check_causality(workload.model)
    with (
        _shared_folder(folder, config, resume, world) as digest,
        stop_request(sinks) as stop,
        matmul_precision(choose_precision(config.train.precision, world.device)),
        onednn_restored(),
        own_stream(world.device),
    ):
        return Run(workload, folder, digest, sinks, stop).go()


class Run:
    """A run under way. `go` is the whole of it; the other methods are its parts, in order."""

    def __init__(self, workload: Workload, folder: Path, digest: str, sinks: Sequence[Sink], stop: StopRequest) -> None:
        self.workload, self.world, self.folder, self.digest = workload, workload.world, folder, digest
        self.sinks, self.stop = sinks, stop
        self.record = Record(folder / RECORD)
        self.output = Output(self.record, sinks, self.world)
        self.saved: int | None = None  # the step of the last checkpoint
        self.saved_at = time.perf_counter()

    def go(self) -> RunResult:
        """Train to the end, or until the run is asked to stop."""
        if end := self.world.gather(self.record.end)[0]:
            return self.finished(end)
        self.workload.start(self.output)
        self.restore()
        self.workload.prepare()
        self.announce()
        try:
            if not self.train():
                return self.result("interrupted")
        except NotFinite as error:
            raise self.diverged(error) from None
        try:
            self.finish()
        except Stopped:
            return self.result("interrupted")
        return self.result("done")

    def finished(self, end: dict[str, Any]) -> RunResult:
        """The result of a run that has ended before."""
        if end["status"] == "diverged":
            raise Diverged(f"{self.folder} holds a run that went no further: {end['reason']}")
        self.workload.output = self.output
        self.workload.progress.step = end["step"]
        return self.result("already_done")

    def restore(self) -> None:
        """Load the last checkpoint, if there is one, and begin or continue the record from there."""
        workload, world = self.workload, self.world
        pointer = find_checkpoint(self.folder, world, digest=self.digest)
        if pointer is not None:
            path, step = self.folder / pointer.name, pointer.step
            world.together(lambda: restore_state(path, step, workload.model, workload.optimiser, world))
            workload.progress, self.saved = Progress(**pointer.progress), step

        def continue_record() -> None:
            if pointer is not None:
                delete_others(self.folder, pointer.name)
                self.record.rewind(pointer.record["bytes"], pointer.record["sha256"])
            elif workload.must_have_saved(self.record.lines):
                raise ValueError(f"{self.folder} has lost its checkpoint.json; restore it, or start in another folder")
            else:
                self.record.rewind(0)
            self.begin_record()

        world.on_rank_zero(continue_record)
        for line in world.gather(self.record.lines)[0]:
            if line["type"] == OUT_OF_MEMORY:
                workload.set_micro_batch(line["micro_batch"])

    def begin_record(self) -> None:
        """Write the first line of the record, or, where code, machine or execution settings have changed, a line of
        type "resume"."""
        workload, config = self.workload, self.workload.config
        where = {"code": describe_code(), "machine": describe_machine(self.world.device), **workload.where()}
        if own := own_code(config):
            where[KEY] = own
        if config.digest() != self.digest:  # it was resumed with other execution settings than it began with
            where["execution"] = config.execution_settings()
        known = [line for line in self.record.lines if line["type"] in ("run", "resume")]
        if not known:
            facts = {"digest": self.digest, "parameters": workload.parameters, **workload.facts()}
            self.record.append({"type": "run", **facts, "config": config.model_dump(mode="json"), **where})
            return
        workload.check_record(self.record.lines)
        for what in changed_code(self.record.lines, config):
            _log.warning("%s has changed since this run began; it goes on with the changed one", what)
        if {key: known[-1].get(key) for key in where} != where:
            self.record.append({"type": "resume", "step": workload.progress.step, **where})

    def announce(self) -> None:
        """Tell the sinks that training begins."""
        workload = self.workload
        where, step, lines = (str(self.world.device), self.world.size), workload.progress.step, list(self.record.lines)
        for sink in self.sinks:
            sink.start(RunStart(workload.config, workload.parameters, *where, step, workload.steps, lines))

    def train(self) -> bool:
        """Train to the end. False: the run was asked to stop, and has been saved."""
        workload = self.workload
        workload.losses.restart_clock()
        while not workload.is_over():
            stopping = self.is_asked_to_stop()
            if stopping or workload.is_save_due(time.perf_counter() - self.saved_at):
                self.save()
            if stopping:
                return False
            workload.step()
            workload.report()
        self.save()
        return True

    def is_asked_to_stop(self) -> bool:
        """True if one of the processes was asked. Several of them must agree, for which they wait for one another: they
        ask only where they do so anyway."""
        if self.world.size > 1 and not self.workload.meets_others():
            return False
        return self.world.any(self.stop.check())

    def save(self) -> None:
        """Write a checkpoint, unless there is one of this step."""
        workload = self.workload
        if self.saved == workload.progress.step:
            return
        workload.flush()
        workload.check_weights()
        save_checkpoint(
            self.folder,
            collect_state(workload.model, workload.optimiser, self.world),
            self.world,
            digest=self.digest,
            progress=asdict(workload.progress),
            record=self.record.describe(),
        )
        self.saved, self.saved_at = workload.progress.step, time.perf_counter()
        workload.losses.restart_clock()
        for sink in self.sinks:
            sink.saved(self.saved)

    def finish(self) -> None:
        """Measure and write the trained model, then write the last line of the record."""
        scores = self.workload.finish(self.folder, self.measuring)
        self.output.line({"type": "end", "status": "done", **scores, "step": self.workload.progress.step})

    def measuring(self, split: str, done: int, total: int) -> None:
        """Tell the sinks how far the last measurement is. It may be stopped and begun again: the last step has its
        checkpoint. One of several processes cannot stop alone: the others would wait."""
        if self.stop.check() and self.world.size == 1:
            raise Stopped
        for sink in self.sinks:
            sink.measuring(split, done, total)

    def diverged(self, error: NotFinite) -> Diverged:
        """Write the last line of a run that diverged; the error to raise."""
        good = read_pointer(self.folder)
        kept = f"the checkpoint of step {good.step} is kept" if good else "nothing was saved yet"
        reason = f"{error.what} at step {error.step}, where lr was {error.lr:.3g}; {kept}. "
        if error.step == 1 and error.what.startswith("the loss became"):
            reason += "No weight had changed yet, so the rate is not the cause: look at the mixers (rebased check)"
        else:
            lower = self.workload.config.train.lr / 3
            reason += f"Try a lower rate, such as --train.lr {lower:.1g}{self.workload.remedy}"
        self.output.line({"type": "end", "status": "diverged", "reason": reason, "step": error.step})
        return Diverged(reason)

    def result(self, status: Status) -> RunResult:
        """What `train` returns."""
        workload = self.workload
        return RunResult(
            status, self.folder, workload.progress.step, **workload.result(), is_rank_zero=self.world.is_rank_zero
        )


@contextmanager
def _shared_folder(folder: Path, config: RunConfig, resume: bool, world: World) -> Iterator[str]:
    """As run_folder; the process of rank 0 takes the folder for all."""
    taken = run_folder(folder, config, resume=resume)
    with ExitStack() as stack:
        yield world.together(lambda: stack.enter_context(taken) if world.is_rank_zero else config.digest())
