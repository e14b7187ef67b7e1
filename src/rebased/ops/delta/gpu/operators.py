# mypy: allow-untyped-defs
"""The kernels of the delta rule as operators of torch: launches, gradients, and the check of their first results."""

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from rebased.ops.backend import shared_memory
from rebased.ops.comparison import (
    RECURRENT,
    ROUNDOFF,
    compare_calls,
    differentiate,
    pick,
    plain_torch,
    replace_tensors,
    some,
)
from rebased.ops.delta.documents import each_document, whole_chunks
from rebased.ops.delta.gpu.backward import grad_states_kernel, gradients_kernel, local_kernel
from rebased.ops.delta.gpu.forward import C, outputs_kernel, prepare_kernel, states_kernel
from rebased.ops.kernel_launch import compile_together, launch
from rebased.ops.polynomial import chunked_recurrence
from rebased.ops.polynomial.chunked_recurrence import Rule
from rebased.ops.polynomial.gpu.call import choose_products
from rebased.ops.polynomial.gpu.layout import canonical, tiled
from rebased.ops.polynomial.gpu.plan import FEATURE_TILE, LARGE, SLICE, padded
from rebased.ops.polynomial.state import PolyState
from rebased.ops.self_check import checked

CHUNK = C.value
WIDEST_KEYS = {1: 128, 2: 2 * SLICE}  # by degree, in bf16
WIDEST_EXACT = 32
"""The same of factors in fp32. With 64 and a gate the backward pass reads outside of its memory on an H200."""
WIDEST_VALUES = 128
HEADS_CHECKED = 2
DOCUMENTS_CHECKED = 8
COEFFICIENTS = {1: (0.0, 1.0, 0.0), 2: (0.0, 0.0, 1.0)}


def takes(q: Tensor, value_width: int, degree: int) -> bool:
    """True if the kernels compute with these queries and values. A unit key of one number is no variable."""
    widest = WIDEST_KEYS[degree] if q.dtype == torch.bfloat16 else min(WIDEST_KEYS[degree], WIDEST_EXACT)
    return 1 < q.shape[3] <= widest and value_width <= WIDEST_VALUES


def feature_tiles(key_width: int, degree: int) -> tuple[int, int]:
    """How many tiles of features there are, and the features of one: pairs of slices, or the key."""
    if degree == 1:
        return 1, padded(key_width)
    return 3 if key_width > SLICE else 1, FEATURE_TILE


class Sizes(NamedTuple):
    """What the kernels of a call are compiled for and launched with."""

    B: int
    T: int
    H: int
    K: int
    V: int
    degree: int
    normalise: bool
    gated: bool
    products: str

    @classmethod
    def of(cls, q: Tensor, v: Tensor, decay: Tensor | None, degree: int, normalise: bool) -> "Sizes":
        """The Sizes of a call."""
        (B, T, H, K), V = q.shape, v.shape[3]
        return cls(B, T, H, K, V, degree, normalise, decay is not None, choose_products(q))

    @property
    def chunks(self) -> int:
        """Per sequence."""
        return triton.cdiv(self.T, CHUNK)

    @property
    def KP(self) -> int:
        """K, padded."""
        return padded(self.K)

    @property
    def VP(self) -> int:
        """V, padded."""
        return padded(self.V)

    @property
    def tiles(self) -> int:
        """Of features."""
        return feature_tiles(self.K, self.degree)[0]

    @property
    def tile(self) -> int:
        """Features of a tile."""
        return feature_tiles(self.K, self.degree)[1]

    @property
    def programs(self) -> int:
        """Chunks of all heads."""
        return self.B * self.H * self.chunks

    @property
    def dtype(self) -> torch.dtype:
        """Of the factors of products."""
        return torch.bfloat16 if self.products == "bf16" else torch.float32

    @property
    def numbers(self) -> tuple[int, ...]:
        """Arguments of all kernels."""
        return self.T, self.chunks, self.programs, self.H

    def constants(self, tile: "Tile", **more: int | bool) -> dict[str, object]:
        """Of a kernel with this tile: those of all kernels, and its own."""
        shared = {"KP": self.KP, "DEGREE": self.degree, "HAS_GATE": self.gated, "PRODUCTS": self.products}
        return {**shared, **more, "num_warps": tile.warps, "num_stages": tile.stages}

    def of_values(self, tile: "Tile") -> dict[str, int]:
        """Constants of kernels that read values."""
        return {"VP": self.VP, "BV": min(tile.values, self.VP)}

    def of_states(self, tile: "Tile") -> dict[str, int]:
        """Constants of kernels that read states."""
        return {**self.of_values(tile), "FT": self.tile, "TILES": self.tiles}

    def value_tiles(self, tile: "Tile") -> int:
        """How many programs share the values of a chunk or a head."""
        return self.VP // min(tile.values, self.VP)

    def buffers(self, like: Tensor) -> "Buffers":
        """New Buffers on the device of `like`."""
        heads, tokens = self.B * self.H, self.chunks * CHUNK

        def empty(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.empty(shape, device=like.device, dtype=dtype)

        return Buffers(
            empty(2, heads, tokens, self.KP),
            empty(4, heads, tokens, dtype=torch.float32),
            empty(heads, tokens, CHUNK),
            empty(heads, tokens, self.VP),
            empty(heads, self.chunks, self.tiles * self.tile, self.VP),
        )


class Buffers(NamedTuple):
    """What the forward kernels hand to each other and to the backward pass; forward.py has the shapes."""

    qk: Tensor
    gates: Tensor
    N: Tensor
    x: Tensor
    states: Tensor


class Tile(NamedTuple):
    """How a kernel is launched."""

    values: int  # columns of values that a program takes at a time, at most
    warps: int
    stages: int


class Tiles(NamedTuple):
    """The tile of each kernel."""

    prepare: Tile
    states: Tile
    outputs: Tile
    local: Tile
    grad_states: Tile
    gradients: Tile


_PARALLEL = Tile(64, 4, 1)
NARROW = Tiles(_PARALLEL, Tile(32, 4, 2), _PARALLEL, _PARALLEL, Tile(32, 4, 2), _PARALLEL)
SMALL = NARROW._replace(grad_states=Tile(32, 4, 1), gradients=Tile(32, 8, 1))
WIDE = SMALL._replace(grad_states=Tile(64, 4, 2))
EXACT = Tiles(_PARALLEL, Tile(32, 4, 1), Tile(32, 4, 1), Tile(32, 4, 1), Tile(16, 4, 1), Tile(16, 8, 1))
FEW_VALUES = Tile(32, 2, 1)
"""Of products whose first factor is a score. Two warps, so no wgmma: for few values ptxas 12.8 gives it a descriptor
that nothing sets."""
MISCOMPILED = (32, 128)
"""KP and VP for which ptxas 12.8 gives four warps with a gate such a descriptor in the gradients."""


def choose_tiles(sizes: Sizes) -> Tiles:
    """By the width of keys and the size of a factor: registers and shared memory are short where they are large."""
    if sizes.dtype == torch.float32:
        return EXACT
    tiles = NARROW if sizes.KP <= 64 else WIDE if shared_memory() >= LARGE else SMALL
    if sizes.gated and (sizes.KP, sizes.VP) == MISCOMPILED:
        tiles = tiles._replace(gradients=SMALL.gradients)
    return tiles._replace(outputs=FEW_VALUES, local=FEW_VALUES) if FEW_VALUES.values >= sizes.VP else tiles


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride()[:3]


def to_kernels(state: Tensor, K: int, degree: int) -> Tensor:
    """A public state [B, H, F, V] in the order of the kernels, [B, H, F', VP]."""
    if degree == 1:
        return functional.pad(state, (0, padded(state.shape[3]) - state.shape[3], 0, padded(K) - K)).contiguous()
    return tiled(PolyState(state, state[..., 0]), K, COEFFICIENTS[2]).kv.contiguous()


def from_kernels(state: Tensor, K: int, V: int, degree: int) -> Tensor:
    """The inverse of to_kernels."""
    if degree == 1:
        return state[:, :, :K, :V].contiguous()
    return canonical(PolyState(state, state[..., 0]), V, K, COEFFICIENTS[2]).kv


def _attend_in_torch(q, k, v, beta, decay, initial, bounds, degree, normalise, eps):
    """o and the final state, differentiable. With `bounds` o is zero after the last document."""
    if bounds is not None:

        def attend(q, k, v, beta, decay, state):
            return _attend_in_torch(q, k, v, beta, decay, state, None, degree, normalise, eps)

        starts = (CHUNK * bounds).tolist()
        outputs, final = each_document(attend, (q, k, v, beta, decay), initial, starts)
        return torch.cat([*outputs, torch.zeros_like(v[:, starts[-1] :])], dim=1), final
    dtype, K, V = initial.dtype, q.shape[3], v.shape[3]
    q, k, u = (x.to(dtype) for x in (q, k, v))
    if normalise:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) for x in (q, k))
    decay = None if decay is None else decay.to(dtype)
    state, rule = from_kernels(initial, K, V, degree), Rule(COEFFICIENTS[degree], 1.0, dtype)
    o, after = chunked_recurrence.recur(q, k, u, decay, beta.to(dtype), state, rule)
    return o.to(v.dtype), to_kernels(after, K, degree)


def _in_torch(q, k, v, beta, decay, initial, bounds, degree, normalise, eps):
    """As _forward; without buffers, the backward pass is in torch, too."""
    return *_attend_in_torch(q, k, v, beta, decay, initial, bounds, degree, normalise, eps), *(v.new_empty(0),) * 5


def _samples(tensors, bounds):
    """Some heads of one batch row or of some packed documents: of [B, T, H, ...] or of states [B, H, F, V] (the flag).
    And the bounds of these documents."""
    (B, _, H, *_), axis = tensors[0][0].shape, 0
    heads, rows = some(H, HEADS_CHECKED), some(B, 1)[-1:]
    tokens = rows
    if bounds is not None:
        starts, axis = (CHUNK * bounds).tolist(), 1
        there = [n for n in range(len(starts) - 1) if starts[n] < starts[n + 1]]
        rows = [there[n] for n in some(len(there), DOCUMENTS_CHECKED)]
        tokens = [token for n in rows for token in range(starts[n], starts[n + 1])]
        bounds = functional.pad(bounds.diff()[rows].cumsum(0), (1, 0))
    picked = [(pick(x, 0, rows), 1) if state else (pick(x, axis, tokens), 2) for x, state in tensors]
    return [pick(x, of, heads) for x, of in picked], bounds


def _roundoff(q: Tensor) -> float:
    """Of the factors, twice: four are rounded on the way to a result (N, x, a state, a score), each by itself."""
    return 2 * {"bf16": ROUNDOFF[torch.bfloat16], "tf32": ROUNDOFF[torch.float32]}.get(choose_products(q), RECURRENT)


def _compare(args, result):
    """Errors of o and the final state, in some heads."""
    *tensors, initial, bounds, degree, normalise, eps = args
    o, final = result[:2]
    given = [*((x, False) for x in tensors), (initial, True), (o, False), (final, True)]
    (*small, o, final), bounds = _samples(given, bounds)
    parts = [o, final]
    call = (*small, bounds, degree, normalise, eps), parts
    return compare_calls(_attend_in_torch, [call], parts, _roundoff(args[0]))


def _differentiate(do, d_final, q, k, v, beta, decay, initial, bounds, degree, normalise, eps):
    def attend(q, k, v, beta, decay, initial):
        return _attend_in_torch(q, k, v, beta, decay, initial, bounds, degree, normalise, eps)

    return differentiate(attend, (q, k, v, beta, decay, initial), do, d_final)


def _backward_in_torch(
    do, d_final, q, k, v, beta, decay, initial, bounds, qk, gates, N, x, states, degree, normalise, eps
):
    """As _backward."""
    found = _differentiate(do, d_final, q, k, v, beta, decay, initial, bounds, degree, normalise, eps)
    return [q.new_empty(0) if x is None else x for x in found]


def _compare_backward(args, result):
    """Errors of all gradients, in some heads."""
    do, d_final, *given, degree, normalise, eps = args
    *tensors, initial, bounds = given[:7]
    given = [(do, False), (d_final, True), *((x, False) for x in tensors), (initial, True)]
    of = [(None if x.numel() == 0 else x, number == 5) for number, x in enumerate(result)]
    small, bounds = _samples(given + of, bounds)
    parts = _gates_by_head(small[8:])

    def law(*args):
        return _gates_by_head(_differentiate(*args))

    call = (*small[:8], bounds, degree, normalise, eps), parts
    return compare_calls(law, [call], parts, _roundoff(args[2]))


def _gates_by_head(gradients):
    """The gradients with those of gates as [B, H, T]: the largest of a head, not each by itself, says how exact they
    are. The gradient of a strong decay is what is left where far larger terms cancel."""
    return [x.transpose(1, 2) if x.ndim == 3 else x for x in gradients if x is not None]


_compiled: set[tuple[object, ...]] = set()  # kinds of calls whose kernels were compiled


def _plan(*args):
    """Both passes without data: the kernels of the first call are compiled at once."""
    args = replace_tensors(args, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))
    o, final, *buffers = _forward._init_fn(*args)
    _backward._init_fn(o, final, *args[:7], *buffers, *args[7:])


@torch.library.custom_op("rebased::delta", mutates_args=())
@checked(_in_torch, compare=_compare)
def _forward(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, initial: Tensor, bounds: Tensor | None,
    degree: int, normalise: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """o [B, T, H, V], the final state [B, H, F', VP] as initial is, and Buffers. Last strides are 1, gates dense.

    bounds: chunks in which n packed documents begin, and the one after the last (whole_chunks): B is 1, and there are n
    states. Results at tokens after the last document are not defined."""
    s = Sizes.of(q, v, decay, degree, normalise)
    if q.is_cuda and (new := (*s[3:], q.dtype, beta.dtype, bounds is None)) not in _compiled:
        _compiled.add(new)
        compile_together(lambda: _plan(q, k, v, beta, decay, initial, bounds, degree, normalise, eps), q.device)
    b = s.buffers(v)
    o, final = torch.empty(v.shape, device=v.device, dtype=v.dtype), torch.empty_like(initial)
    tiles = choose_tiles(s)
    launch(
        prepare_kernel, (s.programs,), q, k, beta, decay, b.qk, b.gates, b.N, *_strides(q), *_strides(k), *s.numbers,
        s.K, eps, **s.constants(tiles.prepare, NORMALISE=normalise),
    )  # fmt: skip
    launch(
        states_kernel, (len(initial) * s.H * s.value_tiles(tiles.states),), v, b.qk, b.gates, b.N, initial, bounds,
        b.x, b.states, final, *_strides(v), *s.numbers, s.V,
        **s.constants(tiles.states, PACKED=bounds is not None, **s.of_states(tiles.states)),
    )  # fmt: skip
    launch(
        outputs_kernel, (s.programs * s.value_tiles(tiles.outputs),), b.qk, b.gates, b.x, b.states, o, *s.numbers,
        s.V, **s.constants(tiles.outputs, **s.of_states(tiles.outputs)),
    )  # fmt: skip
    return o, final, *b


@_forward.register_fake
def _(q, k, v, beta, decay, initial, bounds, degree, normalise, eps):
    o = torch.empty(v.shape, device=v.device, dtype=v.dtype)
    return o, torch.empty_like(initial), *Sizes.of(q, v, decay, degree, normalise).buffers(v)


@torch.library.custom_op("rebased::delta_backward", mutates_args=())
@checked(_backward_in_torch, compare=_compare_backward, inputs=lambda *args: args[:8])
def _backward(
    do: Tensor, d_final: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor | None, initial: Tensor,
    bounds: Tensor | None, qk: Tensor, gates: Tensor, N: Tensor, x: Tensor, states: Tensor, degree: int,
    normalise: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, beta, decay (empty if there is none) and initial."""
    if qk.numel() == 0:  # the forward pass was in torch
        args = (do, d_final, q, k, v, beta, decay, initial, bounds, qk, gates, N, x, states, degree, normalise, eps)
        with plain_torch():
            return tuple(x.clone() for x in _backward_in_torch(*args))
    s = Sizes.of(q, v, decay, degree, normalise)
    dx, d_states, d_initial = torch.empty_like(x), torch.empty_like(states), torch.empty_like(initial)
    dv = torch.empty(v.shape, device=v.device, dtype=s.dtype)
    dq, dk = (torch.empty(q.shape, device=q.device, dtype=q.dtype) for _ in "qk")
    d_beta, d_decay = (torch.empty(beta.shape, device=q.device, dtype=torch.float32) for _ in "bg")
    tiles = choose_tiles(s)
    launch(
        local_kernel, (s.programs * s.value_tiles(tiles.local),), do, qk, gates, dx, *_strides(do), *s.numbers,
        s.V, **s.constants(tiles.local, **s.of_values(tiles.local)),
    )  # fmt: skip
    launch(
        grad_states_kernel, (len(initial) * s.H * s.value_tiles(tiles.grad_states),), do, qk, gates, N, dx, d_final,
        bounds, dv, d_states, d_initial, *_strides(do), *s.numbers, s.V,
        **s.constants(tiles.grad_states, PACKED=bounds is not None, **s.of_states(tiles.grad_states)),
    )  # fmt: skip
    launch(
        gradients_kernel, (s.programs,), do, dv, qk, gates, x, states, d_states, dq, dk, d_beta, d_decay,
        *_strides(do), *s.numbers, s.K, s.V,
        **s.constants(tiles.gradients, NORMALISE=normalise, **s.of_states(tiles.gradients)),
    )  # fmt: skip
    d_decay = d_decay.to(decay.dtype) if decay is not None else d_decay.new_empty(0)
    return dq, dk, dv.to(v.dtype), d_beta.to(beta.dtype), d_decay, d_initial


@_backward.register_fake
def _(do, d_final, q, k, v, beta, decay, initial, bounds, qk, gates, N, x, states, degree, normalise, eps):
    like = [torch.empty(each.shape, device=each.device, dtype=each.dtype) for each in (q, k, v, beta)]
    d_decay = q.new_empty(0) if decay is None else torch.empty_like(decay)
    return *like, d_decay, torch.empty_like(initial)


def _setup(ctx, inputs, output):
    *tensors, ctx.degree, ctx.normalise, ctx.eps = inputs
    ctx.save_for_backward(*tensors, *output[2:])


def _autograd(ctx, do, d_final, *_):
    saved = ctx.saved_tensors
    do = do if do.stride(3) == 1 else do.contiguous()
    found = _backward(do, d_final.contiguous(), *saved, ctx.degree, ctx.normalise, ctx.eps)
    *gradients, d_decay, d_initial = found
    return *gradients, None if saved[4] is None else d_decay, d_initial, None, None, None, None


_forward.register_autograd(_autograd, setup_context=_setup)


def attend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, *, degree: int, normalise: bool,
    eps: float, cu_seqlens: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """delta_attention: o in the dtype of v. q, k and v as a caller gives them."""
    (B, _, H, _), (tiles, tile) = q.shape, feature_tiles(q.shape[3], degree)
    rows = B if cu_seqlens is None else len(cu_seqlens) - 1
    zeros = torch.zeros(rows, H, tiles * tile, padded(v.shape[3]), device=q.device, dtype=torch.float32)
    return _call(q, k, v, log_decay, beta, zeros, cu_seqlens, degree, normalise, eps)[0]


def extend(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor, state: Tensor, *, degree: int,
    normalise: bool, eps: float, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """delta_attention_extend: o, and the state after."""
    initial = to_kernels(state, q.shape[3], degree)
    o, final = _call(q, k, v, log_decay, beta, initial, cu_seqlens, degree, normalise, eps)
    return o, from_kernels(final, q.shape[3], v.shape[3], degree)


def _call(q, k, v, decay, beta, initial, cu_seqlens, degree, normalise, eps):
    given, bounds = [q, k, v, beta, decay], None
    if cu_seqlens is not None:
        layout = whole_chunks(cu_seqlens, q.shape[1], CHUNK)
        given, bounds = [None if x is None else layout.spread(x) for x in given], layout.bounds
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in given[:3])
    beta, decay = (None if x is None else x.contiguous() for x in given[3:])
    o, final = _forward(q, k, v, beta, decay, initial, bounds, degree, normalise, eps)[:2]
    return o if bounds is None else layout.gather(o), final
