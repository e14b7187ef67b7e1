"""The data of one MQAR run: segments to train on and to test on, no example in more than one split."""

from typing import Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor

from rebased.config import Config
from rebased.tasks.mqar import BLOCK_ROWS, MQAR, Alpha, Examples, check_sizes
from rebased.tasks.seeds import mix_seed

_ROUNDS = 16  # of redrawing; a task that still lacks examples then has too few
_ROUND_SIZE = 1024  # at least this many candidates a round, so that small splits of small tasks find theirs


class Segment(Config):
    """So many examples of one length and one load."""

    seq_len: int = 256
    kv_pairs: int = 64
    examples: int = Field(ge=1)


class Splits(NamedTuple):
    """One Examples per segment, in the order of the config."""

    train: tuple[Examples, ...]
    test: tuple[Examples, ...]
    held_out: tuple[Examples, ...]  # empty unless the config asks for it


class MQARData(Config):
    """The paper's data by default. The paper selects on `test`; a number on `held_out` has not been selected for."""

    vocab_size: int = 8192
    alpha: Alpha = 0.01
    random_non_queries: bool = False
    train: tuple[Segment, ...] = (Segment(examples=100_000),)
    test: tuple[Segment, ...] = (Segment(examples=3_000),)
    held_out: tuple[Segment, ...] = ()
    train_seed: int = Field(default=42, ge=0)
    test_seed: int = Field(default=52, ge=0)
    held_out_seed: int = Field(default=62, ge=0)
    seeds: Literal["shared", "per_run"] = "shared"  # shared: every run sees the same data, as in the paper

    @model_validator(mode="after")
    def _check(self) -> "MQARData":
        for name in ("train", "test"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: give at least one segment of seq_len, kv_pairs and examples")
        for name in Splits._fields:
            for i, segment in enumerate(getattr(self, name)):
                try:
                    check_sizes(segment.seq_len, segment.kv_pairs, self.vocab_size)
                except ValueError as error:
                    raise ValueError(f"{name}[{i}]: {error}") from None
        return self

    def task(self, segment: Segment) -> MQAR:
        return MQAR(
            seq_len=segment.seq_len,
            kv_pairs=segment.kv_pairs,
            vocab_size=self.vocab_size,
            alpha=self.alpha,
            random_non_queries=self.random_non_queries,
        )

    def build(self, run_seed: int, device: torch.device | str = "cpu") -> Splits:
        """The data of a run. `run_seed` matters only where seeds is "per_run"."""
        run = (run_seed,) if self.seeds == "per_run" else ()
        seen: dict[int, Tensor] = {}  # seq_len -> hashes of the rows of the splits made so far
        splits: list[tuple[Examples, ...]] = []
        for name in Splits._fields:
            segments: tuple[Segment, ...] = getattr(self, name)
            seed: int = getattr(self, f"{name}_seed")
            made = []
            for i, segment in enumerate(segments):
                streams = [mix_seed(seed, attempt, i, *run) for attempt in range(_ROUNDS)]
                made.append(_build_unseen(self.task(segment), segment.examples, streams, seen, device, name))
            for segment, examples in zip(segments, made, strict=True):
                # Only now: a split may repeat its own examples, as independent draws do.
                hashes = _hash_rows(examples.inputs)
                seen[segment.seq_len] = torch.cat([seen.get(segment.seq_len, hashes[:0]), hashes])
            splits.append(tuple(made))
        return Splits(*splits)


def _build_unseen(
    task: MQAR, n_examples: int, seeds: list[int], seen: dict[int, Tensor], device: torch.device | str, split: str
) -> Examples:
    """Draw, drop what another split has, draw again for what is missing: the task's law, given that it is new."""
    if task.seq_len not in seen:
        return task.build(n_examples, seeds[0], device)
    parts: list[Examples] = []
    missing = n_examples
    for seed in seeds:
        drawn = task.build(max(n_examples, _ROUND_SIZE), seed, device)
        new = torch.isin(_hash_rows(drawn.inputs), seen[task.seq_len], invert=True).nonzero().squeeze(1)[:missing]
        parts.append(Examples(drawn.inputs[new], drawn.labels[new]))
        missing -= len(new)
        if not missing:
            return Examples(torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts]))
    raise ValueError(
        f"{split}: {missing} of {n_examples} examples (seq_len={task.seq_len}, kv_pairs={task.kv_pairs}) could not be "
        f"made that no other split has: the task has only {task.count():,} different ones; "
        "raise vocab_size, seq_len or kv_pairs, or ask for fewer examples"
    )


def _hash_rows(inputs: Tensor) -> Tensor:
    """[N] int64: equal rows have equal hashes. Unequal rows practically never do, and then a row is redrawn in vain."""
    generator = Generator().manual_seed(0)
    weights = torch.randint(-(2**63), 2**63 - 1, (inputs.shape[1],), generator=generator).to(inputs.device)
    return torch.cat([(rows * weights).sum(1) for rows in inputs.split(BLOCK_ROWS)])  # int64 wraps around
