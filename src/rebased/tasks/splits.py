"""The data of one MQAR run: segments to train on and to test on, no example in more than one split."""

from typing import Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Generator, Tensor

from rebased.config import Config
from rebased.tasks.mqar import MQAR, Examples

_ROUNDS = 16  # of redrawing; a task that still lacks examples then has too few
_ROUND_SIZE = 1024  # at least this many candidates a round, so that small splits of small tasks find theirs
_BLOCK_TOKENS = 2**22


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
    alpha: float = 0.01
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
        for segment in self.train + self.test + self.held_out:
            self.task(segment)  # raises where the segment cannot be built
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
        seen: dict[int, Tensor] = {}  # seq_len -> hashes of the rows made so far
        splits = []
        for name, seed in (("train", self.train_seed), ("test", self.test_seed), ("held_out", self.held_out_seed)):
            segments: tuple[Segment, ...] = getattr(self, name)
            made = tuple(
                _build_unseen(name, self.task(segment), segment.examples, seed, (i, *run), seen, device)
                for i, segment in enumerate(segments)
            )
            for examples in made:  # only now: a split may repeat its own examples, as independent draws do
                seq_len = examples.inputs.shape[1]
                hashes = [seen[seq_len]] if seq_len in seen else []
                seen[seq_len] = torch.cat([*hashes, _hash_rows(examples.inputs)])
            splits.append(made)
        return Splits(*splits)


def _build_unseen(
    split: str,
    task: MQAR,
    n_examples: int,
    seed: int,
    stream: tuple[int, ...],
    seen: dict[int, Tensor],
    device: torch.device | str,
) -> Examples:
    """Draw, drop what another split has, draw again for what is missing: the task's law, given that it is new."""
    parts: list[Examples] = []
    missing = n_examples
    for attempt in range(_ROUNDS):
        (mixed,) = np.random.SeedSequence(seed, spawn_key=(attempt, *stream)).generate_state(1, np.uint64)
        if task.seq_len not in seen:
            return task.build(n_examples, int(mixed), device)
        candidates = task.build(max(n_examples, _ROUND_SIZE), int(mixed), device)
        new = torch.isin(_hash_rows(candidates.inputs), seen[task.seq_len], invert=True).nonzero().squeeze(1)[:missing]
        parts.append(Examples(candidates.inputs[new], candidates.labels[new]))
        missing -= len(new)
        if not missing:
            return Examples(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    raise ValueError(
        f"{split}: {missing} of {n_examples} examples (seq_len={task.seq_len}, kv_pairs={task.kv_pairs}) could not be "
        f"made different from those of the other splits: the task has only {task.count():,} examples; "
        "raise vocab_size, seq_len or kv_pairs, or ask for fewer examples"
    )


def _hash_rows(inputs: Tensor) -> Tensor:
    """[N] int64: equal rows have equal hashes. Unequal rows practically never do, and then a row is redrawn in vain."""
    generator = Generator().manual_seed(0)
    weights = torch.randint(-(2**63), 2**63 - 1, (inputs.shape[1],), generator=generator).to(inputs.device)
    block = max(1, _BLOCK_TOKENS // inputs.shape[1])
    return torch.cat([(rows * weights).sum(1) for rows in inputs.split(block)])  # int64 wraps around
