# mypy: allow-untyped-defs
"""WKV on a GPU: one program a batch row and 32 channels, three numbers a channel in registers (see ops/rwkv.py).

With A_t, B_t the sums over the past and M_t = B_{t-1} + e^{u+k_t} the denominator of y_t, the forward keeps
lse = log M. Then the gradients are one pass in each direction, and no state is ever stored or computed twice:

    from the end    GA_t = e^-r GA_{t+1} + dy_{t+1}/M_{t+1},  GB_t likewise with -y dy/M   -> dk, dv, du
    from the start  dA_t/dr = e^-r (dA_{t-1}/dr - A_{t-1}),   B likewise                    -> dr

Sums travel scaled: A = a e^m with m their largest exponent so far, GA = ga e^m with m of its own. All exponents that
are ever taken are at most zero. For few long sequences time is cut into pieces, as in scan_triton.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.kernel_launch import launch
from rebased.ops.rwkv import NOTHING, WKVState, running_sums
from rebased.ops.scan_triton import BLOCK, pieces_of_time

NOTHING_ = tl.constexpr(NOTHING)


@triton.jit
def _load(ptr, t, D, channels):
    return tl.load(ptr + t * D + channels, mask=channels < D, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, value, t, D, channels):
    tl.store(ptr + t * D + channels, value.to(ptr.dtype.element_ty), mask=channels < D)


@triton.jit
def _locate(T, D, piece, BLOCK: tl.constexpr):
    """This program's channels, the offset of its row, its tokens, and the offset of its piece in [B,P,3,D]."""
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, last = part * piece, tl.minimum((part + 1) * piece, T)
    return channels, row * T * D, first, last, (row * tl.num_programs(2) + part) * 3 * D


@triton.jit
def _add(a, b, m, rate, new, a_new, b_new):
    """Fade the sums by one token and add e^new times (a_new, b_new). (m - top) - rate, and not m - rate - top, gives
    the sums what rounding took from m."""
    top = tl.maximum(m - rate, new)
    old, new = tl.exp((m - top) - rate), tl.exp(new - top)
    return old * a + new * a_new, old * b + new * b_new, top


@triton.jit
def forward_kernel(k, v, rates, bonus, starts, y, lse, ends, T, D, piece, BLOCK: tl.constexpr, SUMMARY: tl.constexpr):
    """y and lse [B,T,D], and ends [B,P,3,D], from the states at the start of each piece. SUMMARY: only the ends, from
    nothing."""
    channels, row, first, last, part = _locate(T, D, piece, BLOCK)
    rate, u = _load(rates, 0, D, channels), _load(bonus, 0, D, channels)
    if SUMMARY:
        a = tl.zeros([BLOCK], tl.float32)
        b, m = a, a + NOTHING_
    else:
        a, b = _load(starts + part, 0, D, channels), _load(starts + part, 1, D, channels)
        m = _load(starts + part, 2, D, channels)
    for t in range(first, last):
        key, value = _load(k + row, t, D, channels), _load(v + row, t, D, channels)
        if not SUMMARY:
            top = tl.maximum(m, u + key)
            past, present = tl.exp(m - top), tl.exp(u + key - top)
            den = past * b + present
            _store(y + row, (past * a + present * value) / den, t, D, channels)
            _store(lse + row, top + tl.log(den), t, D, channels)
        a, b, m = _add(a, b, m, rate, key, value, 1.0)
    _store(ends + part, a, 0, D, channels)
    _store(ends + part, b, 1, D, channels)
    _store(ends + part, m, 2, D, channels)


@triton.jit
def backward_kernel(
    k, v, rates, bonus, y, lse, dy, ends, dk, dv, du, starts, T, D, piece, BLOCK: tl.constexpr, SUMMARY: tl.constexpr
):  # fmt: skip
    """From the end: dk, dv [B,T,D], du [B,P,D], and (ga, gb, m) [B,P,3,D] from the end of each piece to its start."""
    channels, row, first, last, part = _locate(T, D, piece, BLOCK)
    rate, u = _load(rates, 0, D, channels), _load(bonus, 0, D, channels)
    du_sum = tl.zeros([BLOCK], tl.float32)
    if SUMMARY:
        ga, gb, m = du_sum, du_sum, du_sum + NOTHING_
    else:
        ga, gb = _load(ends + part, 0, D, channels), _load(ends + part, 1, D, channels)
        m = _load(ends + part, 2, D, channels)
    for i in range(first, last):
        t = first + last - 1 - i
        out, norm, do = (
            _load(y + row, t, D, channels),
            _load(lse + row, t, D, channels),
            _load(dy + row, t, D, channels),
        )
        if not SUMMARY:
            key, value = _load(k + row, t, D, channels), _load(v + row, t, D, channels)
            past, present = tl.exp(key + m), tl.exp(u + key - norm)
            bonus_grad = present * do * (value - out)
            _store(dv + row, present * do + past * ga, t, D, channels)
            _store(dk + row, bonus_grad + past * (ga * value + gb), t, D, channels)
            du_sum += bonus_grad
        ga, gb, m = _add(ga, gb, m, rate, -norm, do, -do * out)
    _store(starts + part, ga, 0, D, channels)
    _store(starts + part, gb, 1, D, channels)
    _store(starts + part, m, 2, D, channels)
    if not SUMMARY:
        _store(du + part // 3, du_sum, 0, D, channels)


@triton.jit
def rate_kernel(k, v, rates, starts, y, lse, dy, ends, dr, T, D, piece, BLOCK: tl.constexpr):
    """From the start: dr [B,P,D], the derivatives of a and b carried beside them; ends (ga, gb, m) as above."""
    channels, row, first, last, part = _locate(T, D, piece, BLOCK)
    rate = _load(rates, 0, D, channels)
    a, b = _load(starts + part, 0, D, channels), _load(starts + part, 1, D, channels)
    m = _load(starts + part, 2, D, channels)
    da = tl.zeros([BLOCK], tl.float32)
    db, dr_sum = da, da
    for t in range(first, last):
        key, value = _load(k + row, t, D, channels), _load(v + row, t, D, channels)
        out, norm, do = (
            _load(y + row, t, D, channels),
            _load(lse + row, t, D, channels),
            _load(dy + row, t, D, channels),
        )
        dr_sum += tl.exp(m - norm) * do * (da - out * db)
        top = tl.maximum(m - rate, key)
        old, new = tl.exp((m - top) - rate), tl.exp(key - top)
        da, db = old * (da - a), old * (db - b)
        a, b, m = old * a + new * value, old * b + new, top
    ga, gb = _load(ends + part, 0, D, channels), _load(ends + part, 1, D, channels)
    dr_sum += tl.exp(m + _load(ends + part, 2, D, channels)) * (da * ga + db * gb)
    _store(dr + part // 3, dr_sum, 0, D, channels)


def _launch(k: Tensor, pieces: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The grid; and T, D and the tokens of a piece."""
    batch, T, D = k.shape
    return (triton.cdiv(D, BLOCK), batch, pieces), (T, D, triton.cdiv(T, pieces))


def _join(sums: Tensor, edge: Tensor, rates: Tensor, T: int, piece: int, back: bool) -> Tensor:
    """What each piece starts from: `edge` [B,3,D] and the pieces' own sums [B,P,3,D] -> [B,P,3,D]."""
    lengths = (T - piece * torch.arange(sums.shape[1], device=sums.device)).clamp(0, piece)
    order = (lambda x: x.flip(0)) if back else (lambda x: x)
    own = order(sums.transpose(0, 1))  # [P,B,3,D]
    fade = order(lengths.view(-1, 1, 1) * rates)
    m, joined = running_sums(own[:, :, 2], own[:, :, :2].transpose(-1, -2), fade, WKVState(*edge.unbind(1)))
    inner = torch.cat([joined.transpose(-1, -2), m[1:].unsqueeze(2)], dim=2)[:-1]
    return order(torch.cat([edge.unsqueeze(0), inner])).transpose(0, 1).contiguous()


@torch.library.custom_op("rebased::wkv", mutates_args=())
def _forward(
    k: Tensor, v: Tensor, rates: Tensor, u: Tensor, start: Tensor, pieces: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """start [B,3,D]: num, den and max. Also gives lse and what each piece started from."""
    grid, shape = _launch(k, pieces)
    starts = start.unsqueeze(1).clone()
    y, lse, ends = torch.empty_like(v), torch.empty_like(k, dtype=torch.float32), _states(start, pieces)
    if pieces > 1:
        launch(forward_kernel, grid, k, v, rates, u, ends, y, lse, ends, *shape, BLOCK=BLOCK, SUMMARY=True, num_warps=1)
        starts = _join(ends, start, rates, shape[0], shape[2], back=False)
    launch(forward_kernel, grid, k, v, rates, u, starts, y, lse, ends, *shape, BLOCK=BLOCK, SUMMARY=False, num_warps=1)
    return y, ends[:, -1].clone(), lse, starts


def _states(start: Tensor, pieces: int) -> Tensor:
    return start.new_empty(start.shape[0], pieces, *start.shape[1:])


@_forward.register_fake
def _(k, v, rates, u, start, pieces):
    lse = torch.empty_like(k, dtype=torch.float32)
    return torch.empty_like(v), torch.empty_like(start), lse, _states(start, pieces)


@torch.library.custom_op("rebased::wkv_backward", mutates_args=())
def _backward(
    k: Tensor, v: Tensor, rates: Tensor, u: Tensor, y: Tensor, lse: Tensor, starts: Tensor, dy: Tensor, edge: Tensor,
    pieces: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """edge [B,3,D]: (ga, gb, m) after the last token."""
    grid, shape = _launch(k, pieces)
    dk, dv, gradients = torch.empty_like(k), torch.empty_like(v), torch.empty_like(starts)
    du, dr = (starts.new_empty(len(k), pieces, k.shape[2]) for _ in "ur")
    given, ends, options = (k, v, rates, u, y, lse, dy), edge.unsqueeze(1), {"BLOCK": BLOCK, "num_warps": 1}
    if pieces > 1:
        launch(backward_kernel, grid, *given, gradients, dk, dv, du, gradients, *shape, SUMMARY=True, **options)
        ends = _join(gradients, edge, rates, shape[0], shape[2], back=True)
    ends = ends.contiguous()
    launch(backward_kernel, grid, *given, ends, dk, dv, du, gradients, *shape, SUMMARY=False, **options)
    launch(rate_kernel, grid, k, v, rates, starts, y, lse, dy, ends, dr, *shape, **options)
    scale = torch.exp(gradients[:, 0, 2] + starts[:, 0, 2])  # into the sums as the state holds them
    dstart = torch.stack([scale * gradients[:, 0, 0], scale * gradients[:, 0, 1], torch.zeros_like(scale)], dim=1)
    return dk, dv, dr.sum((0, 1)), du.sum((0, 1)), dstart


@_backward.register_fake
def _(k, v, rates, u, y, lse, starts, dy, edge, pieces):
    return tuple(torch.empty_like(each) for each in (k, v, rates, u, edge))


def _setup(ctx, inputs, output):
    k, v, rates, u, _, ctx.pieces = inputs
    y, end, lse, starts = output
    ctx.save_for_backward(k, v, rates, u, y, lse, starts, end)


def _autograd(ctx, dy, dend, _, __):
    *tensors, end = ctx.saved_tensors
    edge = torch.stack([dend[:, 0], dend[:, 1], -end[:, 2]], dim=1)  # GA = da e^-max
    return *_backward(*tensors, dy.contiguous(), edge, ctx.pieces), None


_forward.register_autograd(_autograd, setup_context=_setup)


def scan(k: Tensor, v: Tensor, rates: Tensor, u: Tensor, state: WKVState) -> tuple[Tensor, WKVState]:
    """wkv_extend in fp32, whatever the dtype of k and v."""
    y, end, _, _ = _forward(
        k.contiguous(), v.contiguous(), rates, u, torch.stack(state, dim=1), pieces_of_time(*k.shape)
    )
    return y, WKVState(*end.unbind(1))
