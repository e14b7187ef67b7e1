"""Packed documents: several documents in the rows of one batch, none of which sees another.

`cu_seqlens` [n+1] says where documents begin in the B*T tokens of a batch, row after row; its last number is B*T. Every
row begins a document. Two equal numbers are a document without tokens, so that n can be the same in all batches.
"""

import logging
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from rebased.mixers.checks import call_extend, check_extended, check_output
from rebased.mixers.contract import Isolating, mixer_name
from rebased.mixers.slots import join_rows, split_rows
from rebased.ops.backend import to_device

_log = logging.getLogger("rebased")


def forward_documents(mixer: nn.Module, x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return mixer(x) with documents kept apart: x [B,T,D], cu_seqlens [n+1] -> [B,T,D].

    A mixer without `forward_documents` is called once per document.
    """
    if x.numel() == 0:
        return mixer(x)
    if isinstance(mixer, Isolating):
        return mixer.forward_documents(x, cu_seqlens)
    _warn_once(mixer_name(mixer))
    tokens = x.reshape(1, -1, x.shape[2])
    documents = [tokens[:, i:j] for i, j in pairwise(cu_seqlens.tolist()) if i < j]
    outputs = [check_output(mixer, document, mixer(document)) for document in documents]
    return torch.cat(outputs, dim=1).reshape(x.shape)


@runtime_checkable
class ExtendsDocuments(Protocol):
    """A mixer with its own way to read several sequences of different lengths at once, each after a state.

    Its state has a fixed size, with one row per sequence. A mixer whose state grows has `extend_caches` instead
    (mixers/attention.py). Other mixers read them one by one.
    """

    def extend_documents(self, x: Tensor, cu_seqlens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return (y [1,N,D], state after x) of packed documents x [1,N,D], none of them empty.

        cu_seqlens [n+1] says where documents begin; row i of the state, before and after, is that of document i.
        """


def extend_documents(
    mixer: Any, x: Tensor, lengths: Sequence[int], states: Sequence[Any], cu_seqlens: Tensor | None = None
) -> tuple[Tensor, list[Any]]:
    """Return (y [1,N,D], states after x) of packed documents x [1,N,D] of these lengths, each of which follows a state.

    States are those of `extend` at B = 1. It is mixer.extend() of each document by itself, up to rounding.
    `cu_seqlens` is start_numbers(lengths, x.device), which a model makes once for all its layers.
    """
    if isinstance(mixer, ExtendsDocuments) and len(lengths) > 1:
        if cu_seqlens is None:
            cu_seqlens = start_numbers(lengths, x.device)
        own: Any = mixer
        result = own.extend_documents(x, cu_seqlens, join_rows(states))
        y, after = check_extended(own, x, result, "extend_documents")
        return y, split_rows(after, len(lengths))
    if hasattr(mixer, "extend_caches") and len(lengths) > 1:
        y, caches = check_extended(mixer, x, mixer.extend_caches(x, lengths, states), "extend_caches")
        return y, caches
    outputs, found = [], []
    for document, state in zip(x.split(list(lengths), dim=1), states, strict=True):
        y, after = call_extend(mixer, document, state)
        outputs.append(y)
        found.append(after)
    return torch.cat(outputs, dim=1), found


def start_numbers(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the cu_seqlens [n+1] of documents of these lengths, packed one after the other."""
    return to_device([0, *accumulate(lengths)], torch.int32, device)


def document_numbers(cu_seqlens: Tensor, count: int) -> Tensor:
    """Return the number of the document that each of `count` tokens belongs to, from 0: cu_seqlens [n+1] -> [count]."""
    tokens = torch.arange(count, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, tokens, right=True) - 1


def positions_in_documents(cu_seqlens: Tensor, tokens: Tensor) -> Tensor:
    """Return where each token stands in its own document, from 0: tokens [B,T,...] -> [B,T]. Checks cu_seqlens."""
    B, T = tokens.shape[:2]
    check_documents(cu_seqlens, B, T, tokens.device)
    starts = cu_seqlens[document_numbers(cu_seqlens, B * T)]
    return (torch.arange(B * T, device=tokens.device) - starts).view(B, T)


def space_documents(x: Tensor, cu_seqlens: Tensor, gap: int) -> tuple[Tensor, Tensor]:
    """Return all documents in one row with `gap` zero tokens after each, and the place of each token in that row.

    x [B,T,D], cu_seqlens [n+1] -> [1, B*T + n*gap, D] and [B*T]. An operator that looks back at most `gap` tokens then
    sees nothing of another document.
    """
    tokens = x.reshape(1, -1, x.shape[2])
    documents = document_numbers(cu_seqlens, tokens.shape[1])
    places = torch.arange(tokens.shape[1], device=x.device) + gap * documents
    length = tokens.shape[1] + gap * (len(cu_seqlens) - 1)
    return tokens.new_zeros(1, length, x.shape[2]).index_copy(1, places, tokens), places


def follow_states(x: Tensor, cu_seqlens: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return packed documents in one row, each after the last inputs in its state; the places of their tokens; and the
    last inputs after them.

    x [1,N,D], cu_seqlens [n+1], state [n,gap,D] -> [1, N + n*gap, D], [N] and [n,gap,D]. An operator that looks back at
    most `gap` tokens then sees each document after its own state.
    """
    (N, D), (count, gap) = x.shape[1:], state.shape[:2]
    places = torch.arange(N, device=x.device) + gap * (document_numbers(cu_seqlens, N) + 1)
    offsets = gap * torch.arange(count, device=x.device).unsqueeze(1) + torch.arange(gap, device=x.device)  # [n,gap]
    before, last = (cu_seqlens[:-1].unsqueeze(1) + offsets, cu_seqlens[1:].unsqueeze(1) + offsets)
    seen = x.new_empty(1, N + gap * count, D)
    seen.index_copy_(1, places, x).index_copy_(1, before.flatten(), state.to(x.dtype).flatten(0, 1).unsqueeze(0))
    return seen, places, seen[0, last]


def check_documents(cu_seqlens: Tensor, B: int, T: int, device: torch.device) -> None:
    """Check cu_seqlens of B*T tokens. On a GPU its numbers are not looked at: the host would have to wait for them."""
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or len(cu_seqlens) < 2:
        raise ValueError(
            "cu_seqlens must be whole numbers [0, ..., B*T], one axis; "
            f"it is {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and the tokens are on {device}; move one of them")
    if device.type != "cpu" or torch.compiler.is_compiling():
        return
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != B * T or any(i > j for i, j in pairwise(starts)):
        raise ValueError(f"cu_seqlens must rise from 0 to B*T = {B * T}; it is {starts[:4]} ... {starts[-1]}")
    missing = set(range(0, B * T, max(T, 1))) - set(starts)
    if missing:
        raise ValueError(f"every row begins a document, so cu_seqlens must hold {min(missing)}, where a row begins")


@cache
def _warn_once(name: str) -> None:
    _log.warning("mixer %r has no forward_documents: it reads documents one by one, slowly where many are short", name)
