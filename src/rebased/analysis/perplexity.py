"""Perplexity of all, AR and non-AR tokens, by distance, with intervals: what `TextScores` say about a model."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rebased.analysis.intervals import Interval, bootstrap_means
from rebased.analysis.text_scores import TextScores, perplexity


class Measured(NamedTuple):
    """Tokens of one kind."""

    tokens: int
    nats: float  # a token; nan where there is none
    interval: Interval  # of nats

    @property
    def perplexity(self) -> float:
        return perplexity(self.nats)

    @property
    def perplexity_interval(self) -> Interval:
        return Interval(perplexity(self.interval.low), perplexity(self.interval.high))


class AtDistance(NamedTuple):
    nearest: int
    farthest: int
    measured: Measured


class TextSummary(NamedTuple):
    windows: int
    all: Measured
    ar: Measured
    non_ar: Measured
    ar_share: float
    by_distance: list[AtDistance]

    def bits_per_byte(self, bytes_per_token: float) -> float:
        return self.all.nats / math.log(2) / bytes_per_token


def summarise(scores: TextScores) -> TextSummary:
    """Intervals are a bootstrap over windows: 95 of 100 sets of other windows of such a text would lie within."""
    everything = TextScores(_sums(scores.nats), _sums(scores.counts))
    intervals = bootstrap_means(everything.nats.numpy(), everything.counts.numpy())
    nats, counts = everything.nats.sum(0).tolist(), everything.counts.sum(0).tolist()
    kinds = [
        Measured(tokens, total / tokens if tokens else math.nan, interval)
        for total, tokens, interval in zip(nats, counts, intervals, strict=True)
    ]
    every, ar, non_ar, *distances = kinds
    classes = [AtDistance(2**i, 2 ** (i + 1) - 1, kind) for i, kind in enumerate(distances) if kind.tokens]
    return TextSummary(len(scores.nats), every, ar, non_ar, scores.ar_share, classes)


def _sums(table: Tensor) -> Tensor:
    """[W,C] -> [W,C+2]: all, AR, non-AR, then AR by distance."""
    return torch.cat([table.sum(1, keepdim=True), table[:, 1:].sum(1, keepdim=True), table], dim=1)
