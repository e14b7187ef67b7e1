"""The selective scan of Mamba (S6): a diagonal linear recurrence whose step size and projections depend on the token.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t,    y_t = C_t . h_t + skip x_t        h [B,D,N]

Three paths: `reference` is the loop over T; `chunked` scans a chunk of tokens in log depth and never holds the states
of more than one chunk; `triton` keeps h in registers (scan_triton.py). States are fp32, fp64 for fp64 inputs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rebased.ops.backend import Backend
from rebased.ops.linear_scan import Decays, scan_path, state_gradients, states
from rebased.ops.polynomial.state import state_dtype

CHUNK_NUMBERS = 1 << 20  # of [C,B,D,N] in one chunk: what still fits a core's caches
CHUNK_TOKENS = (16, 512)  # at least, at most


def selective_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """x, dt [B,T,D] (dt > 0), A [D,N] (negative), B, C [B,T,N], skip [D] -> y [B,T,D]."""
    state = torch.zeros(x.shape[0], *A.shape, device=x.device, dtype=state_dtype(x.dtype))
    return selective_scan_extend(x, dt, A, B, C, skip, state, backend=backend)[0]


def selective_scan_extend(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    skip: Tensor | None,
    state: Tensor,
    *,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The scan of tokens that follow a state [B,D,N], and the state after them. Differentiable in the state too."""
    _check(x, dt, A, B, C, skip, state)
    path = scan_path(backend, x)
    if path == "triton":
        from rebased.ops.scan_triton import scan

        return scan(x, dt, A, B, C, skip, state)
    dtype = state_dtype(x.dtype)
    inputs = (x.to(dtype), dt.to(dtype), A.to(dtype), B.to(dtype), C.to(dtype))
    if path == "reference":
        y, state = _loop(*inputs, state)
    else:
        with torch.autocast(x.device.type, enabled=False):  # whose products would be in half precision
            y, state = _ChunkedScan.apply(*inputs, state)
    if skip is not None:
        y = torch.addcmul(y, inputs[0], skip.to(dtype))
    return y.to(x.dtype), state


def _loop(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    for t in range(x.shape[1]):
        step = dt[:, t].unsqueeze(-1)  # [B,D,1]
        h = torch.exp(step * A) * h + step * x[:, t].unsqueeze(-1) * B[:, t].unsqueeze(1)
        outputs.append((h * C[:, t].unsqueeze(1)).sum(-1))
    return torch.stack(outputs, dim=1), h


class _ChunkedScan(torch.autograd.Function):
    """Keeps the state at the start of each chunk; the backward computes the states of a chunk again from there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        chunk = _chunk_length(h, x.shape[1])
        y = x.new_empty(x.shape)
        starts = []
        for i in range(0, x.shape[1], chunk):
            tokens = slice(i, i + chunk)
            starts.append(h)
            _, hs = _chunk_states(x[:, tokens], dt[:, tokens], A, B[:, tokens], h)
            y[:, tokens] = torch.einsum("tbdn,btn->btd", hs, C[:, tokens])
            h = hs[-1].clone()  # a view would keep the whole chunk alive
        ctx.save_for_backward(x, dt, A, B, C, *starts)
        return y, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor, ...]:
        x, dt, A, B, C, *starts = ctx.saved_tensors
        chunk = _chunk_length(starts[0], x.shape[1])
        dx, ddt, dA, dB, dC = (
            torch.zeros_like(each, memory_format=torch.contiguous_format) for each in (x, dt, A, B, C)
        )
        for index in reversed(range(len(starts))):
            s = slice(index * chunk, (index + 1) * chunk)
            decays, hs = _chunk_states(x[:, s], dt[:, s], A, B[:, s], starts[index])
            dC[:, s] = torch.einsum("tbdn,btd->btn", hs, dy[:, s])
            dhs = dy[:, s].transpose(0, 1).unsqueeze(-1) * C[:, s].transpose(0, 1).unsqueeze(2)
            dhs[-1] += dh
            g = state_gradients(decays, dhs)  # [C,B,D,N]
            dh = decays.a[0] * g[0]
            du = torch.einsum("tbdn,btn->btd", g, B[:, s])  # into dt x
            dB[:, s] = torch.einsum("tbdn,btd->btn", g, dt[:, s] * x[:, s])
            dx[:, s] = du * dt[:, s]
            dlog_a = g.mul_(decays.a)
            dlog_a[0].mul_(starts[index])
            dlog_a[1:].mul_(hs[:-1])
            ddt[:, s] = torch.einsum("tbdn,dn->btd", dlog_a, A) + du * x[:, s]
            dA += torch.einsum("tbdn,btd->dn", dlog_a, dt[:, s])
        return dx, ddt, dA, dB, dC, dh


def _chunk_states(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, start: Tensor) -> tuple[Decays, Tensor]:
    """The decays and the states of one chunk, [C,B,D,N] each."""
    decays = Decays.of(dt.transpose(0, 1).unsqueeze(-1) * A)
    u = (dt * x).transpose(0, 1).unsqueeze(-1) * B.transpose(0, 1).unsqueeze(2)
    return decays, states(decays, u, start)


def _chunk_length(state: Tensor, T: int) -> int:
    low, high = CHUNK_TOKENS
    return min(T, max(low, min(high, CHUNK_NUMBERS // state.numel())))


def _check(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, skip: Tensor | None, state: Tensor) -> None:
    if x.ndim != 3 or A.ndim != 2 or 0 in x.shape or 0 in A.shape:
        raise ValueError(f"x must be [B,T,D] and A [D,N], no axis empty; they are {list(x.shape)} and {list(A.shape)}")
    batch, T, D = x.shape
    N = A.shape[1]
    wanted = {"dt": [batch, T, D], "A": [D, N], "B": [batch, T, N], "C": [batch, T, N], "state": [batch, D, N]}
    given = {"dt": dt, "A": A, "B": B, "C": C, "state": state}
    if skip is not None:
        wanted["skip"], given["skip"] = [D], skip
    for name, shape in wanted.items():
        if list(given[name].shape) != shape:
            raise ValueError(f"{name} is {list(given[name].shape)}; x {list(x.shape)} with N = {N} needs {shape}")
    if state.dtype != state_dtype(x.dtype):
        raise ValueError(f"a state for {x.dtype} inputs is {state_dtype(x.dtype)}; this one is {state.dtype}")
