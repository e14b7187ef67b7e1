# mypy: allow-untyped-defs
"""The selective scan on a GPU: one program, one warp, per batch row and 16 channels, with their states in registers.

Tokens are loaded GROUP at a time: a warp that loads one token after the other waits for memory at each of them. Where
T, D and N are whole multiples (WHOLE), nothing is masked: a quarter of the forward's instructions were for masks. 16
channels are fewer than a warp's lanes, so Triton loads them as the [16, N] states lie in the lanes; more would first be
exchanged between lanes. A lane holds four numbers of the state of each of two channels: to sum h C over a state it
exchanges four numbers with other lanes, where two numbers of each of four channels would be twelve.

The forward stores a checkpoint every INTERVAL tokens. The backward goes over the intervals from the last to the first.
It computes the states of an interval again from its checkpoint: once forwards, which leaves the state before each group
in a scratch buffer, then group by group from the last, with the states of a group in registers.

Where B * D is too small to fill the GPU, time is cut into chunks: a first pass summarises each chunk, the summaries are
joined, and a second pass runs all chunks at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rebased.ops.comparison import RECURRENT, compare_calls, differentiate, pick, some
from rebased.ops.kernel_launch import launch
from rebased.ops.linear_scan import Decays, states
from rebased.ops.scan import chunked
from rebased.ops.scan.chunked import INTERVAL
from rebased.ops.scan.elementwise_gpu import apply_gate, step_size
from rebased.ops.self_check import checked

CHANNELS = 16  # per program, at most
GROUP = 4  # tokens that are loaded at once, at most; a power of two, at most INTERVAL
PROGRAMS = 1024  # eight warps on each of 132 multiprocessors
SHORTEST_CHUNK = 128  # tokens


@triton.jit
def _load_state(ptr, D, channels, n, N: tl.constexpr):
    """[CHANNELS, NP] of a state [D, N]; zero outside of it."""
    mask = (channels[:, None] < D) & (n[None, :] < N)
    return tl.load(ptr + channels[:, None] * N + n[None, :], mask=mask, other=0.0)


@triton.jit
def _store_state(ptr, value, D, channels, n, N: tl.constexpr):
    """Stores [CHANNELS, NP] into a state [D, N]."""
    mask = (channels[:, None] < D) & (n[None, :] < N)
    tl.store(ptr + channels[:, None] * N + n[None, :], value, mask=mask)


@triton.jit
def _load_rows(ptr, t, T, D, channels, GROUP: tl.constexpr, WHOLE: tl.constexpr):
    """GROUP tokens of [T, D] from token t on: a tuple of [CHANNELS, 1], in fp32. Zero from T on."""
    rows = ()
    for k in tl.static_range(GROUP):
        mask = None if WHOLE else (channels < D) & (t + k < T)
        other = None if WHOLE else 0.0
        rows += (tl.load(ptr + (t + k) * D + channels, mask=mask, other=other).to(tl.float32)[:, None],)  # type: ignore[assignment]
    return rows


@triton.jit
def _load_projections(ptr, t, T, n, N: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr):
    """GROUP tokens of [T, N] from token t on: a tuple of [1, NP], in fp32. Zero from T on."""
    rows = ()
    for k in tl.static_range(GROUP):
        mask = None if WHOLE else (n < N) & (t + k < T)
        other = None if WHOLE else 0.0
        rows += (tl.load(ptr + (t + k) * N + n, mask=mask, other=other).to(tl.float32)[None, :],)  # type: ignore[assignment]
    return rows


@triton.jit
def _store_row(ptr, row, t, T, D, channels, WHOLE: tl.constexpr):
    """Stores [CHANNELS, 1] at token t of [T, D], unless t is T or more."""
    mask = None if WHOLE else (channels[:, None] < D) & (t < T)
    tl.store(ptr + t * D + channels[:, None], row.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_projection(ptr, value, t, T, n, N: tl.constexpr, WHOLE: tl.constexpr):
    """Stores [NP] at token t of [T, N], unless t is T or more."""
    mask = None if WHOLE else (n < N) & (t < T)
    tl.store(ptr + t * N + n, value, mask=mask)


@triton.jit
def forward_kernel(
    x, dt, A, B, C, skip, starts, y, ends, checkpoints, T, D: tl.constexpr, intervals,
    N: tl.constexpr, NP: tl.constexpr, CHANNELS: tl.constexpr, INTERVAL: tl.constexpr, GROUP: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """y [B, T, D] and the state at the end of each chunk (ends), from the state at its start (starts), [B, P, D, N].

    A chunk has `intervals` intervals; P is the number of chunks. checkpoints [B, T/INTERVAL, D, N].
    """
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(2)
    n = tl.arange(0, NP)
    x, dt, y = x + row * T * D, dt + row * T * D, y + row * T * D
    B, C = B + row * T * N, C + row * T * N
    checkpoints += row * tl.cdiv(T, INTERVAL) * D * N
    state = (row * tl.num_programs(2) + chunk) * D * N
    rates = _load_state(A, D, channels, n, N) * 1.4426950408889634  # log2(e): the hardware has exp2
    through = tl.load(skip + channels, mask=channels < D, other=0.0)[:, None]
    h = _load_state(starts + state, D, channels, n, N)
    for interval in range(chunk * intervals, tl.minimum((chunk + 1) * intervals, tl.cdiv(T, INTERVAL))):
        _store_state(checkpoints + interval * D * N, h, D, channels, n, N)
        for group in range(INTERVAL // GROUP):
            t = interval * INTERVAL + group * GROUP
            steps = _load_rows(dt, t, T, D, channels, GROUP, WHOLE)
            inputs = _load_rows(x, t, T, D, channels, GROUP, WHOLE)
            weights = _load_projections(B, t, T, n, N, GROUP, WHOLE)
            readers = _load_projections(C, t, T, n, N, GROUP, WHOLE)
            for k in tl.static_range(GROUP):
                h = tl.exp2(steps[k] * rates) * h + steps[k] * inputs[k] * weights[k]
                out = tl.sum(h * readers[k], 1, keep_dims=True) + through * inputs[k]
                _store_row(y, out, t + k, T, D, channels, WHOLE)
    _store_state(ends + state, h, D, channels, n, N)


@triton.jit
def summary_kernel(
    inputs, weights, dt, A, sums, totals, T, D: tl.constexpr, intervals,
    N: tl.constexpr, NP: tl.constexpr, CHANNELS: tl.constexpr, INTERVAL: tl.constexpr, GROUP: tl.constexpr,
    WHOLE: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """sums [B, P, D, N], what each chunk adds to the state at its end (inputs x, weights B); BACK: to the gradient at
    its start (inputs dy, weights C). And totals [B, P, D], the sum of dt, which gives the decay over the chunk."""
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    row, chunk = tl.program_id(1).to(tl.int64), tl.program_id(2)
    n = tl.arange(0, NP)
    inputs, dt, weights = inputs + row * T * D, dt + row * T * D, weights + row * T * N
    rates = _load_state(A, D, channels, n, N) * 1.4426950408889634
    h = tl.zeros([CHANNELS, NP], tl.float32)
    total = tl.zeros([CHANNELS, 1], tl.float32)
    first, last = chunk * intervals * INTERVAL, tl.minimum((chunk + 1) * intervals * INTERVAL, T)
    groups = tl.cdiv(last - first, GROUP)
    for i in range(groups):
        t = first + (groups - 1 - i if BACK else i) * GROUP
        steps, us = _load_rows(dt, t, T, D, channels, GROUP, WHOLE), _load_rows(inputs, t, T, D, channels, GROUP, WHOLE)
        ws = _load_projections(weights, t, T, n, N, GROUP, WHOLE)
        if BACK:  # from T on all of them are zero, which changes nothing
            for k in tl.static_range(GROUP - 1, -1, -1):
                h = tl.exp2(steps[k] * rates) * (h + us[k] * ws[k])
                total += steps[k]
        else:
            for k in tl.static_range(GROUP):
                h = tl.exp2(steps[k] * rates) * h + steps[k] * us[k] * ws[k]
                total += steps[k]
    at = row * tl.num_programs(2) + chunk
    _store_state(sums + at * D * N, h, D, channels, n, N)
    tl.store(totals + at * D + channels[:, None], total, mask=channels[:, None] < D)


@triton.jit
def backward_kernel(
    x, dt, A, B, C, skip, dy, checkpoints, dends, scratch, dx, ddt, dA, dB, dC, dskip, dstarts, T,
    D: tl.constexpr, intervals, N: tl.constexpr, NP: tl.constexpr, CHANNELS: tl.constexpr, INTERVAL: tl.constexpr,
    GROUP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """dx, ddt [B, T, D], and the gradient at the start of each chunk (dstarts [B, P, D, N]), from its end (dends).

    dB, dC [D/CHANNELS, B, T, N], dA [B, P, D, N] and dskip [B, P, D] are shares that the caller sums.
    """
    block, row, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    channels = block * CHANNELS + tl.arange(0, CHANNELS)
    n = tl.arange(0, NP)
    x, dt, dy, dx, ddt = x + row * T * D, dt + row * T * D, dy + row * T * D, dx + row * T * D, ddt + row * T * D
    B, C = B + row * T * N, C + row * T * N
    shared = (block * tl.num_programs(1) + row) * T * N
    dB, dC = dB + shared, dC + shared
    checkpoints += row * tl.cdiv(T, INTERVAL) * D * N
    at = row * tl.num_programs(2) + chunk
    scratch += (at * tl.num_programs(0) + block) * (INTERVAL // GROUP) * CHANNELS * NP
    own = tl.arange(0, CHANNELS)[:, None] * NP + n[None, :]
    rates = _load_state(A, D, channels, n, N) * 1.4426950408889634
    through = tl.load(skip + channels, mask=channels < D, other=0.0)[:, None]
    g = _load_state(dends + at * D * N, D, channels, n, N)
    rates_sum = tl.zeros([CHANNELS, NP], tl.float32)
    through_sum = tl.zeros([CHANNELS, 1], tl.float32)
    begin, end = chunk * intervals, tl.minimum((chunk + 1) * intervals, tl.cdiv(T, INTERVAL))
    for i in range(begin, end):
        interval = begin + end - 1 - i
        h = _load_state(checkpoints + interval * D * N, D, channels, n, N)
        for group in range(INTERVAL // GROUP):
            tl.store(scratch + group * CHANNELS * NP + own, h)
            t = interval * INTERVAL + group * GROUP
            steps = _load_rows(dt, t, T, D, channels, GROUP, WHOLE)
            inputs = _load_rows(x, t, T, D, channels, GROUP, WHOLE)
            weights = _load_projections(B, t, T, n, N, GROUP, WHOLE)
            for k in tl.static_range(GROUP):
                h = tl.exp2(steps[k] * rates) * h + steps[k] * inputs[k] * weights[k]
        tl.debug_barrier()  # a lane may read what another wrote
        for j in range(INTERVAL // GROUP):
            group = INTERVAL // GROUP - 1 - j
            t = interval * INTERVAL + group * GROUP
            h = tl.load(scratch + group * CHANNELS * NP + own)
            steps = _load_rows(dt, t, T, D, channels, GROUP, WHOLE)
            inputs = _load_rows(x, t, T, D, channels, GROUP, WHOLE)
            weights = _load_projections(B, t, T, n, N, GROUP, WHOLE)
            readers = _load_projections(C, t, T, n, N, GROUP, WHOLE)
            gradients = _load_rows(dy, t, T, D, channels, GROUP, WHOLE)
            before = ()  # the states before each token of the group
            for k in tl.static_range(GROUP):
                before += (h,)  # type: ignore[assignment]
                h = tl.exp2(steps[k] * rates) * h + steps[k] * inputs[k] * weights[k]
            for k in tl.static_range(GROUP - 1, -1, -1):
                do, step, u = gradients[k], steps[k], inputs[k]
                _store_projection(dC, tl.sum(h * do, 0), t + k, T, n, N, WHOLE)
                h = before[k]
                g += do * readers[k]
                _store_projection(dB, tl.sum(g * (step * u), 0), t + k, T, n, N, WHOLE)
                du = tl.sum(g * weights[k], 1, keep_dims=True)  # gradient at step * u
                g *= tl.exp2(step * rates)
                dlog = g * h  # gradient at step * A
                dstep = tl.sum(dlog * rates, 1, keep_dims=True) * 0.6931471805599453 + du * u  # A = rates ln(2)
                _store_row(dx, du * step + do * through, t + k, T, D, channels, WHOLE)
                _store_row(ddt, dstep, t + k, T, D, channels, WHOLE)
                rates_sum += dlog * step
                through_sum += do * u
        tl.debug_barrier()  # the next interval overwrites the scratch
    _store_state(dstarts + at * D * N, g, D, channels, n, N)
    _store_state(dA + at * D * N, rates_sum, D, channels, n, N)
    tl.store(dskip + at * D + channels[:, None], through_sum, mask=channels[:, None] < D)


def count_chunks(programs: int, T: int) -> int:
    """The number of chunks that T tokens are cut into. `programs`: of a grid that has one chunk."""
    return max(1, min(PROGRAMS // max(1, programs), T // SHORTEST_CHUNK))


def channels_per_program(states: int) -> int:
    """CHANNELS, and half as many where each has so many states that registers would be short."""
    return CHANNELS if states <= 32 else CHANNELS // 2


def group_length(states: int) -> int:
    """Tokens of a group if each channel has so many states. Registers hold all states of a group in the backward."""
    return max(1, min(GROUP, 64 // triton.next_power_of_2(states)))


def _launch(x: Tensor, A: Tensor, chunks: int) -> tuple[tuple[int, int, int], int, dict[str, int]]:
    """The grid, the intervals per chunk, and the constants of a kernel."""
    batch, T, D = x.shape
    N = A.shape[1]
    channels = channels_per_program(N)
    NP = triton.next_power_of_2(N)
    whole = T % INTERVAL == 0 and D % channels == 0 and N == NP  # then nothing is masked
    shape = {"N": N, "NP": NP, "CHANNELS": channels, "INTERVAL": INTERVAL, "WHOLE": whole, "num_warps": 1}
    return (triton.cdiv(D, channels), batch, chunks), triton.cdiv(triton.cdiv(T, INTERVAL), chunks), shape


def _join(inputs: Tensor, weights: Tensor, dt: Tensor, A: Tensor, edge: Tensor, chunks: int, back: bool) -> Tensor:
    """The state at the start of each chunk, or (back) the gradient at its end: edge [B, D, N] -> [B, P, D, N]."""
    if chunks == 1:
        return edge.unsqueeze(1)
    grid, intervals, shape = _launch(dt, A, chunks)
    sums = edge.new_empty(len(edge), chunks, *A.shape)
    totals = edge.new_empty(len(edge), chunks, A.shape[0])
    launch(
        summary_kernel, grid, inputs, weights, dt, A, sums, totals, *dt.shape[1:], intervals,
        GROUP=group_length(A.shape[1]), BACK=back, **shape,
    )  # fmt: skip
    order = (lambda x: x.flip(0)) if back else (lambda x: x)
    passing = Decays.of(order((totals.unsqueeze(3) * A).transpose(0, 1)))
    joined = states(passing, order(sums.transpose(0, 1)), edge)  # [P,B,D,N]
    return order(torch.cat([edge.unsqueeze(0), joined[:-1]])).transpose(0, 1).contiguous()


def _scan_in_torch(x, dt, A, B, C, skip, start):
    """y and the state at the end."""
    wide = A.dtype
    y, end = chunked.scan(x.to(wide), dt.to(wide), A, B.to(wide), C.to(wide), start)
    return (y + skip * x).to(x.dtype), end


def _in_torch(x, dt, A, B, C, skip, start, chunks):
    """As _forward."""
    parts, checkpoints, h = [], [], start
    for t in range(0, x.shape[1], INTERVAL):
        checkpoints.append(h)
        tokens = slice(t, t + INTERVAL)
        y, h = _scan_in_torch(x[:, tokens], dt[:, tokens], A, B[:, tokens], C[:, tokens], skip, h)
        parts.append(y)
    return torch.cat(parts, dim=1), h, torch.stack(checkpoints, dim=1)


def _some_channels(given, numbers):
    """The arguments of _scan_in_torch at some channels."""
    x, dt, A, B, C, skip, start = given
    x, dt = (pick(each, 2, numbers) for each in (x, dt))
    return x, dt, pick(A, 0, numbers), B, C, pick(skip, 0, numbers), pick(start, 1, numbers)


def _compare(args, result):
    """Errors of y and the state at the end, in some channels."""
    numbers = some(args[0].shape[2], 16)
    parts = [pick(result[0], 2, numbers), pick(result[1], 1, numbers)]
    return compare_calls(_scan_in_torch, [(_some_channels(args[:7], numbers), parts)], parts, RECURRENT)


def _scan_backward_in_torch(x, dt, A, B, C, skip, start, dy, dend):
    return differentiate(_scan_in_torch, (x, dt, A, B, C, skip, start), dy, dend)


def _backward_in_torch(x, dt, A, B, C, skip, dy, dend, checkpoints, chunks):
    """As _backward."""
    return tuple(_scan_backward_in_torch(x, dt, A, B, C, skip, checkpoints[:, 0], dy, dend))


def _compare_backward(args, result):
    """Errors of what belongs to one channel, in some; of dB and dC, which sum over channels, at the last tokens."""
    x, dt, A, B, C, skip, dy, dend, checkpoints, _ = args
    numbers = some(x.shape[2], 16)
    small = _some_channels((x, dt, A, B, C, skip, checkpoints[:, 0]), numbers)
    small += (pick(dy, 2, numbers), pick(dend, 1, numbers))
    dx, ddt, dA, dB, dC, dskip, dstart = result
    parts = [pick(dx, 2, numbers), pick(ddt, 2, numbers), pick(dA, 0, numbers), pick(dskip, 0, numbers)]
    parts.append(pick(dstart, 1, numbers))

    def own(*given):
        dx, ddt, dA, _, _, dskip, dstart = _scan_backward_in_torch(*given)
        return dx, ddt, dA, dskip, dstart

    errors = compare_calls(own, [(small, parts)], parts, RECURRENT)
    t = max(0, (x.shape[1] - 1) // INTERVAL - 1) * INTERVAL
    last, row = slice(t, None), slice(-1, None)
    x, dt, B, C, dy = (each[row, last] for each in (x, dt, B, C, dy))
    start = checkpoints[row, t // INTERVAL]
    parts = [dB[row, last], dC[row, last]]
    small = (x, dt, A, B, C, skip, start, dy, dend[row])
    shared = compare_calls(lambda *given: _scan_backward_in_torch(*given)[3:5], [(small, parts)], parts, RECURRENT)
    return errors | {f"{name} of a token": error for name, error in shared.items()}


@torch.library.custom_op("rebased::selective_scan", mutates_args=())
@checked(_in_torch, compare=_compare)
def _forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor, start: Tensor, chunks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, D], the state at the end [B, D, N] and the checkpoints. A [D, N] and start [B, D, N] in fp32."""
    grid, intervals, shape = _launch(x, A, chunks)
    starts = _join(x, B, dt, A, start, chunks, back=False).contiguous()
    y, ends, checkpoints = torch.empty_like(x), torch.empty_like(starts), _checkpoints(x, A)
    launch(
        forward_kernel, grid, x, dt, A, B, C, skip, starts, y, ends, checkpoints, *x.shape[1:], intervals,
        GROUP=group_length(A.shape[1]), **shape,
    )  # fmt: skip
    return y, ends[:, -1].clone(), checkpoints


def _checkpoints(x: Tensor, A: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], (x.shape[1] + INTERVAL - 1) // INTERVAL, *A.shape, dtype=torch.float32)


@_forward.register_fake
def _(x, dt, A, B, C, skip, start, chunks):
    return torch.empty_like(x), torch.empty_like(start), _checkpoints(x, A)


@torch.library.custom_op("rebased::selective_scan_backward", mutates_args=())
@checked(_backward_in_torch, compare=_compare_backward)
def _backward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor, dy: Tensor, dend: Tensor,
    checkpoints: Tensor, chunks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    grid, intervals, shape = _launch(x, A, chunks)
    batch, T, D = x.shape
    dends = _join(dy, C, dt, A, dend, chunks, back=True).contiguous()
    group = group_length(A.shape[1])
    scratch = dends.new_empty(grid[0] * grid[1] * grid[2], INTERVAL // group, shape["CHANNELS"], shape["NP"])
    dx, ddt, dA, dstarts = (torch.empty_like(each) for each in (x, dt, dends, dends))
    dB, dC = (dends.new_empty(grid[0], batch, T, A.shape[1]) for _ in "BC")
    dskip = dends.new_empty(batch, chunks, D)
    launch(
        backward_kernel, grid,
        x, dt, A, B, C, skip, dy, checkpoints, dends, scratch, dx, ddt, dA, dB, dC, dskip, dstarts, T, D, intervals,
        GROUP=group, **shape,
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
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    skip: Tensor | None,
    state: Tensor,
    dt_bias: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """selective_scan_extend in fp32: x, dt, gate [B, T, D], A [D, N], B and C [B, T, N], skip and dt_bias [D],
    state [B, D, N]."""
    skip = x.new_zeros(x.shape[2], dtype=torch.float32) if skip is None else skip.float()
    dt = dt if dt_bias is None else step_size(dt, dt_bias)
    x, dt, A, B, C, start = (each.contiguous() for each in (x, dt, A.float(), B, C, state))
    batch, T, D = x.shape
    chunks = count_chunks(batch * triton.cdiv(D, channels_per_program(A.shape[1])), T)
    y, end, _ = _forward(x, dt, A, B, C, skip, start, chunks)
    return (y if gate is None else apply_gate(y, gate)), end
