"""A run as its record tells it: what tables and figures are computed from."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from rebased.mixers import can_extend
from rebased.models import LanguageModel
from rebased.train import Reported, RunConfig, read_record, reported

PAPER_NAMES: dict[tuple[str, ...], str] = {  # as the heads of the paper's Table 4 call these patterns of mixers
    ("short_conv", "rebased"): "ReBased",
    ("short_conv", "based"): "Based",
    ("short_conv", "attention"): "ConvAttention",
    ("attention", "attention"): "Attention",
    ("short_conv", "rwkv"): "ConvRWKV",
    ("rwkv", "rwkv"): "RWKV",
    ("mamba", "mamba"): "Mamba",
    ("hyena", "hyena"): "Hyena",
}


@dataclass(frozen=True)
class Run:
    folder: str  # its name alone: where on a machine it stands is nobody's business
    lines: list[dict[str, Any]]

    @cached_property
    def config(self) -> RunConfig:
        return RunConfig.model_validate(self.lines[0]["config"])

    @cached_property
    def epochs(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["type"] == "epoch"]

    @property
    def model(self) -> str:
        pattern = tuple(mixer.name for mixer in self.config.model.mixers)
        return PAPER_NAMES.get(pattern, " + ".join(dict.fromkeys(pattern)))

    @property
    def parameters(self) -> int:
        return self.lines[0]["parameters"]

    @property
    def accuracies(self) -> list[float]:
        """On the test split, epoch by epoch."""
        return [line["test"]["accuracy"] for line in self.epochs]

    @property
    def reported(self) -> Reported:
        return reported(self.epochs, self.config.train.protocol)

    @property
    def seconds(self) -> float:
        return sum(line["seconds"] + line["test_seconds"] for line in self.epochs)

    @property
    def seq_len(self) -> int:
        """The longest sequence it was tested on."""
        return max(segment.seq_len for segment in self.config.task.test)

    def state_bytes(self, seq_len: int) -> int | None:
        """What the model remembers of one sequence after so many tokens, in fp32; None where a mixer has no state."""
        if not all(can_extend(block.mixer) for block in self._shape.blocks):
            return None
        return 4 * self._shape.state_size(seq_len)

    @cached_property
    def _shape(self) -> LanguageModel:
        with torch.device("meta"):  # no memory for weights, and none are loaded
            return LanguageModel(self.config.model)


def read_run(folder: Path) -> Run:
    lines = read_record(folder)
    if not any(line["type"] == "epoch" for line in lines):
        raise ValueError(f"{folder} has no epoch in its record yet; train it first, or go on with --resume")
    return Run(folder.name, lines)


def by_model(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each model, models in the order in which they first appear."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.model, []).append(run)
    return groups
