"""How a call is divided: regime, chunk length, tiles, warps. Pure arithmetic, so that it can be tested without a GPU.

The cost model counts in *keys*: one key is the time that one query of one head spends on one key of width 16 with a
value of width 64, forward and backward. Measured on an H200 (benchmarks/ops.py), all in bf16:
- a query meets T / 2 keys in the quadratic regime, and half a chunk in the chunked one;
- the cost of a key is proportional to 64 + KP + VP (element-wise work on its score, and the products), 144 at widths 16
  and 64;
- a tile of 64 features costs TILE_KEYS keys at VP = 64, in proportion to 64 + VP (sums, running totals, products). It
  costs more where keys are wider than 16, because the products with a state are then in a loop.
"""

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Literal, NamedTuple

from rebased.ops.backend import shared_memory

SLICE, FEATURE_TILE = 8, 64  # columns of a slice, features of a tile: as in features.py
MAX_KEY_WIDTH = 128
MAX_VALUE_WIDTH = 128  # wider values are computed in several calls: the operator is linear in v
CHUNK = 256  # tokens
LONG = 8192  # tokens up to which features are rounded in sums: gradient errors stay below those of softmax attention
TILE_KEYS, LOOPED_TILE_KEYS = 180, 260
LARGE = 160 * 1024  # bytes of shared memory per program: A100 and H100 have more, RTX 3090 to 5090 have 99 KB

Products = Literal["bf16", "tf32", "tf32x3"]
"""What the tensor cores multiply; three products of TF32 make one of fp32."""


@dataclass(frozen=True)
class Tile:
    """How one kernel is launched."""

    rows: int  # tokens that belong to a program
    step: int  # tokens that it meets at a time; a divisor of rows
    warps: int
    stages: int
    registers: int | None = None  # at most, per thread; fewer let more programs share a multiprocessor

    @cached_property
    def options(self) -> dict[str, int]:
        """The options of Triton's compiler."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


class Tiles(NamedTuple):
    """The tile of each kernel. `sums` and `grad_sums` are those of the chunk sums, forward and backward."""

    forward: Tile
    query_grad: Tile
    key_grad: Tile
    sums: Tile
    grad_sums: Tile


class Plan(NamedTuple):
    """Sizes for one call."""

    chunk: int | None  # tokens between states; None means no states: quadratic in T
    tiles: Tiles
    group: int = 4  # feature tiles per program of the chunk sums, at most four
    hi_lo: bool = False  # True if features go into chunk sums as two bf16 numbers


class Row(NamedTuple):
    """A row of a table: tiles, and the largest sizes they are for. The first row that fits a call is taken."""

    tiles: Tiles
    KP: int = 128  # padded width of keys
    VP: int = 128  # padded width of values
    sum: int = 256  # KP + VP
    T: float = inf  # tokens
    low: bool | None = None  # only if c0 or c1 is not zero (True), or both are (False)
    full: bool = False  # only if values need no padding
    large: bool = False  # only if a program may have LARGE bytes of shared memory


def _tiles(forward: Tile, query_grad: Tile, key_grad: Tile, sums: Tile, grad_sums: Tile | None = None) -> Tiles:
    return Tiles(forward, query_grad, key_grad, sums, grad_sums or sums)


TWO_WARPS = Tile(64, 32, 2, 3)  # where four are miscompiled (docs/kernels.md)
_SUMS = Tile(64, 64, 4, 3)
_KEYS = Tile(64, 64, 4, 1, 168)
_SQUARE = Tile(64, 64, 4, 1, 128)
_STAGED = Tile(64, 64, 4, 3, 128)
_NARROW, _SMALL, _WIDE = Tile(64, 32, 4, 3), Tile(64, 32, 4, 1, 168), Tile(64, 32, 4, 2)
_WHOLE = Tile(64, 64, 4, 1)
_TALL = Tile(128, 64, 8, 3)  # two warp groups, which share keys and values
_PLAIN, _HALF, _FEW = Tile(64, 32, 4, 1), Tile(64, 16, 4, 1), Tile(64, 32, 2, 1)
_LITTLE = Tile(32, 16, 4, 1)
_SPLIT = Tile(64, 32, 4, 3, 96)  # a step of 64 is miscompiled where values are narrower than 16 and keys wider

# Where KP + VP is large, shared memory and registers are short. Where KP is above 16, products with a state are in a
# loop. These rows end every table of 32-bit products.
_WIDE_32_BITS = (
    Row(_tiles(_PLAIN, _PLAIN, _PLAIN, _PLAIN), sum=128),
    Row(_tiles(_HALF, _HALF, _HALF, _PLAIN), large=True),
    Row(_tiles(_LITTLE, _LITTLE, _LITTLE, _PLAIN)),
)
_Table = tuple[Row, ...]
TABLES: dict[tuple[Products, Literal["quadratic", "chunked"]], _Table] = {
    ("bf16", "quadratic"): (
        Row(_tiles(Tile(64, 64, 4, 3, 96), _SQUARE, _SQUARE, _SUMS), KP=16, VP=16, T=512),
        Row(_tiles(Tile(64, 64, 4, 3, 96), _SQUARE, _SQUARE, _SUMS), KP=32, VP=16, T=512, full=True),
        Row(_tiles(_STAGED, _STAGED, _SQUARE, _SUMS), KP=16, VP=16),
        Row(_tiles(_STAGED, _STAGED, _SQUARE, _SUMS), KP=32, VP=16, full=True),
        Row(_tiles(_SPLIT, _SQUARE, _SQUARE, _SUMS), KP=32, VP=16),
        Row(_tiles(Tile(64, 64, 4, 3, 96), _SQUARE, _KEYS, _SUMS), KP=32, VP=32, T=512),
        Row(_tiles(Tile(64, 64, 4, 2, 128), _SQUARE, _KEYS, _SUMS), KP=32, VP=64, T=256),
        Row(_tiles(_STAGED, _STAGED, Tile(64, 64, 4, 2, 168), _SUMS), KP=16, VP=64),
        Row(_tiles(_STAGED, _STAGED, Tile(64, 64, 4, 3, 168), _SUMS), KP=32, VP=32),
        Row(_tiles(_STAGED, _STAGED, Tile(64, 32, 4, 3, 128), _SUMS), KP=32, VP=64),
        Row(_tiles(_NARROW, Tile(64, 64, 4, 3, 168), Tile(64, 32, 4, 3, 168), _SUMS), KP=64, VP=32),
        Row(_tiles(_TALL, Tile(64, 64, 4, 3, 168), Tile(64, 32, 4, 3, 168), _SUMS), KP=64, VP=64),
        Row(_tiles(_NARROW, Tile(64, 64, 4, 3, 168), Tile(64, 32, 4, 3, 168), _SUMS), sum=192),
        Row(_tiles(_TALL, _TALL, _NARROW, _SUMS), large=True),
        Row(_tiles(_WIDE, _SMALL, _NARROW, _SUMS)),
    ),
    ("bf16", "chunked"): (
        Row(_tiles(Tile(64, 64, 2, 3, 128), Tile(64, 32, 4, 1, 96), TWO_WARPS, Tile(64, 32, 2, 4)), KP=16, VP=16),
        Row(_tiles(Tile(64, 64, 4, 1, 96), Tile(64, 32, 4, 1, 96), _KEYS, Tile(64, 32, 2, 4)), KP=16, VP=32),
        Row(_tiles(_SQUARE, _SQUARE, _KEYS, _SUMS, _NARROW), KP=16, VP=64, low=True),
        Row(_tiles(_SQUARE, _SQUARE, Tile(64, 64, 4, 2, 168), Tile(64, 32, 4, 5, 168), _SUMS), KP=16, VP=64, full=True),
        Row(_tiles(_SQUARE, _SQUARE, _KEYS, Tile(64, 32, 4, 5, 168), _SUMS), KP=16, VP=64),
        Row(_tiles(_KEYS, _KEYS, Tile(64, 64, 4, 1), _NARROW), KP=16),
        Row(_tiles(TWO_WARPS, _SQUARE, TWO_WARPS, _SUMS), KP=32, VP=32),
        Row(_tiles(_SQUARE, _SQUARE, _KEYS, _SUMS), KP=32, VP=64),
        Row(_tiles(TWO_WARPS, _KEYS, TWO_WARPS, _SUMS), KP=64, VP=32),
        Row(_tiles(_WIDE, _KEYS, _SMALL, _SUMS), KP=64, VP=64),
        Row(_tiles(TWO_WARPS, _SMALL, TWO_WARPS, _SUMS), VP=32),
        Row(_tiles(_WIDE, _SMALL, _SMALL, _SUMS), sum=192),
        Row(_tiles(_WIDE, _SMALL, _WIDE, _SUMS)),
    ),
    ("tf32", "quadratic"): (
        Row(_tiles(_WHOLE, _SQUARE, _PLAIN, _NARROW), KP=16, VP=16, low=False),
        Row(_tiles(_WHOLE, _PLAIN, _KEYS, _NARROW), KP=16, VP=16),
        Row(_tiles(_PLAIN, _PLAIN, _PLAIN, _NARROW), KP=16, VP=64),
        *_WIDE_32_BITS,
    ),
    ("tf32", "chunked"): (
        Row(_tiles(_SQUARE, _PLAIN, _KEYS, TWO_WARPS), KP=16, VP=32, T=1, low=True),  # else misaligned with a gate
        Row(_tiles(_SQUARE, _SQUARE, _KEYS, TWO_WARPS), KP=16, VP=32),
        Row(_tiles(TWO_WARPS, _PLAIN, _PLAIN, _NARROW), KP=16, VP=64),
        *_WIDE_32_BITS,
    ),
    ("tf32x3", "quadratic"): (
        Row(_tiles(_FEW, _FEW, _FEW, TWO_WARPS), KP=16, VP=32),
        Row(_tiles(_PLAIN, _PLAIN, _PLAIN, _NARROW), KP=16, VP=64),
        *_WIDE_32_BITS,
    ),
    ("tf32x3", "chunked"): (
        Row(_tiles(_FEW, _FEW, _PLAIN, TWO_WARPS), KP=16, VP=32),
        Row(_tiles(_PLAIN, _PLAIN, _PLAIN, _NARROW), KP=16, VP=64),
        *_WIDE_32_BITS,
    ),
}


def padded(width: int) -> int:
    """The width of a tensor core product: the least power of two that is at least `width` and 16."""
    return max(16, 1 << (width - 1).bit_length())


def column_slices(key_width: int) -> int:
    """The number of slices of 8 columns that keys are divided into."""
    return -(-key_width // SLICE)


def feature_tiles(key_width: int, low: bool) -> int:
    """The number of tiles of 64 features: pairs of slices, then (low: c0 or c1 is not zero) x_0 .. x_{K-1}, 1."""
    slices = column_slices(key_width)
    return slices * (slices + 1) // 2 + (-(-(key_width + 1) // FEATURE_TILE) if low else 0)


def quadratic_cost(T: int, K: int, V: int) -> float:
    """The cost of a query in the quadratic regime, in keys."""
    return T / 2 * (64 + padded(K) + padded(V)) / 144


def chunked_cost(K: int, V: int, low: bool) -> float:
    """The cost of a query in the chunked regime, in keys. It does not depend on T."""
    tile = TILE_KEYS if K <= 2 * SLICE else LOOPED_TILE_KEYS
    return quadratic_cost(CHUNK, K, V) + tile * feature_tiles(K, low) * (64 + padded(V)) / 128


SAFE_WIDTHS: set[tuple[Products, int, int]] = set()
"""(products, K, V) of calls whose kernels were found wrong on this machine: they take safe tiles."""


def safe_tiles() -> Tiles:
    """Tiles that fit every GPU and whose products read no descriptors of shared memory: Hopper's products that do so
    have 64 rows and four warps."""
    return _tiles(_LITTLE, _LITTLE, _LITTLE, _FEW)


def make_plan(T: int, K: int, V: int, *, low: bool, products: Products, has_state: bool) -> Plan:
    """The plan of a call with T tokens and widths K and V.

    low: True if c0 or c1 is not zero. has_state: True if a state goes in or out; the call is then chunked at any T.
    """
    chunked = has_state or quadratic_cost(T, K, V) > chunked_cost(K, V, low)
    tiles = find_tiles(products, "chunked" if chunked else "quadratic", T, K, V, low)
    group = 4 if K <= 2 * SLICE else 2
    return Plan(CHUNK if chunked else None, tiles, group, hi_lo=products == "bf16" and T > LONG)


def find_tiles(products: Products, regime: Literal["quadratic", "chunked"], T: int, K: int, V: int, low: bool) -> Tiles:
    """The tiles of the first row of a table that fits the call and this machine's GPUs."""
    if (products, K, V) in SAFE_WIDTHS:
        return safe_tiles()
    KP, VP, large = padded(K), padded(V), shared_memory() >= LARGE
    return next(
        row.tiles
        for row in TABLES[products, regime]
        if KP <= row.KP
        and VP <= row.VP
        and row.sum >= KP + VP
        and T <= row.T
        and row.low in (None, low)
        and (V == VP or not row.full)
        and (large or not row.large)
    )


def selection_pays(n: int, T: int, K: int, V: int, low: bool) -> bool:
    """True if n queries of T, each with up to T keys, cost less than all T queries in the better regime."""
    return n * quadratic_cost(2 * T, K, V) < T * min(quadratic_cost(T, K, V), chunked_cost(K, V, low))
