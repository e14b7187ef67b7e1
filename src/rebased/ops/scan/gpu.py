# mypy: allow-untyped-defs
"""The selective scan on a GPU: one program per batch row and 32 channels, with their [N, 32] states in registers.

A lane is a channel and holds its N states, so the sums over N need no other lane. The forward stores a checkpoint every
INTERVAL tokens. The backward goes over the intervals from the last to the first: it computes the states of an interval
again from its checkpoint, into a scratch buffer of the program, and goes back through them. Where B * D is too small to
fill the GPU, time is cut into chunks: a first pass summarises each chunk, the summaries are joined, and a second pass
runs all chunks at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.kernel_launch import launch
from rebased.ops.linear_scan import Decays, states

CHANNELS = 32  # per program: one warp
INTERVAL = 16  # tokens between two checkpoints: these and the scratch both stay below one [B, T, D] at N = 16
PROGRAMS = 1024  # eight warps on each of 132 multiprocessors
SHORTEST_CHUNK = 128  # tokens


@triton.jit
def _load_state(ptr, D, channels, n, N: tl.constexpr):
    """[NP, CHANNELS] of a state [N, D]; zero outside of it."""
    mask = (n[:, None] < N) & (channels[None, :] < D)
    return tl.load(ptr + n[:, None] * D + channels[None, :], mask=mask, other=0.0)


@triton.jit
def _store_state(ptr, value, D, channels, n, N: tl.constexpr):
    """Stores [NP, CHANNELS] into a state [N, D]."""
    mask = (n[:, None] < N) & (channels[None, :] < D)
    tl.store(ptr + n[:, None] * D + channels[None, :], value, mask=mask)


@triton.jit
def _load_channels(ptr, t, D, channels):
    """[CHANNELS] of token t of [T, D], in fp32."""
    return tl.load(ptr + t * D + channels, mask=channels < D, other=0.0).to(tl.float32)


@triton.jit
def _load_projection(ptr, t, n, N: tl.constexpr):
    """[NP, 1] of token t of [T, N], in fp32."""
    return tl.load(ptr + t * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]


@triton.jit
def forward_kernel(
    x, dt, A, B, C, skip, starts, y, ends, checkpoints, T, D, intervals,
    N: tl.constexpr, NP: tl.constexpr, CHANNELS: tl.constexpr, INTERVAL: tl.constexpr,
):  # fmt: skip
    """y [B, T, D] and the state at the end of each chunk (ends), from the state at its start (starts), [B, P, N, D].

    A chunk has `intervals` intervals; P is the number of chunks. checkpoints [B, T/INTERVAL, N, D].
    """
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(2)
    n = tl.arange(0, NP)
    x, dt, y = x + row * T * D, dt + row * T * D, y + row * T * D
    B, C = B + row * T * N, C + row * T * N
    checkpoints += row * tl.cdiv(T, INTERVAL) * N * D
    state = (row * tl.num_programs(2) + chunk) * N * D
    rates = _load_state(A, D, channels, n, N) * 1.4426950408889634  # log2(e): the hardware has exp2
    through = tl.load(skip + channels, mask=channels < D, other=0.0)
    h = _load_state(starts + state, D, channels, n, N)
    for interval in range(chunk * intervals, tl.minimum((chunk + 1) * intervals, tl.cdiv(T, INTERVAL))):
        _store_state(checkpoints + interval * N * D, h, D, channels, n, N)
        for t in range(interval * INTERVAL, tl.minimum((interval + 1) * INTERVAL, T)):
            step, u = _load_channels(dt, t, D, channels), _load_channels(x, t, D, channels)
            h = tl.exp2(step[None, :] * rates) * h + (step * u)[None, :] * _load_projection(B, t, n, N)
            out = tl.sum(h * _load_projection(C, t, n, N), 0) + through * u
            tl.store(y + t * D + channels, out.to(y.dtype.element_ty), mask=channels < D)
    _store_state(ends + state, h, D, channels, n, N)


@triton.jit
def summary_kernel(
    inputs, weights, dt, A, sums, totals, T, D, intervals,
    N: tl.constexpr, NP: tl.constexpr, CHANNELS: tl.constexpr, INTERVAL: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """sums [B, P, N, D], what each chunk adds to the state at its end (inputs x, weights B); BACK: to the gradient at
    its start (inputs dy, weights C). And totals [B, P, D], the sum of dt, which gives the decay over the chunk."""
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(2)
    n = tl.arange(0, NP)
    inputs, dt, weights = inputs + row * T * D, dt + row * T * D, weights + row * T * N
    rates = _load_state(A, D, channels, n, N) * 1.4426950408889634
    h = tl.zeros([NP, CHANNELS], tl.float32)
    total = tl.zeros([CHANNELS], tl.float32)
    first, last = chunk * intervals * INTERVAL, tl.minimum((chunk + 1) * intervals * INTERVAL, T)
    for i in range(first, last):
        t = first + last - 1 - i if BACK else i
        step, u = _load_channels(dt, t, D, channels), _load_channels(inputs, t, D, channels)
        a, w = tl.exp2(step[None, :] * rates), _load_projection(weights, t, n, N)
        if BACK:
            h = a * (h + u[None, :] * w)
        else:
            h = a * h + (step * u)[None, :] * w
        total += step
    at = row * tl.num_programs(2) + chunk
    _store_state(sums + at * N * D, h, D, channels, n, N)
    tl.store(totals + at * D + channels, total, mask=channels < D)


@triton.jit
def backward_kernel(
    x, dt, A, B, C, skip, dy, checkpoints, dends, scratch, dx, ddt, dA, dB, dC, dskip, dstarts, T, D, intervals,
    N: tl.constexpr, NP: tl.constexpr, CHANNELS: tl.constexpr, INTERVAL: tl.constexpr,
):  # fmt: skip
    """dx, ddt [B, T, D], and the gradient at the start of each chunk (dstarts [B, P, N, D]), from its end (dends).

    dB, dC [D/CHANNELS, B, T, N], dA [B, P, N, D] and dskip [B, P, D] are shares that the caller sums.
    """
    group, row, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    channels = group * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.arange(0, NP)
    x, dt, dy, dx, ddt = x + row * T * D, dt + row * T * D, dy + row * T * D, dx + row * T * D, ddt + row * T * D
    B, C = B + row * T * N, C + row * T * N
    shared = (group * tl.num_programs(1) + row) * T * N
    dB, dC = dB + shared, dC + shared
    checkpoints += row * tl.cdiv(T, INTERVAL) * N * D
    at = row * tl.num_programs(2) + chunk
    scratch += (at * tl.num_programs(0) + group) * INTERVAL * NP * CHANNELS
    own = n[:, None] * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    rates = _load_state(A, D, channels, n, N)
    through = tl.load(skip + channels, mask=channels < D, other=0.0)
    g = _load_state(dends + at * N * D, D, channels, n, N)
    rates_sum = tl.zeros([NP, CHANNELS], tl.float32)
    through_sum = tl.zeros([CHANNELS], tl.float32)
    begin, end = chunk * intervals, tl.minimum((chunk + 1) * intervals, tl.cdiv(T, INTERVAL))
    for i in range(begin, end):
        interval = begin + end - 1 - i
        first, last = interval * INTERVAL, tl.minimum((interval + 1) * INTERVAL, T)
        h = _load_state(checkpoints + interval * N * D, D, channels, n, N)
        for t in range(first, last):
            tl.store(scratch + (t - first) * NP * CHANNELS + own, h)
            step, u = _load_channels(dt, t, D, channels), _load_channels(x, t, D, channels)
            a = tl.exp2(step[None, :] * rates * 1.4426950408889634)
            h = a * h + (step * u)[None, :] * _load_projection(B, t, n, N)
        tl.debug_barrier()  # a lane may read what another wrote
        for j in range(first, last):
            t = first + last - 1 - j
            before = tl.load(scratch + (t - first) * NP * CHANNELS + own)
            step, u = _load_channels(dt, t, D, channels), _load_channels(x, t, D, channels)
            do, b = _load_channels(dy, t, D, channels), _load_projection(B, t, n, N)
            a = tl.exp2(step[None, :] * rates * 1.4426950408889634)
            h = a * before + (step * u)[None, :] * b
            tl.store(dC + t * N + n, tl.sum(h * do[None, :], 1), mask=n < N)
            g += do[None, :] * _load_projection(C, t, n, N)
            tl.store(dB + t * N + n, tl.sum(g * (step * u)[None, :], 1), mask=n < N)
            du = tl.sum(g * b, 0)  # gradient at step * u
            g *= a
            dlog = g * before  # gradient at step * rates
            dstep = tl.sum(dlog * rates, 0) + du * u
            tl.store(dx + t * D + channels, (du * step + do * through).to(dx.dtype.element_ty), mask=channels < D)
            tl.store(ddt + t * D + channels, dstep.to(ddt.dtype.element_ty), mask=channels < D)
            rates_sum += dlog * step[None, :]
            through_sum += do * u
        tl.debug_barrier()  # the next interval overwrites the scratch
    _store_state(dstarts + at * N * D, g, D, channels, n, N)
    _store_state(dA + at * N * D, rates_sum, D, channels, n, N)
    tl.store(dskip + at * D + channels, through_sum, mask=channels < D)


def count_chunks(batch: int, T: int, D: int) -> int:
    """The number of chunks that time is cut into; 1 where rows and channels alone fill the GPU."""
    wanted = PROGRAMS // (batch * -(-D // CHANNELS))
    return max(1, min(wanted, T // SHORTEST_CHUNK))


def _launch(x: Tensor, A: Tensor, chunks: int) -> tuple[tuple[int, int, int], int, dict[str, int]]:
    """The grid, the intervals per chunk, and the constants of a kernel."""
    batch, T, D = x.shape
    N = A.shape[0]
    shape = {"N": N, "NP": triton.next_power_of_2(N), "CHANNELS": CHANNELS, "INTERVAL": INTERVAL, "num_warps": 1}
    return (triton.cdiv(D, CHANNELS), batch, chunks), triton.cdiv(triton.cdiv(T, INTERVAL), chunks), shape


def _join(inputs: Tensor, weights: Tensor, dt: Tensor, A: Tensor, edge: Tensor, chunks: int, back: bool) -> Tensor:
    """The state at the start of each chunk, or (back) the gradient at its end: edge [B, N, D] -> [B, P, N, D]."""
    if chunks == 1:
        return edge.unsqueeze(1)
    grid, intervals, shape = _launch(dt, A, chunks)
    sums = edge.new_empty(len(edge), chunks, *A.shape)
    totals = edge.new_empty(len(edge), chunks, A.shape[1])
    launch(summary_kernel, grid, inputs, weights, dt, A, sums, totals, *dt.shape[1:], intervals, BACK=back, **shape)
    order = (lambda x: x.flip(0)) if back else (lambda x: x)
    passing = Decays.of(order((totals.unsqueeze(2) * A).transpose(0, 1)))
    joined = states(passing, order(sums.transpose(0, 1)), edge)  # [P,B,N,D]
    return order(torch.cat([edge.unsqueeze(0), joined[:-1]])).transpose(0, 1).contiguous()


@torch.library.custom_op("rebased::selective_scan", mutates_args=())
def _forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor, start: Tensor, chunks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, D], the state at the end [B, N, D] and the checkpoints. A [N, D], start [B, N, D]: channels last."""
    grid, intervals, shape = _launch(x, A, chunks)
    starts = _join(x, B, dt, A, start, chunks, back=False).contiguous()
    y, ends, checkpoints = torch.empty_like(x), torch.empty_like(starts), _checkpoints(x, A)
    launch(forward_kernel, grid, x, dt, A, B, C, skip, starts, y, ends, checkpoints, *x.shape[1:], intervals, **shape)
    return y, ends[:, -1].clone(), checkpoints


def _checkpoints(x: Tensor, A: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], (x.shape[1] + INTERVAL - 1) // INTERVAL, *A.shape, dtype=torch.float32)


@_forward.register_fake
def _(x, dt, A, B, C, skip, start, chunks):
    return torch.empty_like(x), torch.empty_like(start), _checkpoints(x, A)


@torch.library.custom_op("rebased::selective_scan_backward", mutates_args=())
def _backward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor, dy: Tensor, dend: Tensor,
    checkpoints: Tensor, chunks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grid, intervals, shape = _launch(x, A, chunks)
    batch, T, D = x.shape
    dends = _join(dy, C, dt, A, dend, chunks, back=True).contiguous()
    scratch = dends.new_empty(grid[0] * grid[1] * grid[2], INTERVAL, shape["NP"], CHANNELS)
    dx, ddt, dA, dstarts = (torch.empty_like(each) for each in (x, dt, dends, dends))
    dB, dC = (dends.new_empty(grid[0], batch, T, A.shape[0]) for _ in "BC")
    dskip = dends.new_empty(batch, chunks, D)
    launch(
        backward_kernel, grid,
        x, dt, A, B, C, skip, dy, checkpoints, dends, scratch, dx, ddt, dA, dB, dC, dskip, dstarts, T, D, intervals,
        **shape,
    )  # fmt: skip
    sums = dA.sum((0, 1)), dB.sum(0).to(B.dtype), dC.sum(0).to(C.dtype), dskip.sum((0, 1))
    return dx, ddt, *sums, dstarts[:, 0].clone()


@_backward.register_fake
def _(x, dt, A, B, C, skip, dy, dend, checkpoints, chunks):
    return tuple(torch.empty_like(each) for each in (x, dt, A, B, C, skip, dend))


def _setup(ctx, inputs, output):
    *tensors, _, ctx.chunks = inputs
    ctx.save_for_backward(*tensors, output[2])


def _autograd(ctx, dy, dend, _):
    *tensors, checkpoints = ctx.saved_tensors
    return *_backward(*tensors, dy.contiguous(), dend.contiguous(), checkpoints, ctx.chunks), None


_forward.register_autograd(_autograd, setup_context=_setup)


def scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """selective_scan_extend in fp32: x, dt [B, T, D], A [D, N], B and C [B, T, N], skip [D], state [B, D, N]."""
    skip = x.new_zeros(x.shape[2], dtype=torch.float32) if skip is None else skip.float()
    x, dt, B, C = (each.contiguous() for each in (x, dt, B, C))
    A, start = A.float().t().contiguous(), state.transpose(1, 2).contiguous()
    y, end, _ = _forward(x, dt, A, B, C, skip, start, count_chunks(*x.shape))
    return y, end.transpose(1, 2)
