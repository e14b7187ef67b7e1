"""Sequences cut into blocks of tokens, one or more a sequence: what programs are counted by."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Blocks:
    """Blocks of `size` tokens that never straddle two sequences."""

    count: int  # how many there are, or for packed documents at most
    per_sequence: int
    first: Tensor | None  # [N+1] packed: the number of each document's first block
    owner: Tensor | None  # [count] packed: the document a block belongs to


def cut(B: int, T: int, size: int, cu_seqlens: Tensor | None) -> Blocks:
    if cu_seqlens is None:
        per_sequence = -(-T // size)
        return Blocks(B * per_sequence, per_sequence, None, None)
    N = cu_seqlens.shape[0] - 1
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    ends = torch.cumsum((lengths + size - 1) // size, 0)
    first = functional.pad(ends, (1, 0)).to(torch.int32)
    count = T // size + N  # no document wastes more than one block; the exact number would cost a host sync
    numbers = torch.arange(count, device=cu_seqlens.device)
    owner = torch.searchsorted(ends, numbers, right=True).clamp_(max=N - 1).to(torch.int32)
    return Blocks(count, 0, first, owner)
