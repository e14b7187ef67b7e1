"""Context parallelism as mixers see it: several processes (ranks) share one sequence, each holding one shard of it.

All shards are equally long. Rank 0 holds the first tokens, the last rank the last ones.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

GatherEarlier = Callable[[Tensor], Tensor]
"""Sends a tensor [...] to all later ranks and returns those of the n earlier ranks, [n, ...], in the order of ranks.

n is 0 on rank 0. Gradients flow through it. Every rank must call it equally often, or the ranks wait for each other.
"""


@runtime_checkable
class Shardable(Protocol):
    """A mixer that can compute one shard of a sequence while other ranks compute the others."""

    def forward_shard(self, x: Tensor, gather_earlier: GatherEarlier) -> Tensor:
        """Return what forward() of the whole sequence gives at the tokens of this shard: x [B,T,D] -> [B,T,D]."""


def can_shard(mixer: nn.Module) -> bool:
    """Return True if the mixer has `forward_shard`."""
    return isinstance(mixer, Shardable)


def tokens_before(x: Tensor, gather_earlier: GatherEarlier, count: int) -> Tensor:
    """Return the last `count` tokens before this shard, or all of them if there are fewer.

    x [B,T,...] holds one entry per token of this shard. The result is [B,s,...] with s <= count, and s = 0 on rank 0.
    """
    gathered = gather_earlier(_last(x, count))  # [n,B,min(T,count),...]
    return _last(gathered.transpose(0, 1).flatten(1, 2), count)


def _last(x: Tensor, count: int) -> Tensor:
    return x[:, max(0, x.shape[1] - count) :]
