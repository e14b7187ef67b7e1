"""What the trainer must know of runs on text, besides their workload."""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from rebased.runs.lm_config import LMRunConfig
from rebased.train.kinds import TrainingKind, block_inputs, register_training, sequence_work
from rebased.train.lm.corpus import describe_corpus, open_corpus
from rebased.train.world import World, refusal, started_processes

if TYPE_CHECKING:
    from rebased.train.workload import Workload

SHORTEST = 64  # tokens of a shortened sequence


class LMTraining(TrainingKind):
    """Runs on text."""

    def workload(self, config: LMRunConfig, world: World) -> "Workload":
        from rebased.train.lm.workload import LMWorkload

        return LMWorkload(config, world)

    def processes(self, config: LMRunConfig) -> int:
        size = started_processes()
        if size > 1 and (message := why_not_shared(config, size)):
            raise refusal(message)
        return size

    def memory(self, config: LMRunConfig, processes: int) -> int:
        rows = -(-(config.train.micro_batch or config.train.batch_size) // processes)
        return 8 * config.train.batch_size + block_inputs(config.model, rows, config.data.seq_len)

    def other_data(self, config: LMRunConfig, run: dict[str, Any]) -> str | None:
        text = _text_checksum(config)
        return (
            f"trained on another text than {config.data.folder}"
            if text not in (None, run["corpus"]["sha256"])
            else None
        )

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
        tree["train"] |= {"checkpoint_every": lines * steps, "eval_windows": 1, "final_windows": 1, "parallel": "none"}
        tree["train"] |= {"batch_size": rows}
        if share is not None:
            tree["data"] |= {"seq_len": min(length, max(SHORTEST, int(length * share)))}
            tree["train"] |= {"compile": "none"}  # it would take longer than the steps, and hardly changes them
        return LMRunConfig.model_validate(tree)


def why_not_shared(config: LMRunConfig, size: int) -> str | None:
    """An error message if `size` processes cannot train this run together; None if they can."""
    train = config.train
    if train.parallel == "none":
        return f"torchrun started {size} processes and train.parallel is none; set it to ddp or fsdp"
    if train.batch_size % size:
        return (
            f"train.batch_size {train.batch_size} cannot be divided among {size} processes; choose a multiple of {size}"
        )
    return None


def _windows(config: LMRunConfig, split: str, limit: int | None) -> int:
    """The number of windows of a split that are evaluated: all of them, or at most `limit`."""
    corpus = open_corpus(config, verify=False)
    count = len(corpus.windows(split, config.data.seq_len)) if split in corpus.splits else 0
    return count if limit is None else min(count, limit)


@cache
def _text_checksum(config: LMRunConfig) -> str | None:
    """The checksum of the text that a run would be trained on; None if it is not here."""
    try:
        checksum: str = describe_corpus(open_corpus(config, verify=False))["sha256"]
    except ValueError:
        return None
    return checksum


register_training(LMRunConfig.kind.section, LMTraining())
