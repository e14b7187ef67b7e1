"""What the trainer must know of runs on text, besides their workload."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from rebased.runs.lm_config import LMRunConfig
from rebased.train.lm.corpus import describe_corpus, open_corpus
from rebased.train.lm.workload import LMWorkload
from rebased.train.training_kind import TrainingKind, block_inputs, sequence_work
from rebased.train.world import World, refusal, started_processes

SHORTEST = 64  # tokens of a shortened sequence


class LMTraining(TrainingKind):
    """Runs on text."""

    def workload(self, config: LMRunConfig, world: World) -> LMWorkload:
        return LMWorkload(config, world)

    def processes(self, config: LMRunConfig) -> int:
        size, train = started_processes(), config.train
        if size > 1 and train.parallel == "none":
            raise refusal(f"torchrun started {size} processes and train.parallel is none; set it to ddp or fsdp")
        if train.batch_size % size:
            raise refusal(
                f"train.batch_size {train.batch_size} cannot be divided among {size} processes; choose a multiple of "
                f"{size}"
            )
        return size

    def memory(self, config: LMRunConfig, processes: int) -> int:
        rows = -(-(config.train.micro_batch or config.train.batch_size) // processes)
        return 8 * config.train.batch_size + block_inputs(config.model, rows, config.data.seq_len)

    def other_data(self, config: LMRunConfig, run: dict[str, Any]) -> str | None:
        is_other = _text_checksum(config) not in (None, run["corpus"]["sha256"])
        return f"trained on another text than {config.data.folder}" if is_other else None

    def run_work(self, config: LMRunConfig) -> float:
        train, window = config.train, sequence_work(config.model, config.data.seq_len, config.data.seq_len)
        evaluations = -(-train.steps // train.eval_every) if train.eval_every else 1
        windows = evaluations * _windows(config, "valid", train.eval_windows)
        windows += sum(_windows(config, split, train.final_windows) for split in ("valid", "test"))
        return train.steps * self.step_work(config) + windows * window

    def step_work(self, config: LMRunConfig) -> float:
        T = config.data.seq_len
        return 3 * config.train.batch_size * sequence_work(config.model, T, T)

    def recorded_work(self, config: LMRunConfig, lines: Sequence[dict[str, Any]]) -> tuple[float, float]:
        steps = [line for line in lines if line["type"] == "step" and "seconds" in line]
        return (steps[-1]["step"] * self.step_work(config) if steps else 0.0), sum(line["seconds"] for line in steps)

    def shorten(
        self, config: LMRunConfig, rows: int, lines: int, steps: int, share: float | None = None
    ) -> LMRunConfig:
        tree, length = config.model_dump(), config.data.seq_len
        tree["train"] |= {"steps": lines * steps, "warmup_steps": 0, "log_every": steps, "eval_every": None}
        tree["train"] |= {"checkpoint_every": lines * steps, "eval_windows": 1, "final_windows": 1}
        tree["train"] |= {"parallel": "none", "batch_size": rows}
        if share is not None:
            tree["data"] |= {"seq_len": min(length, max(SHORTEST, int(length * share)))}
            tree["train"] |= {"compile": "none"}  # it would take longer than the steps, and hardly changes them
        return LMRunConfig.model_validate(tree)


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
