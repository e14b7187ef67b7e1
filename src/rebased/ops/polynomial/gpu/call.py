"""What follows from the sizes of a call: its plan, the shapes of what it makes, the constants of its kernels.

Python takes longer than the kernels of a short sequence. So a Call is made once for each set of sizes and found again.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.polynomial.gpu.forward import EARLY
from rebased.ops.polynomial.gpu.plan import (
    FEATURE_TILE,
    SAFE_WIDTHS,
    Plan,
    Products,
    Tile,
    column_slices,
    feature_tiles,
    make_plan,
    padded,
)

Strides = tuple[tuple[int, ...], ...]  # of each input


class Count(NamedTuple):
    """How many tiles (or chunks) of tokens there are; none belongs to two sequences."""

    total: int  # of packed documents: at most
    per_sequence: int  # 0 for packed documents


class Documents(NamedTuple):
    """Where kernels find packed documents; all None for a plain batch."""

    cu_seqlens: Tensor | None = None  # [N+1] int32: the first token of each document, and T
    first: Tensor | None = None  # [N+1] int32: the number of the first tile (or chunk) of each document
    owner: Tensor | None = None  # [total] int32: the document of each tile (or chunk)


NO_DOCUMENTS = Documents()


def product_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which products read states: bf16 for bf16 inputs, else fp32."""
    return torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32


def rows_of(x: Tensor) -> Tensor:
    """x with a last stride of 1, which the kernels need; other strides are free."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def keeps_o_lo(v: Tensor) -> bool:
    """True if o is stored in half precision. The rounding errors of its first rows are then saved for the backward."""
    return v.dtype != torch.float32


@dataclass(frozen=True, eq=False)
class Call:
    """The sizes of a call and its plan. Compared by identity: make_call returns the same object for the same sizes."""

    B: int
    T: int
    H: int
    K: int
    V: int
    low: bool  # True if c0 or c1 is not zero
    plan: Plan
    products: Products
    documents: int | None  # number of packed documents, or None for a plain batch

    @property
    def sizes(self) -> tuple[Any, ...]:
        """All that the Call depends on."""
        return self.B, self.T, self.H, self.K, self.V, self.low, self.products, self.documents, self.plan.chunk

    @property
    def sequences(self) -> int:
        """The number of sequences: batch rows or documents."""
        return self.B if self.documents is None else self.documents

    @cached_property
    def features(self) -> dict[str, int]:
        """The constants that describe the features: slices, pairs of slices, feature tiles."""
        tiles = feature_tiles(self.K, self.low)
        return {"SLICES": column_slices(self.K), "PAIRS": feature_tiles(self.K, False), "TILES": tiles}

    def state_shapes(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of kv and z of `count` tiled states."""
        z = (count, self.H, self.features["TILES"] * FEATURE_TILE)
        return (*z, padded(self.V)), z

    @property
    def lo_like_o(self) -> bool:
        """True if sequences are so short that o_lo in the shape of o needs no more memory."""
        return self.sequences * EARLY.value >= self.B * self.T

    @property
    def o_lo_shape(self) -> tuple[int, ...]:
        """The shape of the rounding errors of the first outputs of each sequence."""
        if self.lo_like_o:
            return (self.B, self.T, self.H, self.V)
        return (self.sequences, self.H, EARLY.value, self.V)

    @property
    def gate(self) -> int:
        """Tokens over which a gate is summed up: no tile of tokens has fewer."""
        tiles = self.plan.tiles
        return min(tiles.forward.rows, tiles.query_grad.rows, tiles.key_grad.rows)

    @property
    def chunk(self) -> int:
        """Tokens between states; T if there are no states."""
        return self.plan.chunk or self.T

    def count(self, size: int) -> Count:
        """The number of tiles (or chunks) of `size` tokens."""
        if self.documents is None:
            per_sequence = -(-self.T // size)
            return Count(self.B * per_sequence, per_sequence)
        return Count(self.T // size + self.documents, 0)  # at most one too many per document: exact needs a host sync

    def find(self, cu_seqlens: Tensor | None, size: int) -> Documents:
        """Where kernels find documents that are divided into tiles (or chunks) of `size` tokens."""
        if cu_seqlens is None:
            return NO_DOCUMENTS
        cu_seqlens = cu_seqlens.to(torch.int32)
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        ends = torch.cumsum((lengths + size - 1) // size, 0)
        first = functional.pad(ends, (1, 0)).to(torch.int32)
        numbers = torch.arange(self.count(size).total, device=cu_seqlens.device)
        owner = torch.searchsorted(ends, numbers, right=True).clamp_(max=len(lengths) - 1).to(torch.int32)
        return Documents(cu_seqlens, first, owner)

    def constants(self, tile: Tile, keys: Strides, values: Strides) -> dict[str, Any]:
        """The constants of a kernel that meets queries and keys, or sums over either. Strides are those of the inputs:
        of queries and keys, and of values and their gradients.

        PRECISION is that of products not in bf16. EVEN: all tiles are full. WIDE: an offset in one batch row, of inputs
        or of what the kernels write, may not fit into 32 bits. K_UNIT and V_UNIT divide all strides; at most 16.
        """
        packed = self.documents is not None
        token = max(self.H * max(self.K, self.V), *(abs(stride[1]) for stride in (*keys, *values)))
        return {
            "K": self.K, "V": self.V, "VP": padded(self.V), **self.features,
            "PRECISION": "tf32x3" if self.products == "tf32x3" else "tf32",
            "PACKED": packed, "EVEN": not packed and self.T % max(tile.rows, tile.step) == 0,
            "WIDE": self.T * token >= 2**31, "K_UNIT": unit_of(keys), "V_UNIT": unit_of(values), **tile.options,
        }  # fmt: skip


def unit_of(strides: Strides) -> int:
    """The number, at most 16, that divides all strides but the last of each tensor."""
    return gcd(16, *(number for stride in strides for number in stride[:3]))


def prepare(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, low: bool, has_state: bool) -> Call:
    """The Call of q [B, T, H, K] and v [B, T, H, V]; has_state: True if a state goes in or out."""
    sizes = (*q.shape, v.shape[-1], None if cu_seqlens is None else cu_seqlens.shape[0] - 1)
    known = all(size is None or type(size) is int for size in sizes)  # symbols of torch.compile cannot be looked up
    make = make_call if known else make_call.__wrapped__
    return make(*sizes, low, choose_products(q), has_state)


def choose_products(q: Tensor) -> Products:
    """What the tensor cores multiply for q and k of this dtype, as torch's setting for fp32 allows."""
    if q.dtype == torch.bfloat16:
        return "bf16"
    exact = q.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "tf32x3" if exact else "tf32"


def take_safe_tiles(products: Products, K: int, V: int) -> bool:
    """From now on calls of these widths take tiles that are declared safe. False if they do already."""
    if (products, K, V) in SAFE_WIDTHS:
        return False
    SAFE_WIDTHS.add((products, K, V))
    make_call.cache_clear()
    return True


@lru_cache(maxsize=1024)
def make_call(
    B: int, T: int, H: int, K: int, V: int, documents: int | None, low: bool, products: Products, has_state: bool
) -> Call:
    """The Call of these sizes. Launches are kept per Call: after make_call.cache_clear() all are made anew."""
    plan = make_plan(T, K, V, low=low, products=products, has_state=has_state)
    return Call(B, T, H, K, V, low, plan, products, documents)
