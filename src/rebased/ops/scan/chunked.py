"""The selective scan in plain torch: each chunk of tokens is scanned in log depth.

Never more than the states of one chunk are in memory. The backward computes the states of a chunk again from the state
at its start.
"""

from typing import Any

import torch
from torch import Tensor

from rebased.ops.derivatives import first_derivatives_only
from rebased.ops.linear_scan import Decays, state_gradients, states

CHUNK_NUMBERS = 1 << 20  # numbers of [C, B, D, N] in one chunk: what still fits the caches of a core
CHUNK_TOKENS = (16, 512)  # at least, at most
INTERVAL = 16  # tokens between two checkpoints of the kernels: at N = 16 they take the memory of one [B, T, D]


def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """As reference.scan; differentiable once."""
    with torch.autocast(x.device.type, enabled=False):  # autocast would compute products in half precision
        return _ChunkedScan.apply(x, dt, A, B, C, h)


class _ChunkedScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        chunk = ctx.chunk = _chunk_length(h, x.shape[1])
        y = x.new_empty(x.shape)
        starts = []
        for i in range(0, x.shape[1], chunk):
            tokens = slice(i, i + chunk)
            starts.append(h)
            _, hs = _chunk_states(x[:, tokens], dt[:, tokens], A, B[:, tokens], h)
            y[:, tokens] = torch.einsum("tbdn,btn->btd", hs, C[:, tokens])
            h = hs[-1].clone()  # a view would keep all states of the chunk alive
        ctx.save_for_backward(x, dt, A, B, C, *starts)
        return y, h if starts else h.clone()

    @staticmethod
    @first_derivatives_only("the chunked path of selective_scan")
    def backward(ctx: Any, dy: Tensor, dh: Tensor) -> tuple[Tensor, ...]:
        x, dt, A, B, C, *starts = ctx.saved_tensors
        dx, ddt, dA, dB, dC = (
            torch.zeros_like(each, memory_format=torch.contiguous_format) for each in (x, dt, A, B, C)
        )
        for index in reversed(range(len(starts))):
            s = slice(index * ctx.chunk, (index + 1) * ctx.chunk)
            decays, hs = _chunk_states(x[:, s], dt[:, s], A, B[:, s], starts[index])
            dC[:, s] = torch.einsum("tbdn,btd->btn", hs, dy[:, s])
            dhs = dy[:, s].transpose(0, 1).unsqueeze(-1) * C[:, s].transpose(0, 1).unsqueeze(2)
            dhs[-1] += dh
            g = state_gradients(decays, dhs)  # [C, B, D, N]
            dh = decays.a[0] * g[0]
            du = torch.einsum("tbdn,btn->btd", g, B[:, s])  # gradient at dt x
            dB[:, s] = torch.einsum("tbdn,btd->btn", g, dt[:, s] * x[:, s])
            dx[:, s] = du * dt[:, s]
            dlog_a = g.mul_(decays.a)
            dlog_a[0].mul_(starts[index])
            dlog_a[1:].mul_(hs[:-1])
            ddt[:, s] = torch.einsum("tbdn,dn->btd", dlog_a, A) + du * x[:, s]
            dA += torch.einsum("tbdn,btd->dn", dlog_a, dt[:, s])
        return dx, ddt, dA, dB, dC, dh


def _chunk_states(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, start: Tensor) -> tuple[Decays, Tensor]:
    """The decays and the states of one chunk, [C, B, D, N] each."""
    decays = Decays.of(dt.transpose(0, 1).unsqueeze(-1) * A)
    u = (dt * x).transpose(0, 1).unsqueeze(-1) * B.transpose(0, 1).unsqueeze(2)
    return decays, states(decays, u, start)


def _chunk_length(state: Tensor, T: int) -> int:
    """Tokens per chunk, at least 1."""
    low, high = CHUNK_TOKENS
    return max(1, min(T, max(low, min(high, CHUNK_NUMBERS // max(1, state.numel())))))
