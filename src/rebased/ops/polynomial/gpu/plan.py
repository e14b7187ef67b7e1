"""How a call is cut up: chunk length, tiles, warps. Pure arithmetic, so that it can be tested without a GPU.

The cost model counts in *keys*: the time that one query of one head spends on one key of width 16 with a value of width
64, forward and backward. Measured on an H200 (benchmarks/ops.py), all in bf16:
- a query meets T / 2 keys in the quadratic regime, half a chunk in the chunked one;
- a key costs in proportion to 64 + KP + VP (elementwise work on its score, and the products), 144 at widths 16 and 64;
- a block of 64 features costs BLOCK_KEYS keys at VP = 64, in proportion to 64 + VP (sums, running totals, products),
  and more where keys are wider than 16 and the products with a state stand in a loop.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

FEATURE_TILE, FEATURE_BLOCK = 8, 64  # as in features.py
MAX_KEY_WIDTH = 128
MAX_VALUE_WIDTH = 128  # wider values are cut into slices: the operator is linear in v
CHUNK = 256
LONG = 8192  # tokens up to which features are rounded in sums, and gradients lose no more than softmax attention's
BLOCK_KEYS, LOOPED_BLOCK_KEYS = 180, 260

Products = Literal["bf16", "tf32", "tf32x3"]
"""What the tensor cores multiply; three products of TF32 make one of fp32."""


@dataclass(frozen=True)
class Tile:
    """How one kernel is launched."""

    rows: int  # tokens that belong to a program
    step: int  # tokens it meets at a time; it divides rows
    warps: int
    stages: int
    registers: int | None = None  # a thread's at most; fewer let more programs share a multiprocessor

    @cached_property
    def options(self) -> dict[str, int]:
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


@dataclass(frozen=True)
class Plan:
    """Sizes for one call. `chunk` is the number of tokens between states; None means no states: quadratic in T."""

    chunk: int | None
    forward: Tile
    query_grad: Tile
    key_grad: Tile
    sums: Tile
    group: int = 4  # feature blocks that a program of the sums takes, at most four
    grad_sums: Tile | None = None  # of the backward pass, where they differ
    whole: bool = False  # features go into sums as two numbers of bf16


TWO_WARPS = Tile(64, 32, 2, 3)  # where four are miscompiled (docs/kernels.md, benchmarks/compiled.py)


def padded(width: int) -> int:
    """The width a tensor core product is done in: a power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def feature_tiles(key_width: int) -> int:
    return -(-key_width // FEATURE_TILE)


def feature_blocks(key_width: int, low: bool) -> int:
    """Blocks of 64 features: the pairs of tiles, then (low: c0 or c1 is not zero) x_0 .. x_{K-1}, 1."""
    tiles = feature_tiles(key_width)
    return tiles * (tiles + 1) // 2 + (-(-(key_width + 1) // FEATURE_BLOCK) if low else 0)


def quadratic_cost(T: int, K: int, V: int) -> float:
    return T / 2 * (64 + padded(K) + padded(V)) / 144


def chunked_cost(K: int, V: int, low: bool) -> float:
    """Does not depend on T: that is the point."""
    block = BLOCK_KEYS if K <= 2 * FEATURE_TILE else LOOPED_BLOCK_KEYS
    return quadratic_cost(CHUNK, K, V) + block * feature_blocks(K, low) * (64 + padded(V)) / 128


def make_plan(T: int, K: int, V: int, *, low: bool, products: Products, has_state: bool) -> Plan:
    """`has_state`: a state goes in or out."""
    chunked = has_state or quadratic_cost(T, K, V) > chunked_cost(K, V, low)
    chunk = CHUNK if chunked else None
    group = 4 if K <= 2 * FEATURE_TILE else 2
    if products != "bf16":
        return _plan_in_32_bits(chunk, K, V, products, group)
    return replace(_plan_in_16_bits(chunk, T, K, V, low, group), whole=T > LONG)


def _plan_in_16_bits(chunk: int | None, T: int, K: int, V: int, low: bool, group: int) -> Plan:
    KP, VP = padded(K), padded(V)
    sums = Tile(64, 64, 4, 3)
    if KP > 32 or VP > 64:
        return _plan_of_wide(chunk, KP, VP, group)
    keys = Tile(64, 64, 4, 1, 168)
    if chunk is None:
        if VP == 16:
            keys = replace(keys, registers=128)
        if T <= 512 and VP < 64:
            return Plan(None, Tile(64, 64, 4, 3, 96), Tile(64, 64, 4, 1, 128), keys, sums, group)
        if T <= 256:
            return Plan(None, Tile(64, 64, 4, 2, 128), Tile(64, 64, 4, 1, 128), keys, sums, group)
        if VP > 16:
            keys = replace(keys, stages=2 if KP == 16 else 3)
        if KP == 32 and VP == 64:
            keys = Tile(64, 32, 4, 3, 128)
        queries = Tile(64, 64, 4, 3, 128)
        return Plan(None, queries, queries, keys, sums, group)
    queries = Tile(64, 64, 4, 1, 128)
    if K > 2 * FEATURE_TILE:  # their products with a state stand in a loop
        if VP < 64:
            return Plan(chunk, TWO_WARPS, queries, TWO_WARPS, sums, group)
        return Plan(chunk, queries, queries, keys, sums, group)
    if VP == 16:
        return Plan(chunk, Tile(64, 64, 2, 3, 128), Tile(64, 32, 4, 1, 96), TWO_WARPS, Tile(64, 32, 2, 4))
    if VP == 32:
        return Plan(chunk, Tile(64, 64, 4, 1, 96), Tile(64, 32, 4, 1, 96), keys, Tile(64, 32, 2, 4))
    if low:
        return Plan(chunk, queries, queries, keys, sums, group, Tile(64, 32, 4, 3))
    if V == VP:
        keys = replace(keys, stages=2)
    return Plan(chunk, queries, queries, keys, Tile(64, 32, 4, 5, 168), group, sums)


def _plan_of_wide(chunk: int | None, KP: int, VP: int, group: int) -> Plan:
    """In 16 bits, where shared memory and registers are short."""
    sums, widest = Tile(64, 64, 4, 3), KP + VP > 192
    if chunk is None:
        tile = Tile(64, 32, 4, 3)
        if widest:
            return Plan(None, tile, tile, tile, sums, group)
        return Plan(None, tile, Tile(64, 64, 4, 3, 168), replace(tile, registers=168), sums, group)
    if KP == 16:
        queries = Tile(64, 64, 4, 1, 168)
        return Plan(chunk, queries, queries, Tile(64, 64, 4, 1), Tile(64, 32, 4, 3), group)
    tile, small = Tile(64, 32, 4, 2), Tile(64, 32, 4, 1, 168)
    queries = replace(small, step=64) if KP + VP <= 128 else small
    if VP < 64:
        return Plan(chunk, TWO_WARPS, queries, TWO_WARPS, sums, group)
    return Plan(chunk, tile, queries, tile if widest else small, sums, group)


def _plan_in_32_bits(chunk: int | None, K: int, V: int, products: Products, group: int) -> Plan:
    if padded(K) > 32 or padded(V) > 64:
        tile = Tile(64, 32 if padded(K) + padded(V) <= 128 else 16, 4, 1)
        return Plan(chunk, tile, tile, tile, Tile(64, 32, 4, 1), group)
    tile, sums = Tile(64, 32, 4, 1), Tile(64, 32, 4, 3)
    if K > 2 * FEATURE_TILE:
        return Plan(chunk, tile, tile, tile, replace(sums, stages=1), group)
    few = replace(tile, warps=2)
    if padded(V) > 32:
        forward = replace(few, stages=3) if products == "tf32" and chunk else tile
        return Plan(chunk, forward, tile, tile, sums, group)
    if products == "tf32x3":
        return Plan(chunk, few, few, tile if chunk else few, replace(sums, warps=2), group)
    if not chunk:
        return Plan(chunk, tile, tile, tile, sums, group)
    queries = Tile(64, 64, 4, 1, 128)
    return Plan(chunk, queries, queries, replace(queries, registers=168), replace(sums, warps=2), group)
