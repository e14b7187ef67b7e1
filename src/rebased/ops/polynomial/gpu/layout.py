"""The order of features in a public state and in the kernels: what stands where.

Inside, a state is tiled: kv [sequence, H, F', VP] and z [sequence, H, F'], F' in feature blocks of 64 (features.py), so
that the kernels need no gathers. `tiled` and `canonical` translate from and to the public PolyState.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.polynomial.gpu.plan import FEATURE_BLOCK, FEATURE_TILE, feature_tiles, padded
from rebased.ops.polynomial.state import Coefficients, PolyState, feature_count, query_weights


@lru_cache(maxsize=64)
def _orders(K: int, coefficients: tuple[bool, bool, bool], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of each tiled feature its public number (F: none); of each public feature the two tiled ones that hold it."""
    has0, has1, has2 = coefficients
    F = feature_count(K, tuple(map(float, coefficients)))  # type: ignore[arg-type]
    first_linear, first_pair = int(has0), int(has0) + has1 * K
    tiles = feature_tiles(K)
    numbers = []
    for a in range(tiles):
        for b in range(a, tiles):
            for i in range(a * FEATURE_TILE, (a + 1) * FEATURE_TILE):
                for j in range(b * FEATURE_TILE, (b + 1) * FEATURE_TILE):
                    m, n = min(i, j), max(i, j)
                    numbers.append(first_pair + m * K - m * (m - 1) // 2 + n - m if has2 and n < K else F)
    if has0 or has1:
        linear = [first_linear + f if has1 else F for f in range(K)] + [0 if has0 else F]
        numbers += linear + [F] * (-len(linear) % FEATURE_BLOCK)
    where = {number: place for place, number in enumerate(numbers)}
    mirror = {number: place for place, number in reversed(list(enumerate(numbers)))}
    orders = (numbers, [where[number] for number in range(F)], [mirror[number] for number in range(F)])
    with torch.inference_mode(False):  # kept, and perhaps first asked for where nothing may be saved for a backward
        to_tiled, one, other = (torch.tensor(order, device=device) for order in orders)
    return to_tiled, one, other


def _which(coefficients: Coefficients) -> tuple[bool, bool, bool]:
    c0, c1, c2 = coefficients
    return c0 != 0, c1 != 0, c2 != 0


def tiled(state: PolyState, K: int, coefficients: Coefficients) -> PolyState:
    """kv [B,H,F,V] and z [B,H,F] -> [B,H,F',VP] and [B,H,F']."""
    order, _, _ = _orders(K, _which(coefficients), state.z.device)
    V = state.kv.shape[-1]
    kv = functional.pad(state.kv, (0, padded(V) - V, 0, 1))
    return PolyState(kv.index_select(2, order), functional.pad(state.z, (0, 1)).index_select(2, order))


def canonical(state: PolyState, V: int, K: int, coefficients: Coefficients) -> PolyState:
    """The way back. Reads both x_i x_j and x_j x_i, so that its gradient is symmetric, as the kernels want it."""
    _, one, other = _orders(K, _which(coefficients), state.z.device)
    kv, z = ((x.index_select(2, one) + x.index_select(2, other)) / 2 for x in state)
    return PolyState(kv[..., :V].contiguous(), z)  # no more memory than a state needs


@lru_cache(maxsize=64)
def monomials(K: int, coefficients: Coefficients, scale: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The two factors of each public feature, K standing for 1, and what stands before it on the query's side."""
    c0, c1, c2 = coefficients
    pairs = [(K, K)] * (c0 != 0) + [(i, K) for i in range(K)] * (c1 != 0)
    pairs += [(i, j) for i in range(K) for j in range(i, K)] * (c2 != 0)
    first, second = torch.tensor(pairs, dtype=torch.int32).T.contiguous().to(device)
    return first, second, query_weights(K, coefficients, scale, device=device, dtype=torch.float32)
