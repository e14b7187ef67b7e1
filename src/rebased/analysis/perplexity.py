"""Perplexity of all, AR and non-AR tokens, by distance and with intervals, computed from `TextScores`."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rebased.analysis.intervals import Interval, bootstrap_means
from rebased.analysis.text_scores import TextScores, distances_of, perplexity


class Measured(NamedTuple):
    """The mean loss of the tokens of one kind."""

    tokens: int  # how many there are
    nats: float  # mean loss per token; nan if there is no token
    interval: Interval  # of nats

    @property
    def perplexity(self) -> float:
        """exp(nats)."""
        return perplexity(self.nats)

    @property
    def perplexity_interval(self) -> Interval:
        """The interval of the perplexity."""
        return Interval(perplexity(self.interval.low), perplexity(self.interval.high))


class AtDistance(NamedTuple):
    """AR tokens whose n-gram was last seen `nearest` to `farthest` tokens ago."""

    nearest: int
    farthest: int
    measured: Measured


class TextSummary(NamedTuple):
    """The losses of a text: all tokens, AR and non-AR tokens, and AR tokens by distance."""

    windows: int  # how many were scored
    all: Measured
    ar: Measured
    non_ar: Measured
    ar_share: float  # AR tokens / all tokens
    by_distance: list[AtDistance]  # classes that have tokens, nearest first

    def bits_per_byte(self, bytes_per_token: float) -> float:
        """The mean loss of all tokens in bits per byte of text."""
        return self.all.nats / math.log(2) / bytes_per_token


def summarise(scores: TextScores) -> TextSummary:
    """The mean losses in `scores` with 95 % intervals from a bootstrap over windows."""
    everything = TextScores(_sums(scores.nats), _sums(scores.counts))
    intervals = bootstrap_means(everything.nats.numpy(), everything.counts.numpy())
    nats, counts = everything.nats.sum(0).tolist(), everything.counts.sum(0).tolist()
    kinds = [
        Measured(tokens, total / tokens if tokens else math.nan, interval)
        for total, tokens, interval in zip(nats, counts, intervals, strict=True)
    ]
    every, ar, non_ar, *distances = kinds
    classes = [AtDistance(*distances_of(column), kind) for column, kind in enumerate(distances, 1) if kind.tokens]
    return TextSummary(len(scores.nats), every, ar, non_ar, scores.ar_share, classes)


def _sums(table: Tensor) -> Tensor:
    """[W,C] -> [W,C+2]: the columns all, AR, non-AR, then AR by distance."""
    return torch.cat([table.sum(1, keepdim=True), table[:, 1:].sum(1, keepdim=True), table], dim=1)
