"""One run, from its config to its result, and on from wherever it was ended."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from rebased.evaluate.accuracy import evaluate
from rebased.models import LanguageModel
from rebased.models.weights import save_model
from rebased.ops.backend import has_gpu
from rebased.runs.folder import run_folder
from rebased.runs.protocol import reported
from rebased.runs.provenance import describe_code, describe_machine
from rebased.runs.record import RECORD, Record
from rebased.runs.synthetic_config import RunConfig
from rebased.tasks import Batch, Examples, Questions, Segment, epoch_batches, find_questions
from rebased.tasks.seeds import mix_seed
from rebased.train.cuda_graph import CapturedStep, own_stream
from rebased.train.deferred_losses import LossLog
from rebased.train.interrupt import StopRequest, stop_request
from rebased.train.oom import OUT_OF_MEMORY, forget_unused, half
from rebased.train.sinks import RunStart, Sink, StepReport
from rebased.train.synthetic.checkpoint import read_pointer
from rebased.train.synthetic.optimiser import build_optimiser, cosine_lr, set_lr
from rebased.train.synthetic.state import TrainState
from rebased.train.synthetic.step import Step, autocast, matmul_precision, onednn_as_it_was

Answer = TypeVar("Answer")
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
    on a CPU bit for bit as if it had never been ended; a run that is done is left as it is. On a GPU a resumed run sees
    the same batches and the same dropout, and its sums differ by as much as the device's own from one run to the next.
    """
    folder, device = Path(folder), choose_device(config.train.device)
    gpus = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):  # dropout draws from torch's global generators: give them back
        torch.manual_seed(mix_seed(config.train.seed, INIT))
        model = LanguageModel(config.model)  # on the CPU, for the same weights everywhere; before there is a folder
        torch.manual_seed(mix_seed(config.train.seed, DROPOUT))
        with (
            run_folder(folder, config, resume=resume),
            stop_request(sinks) as stop,
            matmul_precision(config.train.precision),
            onednn_as_it_was(),
            own_stream(device),
        ):
            return Run(config, folder, model.to(device), device, sinks, stop).go()


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not has_gpu():
        raise ValueError("device cuda is asked for, and torch sees no GPU here; use cpu, or auto to take what there is")
    if name == "auto":
        name = "cuda" if has_gpu() else "cpu"
    return torch.device(name)


class Run:
    """A run under way. `go` is the whole of it; the other methods are its parts, in order."""

    train_set: tuple[Questions, ...]  # a segment each
    tests: dict[str, tuple[Examples, ...]]  # by split

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
        self.cut(config.train.micro_batch)
        self.losses = LossLog(device)
        self.record = Record(folder / RECORD)

    def cut(self, micro_batch: int | None) -> None:
        """Compute so many sequences at once from here on."""
        self.micro_batch = micro_batch
        self.step = self.build_step(micro_batch)

    def build_step(self, micro_batch: int | None) -> Callable[[Questions, Tensor], Tensor]:
        config = self.config.train
        step = Step(
            self.model,
            self.state.optimiser,
            micro_batch=micro_batch,
            precision=config.precision,
            compiled=config.compile,
        )
        return CapturedStep(step) if config.capture and self.device.type == "cuda" else step

    def go(self) -> RunResult:
        if self.record.end:
            return self.finished(self.record.end)
        self.restore()
        self.make_data()
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
        for line in self.record.lines:
            if line["type"] == OUT_OF_MEMORY:
                self.cut(line["micro_batch"])
        where = {"code": describe_code(), "machine": describe_machine(self.device)}
        known = [{key: line[key] for key in where} for line in self.record.lines if line["type"] in ("run", "resume")]
        if not known:
            config = self.config.model_dump(mode="json")
            about = {"digest": self.config.digest(), "parameters": self.model.num_parameters(), "config": config}
            self.record.append({"type": "run", **about, **where})
        elif known[-1] != where:
            self.record.append({"type": "resume", "step": self.state.progress.step, **where})

    def make_data(self) -> None:
        data = self.config.task.build(self.config.train.seed, self.device)
        self.train_set = tuple(find_questions(examples) for examples in data.train)
        self.tests = {"test": data.test, "held_out": data.held_out}

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
        self.losses.restart()
        for batch in self.batches()[progress.batch :]:
            stopping = self.stop.heed()  # asked once: a signal may come between two looks
            if stopping or time.perf_counter() - saved > config.checkpoint_seconds:
                self.read_losses(lr)
                self.check_weights(lr)
                self.save()
                saved = time.perf_counter()
                self.losses.restart()
            if stopping:
                return False
            self.take_step(batch)
            progress.step += 1
            progress.batch += 1
            if self.losses.is_due:
                self.read_losses(lr)
        self.read_losses(lr)
        self.check_weights(lr)
        return True

    def take_step(self, batch: Batch) -> None:
        questions = self.train_set[batch.segment]
        outcome = self.fit(lambda: self.step(questions, batch.rows))
        self.losses.add(outcome, tokens=len(batch.rows) * questions.inputs.shape[1])

    def fit(self, work: Callable[[], Answer]) -> Answer:
        """What the work gives. When the GPU's memory is too small for it, it is done again, from here on with half as
        many sequences at once; the batch stays what it is, and the record tells of it."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                pass  # the error holds frames, and those hold tensors: leave it before going on
            self.cut(half(self.micro_batch or self.config.train.batch_size))
            forget_unused(self.device)
            about = {"step": self.state.progress.step, "micro_batch": self.micro_batch}
            self.record.append({"type": OUT_OF_MEMORY, **about})

    def read_losses(self, lr: float) -> None:
        """Wait for the steps taken since the last time, and tell of each. One whose loss is no number ends the run,
        as if none had been taken after it: nothing has been saved since."""
        if not len(self.losses):
            return
        progress, first = self.state.progress, self.state.progress.step - len(self.losses) + 1
        losses, seconds = self.losses.read()
        progress.seconds += seconds
        progress.tokens += sum(each.tokens for each in losses)
        for step, (loss, labels, _) in enumerate(losses, start=first):
            if not math.isfinite(loss):
                progress.step = step
                raise self.diverged(f"the loss became {loss}", lr)
            progress.loss += loss * labels
            progress.labels += labels
            report = StepReport(step, progress.epoch + 1, loss, lr, progress.tokens / progress.seconds)
            for sink in self.sinks:
                sink.step(report)
        self.losses.restart()

    def batches(self) -> list[Batch]:
        """The order of this epoch, on the device: a function of the seed and the epoch, so there is nothing about it
        to save."""
        sizes = [segment.examples for segment in self.config.task.train]
        order = mix_seed(self.config.train.seed, ORDER)
        batches = epoch_batches(sizes, self.config.train.batch_size, order, self.state.progress.epoch)
        rows = torch.cat([batch.rows for batch in batches]).to(self.device)  # one copy an epoch
        parts = rows.split([len(batch.rows) for batch in batches])
        return [Batch(batch.segment, part) for batch, part in zip(batches, parts, strict=True)]

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
        for split, examples in self.tests.items():
            if examples:
                line[split] = self.test(getattr(self.config.task, split), examples)
        line["seconds"] = progress.seconds
        line["test_seconds"] = time.perf_counter() - started
        line["tokens_per_second"] = progress.tokens / progress.seconds
        self.record.append(line)
        self.state.progress = progress.next_epoch()
        self.save()
        for sink in self.sinks:
            sink.epoch(line)

    def test(self, segments: Sequence[Segment], examples: Sequence[Examples]) -> dict[str, Any]:
        batch = self.config.train.batch_size
        with autocast(self.config.train.precision, self.device):
            return self.fit(lambda: evaluate(self.model, segments, examples, self.micro_batch or batch))

    def save(self) -> None:
        self.state.save(self.folder, self.config.digest(), self.record.size)

    def check_weights(self, lr: float) -> None:
        """A last step may have a finite loss and an infinite gradient: such weights must not reach a checkpoint."""
        if not torch.stack([parameter.isfinite().all() for parameter in self.model.parameters()]).all():
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
