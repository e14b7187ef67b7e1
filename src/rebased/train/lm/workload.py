"""Training a language model on windows of text, in one process or in several that share each step."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from rebased.analysis.text_scores import perplexity
from rebased.data import TextBatch, Windows, window_rows
from rebased.evaluate.norms import norm_statistics
from rebased.models import LanguageModel, LMConfig
from rebased.models.weights import save_model
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.provenance import describe_machine
from rebased.runs.schedule import step_lr
from rebased.tasks.draws import mix_seed
from rebased.train.deferred_losses import DeferredLosses, SeenLoss
from rebased.train.lm.corpus import describe_corpus, open_corpus
from rebased.train.lm.flops import flops_per_token, peak_flops
from rebased.train.lm.measure import measure, validate
from rebased.train.lm.step import LMStep
from rebased.train.sinks import StepReport
from rebased.train.workload import DROPOUT, INIT, ORDER, NotFinite, Output, Progress, Workload, sequence_work
from rebased.train.world import World, refusal, started_processes

SHORTEST = 64  # tokens of a shortened sequence


class LMWorkload(Workload):
    """A given number of steps, with lines of the record, evaluations and checkpoints every so many of them."""

    remedy = ", or a longer warm-up"

    config: LMRunConfig

    def __init__(self, config: LMRunConfig, world: World) -> None:
        super().__init__(config, world)
        self.batch_share = config.train.batch_size // world.size  # sequences of a step that this process reads
        self.corpus = world.together(lambda: open_corpus(config, verify=world.is_rank_zero))
        self.corpus_facts = describe_corpus(self.corpus)
        torch.manual_seed(mix_seed(config.train.seed, INIT))
        self.model = LanguageModel(config.model)  # on the CPU: the same weights everywhere
        self.parameters = self.model.num_parameters()  # before it is sharded
        self.train_windows, self.valid_windows = self.windows("train"), self.windows("valid")

    @classmethod
    def processes(cls, config: LMRunConfig) -> int:
        size, train = started_processes(), config.train
        if size > 1 and train.parallel == "none":
            raise refusal(f"torchrun started {size} processes and train.parallel is none; set it to ddp or fsdp")
        if train.batch_size % size:
            raise refusal(
                f"train.batch_size {train.batch_size} cannot be divided among {size} processes; choose a multiple of "
                f"{size}"
            )
        return size

    @classmethod
    def memory(cls, config: LMRunConfig, processes: int) -> int:
        rows = -(-(config.train.micro_batch or config.train.batch_size) // processes)
        return 8 * config.train.batch_size + cls.block_inputs(config.model, rows, config.data.seq_len)

    @classmethod
    def other_data(cls, config: LMRunConfig, run: dict[str, Any]) -> str | None:
        is_other = _text_checksum(config) not in (None, run["corpus"]["sha256"])
        return f"trained on another text than {config.data.folder}" if is_other else None

    @classmethod
    def run_work(cls, config: LMRunConfig) -> float:
        train, window = config.train, sequence_work(config.model, config.data.seq_len, config.data.seq_len)
        evaluations = -(-train.steps // train.eval_every) if train.eval_every else 1
        windows = evaluations * _windows(config, "valid", train.eval_windows)
        windows += sum(_windows(config, split, train.final_windows) for split in ("valid", "test"))
        return train.steps * cls.step_work(config) + windows * window

    @classmethod
    def step_work(cls, config: LMRunConfig) -> float:
        T = config.data.seq_len
        return 3 * config.train.batch_size * sequence_work(config.model, T, T)

    @classmethod
    def recorded_work(cls, config: LMRunConfig, lines: Sequence[dict[str, Any]]) -> tuple[float, float]:
        steps = [line for line in lines if line["type"] == "step" and "seconds" in line]
        return (steps[-1]["step"] * cls.step_work(config) if steps else 0.0), sum(line["seconds"] for line in steps)

    @classmethod
    def shorten(cls, config: LMRunConfig, rows: int, lines: int, steps: int, share: float | None = None) -> LMRunConfig:
        tree, length = config.model_dump(), config.data.seq_len
        tree["train"] |= {"steps": lines * steps, "warmup_steps": 0, "log_every": steps, "eval_every": None}
        tree["train"] |= {"checkpoint_every": lines * steps, "eval_windows": 1, "final_windows": 1}
        tree["train"] |= {"parallel": "none", "batch_size": rows}
        if share is not None:
            tree["data"] |= {"seq_len": min(length, max(SHORTEST, int(length * share)))}
            tree["train"] |= {"compile": "none"}  # it would take longer than the steps, and hardly changes them
        return LMRunConfig.model_validate(tree)

    def windows(self, split: str) -> Windows:
        """A split of the corpus, cut into windows."""
        data = self.config.data
        return self.corpus.windows(split, data.seq_len, isolate_documents=data.isolate_documents)

    @property
    def steps(self) -> int:
        return self.config.train.steps

    def facts(self) -> dict[str, Any]:
        return {"corpus": self.corpus_facts, "flops_per_token": self.flops, "peak_flops": self.peak}

    def where(self) -> dict[str, Any]:
        return {"processes": self.world.size, "execution": self.config.execution_settings()}

    def check_record(self, lines: Sequence[dict[str, Any]]) -> None:
        if lines[0]["corpus"]["sha256"] != self.corpus_facts["sha256"]:
            raise ValueError(
                f"{self.config.data.folder} holds another text than this run began with; restore it, or start the run "
                "again in another folder (--out)"
            )

    def must_have_saved(self, lines: Sequence[dict[str, Any]]) -> bool:
        return max((line.get("step", 0) for line in lines), default=0) > self.config.train.checkpoint_every

    def start(self, output: Output) -> None:
        super().start(output)
        config = self.config.train
        self.sharded = LMStep(self.model, config, self.world)
        self.optimiser = self.sharded.optimiser
        self.losses = DeferredLosses(self.world, columns=3, capacity=config.log_every)
        self.set_micro_batch(config.micro_batch)
        machine = describe_machine(self.world.device)
        self.flops = flops_per_token(self.config.model, self.config.data.seq_len)
        self.peak = peak_flops(machine["gpu"], self.sharded.precision)

    def set_micro_batch(self, rows: int | None) -> None:
        self.micro_batch = rows
        self.sharded.forget_graphs()

    @property
    def rows_at_once(self) -> int:
        """Sequences that this process computes at once."""
        return self.micro_batch or self.batch_share

    def is_over(self) -> bool:
        return self.progress.step >= self.config.train.steps

    def step(self) -> None:
        seed, step = self.config.train.seed, self.progress.step

        def take() -> torch.Tensor:
            torch.manual_seed(mix_seed(seed, DROPOUT, step, self.world.rank))
            return self.sharded(self.batch(step), step)

        outcome = self.fit(take, self.batch_share)
        self.losses.add(outcome, tokens=self.config.train.batch_size * self.config.data.seq_len)
        self.progress.step += 1
        self.output.step(StepReport(self.progress.step))

    def batch(self, step: int) -> list[TextBatch]:
        """This process's share of a step's windows, in micro batches. Which windows a step has is a function of the
        seed and the step, so a checkpoint need not hold it."""
        config = self.config.train
        rows = window_rows(len(self.train_windows), config.batch_size, mix_seed(config.seed, ORDER), step)
        rows = rows.chunk(self.world.size)[self.world.rank]
        return [self.train_windows.batch(some) for some in rows.split(self.rows_at_once)]

    def report(self) -> None:
        if self.is_time(self.config.train.log_every):
            self.write_step()
        if self.is_time(self.config.train.eval_every):
            self.evaluate()

    def is_time(self, every: int | None) -> bool:
        """True after every so many steps, and after the last one."""
        step = self.progress.step
        return step == self.config.train.steps or (every is not None and step % every == 0)

    def meets_others(self) -> bool:
        return self.is_time(self.config.train.log_every)

    def is_save_due(self, seconds: float) -> bool:
        return self.progress.step > 0 and self.is_time(self.config.train.checkpoint_every)

    def lr_of(self, step: int) -> float:
        return step_lr(self.config.train, step - 1)

    def check_finite(self, step: int, seen: SeenLoss) -> None:
        super().check_finite(step, seen)
        if not math.isfinite(seen.values[2]):
            raise NotFinite(f"the gradient's norm became {seen.values[2]}", step, self.lr_of(step))

    def add_losses(self, first: int, seen: Sequence[SeenLoss]) -> None:
        for step, each in enumerate(seen, start=first):
            self.check_finite(step, each)
        self.progress.loss += sum(each.values[0] for each in seen)
        self.progress.labels += int(sum(each.values[1] for each in seen))
        self.progress.norms += [each.values[2] for each in seen]

    def write_step(self) -> None:
        """The line of type "step": the mean of the steps since the last one."""
        self.flush()
        progress, config = self.progress, self.config
        speed = progress.tokens / progress.seconds
        self.progress = Progress(step=progress.step)
        self.output.line(
            {
                "type": "step",
                "step": progress.step,
                "tokens": progress.step * config.train.batch_size * config.data.seq_len,
                "loss": progress.loss / progress.labels,
                "grad_norm": sum(progress.norms) / len(progress.norms),
                "lr": self.lr_of(progress.step),
                "seconds": progress.seconds,
                "tokens_per_second": speed,
                "mfu": speed * self.flops / (self.peak * self.world.size) if self.peak else None,
            }
        )

    def evaluate(self) -> None:
        """The line of type "eval": the loss on the valid split."""
        self.flush()
        config, windows, step = self.config.train, self.valid_windows, self.progress.step
        rows = range(len(windows) if config.eval_windows is None else min(config.eval_windows, len(windows)))
        loss, tokens = self.fit(lambda: validate(self.sharded, windows, rows, self.rows_at_once), self.batch_share)
        if not math.isfinite(perplexity(loss)):
            raise NotFinite(f"the loss on the valid split became {loss:.3g}", step, self.lr_of(step))
        norms = norm_statistics(self.model)
        seconds = self.losses.restart_clock()
        line = {"type": "eval", "step": step, "loss": loss, "perplexity": perplexity(loss), "valid_tokens": tokens}
        self.output.line(line | {"seconds": seconds} | ({"norms": norms} if norms else {}))

    def finish(self, folder: Path, measuring: Callable[[str, int, int], None]) -> dict[str, Any]:
        """Measure the trained model as the paper's Table 2 does, and write it."""
        model = gather_model(self.model, self.config.model, self.world)
        settings = (self.config.train.final_windows, self.rows_at_once, self.sharded.precision, self.world)
        scores: dict[str, Any] = {
            split: measure(model, self.windows(split), *settings, partial(measuring, split))
            for split in ("valid", "test")
            if split in self.corpus.splits
        }
        if self.world.is_rank_zero:
            save_model(model, folder)
        return scores

    def result(self) -> dict[str, Any]:
        """The perplexity of the trained model where it was measured, else that of the last evaluation."""
        record = self.output.record
        if record.end and "valid" in record.end:
            return {"perplexity": record.end["valid"]["all"]["perplexity"]}
        measured = [line["perplexity"] for line in record.lines if line["type"] == "eval"]
        return {"perplexity": measured[-1] if measured else None}


@torch.no_grad()
def gather_model(model: LanguageModel, config: LMConfig, world: World) -> LanguageModel:
    """A copy of the model with all its weights on this process's device, in eval mode. All processes must call this."""
    with torch.random.fork_rng(devices=[]):  # the initial weights drawn here must not advance the run's random numbers
        copy = LanguageModel(config).to(world.device)
    targets, sources = ([*each.parameters(), *each.buffers()] for each in (copy, model))
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source.full_tensor() if hasattr(source, "full_tensor") else source)
    return copy.eval()


def _windows(config: LMRunConfig, split: str, limit: int | None) -> int:
    """The number of windows of a split that are evaluated: all of them, or at most `limit`."""
    corpus = open_corpus(config, verify=False)
    count = len(corpus.windows(split, config.data.seq_len)) if split in corpus.splits else 0
    return count if limit is None else min(count, limit)


@cache
def _text_checksum(config: LMRunConfig) -> str | None:
    """The checksum of the text that a run would be trained on; None if it is not here."""
    try:
        return str(describe_corpus(open_corpus(config, verify=False))["sha256"])
    except ValueError:
        return None
