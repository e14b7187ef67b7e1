"""What the mixers of the delta rule share, and Gated DeltaNet's relatives: projections, convolution, norm and gate
around one operator, `delta_attention`.

    q, k, v = conv(W x),    o = delta_attention(q, k, v, beta, log_decay),    y = W_o (norm(o) gate(x))

A mixer is this class with its gates. docs/mixers.md has the equations.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.mixers.checks import check_input, check_state, empty_output
from rebased.mixers.contract import named_arguments
from rebased.mixers.documents import check_documents, follow_states, positions_in_documents
from rebased.mixers.wrapper import NORM_EPS, OutputGate, check_options, gate_heads
from rebased.ops import (
    Backend,
    Degree,
    delta_attention_extend,
    delta_attention_extend_,
    delta_packs,
    init_delta_state,
    short_conv,
    short_conv_extend,
)

DT_RANGE, DT_FLOOR = (1e-3, 1e-1), 1e-4
FORGET = -1e4  # of log decays: its power is 0 in every dtype
SPREADS_NAN = "a chunk of tokens is computed at once, and zero times NaN is NaN"


class RecurrentState(NamedTuple):
    """The state of a recurrent mixer, of constant size."""

    conv: Tensor  # [B, conv_width - 1, channels]  the last inputs of the short convolution, in the dtype of x
    memory: Tensor  # [B, H, F, V], fp32 (fp64 for fp64)


class RecurrentMixer(nn.Module):
    """Base class: a subclass gives `gates`, and whatever else differs from DeltaNet.

    The weights are proj_qkv [H K + H K + H V, D], conv (if conv_width is not 0) with a SiLU after it, the head norm,
    proj_gate [H V, D] (if there is an output gate) and proj_o [D, H V].
    """

    residual_projections: tuple[str, ...] = ("proj_o",)
    degree: Degree = 1
    centred = False
    normalise = True  # q and k have length 1
    scaled = False  # o is divided by sqrt(K) before its norm: the same as a norm with K times the eps
    overwrites = False  # it has a beta
    spreads_nan = SPREADS_NAN

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        key_width: int,
        value_width: int,
        *,
        conv_width: int,
        output_gate: OutputGate,
        backend: Backend,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if min(n_heads, key_width, value_width) < 1:
            raise ValueError(
                f"n_heads {n_heads}, key_width {key_width} and value_width {value_width} must be at least 1 "
                f"(at d_model {d_model})"
            )
        check_options(conv_width, output_gate)
        self.d_model, self.n_heads, self.key_width, self.value_width = d_model, n_heads, key_width, value_width
        self.conv_width, self.backend = conv_width, backend
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        values = n_heads * value_width
        self.proj_qkv = nn.Linear(d_model, sum(self.widths), bias=False, **factory)
        # It holds the taps; short_conv applies them.
        self.conv = self.make_conv(sum(self.widths), conv_width, **factory) if conv_width else None
        self.head_norm = nn.RMSNorm(value_width, eps=NORM_EPS * (key_width if self.scaled else 1), **factory)
        self.output_gate = output_gate
        self.proj_gate = nn.Linear(d_model, values, bias=False, **factory) if output_gate != "none" else None
        self.proj_o = nn.Linear(values, d_model, bias=False, **factory)

    @property
    def widths(self) -> tuple[int, int, int]:
        """The widths of q, k and v of all heads, as proj_qkv makes them."""
        return self.n_heads * self.key_width, self.n_heads * self.key_width, self.n_heads * self.value_width

    def make_conv(self, channels: int, width: int, **factory: Any) -> nn.Conv1d:
        """Return the short convolution over q, k and v. Here it has no bias."""
        return nn.Conv1d(channels, channels, width, groups=channels, bias=False, **factory)

    def init_weights(self) -> None:
        """Set the weights of gates and decays. The model calls it after its own init."""
        for layer in self.children():
            if hasattr(layer, "init_weights"):
                layer.init_weights()  # type: ignore[operator]

    def gates(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return beta [B,T,H] and the log decay [B,T,H] or [B,T,H,K] of x [B,T,D]; None where there is none."""
        raise NotImplementedError

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k [B,T,H,K] and v [B,T,H,V] from what the convolution returns."""
        q, k, v = qkv.split(self.widths, dim=-1)
        return (
            q.unflatten(-1, (self.n_heads, self.key_width)),
            k.unflatten(-1, (self.n_heads, self.key_width)),
            v.unflatten(-1, (self.n_heads, self.value_width)),
        )

    def attend(self, x: Tensor, qkv: Tensor, memory: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        """Return o [B,T,H,V] and the memory after x; `how` are options of `recur`."""
        q, k, v = self.heads(qkv)
        beta, log_decay = self.gates(x)
        return self.recur(q, k, v, beta, memory, log_decay, **how)

    def recur(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, memory: Tensor, log_decay: Tensor | None,
        *, overwrite: bool = False, cu_seqlens: Tensor | None = None, fresh: bool = False,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return o [B,T,H,V] and the memory after the tokens, with `overwrite` in the place of the one before and
        without gradients.

        With cu_seqlens [n+1] the tokens are packed documents, and memory has a row for each. If these rows are `fresh`,
        all zeros, and nobody needs those after, documents are one call also where no kernel takes them packed: the
        first token of each has a decay that forgets all. In a chunk in which n documents begin, other decays are then
        exact to 104 n roundoffs.
        """
        rule: Any = {"degree": self.degree, "centred": self.centred, "backend": self.backend}
        if fresh and cu_seqlens is not None and not delta_packs(q, v, beta, log_decay, **rule):
            log_decay = begin_anew(log_decay, positions_in_documents(cu_seqlens, q) == 0, q)
            memory, cu_seqlens = memory[: len(q)], None
        rule["normalise"] = self.normalise
        if overwrite:
            return delta_attention_extend_(q, k, v, beta, memory, log_decay, **rule), memory
        shape, given = v.shape, [q, k, v, beta, log_decay]
        if cu_seqlens is not None:  # one row
            given = [None if x is None else x.reshape(1, -1, *x.shape[2:]) for x in given]
        q, k, v, beta, log_decay = given  # type: ignore[assignment]
        o, memory = delta_attention_extend(q, k, v, beta, memory, log_decay, **rule, cu_seqlens=cu_seqlens)
        return o.view(shape), memory

    def finish(self, x: Tensor, o: Tensor) -> Tensor:
        """Return y [B,T,D]: the norm of each head, the output gate and the last projection."""
        return self.proj_o(gate_heads(o, x, self.head_norm, self.proj_gate, self.output_gate))

    def forward(self, x: Tensor) -> Tensor:
        """Return the recurrence over time: x [B,T,D] -> [B,T,D], time and memory linear in T."""
        check_input(self, x, self.proj_qkv.weight)
        return self.extend(x, self.init_state(x.shape[0], device=x.device, dtype=x.dtype))[0]

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return forward() of each packed document by itself: x [B,T,D], cu_seqlens [n+1] -> [B,T,D]."""
        check_input(self, x, self.proj_qkv.weight)
        check_documents(cu_seqlens, x.shape[0], x.shape[1], x.device)
        conv, memory = self.init_state(len(cu_seqlens) - 1, device=x.device, dtype=x.dtype)
        qkv, _ = self.convolve(x, conv, cu_seqlens)
        return self.finish(x, self.attend(x, qkv, memory, cu_seqlens=cu_seqlens, fresh=True)[0])

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> RecurrentState:
        """Return the state before the first token: conv [B, conv_width - 1, channels] and memory [B,H,F,V]."""
        weight = self.proj_qkv.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        conv = torch.zeros(batch, max(self.conv_width - 1, 0), sum(self.widths), device=device, dtype=dtype)
        memory = init_delta_state(
            batch, self.n_heads, self.key_width, self.value_width,
            degree=self.degree, centred=self.centred, device=device, dtype=dtype,
        )  # fmt: skip
        return RecurrentState(conv, memory)

    def extend(self, x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """Return (y [B,T,D], state after x): forward() of tokens x [B,T,D] that follow those the state has seen."""
        check_input(self, x, self.proj_qkv.weight)
        check_state(state, RecurrentState)
        if x.numel() == 0:
            return empty_output(self, x), state
        qkv, conv = self.convolve(x, state.conv)
        o, memory = self.attend(x, qkv, state.memory)
        return self.finish(x, o), RecurrentState(conv, memory)

    def extend_documents(self, x: Tensor, cu_seqlens: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        """Return (y [1,N,D], state after x): extend() of each packed document by itself (mixers/documents.py)."""
        check_input(self, x, self.proj_qkv.weight)
        qkv, conv = self.convolve(x, state.conv, cu_seqlens)
        o, memory = self.attend(x, qkv, state.memory, cu_seqlens=cu_seqlens)
        return self.finish(x, o), RecurrentState(conv, memory)

    @torch.no_grad()
    def extend_(self, x: Tensor, state: RecurrentState) -> Tensor:
        """Return y of `extend`, and overwrite the state by the one after x. One token on a GPU reads and writes the
        memory in one kernel."""
        qkv, conv = self.convolve(x, state.conv)
        state.conv.copy_(conv)
        return self.finish(x, self.attend(x, qkv, state.memory, overwrite=True)[0])

    def convolve(self, x: Tensor, conv: Tensor, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return q, k and v of x [B,T,D] side by side, and the last inputs of the convolution: of each document if
        cu_seqlens [n+1] says where they begin."""
        qkv = self.proj_qkv(x)
        if self.conv is None:
            return qkv, conv
        taps, bias = self.conv.weight.squeeze(1), self.conv.bias
        if cu_seqlens is None:
            return short_conv_extend(qkv, taps, bias, conv, activation="silu", backend=self.backend)
        seen, places, conv = follow_states(qkv.reshape(1, -1, qkv.shape[2]), cu_seqlens, conv)
        after = short_conv(seen, taps, bias, activation="silu", backend=self.backend).index_select(1, places)
        return after.view_as(qkv), conv

    def state_size(self, seq_len: int) -> int:
        """Return how many numbers the state of one sequence holds, whatever seq_len is."""
        state = self.init_state(1, device=torch.device("meta"))
        return state.conv.numel() + state.memory.numel()

    def extra_repr(self) -> str:
        return named_arguments(self)


def begin_anew(log_decay: Tensor | None, first: Tensor, q: Tensor) -> Tensor:
    """Return the log decay of q [B,T,H,K] with all forgotten at the tokens `first` [B,T]."""
    if log_decay is None:
        log_decay = torch.zeros_like(q[..., 0], dtype=torch.promote_types(q.dtype, torch.float32))
    return log_decay.masked_fill(first.reshape(*first.shape, *(1,) * (log_decay.ndim - 2)), FORGET)


def draw_time_steps(bias: Tensor) -> None:
    """Fill a bias so that softplus(bias) is log-uniform from 0.001 to 0.1: memories of 10 to 1,000 tokens."""
    if bias.is_meta:  # there is nothing to fill, and torch would import its compiler to compute it
        return
    low, high = (math.log(bound) for bound in DT_RANGE)
    wide = torch.empty_like(bias, dtype=torch.promote_types(bias.dtype, torch.float32))
    dt = wide.uniform_(low, high).exp().clamp(min=DT_FLOOR)
    bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus


class TimeStep(nn.Module):
    """The decay of Mamba-2 and Gated DeltaNet: dt = softplus(x + bias), g = -e^A_log dt; one rate per head.

    Memories are of many lengths at first: e^A_log is uniform in `rates`, dt log-uniform from 0.001 to 0.1.
    """

    def __init__(
        self, heads: int, channels: int, rates: tuple[float, float], *, device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rates = rates
        self.A_log = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty(heads * channels, device=device, dtype=dtype))
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the rates and the first steps."""
        if self.A_log.is_meta:
            return
        wide = torch.promote_types(self.A_log.dtype, torch.float32)
        self.A_log.copy_(torch.empty_like(self.A_log, dtype=wide).uniform_(*self.rates).log())
        draw_time_steps(self.dt_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return dt and the log decay of x [B,T,H*channels]: [B,T,H,channels] each, in fp32 (fp64 for fp64)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        dt = functional.softplus(x.to(wide) + self.dt_bias.to(wide)).unflatten(-1, (len(self.A_log), -1))
        return dt, -self.A_log.to(wide).exp().unsqueeze(-1) * dt
