"""One run, from its config to its result, and on from wherever it was ended."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from rebased.models import LanguageModel
from rebased.ops.backend import has_gpu
from rebased.tasks import Batch, Examples, Splits, epoch_batches
from rebased.tasks.seeds import mix_seed
from rebased.train.checkpoint import read_pointer
from rebased.train.config import RunConfig
from rebased.train.evaluate import accuracies, evaluate
from rebased.train.folder import run_folder
from rebased.train.interrupt import StopRequest, stop_request
from rebased.train.optimiser import build_optimiser, cosine_lr, set_lr, training_step
from rebased.train.protocol import reported
from rebased.train.provenance import describe_code, describe_machine
from rebased.train.record import RECORD, Record
from rebased.train.sinks import RunStart, Sink, StepReport
from rebased.train.state import TrainState
from rebased.train.weights import save_model

INIT, DROPOUT, ORDER = range(3)  # the streams of random numbers that a run's seed feeds


class RunResult(NamedTuple):
    status: Literal["done", "already_done", "interrupted"]
    folder: Path
    step: int
    accuracy: float | None  # by the run's protocol; None while no epoch has ended
    epoch: int | None  # the one it was reached in


class Diverged(ValueError):
    """The loss or the weights are no longer finite numbers."""


def train(config: RunConfig, folder: Path | str, *, resume: bool = False, sinks: Sequence[Sink] = ()) -> RunResult:
    """Train as the config says; leave config, record, checkpoint and model in the folder.

    Ctrl-C or SIGTERM saves and returns with status "interrupted". With `resume` a run goes on from its last checkpoint,
    on a CPU bit for bit as if it had never been ended; a run that is done is left as it is.
    """
    folder, device = Path(folder), choose_device(config.train.device)
    gpus = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):  # dropout draws from torch's global generators: give them back
        torch.manual_seed(mix_seed(config.train.seed, INIT))
        model = LanguageModel(config.model)  # on the CPU, for the same weights everywhere; before there is a folder
        torch.manual_seed(mix_seed(config.train.seed, DROPOUT))
        with run_folder(folder, config, resume=resume), stop_request() as stop:
            return Run(config, folder, model.to(device), device, sinks, stop).go()


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not has_gpu():
        raise ValueError("train.device is cuda, and torch sees no GPU here; use cpu, or auto to take what there is")
    if name == "auto":
        name = "cuda" if has_gpu() else "cpu"
    return torch.device(name)


class Run:
    """A run under way. `go` is the whole of it; the other methods are its parts, in order."""

    data: Splits

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        model: LanguageModel,
        device: torch.device,
        sinks: Sequence[Sink],
        stop: StopRequest,
    ) -> None:
        self.config, self.folder, self.model, self.device = config, folder, model, device
        self.sinks, self.stop = sinks, stop
        self.state = TrainState(model, build_optimiser(model, config.train), device)
        self.record = Record(folder / RECORD)

    def go(self) -> RunResult:
        if self.record.end:
            return self.finished(self.record.end)
        self.restore()
        self.data = self.config.task.build(self.config.train.seed, self.device)
        self.announce()
        try:
            while not self.is_over():
                if not self.train_epoch():
                    return self.result("interrupted")
                self.end_epoch()
        except Diverged as error:
            self.end({"status": "diverged", "reason": str(error), "step": self.state.progress.step})
            raise
        save_model(self.model, self.folder)
        accuracy, epoch = reported(self.record.epochs, self.config.train.protocol)
        self.end({"status": "done", "accuracy": accuracy, "epoch": epoch, "step": self.state.progress.step})
        return self.result("done")

    def finished(self, end: dict[str, Any]) -> RunResult:
        if end["status"] == "diverged":
            raise ValueError(f"{self.folder} holds a run that went no further: {end['reason']}")
        self.state.progress.step = end["step"]
        return self.result("already_done")

    def restore(self) -> None:
        """Go back to the last checkpoint, or to the start, and begin or continue the record from there."""
        size = self.state.restore(self.folder, self.config.digest())
        if size is None and len(self.record.epochs) > 1:  # the first is written just before the first checkpoint
            raise ValueError(f"{self.folder} has lost its checkpoint.json; restore it, or start in another folder")
        self.record.rewind(size or 0)
        where = {"code": describe_code(), "machine": describe_machine(self.device)}
        known = [{key: line[key] for key in where} for line in self.record.lines if line["type"] in ("run", "resume")]
        if not known:
            config = self.config.model_dump(mode="json")
            about = {"digest": self.config.digest(), "parameters": self.model.num_parameters(), "config": config}
            self.record.append({"type": "run", **about, **where})
        elif known[-1] != where:
            self.record.append({"type": "resume", "step": self.state.progress.step, **where})

    def announce(self) -> None:
        start = RunStart(
            self.config,
            self.model.num_parameters(),
            str(self.device),
            step=self.state.progress.step,
            steps=len(self.batches()) * self.config.train.epochs,
            epochs=self.record.epochs,
        )
        for sink in self.sinks:
            sink.start(start)

    def is_over(self) -> bool:
        epochs, config = self.record.epochs, self.config.train
        return len(epochs) == config.epochs or (bool(epochs) and epochs[-1]["test"]["accuracy"] > config.stop_above)

    def train_epoch(self) -> bool:
        """Train on what is left of the epoch. False: the run was asked to stop, and has been saved."""
        config, progress = self.config.train, self.state.progress
        lr = cosine_lr(config, progress.epoch)
        set_lr(self.state.optimiser, lr)
        self.model.train()
        saved = time.perf_counter()
        for batch in self.batches()[progress.batch :]:
            if self.stop.asked or time.perf_counter() - saved > config.checkpoint_seconds:
                self.check_weights(lr)
                self.save()
                saved = time.perf_counter()
            if self.stop.asked:
                return False
            started = time.perf_counter()
            examples = self.examples(batch)
            outcome = training_step(self.model, self.state.optimiser, examples, config.micro_batch)
            loss, labels = outcome.mean.item(), int(outcome.labels.item())
            progress.step += 1
            progress.batch += 1
            if not math.isfinite(loss):
                raise self.diverged(f"the loss became {loss}", lr)
            progress.loss += loss * labels
            progress.labels += labels
            progress.tokens += examples.inputs.numel()
            progress.seconds += time.perf_counter() - started
            for sink in self.sinks:
                speed = progress.tokens / progress.seconds
                sink.step(StepReport(progress.step, progress.epoch + 1, loss, lr, speed))
        self.check_weights(lr)
        return True

    def batches(self) -> list[Batch]:
        """The order of this epoch: a function of the seed and the epoch, so there is nothing about it to save."""
        sizes = [segment.examples for segment in self.config.task.train]
        order = mix_seed(self.config.train.seed, ORDER)
        return epoch_batches(sizes, self.config.train.batch_size, order, self.state.progress.epoch)

    def examples(self, batch: Batch) -> Examples:
        segment, rows = self.data.train[batch.segment], batch.rows.to(self.device)
        return Examples(segment.inputs[rows], segment.labels[rows])

    def end_epoch(self) -> None:
        """Evaluate, record, save, in this order: what a checkpoint says has ended stands in the record."""
        config, progress = self.config.train, self.state.progress
        started = time.perf_counter()
        line: dict[str, Any] = {
            "type": "epoch",
            "epoch": progress.epoch + 1,
            "step": progress.step,
            "lr": cosine_lr(config, progress.epoch),
            "loss": progress.loss / progress.labels,
        }
        for split in ("test", "held_out"):
            segments, examples = getattr(self.config.task, split), getattr(self.data, split)
            if segments:
                rows = config.micro_batch or config.batch_size
                line[split] = accuracies(evaluate(self.model, segments, examples, rows))
        line["seconds"] = progress.seconds
        line["test_seconds"] = time.perf_counter() - started
        line["tokens_per_second"] = progress.tokens / progress.seconds
        self.record.append(line)
        self.state.progress = progress.next_epoch()
        self.save()
        for sink in self.sinks:
            sink.epoch(line)

    def save(self) -> None:
        self.state.save(self.folder, self.config.digest(), self.record.size)

    def check_weights(self, lr: float) -> None:
        """A last step may have a finite loss and an infinite gradient: such weights must not reach a checkpoint."""
        if not all(parameter.isfinite().all() for parameter in self.model.parameters()):
            raise self.diverged("a weight became infinite or not a number", lr)

    def diverged(self, what: str, lr: float) -> Diverged:
        good = read_pointer(self.folder)
        kept = f"the checkpoint of step {good['step']} is kept" if good else "nothing was saved yet"
        return Diverged(
            f"{what} at step {self.state.progress.step}, where lr was {lr:.3g}; {kept}. "
            f"Try a lower rate, such as --train.lr {self.config.train.lr / 3:.1g}"
        )

    def end(self, line: dict[str, Any]) -> None:
        line = {"type": "end", **line}
        self.record.append(line)
        for sink in self.sinks:
            sink.end(line)

    def result(self, status: Literal["done", "already_done", "interrupted"]) -> RunResult:
        epochs = self.record.epochs
        accuracy, epoch = reported(epochs, self.config.train.protocol) if epochs else (None, None)
        return RunResult(status, self.folder, self.state.progress.step, accuracy, epoch)
