"""What runs would cost in GPU time, from speeds that were measured on one H200 and recorded."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rebased.files import read_json
from rebased.paper.values import EPOCHS, EXAMPLES, RATES, SEEDS, TEST_EXAMPLES

ROWS = 512  # sequences of a recorded step
EVALUATED = 1 / 3  # a forward pass, of the three that a training step costs
LM_LENGTH = 4096
LM_MODELS = {"attention", "paper-text"}  # of benchmarks/lm.py, that costs are computed from
TABLE_2_TOKENS = 20_000 * 1024 * LM_LENGTH  # the paper's Table 6: steps, sequences, tokens per sequence
PRESETS = {"Attention": "attention", "ConvAttention": "conv_attention", "RWKV": "rwkv", "ConvRWKV": "conv_rwkv"}
PRESETS |= {"Mamba": "mamba", "Based": "based"}
"""Presets by the paper's names. All others, the kernels of Table 1, are ReBased's."""


class Speeds(NamedTuple):
    """Recorded speeds. `records` are the names of the files that they are from."""

    shapes: Sequence[dict[str, Any]]  # ReBased in TF32: {"T", "D", "ms"} of a step of ROWS sequences
    presets: Sequence[dict[str, Any]]  # every model at D = 64: {"preset", "T", "ms"}
    language_models: Sequence[dict[str, Any]]  # {"model", "T", "tokens_per_second"}
    records: Sequence[str]

    def nanoseconds(self, d_model: int) -> float:
        """Of ReBased per token of training: a line in D by least squares, each shape with the faster of its modes."""
        best: dict[tuple[int, int], float] = {}
        for row in self.shapes:
            at = row["T"], row["D"]
            best[at] = min(best.get(at, math.inf), 1e6 * row["ms"] / (ROWS * row["T"]))
        widths, times = [D for _, D in best], list(best.values())
        middle, level = sum(widths) / len(widths), sum(times) / len(times)
        slope = sum((D - middle) * (t - level) for D, t in zip(widths, times, strict=True))
        slope /= sum((D - middle) ** 2 for D in widths)
        return level + slope * (d_model - middle)

    def seconds(self, preset: str, d_model: int, seq_len: int, examples: float) -> float:
        """To train a model on so many examples once. It costs in proportion to its step beside ReBased's at D = 64 and
        the nearest length."""
        steps = {(row["preset"], row["T"]): row["ms"] for row in self.presets}
        near = min({T for _, T in steps}, key=lambda T: abs(math.log(T / seq_len)))
        ratio = steps[preset, near] / steps["rebased", near]
        return examples * seq_len * ratio * self.nanoseconds(d_model) * 1e-9

    def tokens_per_second(self, model: str, seq_len: int = LM_LENGTH) -> float:
        """Of training a language model of the paper."""
        return next(
            float(row["tokens_per_second"])
            for row in self.language_models
            if row["model"] == model and row["T"] == seq_len
        )


def load_speeds(path: Path) -> Speeds:
    """The speeds in a file that `json.dumps(speeds._asdict())` wrote."""
    return Speeds(**read_json(path))


def mqar_minutes(speeds: Speeds, cells: Iterable[tuple[str, int, int]], runs: int = len(RATES) * SEEDS) -> float:
    """GPU minutes of so many runs of each cell (model, T, D) by the paper's protocol, one at a time, no early stop."""
    examples = EPOCHS * (EXAMPLES + EVALUATED * TEST_EXAMPLES)
    return sum(
        runs * speeds.seconds(PRESETS.get(model, "rebased"), d_model, seq_len, examples) / 60
        for model, seq_len, d_model in cells
    )


class Cost(NamedTuple):
    """What was not run would cost this."""

    minutes: float  # of one H200
    what: str
    records: Sequence[str]  # the files with the speeds

    @property
    def brief(self) -> str:
        """'about 2,580 GPU minutes (43 hours)'"""
        hours = f" ({self.minutes / 60:,.0f} hours)" if self.minutes >= 120 else ""
        return f"about {self.minutes:,.0f} GPU minutes{hours}"

    def __str__(self) -> str:
        return f"{self.what}: {self.brief} on one H200, one run at a time (speeds: {', '.join(self.records)})."
