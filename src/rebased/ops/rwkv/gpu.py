# mypy: allow-untyped-defs
"""WKV on a GPU: one program per batch row and 32 channels, three numbers per channel in registers (see state.py).

A_t and B_t are the sums over the past and M_t = B_{t-1} + e^{u+k_t} is the denominator of y_t. The forward stores
lse = log M. The gradients are then one pass in each direction, and no state is stored or computed twice:

    from the end    GA_t = e^-r GA_{t+1} + dy_{t+1}/M_{t+1},  GB_t likewise with -y dy/M   -> dk, dv, du
    from the start  dA_t/dr = e^-r (dA_{t-1}/dr - A_{t-1}),   B likewise                    -> dr

Sums are scaled: A = a e^m with m their largest exponent so far, GA = ga e^m with another m. Every exponent that exp is
applied to is at most zero. As in scan/gpu.py, tokens are loaded GROUP at a time, and time is cut into chunks
where B * D is small.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.comparison import RECURRENT, ROUNDOFF, compare_calls, differentiate, some_channels
from rebased.ops.kernel_launch import launch
from rebased.ops.rwkv import chunked
from rebased.ops.rwkv.chunked import running_sums
from rebased.ops.rwkv.state import NOTHING, WKVState
from rebased.ops.scan.gpu import count_chunks
from rebased.ops.self_check import checked

NOTHING_ = tl.constexpr(NOTHING)
CHANNELS = 32  # per program: one warp
GROUP = 8  # tokens that are loaded at once
LARGEST_EXPONENT = 64.0  # up to which results are checked: beyond, fp32 has too few digits of exponents
OPTIONS = {"CHANNELS": CHANNELS, "GROUP": GROUP, "num_warps": 1}


@triton.jit
def _load(ptr, t, D, channels):
    """[CHANNELS] of token t of [T, D], in fp32."""
    return tl.load(ptr + t * D + channels, mask=channels < D, other=0.0).to(tl.float32)


@triton.jit
def _load_group(ptr, t, first, last, D, channels, GROUP: tl.constexpr, BACK: tl.constexpr):
    """GROUP tokens of [T, D] from t on (BACK: from t backwards), a tuple of [CHANNELS] in fp32; zero outside of the
    chunk."""
    rows = ()
    for i in tl.static_range(GROUP):
        at = t - i if BACK else t + i
        mask = (channels < D) & (at >= first) & (at < last)
        rows += (tl.load(ptr + at * D + channels, mask=mask, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return rows


@triton.jit
def _store(ptr, value, t, D, channels):
    """Stores [CHANNELS] at token t of [T, D]."""
    tl.store(ptr + t * D + channels, value.to(ptr.dtype.element_ty), mask=channels < D)


@triton.jit
def _locate(T, D, length, CHANNELS: tl.constexpr):
    """This program's channels, the offset of its row, its first and last token, and the offset of its chunk in
    [B, P, 3, D], P being the number of chunks."""
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(2)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    first, last = chunk * length, tl.minimum((chunk + 1) * length, T)
    return channels, row * T * D, first, last, (row * tl.num_programs(2) + chunk) * 3 * D


@triton.jit
def _add(a, b, m, rate, new, a_new, b_new):
    """The sums faded by one token, plus e^new times (a_new, b_new). The order (m - top) - rate gives the sums back what
    rounding took from m; m - rate - top would not."""
    top = tl.maximum(m - rate, new)
    old, new = tl.exp((m - top) - rate), tl.exp(new - top)
    return old * a + new * a_new, old * b + new * b_new, top


@triton.jit
def forward_kernel(
    k, v, rates, bonus, starts, y, lse, ends, T, D, length,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, SUMMARY: tl.constexpr,
):  # fmt: skip
    """y and lse [B, T, D], and ends [B, P, 3, D], from the state at the start of each chunk. SUMMARY: only the ends,
    from the empty state."""
    channels, row, first, last, chunk = _locate(T, D, length, CHANNELS)
    rate, u = _load(rates, 0, D, channels), _load(bonus, 0, D, channels)
    if SUMMARY:
        a = tl.zeros([CHANNELS], tl.float32)
        b, m = a, a + NOTHING_
    else:
        a, b = _load(starts + chunk, 0, D, channels), _load(starts + chunk, 1, D, channels)
        m = _load(starts + chunk, 2, D, channels)
    for group in range(first, last, GROUP):
        keys = _load_group(k + row, group, first, last, D, channels, GROUP, False)
        values = _load_group(v + row, group, first, last, D, channels, GROUP, False)
        for i in tl.static_range(GROUP):
            if group + i < last:
                key, value = keys[i], values[i]
                if not SUMMARY:
                    top = tl.maximum(m, u + key)
                    past, present = tl.exp(m - top), tl.exp(u + key - top)
                    den = past * b + present
                    _store(y + row, (past * a + present * value) / den, group + i, D, channels)
                    _store(lse + row, top + tl.log(den), group + i, D, channels)
                a, b, m = _add(a, b, m, rate, key, value, 1.0)
    _store(ends + chunk, a, 0, D, channels)
    _store(ends + chunk, b, 1, D, channels)
    _store(ends + chunk, m, 2, D, channels)


@triton.jit
def backward_kernel(
    k, v, rates, bonus, y, lse, dy, ends, dk, dv, du, starts, T, D, length,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, SUMMARY: tl.constexpr,
):  # fmt: skip
    """From the end: dk, dv [B, T, D], du [B, P, D], and starts: (ga, gb, m) [B, P, 3, D] at the start of each chunk."""
    channels, row, first, last, chunk = _locate(T, D, length, CHANNELS)
    rate, u = _load(rates, 0, D, channels), _load(bonus, 0, D, channels)
    du_sum = tl.zeros([CHANNELS], tl.float32)
    if SUMMARY:
        ga, gb, m = du_sum, du_sum, du_sum + NOTHING_
    else:
        ga, gb = _load(ends + chunk, 0, D, channels), _load(ends + chunk, 1, D, channels)
        m = _load(ends + chunk, 2, D, channels)
    for done in range(0, last - first, GROUP):
        group = last - 1 - done
        outs = _load_group(y + row, group, first, last, D, channels, GROUP, True)
        norms = _load_group(lse + row, group, first, last, D, channels, GROUP, True)
        dos = _load_group(dy + row, group, first, last, D, channels, GROUP, True)
        if not SUMMARY:
            keys = _load_group(k + row, group, first, last, D, channels, GROUP, True)
            values = _load_group(v + row, group, first, last, D, channels, GROUP, True)
        for i in tl.static_range(GROUP):
            if group - i >= first:
                out, norm, do = outs[i], norms[i], dos[i]
                if not SUMMARY:
                    key, value = keys[i], values[i]
                    past, present = tl.exp(key + m), tl.exp(u + key - norm)
                    bonus_grad = present * do * (value - out)
                    _store(dv + row, present * do + past * ga, group - i, D, channels)
                    _store(dk + row, bonus_grad + past * (ga * value + gb), group - i, D, channels)
                    du_sum += bonus_grad
                ga, gb, m = _add(ga, gb, m, rate, -norm, do, -do * out)
    _store(starts + chunk, ga, 0, D, channels)
    _store(starts + chunk, gb, 1, D, channels)
    _store(starts + chunk, m, 2, D, channels)
    if not SUMMARY:
        _store(du + chunk // 3, du_sum, 0, D, channels)


@triton.jit
def rate_kernel(
    k, v, rates, starts, y, lse, dy, ends, dr, T, D, length, CHANNELS: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """From the start: dr [B, P, D], with the derivatives of a and b beside them; ends: (ga, gb, m) at the end of each
    chunk."""
    channels, row, first, last, chunk = _locate(T, D, length, CHANNELS)
    rate = _load(rates, 0, D, channels)
    a, b = _load(starts + chunk, 0, D, channels), _load(starts + chunk, 1, D, channels)
    m = _load(starts + chunk, 2, D, channels)
    da = tl.zeros([CHANNELS], tl.float32)
    db, dr_sum = da, da
    for group in range(first, last, GROUP):
        keys = _load_group(k + row, group, first, last, D, channels, GROUP, False)
        values = _load_group(v + row, group, first, last, D, channels, GROUP, False)
        outs = _load_group(y + row, group, first, last, D, channels, GROUP, False)
        norms = _load_group(lse + row, group, first, last, D, channels, GROUP, False)
        dos = _load_group(dy + row, group, first, last, D, channels, GROUP, False)
        for i in tl.static_range(GROUP):
            if group + i < last:
                dr_sum += tl.exp(m - norms[i]) * dos[i] * (da - outs[i] * db)
                top = tl.maximum(m - rate, keys[i])
                old, new = tl.exp((m - top) - rate), tl.exp(keys[i] - top)
                da, db = old * (da - a), old * (db - b)
                a, b, m = old * a + new * values[i], old * b + new, top
    ga, gb = _load(ends + chunk, 0, D, channels), _load(ends + chunk, 1, D, channels)
    dr_sum += tl.exp(m + _load(ends + chunk, 2, D, channels)) * (da * ga + db * gb)
    _store(dr + chunk // 3, dr_sum, 0, D, channels)


def _launch(k: Tensor, chunks: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The grid; and T, D and the tokens per chunk."""
    batch, T, D = k.shape
    return (triton.cdiv(D, CHANNELS), batch, chunks), (T, D, triton.cdiv(T, chunks))


def _join(sums: Tensor, edge: Tensor, rates: Tensor, T: int, length: int, back: bool) -> Tensor:
    """What each chunk starts from: edge [B, 3, D] and the sums of each chunk [B, P, 3, D] -> [B, P, 3, D]."""
    lengths = (T - length * torch.arange(sums.shape[1], device=sums.device)).clamp(0, length)
    order = (lambda x: x.flip(0)) if back else (lambda x: x)
    own = order(sums.transpose(0, 1))  # [P,B,3,D]
    fade = order(lengths.view(-1, 1, 1) * rates)
    m, joined = running_sums(own[:, :, 2], own[:, :, :2].transpose(-1, -2), fade, WKVState(*edge.unbind(1)))
    inner = torch.cat([joined.transpose(-1, -2), m[1:].unsqueeze(2)], dim=2)[:-1]
    return order(torch.cat([edge.unsqueeze(0), inner])).transpose(0, 1).contiguous()


def _scan_in_torch(k, v, rates, u, num, den, top):
    """y, and num and den at the end."""
    y, end = chunked.scan(k.to(rates.dtype), v.to(rates.dtype), rates, u, WKVState(num, den, top))
    return y.to(v.dtype), *end


def _in_torch(k, v, rates, u, start, chunks):
    """As _forward, with as many starts as it is asked for."""
    length = triton.cdiv(k.shape[1], chunks)
    ys, starts, state = [], [], start.unbind(1)
    for t in range(0, k.shape[1], length):
        starts.append(torch.stack(state, dim=1))
        y, *state = _scan_in_torch(k[:, t : t + length], v[:, t : t + length], rates, u, *state)
        ys.append(y)
    starts += [starts[-1]] * (chunks - len(starts))
    y = torch.cat(ys, dim=1)
    return y, torch.stack(state, dim=1), _log_sums(k, rates, u, start), torch.stack(starts, dim=1)


def _log_sums(k, rates, u, start):
    """ln of the denominator of each output: [B, T, D]."""
    keys, state = k.to(rates.dtype).transpose(0, 1), WKVState(*start.unbind(1))
    ones = torch.ones(*keys.shape, 2, dtype=keys.dtype, device=keys.device)
    m, sums = running_sums(keys, ones, rates.expand(len(keys), 1, -1), state)
    den = torch.cat([state.den.unsqueeze(0), sums[..., 1]])[:-1]
    largest = torch.maximum(m[:-1], u + keys)
    return (largest + ((m[:-1] - largest).exp() * den + (u + keys - largest).exp()).log()).transpose(0, 1)


def _compare(args, result):
    """Errors of y, ln of the denominators and the state at the end, in some channels; None as _compare_backward."""
    if args[0].abs().max() > LARGEST_EXPONENT:
        return None
    k, v, rates, u, start, _ = args
    y, end, lse, _ = result
    (k, v, rates, u, start), (y, end, lse) = some_channels((k, v, rates, u, start), (y, end, lse))
    ends = end[:, :2] * (end[:, 2:]).exp()

    def law(k, v, rates, u, start):
        y, num, den, top = _scan_in_torch(k, v, rates, u, *start.unbind(1))
        return y, torch.stack([num, den], dim=1) * top.unsqueeze(1).exp(), _log_sums(k, rates, u, start)

    parts = [y, ends, lse]
    return compare_calls(law, [((k, v, rates, u, start), parts)], parts, RECURRENT)


def _backward_in_torch(k, v, rates, u, y, lse, starts, dy, edge, chunks):
    """As _backward."""
    num, den, top = starts[:, 0].unbind(1)
    da, db, _ = edge.unbind(1)

    def scan(k, v, rates, u, num, den):
        y, a, b, _ = _scan_in_torch(k, v, rates, u, num, den, top)
        return y, a, b

    dk, dv, drates, du, dnum, dden = differentiate(scan, (k, v, rates, u, num, den), dy, da, db)
    return dk, dv, drates, du, torch.stack([dnum, dden, torch.zeros_like(dnum)], dim=1)


def _compare_backward(args, result):
    """Errors in some channels; None if exponents are too large."""
    if args[0].abs().max() > LARGEST_EXPONENT:
        return None
    small, parts = some_channels(args, result)
    wide = args[1].dtype == torch.float32
    return compare_calls(_backward_in_torch, [(small, parts)], parts, RECURRENT if wide else ROUNDOFF[args[1].dtype])


@torch.library.custom_op("rebased::wkv", mutates_args=())
@checked(_in_torch, compare=_compare)
def _forward(
    k: Tensor, v: Tensor, rates: Tensor, u: Tensor, start: Tensor, chunks: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y [B, T, D], the state at the end [B, 3, D], lse [B, T, D] and the state at the start of each chunk [B, P, 3, D].

    start [B, 3, D]: num, den and max."""
    grid, shape = _launch(k, chunks)
    starts = start.unsqueeze(1).clone()
    y, lse, ends = torch.empty_like(v), torch.empty_like(k, dtype=torch.float32), _states(start, chunks)
    if chunks > 1:
        launch(forward_kernel, grid, k, v, rates, u, ends, y, lse, ends, *shape, SUMMARY=True, **OPTIONS)
        starts = _join(ends, start, rates, shape[0], shape[2], back=False)
    launch(forward_kernel, grid, k, v, rates, u, starts, y, lse, ends, *shape, SUMMARY=False, **OPTIONS)
    return y, ends[:, -1].clone(), lse, starts


def _states(start: Tensor, chunks: int) -> Tensor:
    return start.new_empty(start.shape[0], chunks, *start.shape[1:])


@_forward.register_fake
def _(k, v, rates, u, start, chunks):
    lse = torch.empty_like(k, dtype=torch.float32)
    return torch.empty_like(v), torch.empty_like(start), lse, _states(start, chunks)


@torch.library.custom_op("rebased::wkv_backward", mutates_args=())
@checked(_backward_in_torch, compare=_compare_backward)
def _backward(
    k: Tensor, v: Tensor, rates: Tensor, u: Tensor, y: Tensor, lse: Tensor, starts: Tensor, dy: Tensor, edge: Tensor,
    chunks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of k, v, rates, u and start; edge [B, 3, D]: (ga, gb, m) after the last token."""
    grid, shape = _launch(k, chunks)
    dk, dv, gradients = torch.empty_like(k), torch.empty_like(v), torch.empty_like(starts)
    du, dr = (starts.new_empty(len(k), chunks, k.shape[2]) for _ in "ur")
    given, ends = (k, v, rates, u, y, lse, dy), edge.unsqueeze(1)
    if chunks > 1:
        launch(backward_kernel, grid, *given, gradients, dk, dv, du, gradients, *shape, SUMMARY=True, **OPTIONS)
        ends = _join(gradients, edge, rates, shape[0], shape[2], back=True)
    ends = ends.contiguous()
    launch(backward_kernel, grid, *given, ends, dk, dv, du, gradients, *shape, SUMMARY=False, **OPTIONS)
    launch(rate_kernel, grid, k, v, rates, starts, y, lse, dy, ends, dr, *shape, **OPTIONS)
    scale = torch.exp(gradients[:, 0, 2] + starts[:, 0, 2])  # the gradient at the sums as the state holds them
    dstart = torch.stack([scale * gradients[:, 0, 0], scale * gradients[:, 0, 1], torch.zeros_like(scale)], dim=1)
    return dk, dv, dr.sum((0, 1)), du.sum((0, 1)), dstart


@_backward.register_fake
def _(k, v, rates, u, y, lse, starts, dy, edge, chunks):
    return tuple(torch.empty_like(each) for each in (k, v, rates, u, edge))


def _setup(ctx, inputs, output):
    k, v, rates, u, _, ctx.chunks = inputs
    y, end, lse, starts = output
    ctx.save_for_backward(k, v, rates, u, y, lse, starts, end)


def _autograd(ctx, dy, dend, _, __):
    *tensors, end = ctx.saved_tensors
    edge = torch.stack([dend[:, 0], dend[:, 1], -end[:, 2]], dim=1)  # GA = da e^-max
    return *_backward(*tensors, dy.contiguous(), edge, ctx.chunks), None


_forward.register_autograd(_autograd, setup_context=_setup)


def scan(k: Tensor, v: Tensor, rates: Tensor, u: Tensor, state: WKVState) -> tuple[Tensor, WKVState]:
    """wkv_extend in fp32: k, v [B, T, D], rates and u [D] in fp32 -> y in the dtype of v, and the state after."""
    batch, T, D = k.shape
    chunks = count_chunks(batch * triton.cdiv(D, CHANNELS), T)
    y, end, _, _ = _forward(k.contiguous(), v.contiguous(), rates, u, torch.stack(state, dim=1), chunks)
    return y, WKVState(*end.unbind(1))
