"""Packed documents of the delta rule: one call for each, or a layout in which each begins a chunk, so that no chunk
holds tokens of two."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


def each_document(
    attend: Callable[..., tuple[Tensor, Tensor]],
    tensors: Sequence[Tensor | None],
    state: Tensor,
    bounds: Sequence[int],
) -> tuple[list[Tensor], Tensor]:
    """The outputs and the states after attend(*tensors, state) of each document that has tokens.

    tensors: [1, T, ...] each. state: a row per document. bounds: where documents begin, and where the last one ends.
    """
    outputs, states = [], list(state.split(1))
    for n, (i, j) in enumerate(pairwise(bounds)):
        if i < j:
            o, states[n] = attend(*(None if x is None else x[:, i:j] for x in tensors), states[n])
            outputs.append(o)
    return outputs, torch.cat(states)


class WholeChunks(NamedTuple):
    """Where tokens of packed documents lie if each document begins a chunk. The gaps are zeros."""

    places: Tensor  # [T]: of each token
    bounds: Tensor  # [n + 1] int32: the chunk in which each document begins, and the one after the last
    length: int  # tokens and gaps: the most that T tokens in n documents take, so that nobody waits for the GPU

    def spread(self, x: Tensor) -> Tensor:
        """x [1, T, ...] in this layout, [1, length, ...]."""
        return x.new_zeros(1, self.length, *x.shape[2:]).index_copy_(1, self.places, x)

    def gather(self, x: Tensor) -> Tensor:
        """The inverse of spread."""
        return x.index_select(1, self.places)


def whole_chunks(cu_seqlens: Tensor, T: int, size: int) -> WholeChunks:
    """The layout of T tokens with chunks of `size` tokens."""
    count = len(cu_seqlens) - 1
    bounds = functional.pad(((cu_seqlens.diff() + size - 1) // size).cumsum(0), (1, 0))
    tokens = torch.arange(T, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    places = tokens + (size * bounds - cu_seqlens)[document]
    return WholeChunks(places, bounds.to(torch.int32), (T + (size - 1) * count) // size * size)
