"""One language model's run, from its config to its result, and on from wherever it was ended."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch

from rebased.analysis.text_scores import perplexity
from rebased.data import Corpus, TextBatch, window_rows
from rebased.models import LanguageModel
from rebased.models.weights import save_model
from rebased.runs.folder import run_folder
from rebased.runs.lm_config import TextRunConfig
from rebased.runs.provenance import describe_code, describe_machine
from rebased.runs.record import RECORD, Record
from rebased.tasks.seeds import mix_seed
from rebased.train.interrupt import Stopped, StopRequest, stop_request
from rebased.train.lm.checkpoint import load_checkpoint, read_pointer, save_checkpoint
from rebased.train.lm.corpus import describe_corpus, open_corpus
from rebased.train.lm.flops import flops_per_token, peak_flops
from rebased.train.lm.gather_weights import whole_model
from rebased.train.lm.measure import measure
from rebased.train.lm.schedule import learning_rate
from rebased.train.lm.sinks import TextSink, TextStart
from rebased.train.lm.step import Outcome, TextStep
from rebased.train.lm.validate import validate
from rebased.train.lm.world import World, join_world
from rebased.train.synthetic.loop import Diverged
from rebased.train.synthetic.step import onednn_as_it_was

INIT, DROPOUT, ORDER = range(3)  # the streams of random numbers that a run's seed feeds


class TextResult(NamedTuple):
    status: Literal["done", "already_done", "interrupted"]
    folder: Path
    step: int
    perplexity: float | None  # on the valid split; None before the first evaluation
    speaks: bool  # whether this is the first of the run's processes: one message is enough


@dataclass
class Progress:
    """Where a run stands, in plain numbers: all that a checkpoint holds besides tensors."""

    step: int = 0
    nats: float = 0.0  # sums over the steps since the last line of the record
    labels: int = 0
    norms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    record_bytes: int = 0


def train_text(
    config: TextRunConfig, folder: Path | str, *, resume: bool = False, sinks: Sequence[TextSink] = ()
) -> TextResult:
    """Train as the config says, together with the other processes that torchrun has started, if any.

    Leaves config, record, checkpoint and model in the folder. Ctrl-C or SIGTERM saves and returns with status
    "interrupted". With `resume` a run goes on from its last checkpoint, on a CPU bit for bit as if it had never been
    ended; a run that is done is left as it is.
    """
    folder = Path(folder)
    with join_world(config) as world, torch.random.fork_rng(devices=_gpus(world)):
        corpus = world.together(lambda: open_corpus(config, verify=world.leads))
        torch.manual_seed(mix_seed(config.train.seed, INIT))
        model = LanguageModel(config.model)  # on the CPU, for the same weights everywhere; before there is a folder
        heard = sinks if world.leads else ()
        with _shared_folder(folder, config, resume, world), stop_request(heard) as stop, onednn_as_it_was():
            return TextRun(config, folder, model, corpus, world, heard, stop).go()


@contextmanager
def _shared_folder(folder: Path, config: TextRunConfig, resume: bool, world: World) -> Iterator[None]:
    """As run_folder: the first process takes the folder for all."""
    taken = run_folder(folder, config, resume=resume)
    if not world.leads:
        world.together(lambda: None)
        yield
        return
    world.together(taken.__enter__)
    try:
        yield
    finally:
        taken.__exit__(None, None, None)


def _gpus(world: World) -> list[torch.device]:
    return [world.device] if world.device.type == "cuda" else []


class TextRun:
    """A run under way. `go` is the whole of it; the other methods are its parts, in order."""

    def __init__(
        self,
        config: TextRunConfig,
        folder: Path,
        model: LanguageModel,
        corpus: Corpus,
        world: World,
        sinks: Sequence[TextSink],
        stop: StopRequest,
    ) -> None:
        self.config, self.folder, self.world = config, folder, world
        self.corpus, self.about_text = corpus, describe_corpus(corpus)
        self.sinks, self.stop = sinks, stop
        self.parameters = model.num_parameters()
        self.step = TextStep(model, config.train, world)
        self.model = self.step.model
        self.rows_at_once = config.train.micro_batch or config.train.batch_size // self.step.share[1]
        data = config.data
        self.train_windows = corpus.windows("train", data.seq_len, isolate_documents=data.isolate_documents)
        self.valid_windows = corpus.windows("valid", data.seq_len, isolate_documents=data.isolate_documents)
        self.record = Record(folder / RECORD)
        self.progress = Progress()
        self.outcomes: list[Outcome] = []  # of steps whose numbers have not been read from the device
        self.saved: int | None = None  # the step of the last checkpoint
        machine = describe_machine(world.device)
        self.flops = flops_per_token(config.model, data.seq_len)
        self.peak = peak_flops(machine["gpu"], self.step.precision)
        how = config.train.model_dump(include={key.removeprefix("train.") for key in config.how})
        self.where = {"code": describe_code(), "machine": machine, "processes": world.size, "how": how}

    def go(self) -> TextResult:
        if end := self.world.gather(self.record.end)[0]:
            return self.finished(end)
        self.restore()
        self.announce()
        try:
            if not self.train():
                return self.result("interrupted")
        except Diverged as error:
            self.end({"status": "diverged", "reason": str(error), "step": self.progress.step})
            raise
        try:
            self.finish()
        except Stopped:
            return self.result("interrupted")
        return self.result("done")

    def finished(self, end: dict[str, Any]) -> TextResult:
        if end["status"] == "diverged":
            raise Diverged(f"{self.folder} holds a run that went no further: {end['reason']}")
        self.progress.step = end["step"]
        return self.result("already_done")

    def restore(self) -> None:
        """Go back to the last checkpoint, or to the start, and begin or continue the record from there."""
        digest = self.config.digest()
        progress = load_checkpoint(self.folder, self.model, self.step.optimiser, self.world, digest=digest)
        if progress is not None:
            self.progress = Progress(**progress)
            self.saved = self.progress.step

        def take_up_record() -> None:
            if self.world.leads:
                reached = max((line.get("step", 0) for line in self.record.lines), default=0)
                if progress is None and reached > self.config.train.checkpoint_every:
                    raise ValueError(
                        f"{self.folder} has lost its checkpoint.json; restore it, or start in another folder"
                    )
                self.record.rewind(self.progress.record_bytes)
                self.begin_record()

        self.world.together(take_up_record)

    def begin_record(self) -> None:
        lines = self.record.lines
        if not lines:
            about = {
                "digest": self.config.digest(),
                "parameters": self.parameters,
                "corpus": self.about_text,
                "flops_per_token": self.flops,
                "peak_flops": self.peak,
                "config": self.config.model_dump(mode="json"),
            }
            self.record.append({"type": "run", **about, **self.where})
            return
        if lines[0]["corpus"]["sha256"] != self.about_text["sha256"]:
            raise ValueError(
                f"{self.config.data.folder} holds another text than this run began with; restore it, or start the run "
                "again in another folder (--out)"
            )
        known = [{key: line.get(key) for key in self.where} for line in lines if line["type"] in ("run", "resume")]
        if known[-1] != self.where:
            self.record.append({"type": "resume", "step": self.progress.step, **self.where})

    def announce(self) -> None:
        start = TextStart(
            self.config,
            self.parameters,
            str(self.world.device),
            self.world.size,
            step=self.progress.step,
            perplexity=self.last_perplexity(),
        )
        for sink in self.sinks:
            sink.start(start)

    def train(self) -> bool:
        """Train to the end. False: the run was asked to stop, and has been saved."""
        config = self.config.train
        self.clock = time.perf_counter()
        while self.progress.step < config.steps:
            torch.manual_seed(mix_seed(config.seed, DROPOUT, self.progress.step, self.world.rank))
            self.outcomes.append(self.step(self.batch(self.progress.step), self.progress.step))
            self.progress.step += 1
            for sink in self.sinks:
                sink.step(self.progress.step)
            if self.is_time(config.log_every):
                self.report()
            if self.is_time(config.eval_every):
                self.evaluate()
            stop = self.is_asked_to_stop()
            if stop or self.is_time(config.checkpoint_every):
                self.save()
            if stop and self.progress.step < config.steps:
                return False
        return True

    def is_time(self, every: int | None) -> bool:
        step = self.progress.step
        return step == self.config.train.steps or (every is not None and step % every == 0)

    def is_asked_to_stop(self) -> bool:
        """Several processes must agree, for which they wait for one another: where they do so anyway."""
        if self.world.size > 1 and not self.is_time(self.config.train.log_every):
            return False
        return self.world.any(self.stop.heed())

    def batch(self, step: int) -> list[TextBatch]:
        """This process's share of a step's windows, in micro batches. Which windows a step has is a function of the
        seed and the step, so there is nothing about it to save."""
        config, (mine_is, shares) = self.config.train, self.step.share
        rows = window_rows(len(self.train_windows), config.batch_size, mix_seed(config.seed, ORDER), step)
        rows = rows.chunk(shares)[mine_is]
        return [self.train_windows.batch(part) for part in rows.split(self.rows_at_once)]

    def read_outcomes(self) -> None:
        """Wait for the device, and take over what it has computed since the last time."""
        if self.outcomes:
            nats = torch.stack([outcome.nats.double() for outcome in self.outcomes])
            labels = torch.tensor([outcome.labels for outcome in self.outcomes], dtype=torch.float64)
            sums = self.world.total(torch.stack([nats, labels.to(nats.device)])).tolist()
            norms = torch.stack([outcome.norm for outcome in self.outcomes]).tolist()
            first = self.progress.step - len(self.outcomes) + 1
            for i, (nat, norm) in enumerate(zip(sums[0], norms, strict=True)):
                if not math.isfinite(nat):
                    raise self.diverged(f"the loss became {nat}", first + i)
                if not math.isfinite(norm):
                    raise self.diverged(f"the gradient's norm became {norm}", first + i)
            self.progress.nats += sum(sums[0])
            self.progress.labels += int(sum(sums[1]))
            self.progress.norms += norms
            self.outcomes.clear()
        now = time.perf_counter()
        self.progress.seconds += now - self.clock
        self.clock = now

    def report(self) -> None:
        self.read_outcomes()
        progress, config = self.progress, self.config
        tokens = len(progress.norms) * config.train.batch_size * config.data.seq_len
        speed = tokens / progress.seconds
        line = {
            "type": "step",
            "step": progress.step,
            "tokens": progress.step * config.train.batch_size * config.data.seq_len,
            "loss": progress.nats / progress.labels,
            "grad_norm": sum(progress.norms) / len(progress.norms),
            "lr": learning_rate(config.train, progress.step - 1),
            "seconds": progress.seconds,
            "tokens_per_second": speed,
            "mfu": speed * self.flops / (self.peak * self.world.size) if self.peak else None,
        }
        self.progress = Progress(step=progress.step)
        self.tell("report", line)

    def evaluate(self) -> None:
        self.read_outcomes()
        config, windows = self.config.train, self.valid_windows
        rows = range(len(windows) if config.eval_windows is None else min(config.eval_windows, len(windows)))
        loss, tokens = validate(self.step, windows, rows, self.rows_at_once)
        if not math.isfinite(perplexity(loss)):
            raise self.diverged(f"the loss on the valid split became {loss:.3g}", self.progress.step)
        seconds = self.restart_clock()
        about = {"loss": loss, "perplexity": perplexity(loss), "valid_tokens": tokens, "seconds": seconds}
        self.tell("evaluation", {"type": "eval", "step": self.progress.step, **about})

    def save(self) -> None:
        if self.saved == self.progress.step:
            return
        self.read_outcomes()
        self.progress.record_bytes = self.record.size
        digest, progress = self.config.digest(), asdict(self.progress)
        save_checkpoint(self.folder, self.model, self.step.optimiser, self.world, digest=digest, progress=progress)
        self.saved = self.progress.step
        self.restart_clock()
        for sink in self.sinks:
            sink.saved(self.progress.step)

    def restart_clock(self) -> float:
        """What a pause took: the seconds since the clock was last read are nobody's training."""
        before, self.clock = self.clock, time.perf_counter()
        return self.clock - before

    def finish(self) -> None:
        """Measure the trained model as the paper does, write it, and say that this is the end."""
        model = whole_model(self.model, self.config.model, self.world)
        config, data = self.config.train, self.config.data
        scores: dict[str, Any] = {}
        for split in ("valid", "test"):
            if split in self.corpus.splits:
                windows = self.corpus.windows(split, data.seq_len, isolate_documents=data.isolate_documents)
                common = (config.final_windows, self.rows_at_once, self.step.precision, self.world)
                scores[split] = measure(model, windows, *common, partial(self.tell_measuring, split))
        if self.world.leads:
            save_model(model, self.folder)
            self.end({"status": "done", "step": self.progress.step, **scores})

    def diverged(self, what: str, step: int) -> Diverged:
        good = read_pointer(self.folder)
        kept = f"the checkpoint of step {good['progress']['step']} is kept" if good else "nothing was saved yet"
        lr = learning_rate(self.config.train, step - 1)
        return Diverged(
            f"{what} at step {step}, where lr was {lr:.3g}; {kept}. "
            f"Try a lower rate, such as --train.lr {self.config.train.lr / 3:.1g}, or a longer warm-up"
        )

    def tell(self, event: Literal["report", "evaluation", "end"], line: dict[str, Any]) -> None:
        if self.world.leads:
            self.record.append(line)
            for sink in self.sinks:
                getattr(sink, event)(line)

    def tell_measuring(self, split: str, done: int, total: int) -> None:
        """The last step has its checkpoint, so that measuring can be left and begun again. One of several processes
        cannot leave it alone: the others would wait."""
        if self.stop.heed() and self.world.size == 1:
            raise Stopped
        for sink in self.sinks:
            sink.measuring(split, done, total)

    def end(self, line: dict[str, Any]) -> None:
        self.tell("end", {"type": "end", **line})

    def last_perplexity(self) -> float | None:
        """Of the trained model where it was measured, else of the last evaluation on the way."""
        if self.record.end and "valid" in self.record.end:
            return cast(float | None, self.record.end["valid"]["all"]["perplexity"])
        return next((line["perplexity"] for line in reversed(self.record.lines) if line["type"] == "eval"), None)

    def result(self, status: Literal["done", "already_done", "interrupted"]) -> TextResult:
        return TextResult(status, self.folder, self.progress.step, self.last_perplexity(), self.world.leads)
