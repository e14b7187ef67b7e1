"""A cost model of language models on many GPUs: bytes sent, seconds per step, memory, and sequences when serving.

It is arithmetic, not a measurement. Whoever calls it brings measured seconds per token and counted bytes;
benchmarks/scale_report.py does so, and docs/scaling.md says what comes out.

Bytes are those that one GPU sends per step. n is the number of GPUs, T the length of a sequence.
"""

from collections.abc import Mapping
from math import ceil, log2
from typing import Literal, NamedTuple

Way = Literal["ddp", "fsdp"]
WAYS: tuple[Way, ...] = ("ddp", "fsdp")

FP32, BF16 = 4, 2
"""Bytes of a number."""

TRAINED = 4 * FP32
"""Bytes per parameter in training: weight, gradient and AdamW's two moments, in fp32."""


class Cluster(NamedTuple):
    """Machines of equal GPUs. Speeds are bytes per second in one direction."""

    node: int
    """GPUs per machine."""
    within: float
    """A GPU to the others of its machine (NVLink)."""
    between: float
    """A GPU to other machines: its own adapter (InfiniBand)."""
    reached: float
    """The share of these speeds that a collective reaches, in (0, 1]."""
    latency: float
    """Seconds per hop of a tree; a collective of n GPUs makes log2(n) hops."""
    memory: float
    """Bytes of one GPU."""
    bandwidth: float
    """Bytes per second between a GPU and its own memory."""


class Model(NamedTuple):
    """What the cost model needs to know of a language model."""

    blocks: int
    """Parameters of all blocks."""
    root: int
    """All other parameters: embeddings and the last norm."""
    layers: int
    """Blocks."""

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.blocks + self.root


class Speed(NamedTuple):
    """Measured times of a training step on one GPU."""

    per_token: float
    """Seconds per token at T = 0 of the line that was fitted."""
    per_length: float
    """Seconds per token and per token of T: 0 where the time does not depend on T."""
    shortest: float
    """Seconds of the shortest micro batch: the host launches kernels for as long as this."""
    measured: Mapping[int, float]
    """T to seconds per token where it was measured."""

    def seconds_per_token(self, T: int) -> float:
        """Seconds per token at this T: as measured, or on the line where T was not measured."""
        return self.measured.get(T, self.per_token + self.per_length * T)


class Step(NamedTuple):
    """One training step on n GPUs. Times are seconds."""

    n: int
    compute: float
    communication: float
    """All communication, as if nothing else happened."""
    waiting: float
    """The part of it that no computation hides."""
    tokens: int
    """Tokens of the step, over all GPUs."""
    sent: float
    """Bytes that one GPU sends."""
    memory: float
    """Bytes that one GPU needs."""

    @property
    def seconds(self) -> float:
        """The time of the step."""
        return self.compute + self.waiting

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs together."""
        return self.tokens / self.seconds


def fit_speed(seconds_per_token: Mapping[int, float], shortest: float) -> Speed:
    """The line a + b T nearest to the measured seconds per token, by relative error; b is at least 0.

    seconds_per_token: T to seconds per token. shortest: the least time that any step took, in seconds.
    """
    if not seconds_per_token:
        raise ValueError("there are no measured times to fit; give at least one length with its seconds per token")
    lengths, times = list(seconds_per_token), list(seconds_per_token.values())
    # Least squares of (a + b T) / y = 1: every point counts by its relative error.
    columns = [(1 / y, T / y) for T, y in zip(lengths, times, strict=True)]
    aa, ab, bb = (sum(c[i] * c[j] for c in columns) for i, j in ((0, 0), (0, 1), (1, 1)))
    a1, b1 = (sum(c[i] for c in columns) for i in (0, 1))
    determinant = aa * bb - ab * ab
    slope = (aa * b1 - ab * a1) / determinant if len(lengths) > 1 else 0.0
    slope = max(0.0, slope)
    return Speed((a1 - ab * slope) / aa, slope, shortest, dict(seconds_per_token))


# Bytes that one of n processes sends, as rings do it.


def all_reduce_bytes(size: float, n: int) -> float:
    """To sum tensors of `size` bytes over n processes."""
    return 2 * size * (n - 1) / n


def reduce_scatter_bytes(size: float, n: int) -> float:
    """To sum tensors of `size` bytes and keep an n-th of the sum per process."""
    return size * (n - 1) / n


def all_gather_bytes(shard: float, n: int) -> float:
    """To give every process the shards of all, each of `shard` bytes."""
    return shard * (n - 1)


def sent_bytes(model: Model, way: Way, n: int, micro_batches: int = 1) -> dict[str, float]:
    """Bytes that one of n processes sends per step, by purpose, as train/lm/step.py does it."""
    gradients = FP32 * model.parameters
    if n == 1:
        return {}
    if way == "ddp":
        return {"gradients": all_reduce_bytes(gradients, n)}
    # fsdp: the root stays whole between forward and backward; blocks are gathered for each
    gathered = all_gather_bytes(FP32 * (2 * model.blocks + model.root) / n, n)
    return {"weights": micro_batches * gathered, "gradients": reduce_scatter_bytes(gradients, n)}


# Seconds


def ring_seconds(sent: float, n: int, cluster: Cluster) -> float:
    """Seconds of all-reduce, all-gather or reduce-scatter in which each of n GPUs sends `sent` bytes.

    Over several machines rings run side by side, one per adapter, so a machine's adapters add up.
    """
    if n == 1:
        return 0.0
    speed = cluster.within if n <= cluster.node else min(cluster.within, cluster.node * cluster.between)
    return sent / (speed * cluster.reached) + cluster.latency * log2(n)


def training_step(
    model: Model,
    speed: Speed,
    cluster: Cluster,
    way: Way,
    *,
    n: int,
    sequences: int,
    T: int,
    activations: float,
    tokens_at_once: int = 32_768,
) -> Step | None:
    """One training step of `sequences` sequences of T tokens on n GPUs; None if they cannot be divided so.

    Computation: `seconds_per_token` times the tokens of a GPU, in micro batches of tokens_at_once tokens, or of one
    sequence where that is longer. No micro batch takes less time than `speed.shortest`. A micro batch
    is halved until it fits into memory; `Step.memory` says what is needed, also where one sequence does not fit.
    Communication: ddp hides the sum of gradients behind the backward pass (two thirds) of the last micro batch, fsdp
    hides all of it behind a whole micro batch.

    Args:
        activations: bytes per token that is computed at once.
    """
    if sequences % n:
        return None
    own = sequences // n  # of one GPU
    at_once = min(own, max(1, tokens_at_once // T))
    fixed = TRAINED * (model.parameters / n if way == "fsdp" else model.parameters)
    while at_once > 1 and fixed + at_once * activations * T > cluster.memory:
        at_once //= 2
    memory = fixed + at_once * activations * T
    micro_batches, micro_batch = ceil(own / at_once), max(speed.shortest, at_once * T * speed.seconds_per_token(T))
    compute = micro_batches * micro_batch
    sent = sent_bytes(model, way, n, micro_batches)
    waiting = communication = 0.0
    if sent:
        gradients = ring_seconds(sent["gradients"], n, cluster)
        communication = gradients
        if way == "ddp":
            waiting = max(0.0, gradients - micro_batch * 2 / 3)
        else:
            weights = ring_seconds(sent["weights"] / micro_batches, n, cluster) + 2 * model.layers * _hops(n, cluster)
            communication += micro_batches * weights
            last = max(0.0, weights + gradients - micro_batch)
            waiting = last + (micro_batches - 1) * max(0.0, weights - micro_batch)
    return Step(n, compute, communication, waiting, sequences * T, sum(sent.values()), memory)


def _hops(n: int, cluster: Cluster) -> float:
    return cluster.latency * log2(n)


# Serving


def sequences_per_gpu(memory: float, weights: float, state: float) -> int:
    """How many sequences a GPU holds, each with a state (or KV cache) of `state` bytes beside the weights."""
    return max(0, int((memory - weights) // state))


def decode_seconds(sequences: int, weights: float, moved: float, bandwidth: float) -> float:
    """The least seconds of one decoding step: weights are read once, and each sequence moves `moved` bytes.

    A state of fixed size is read and written; a KV cache is read, and one token of it written.
    """
    return (weights + sequences * moved) / bandwidth
