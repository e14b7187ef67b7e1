"""The order of features in a public state and in the kernels.

In the kernels a state is tiled: kv [sequences, H, F', VP] and z [sequences, H, F'], with F' in feature tiles of 64
(features.py), so that they need no gathers. `tiled` and `canonical` convert from and to the public PolyState.
"""

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.polynomial.gpu.plan import FEATURE_TILE, SLICE, column_slices, padded
from rebased.ops.polynomial.state import Coefficients, PolyState, cached, feature_count, query_weights


@cached
def _orders(K: int, coefficients: tuple[bool, bool, bool], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The public number of each tiled feature (F for none); and the two tiled features of each public feature."""
    has0, has1, has2 = coefficients
    F = feature_count(K, tuple(map(float, coefficients)))  # type: ignore[arg-type]
    first_linear, first_pair = int(has0), int(has0) + has1 * K
    slices = column_slices(K)
    numbers = []
    for a in range(slices):
        for b in range(a, slices):
            for i in range(a * SLICE, (a + 1) * SLICE):
                for j in range(b * SLICE, (b + 1) * SLICE):
                    m, n = min(i, j), max(i, j)
                    numbers.append(first_pair + m * K - m * (m - 1) // 2 + n - m if has2 and n < K else F)
    if has0 or has1:
        linear = [first_linear + f if has1 else F for f in range(K)] + [0 if has0 else F]
        numbers += linear + [F] * (-len(linear) % FEATURE_TILE)
    where = {number: place for place, number in enumerate(numbers)}
    mirror = {number: place for place, number in reversed(list(enumerate(numbers)))}
    orders = (numbers, [where[number] for number in range(F)], [mirror[number] for number in range(F)])
    with torch.inference_mode(False):  # cached for later calls, which may need gradients
        to_tiled, one, other = (torch.tensor(order, device=device) for order in orders)
    return to_tiled, one, other


def _which(coefficients: Coefficients) -> tuple[bool, bool, bool]:
    c0, c1, c2 = coefficients
    return c0 != 0, c1 != 0, c2 != 0


def tiled(state: PolyState, K: int, coefficients: Coefficients) -> PolyState:
    """A public state in the order of the kernels: kv [B, H, F, V], z [B, H, F] -> [B, H, F', VP] and [B, H, F']."""
    order, _, _ = _orders(K, _which(coefficients), state.z.device)
    V = state.kv.shape[-1]
    kv = functional.pad(state.kv, (0, padded(V) - V, 0, 1))
    return PolyState(kv.index_select(2, order), functional.pad(state.z, (0, 1)).index_select(2, order))


def canonical(state: PolyState, V: int, K: int, coefficients: Coefficients) -> PolyState:
    """A tiled state in the public order: the inverse of `tiled`.

    It reads both x_i x_j and x_j x_i, so that its gradient is symmetric, as the kernels need it.
    """
    _, one, other = _orders(K, _which(coefficients), state.z.device)
    kv, z = ((x.index_select(2, one) + x.index_select(2, other)) / 2 for x in state)
    return PolyState(kv[..., :V].contiguous(), z)  # no more memory than a state needs


def public_gradient(state: PolyState, V: int, K: int, coefficients: Coefficients) -> PolyState:
    """The gradient of a public state from that of the same state tiled."""
    order, _, _ = _orders(K, _which(coefficients), state.z.device)
    F = feature_count(K, coefficients)  # which also stands for no feature
    kv, z = (x.new_zeros(*x.shape[:2], F + 1, *x.shape[3:]).index_add(2, order, x) for x in state)
    return PolyState(kv[:, :, :F, :V], z[:, :, :F])


@cached
def monomials(K: int, coefficients: Coefficients, scale: float, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The two factors of each public feature, where K means 1, and its weight on the query side: three tensors [F]."""
    c0, c1, c2 = coefficients
    pairs = [(K, K)] * (c0 != 0) + [(i, K) for i in range(K)] * (c1 != 0)
    pairs += [(i, j) for i in range(K) for j in range(i, K)] * (c2 != 0)
    first, second = torch.tensor(pairs, dtype=torch.int32).T.contiguous().to(device)
    return first, second, query_weights(K, coefficients, scale, device=device, dtype=torch.float32)
