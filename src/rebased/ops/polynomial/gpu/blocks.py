"""Sequences cut into blocks of tokens, one or more a sequence: what programs are counted by."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Blocks(NamedTuple):
    """How many blocks there are (of packed documents at most), none of which straddles two sequences."""

    total: int
    per_sequence: int  # 0 for packed documents


def count_blocks(B: int, T: int, size: int, documents: int | None) -> Blocks:
    """Of B sequences of T tokens, or of T tokens that `documents` share."""
    if documents is None:
        per_sequence = -(-T // size)
        return Blocks(B * per_sequence, per_sequence)
    return Blocks(T // size + documents, 0)  # each wastes at most one; the exact number would cost a host sync


def find_documents(cu_seqlens: Tensor, size: int, total: int) -> tuple[Tensor, Tensor]:
    """(the number of each document's first block [N+1], the document that a block belongs to [total])."""
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    ends = torch.cumsum((lengths + size - 1) // size, 0)
    first = functional.pad(ends, (1, 0)).to(torch.int32)
    numbers = torch.arange(total, device=cu_seqlens.device)
    owner = torch.searchsorted(ends, numbers, right=True).clamp_(max=len(lengths) - 1).to(torch.int32)
    return first, owner
