"""A short convolution before a mixer and a gate with a norm on its heads: two options that every mixer can have.

    u = silu(conv(x)),    o = the heads of mixer(u),    y = W_o (norm(o) gate(W x))

Comparisons turn on these two, so a config gives them to any mixer: {name: rebased, conv_width: 4, output_gate: silu}.
A mixer whose constructor has arguments of these names, or which names them in `built_in`, has its own instead.
"""

from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.mixers.attention_maps import HasAttentionMap, HasSimilarity
from rebased.mixers.checks import check_state, check_state_size, empty_output
from rebased.mixers.contract import Extendable, Isolating
from rebased.mixers.documents import ExtendsDocuments, follow_states, forward_documents, space_documents
from rebased.mixers.slots import HasSlots, HasStepHeads, Slots, init_slots
from rebased.ops import Norm, short_conv_extend
from rebased.ops.decoding.reference import normalise

OutputGate = Literal["none", "silu", "sigmoid"]
OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "conv_width": (int, 0, "taps of a short convolution with SiLU before the mixer; 0: none"),
    "output_gate": (OutputGate, "none", "norm of the heads, times this function of a projection of x; none: neither"),
}
"""The options as fields of a mixer's config: type, default and meaning."""
NORM_EPS = 1e-5


def check_options(conv_width: int, output_gate: OutputGate) -> None:
    """Raise ValueError unless both options are known."""
    if conv_width < 0:
        raise ValueError(f"conv_width {conv_width} must be at least 1, or 0 for no convolution")
    if output_gate not in get_args(OutputGate):
        raise ValueError(f"output_gate {output_gate!r} is unknown; choose one of {get_args(OutputGate)}")


class WrappedState(NamedTuple):
    """The state of a mixer with a short convolution before it."""

    conv: Tensor  # [B, conv_width - 1, D]  the last inputs of the convolution, in the dtype of x
    mixer: Any  # the state of the mixer


def gate_heads(o: Tensor, x: Tensor, norm: nn.Module, proj_gate: nn.Module | None, kind: OutputGate) -> Tensor:
    """Return norm(o) gate(W x) of heads o [B,T,H,V] and tokens x [B,T,D]: [B,T,H*V]. Without W there is no gate."""
    o = norm(o.to(next(norm.parameters()).dtype)).flatten(-2)
    if proj_gate is None:
        return o
    return o * (functional.silu if kind == "silu" else torch.sigmoid)(proj_gate(x))


class WrappedMixer(nn.Module):
    """A mixer with a short convolution before it, a gate after it, or both. `wrap` makes one.

    A mixer names the layer that makes y of its heads as `output_projection`; the gate stands before that layer, and the
    norm is one per head. Without the name, norm and gate follow the mixer's output.
    """

    conv: nn.Conv1d | None
    proj_gate: nn.Linear | None

    def __init__(
        self, mixer: Any, d_model: int, conv_width: int, output_gate: OutputGate, device: Any, dtype: Any
    ) -> None:
        super().__init__()
        check_options(conv_width, output_gate)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.d_model, self.conv_width, self.output_gate = d_model, conv_width, output_gate
        self.wrapped_mixer, self.n_heads = mixer, getattr(mixer, "n_heads", 1)
        self.conv = self.proj_gate = None
        if hasattr(mixer, "spreads_nan"):
            self.spreads_nan = mixer.spreads_nan
        if conv_width:  # it holds the taps; short_conv applies them
            self.conv = nn.Conv1d(d_model, d_model, conv_width, groups=d_model, bias=False, **factory)
        self.proj_o: nn.Module = nn.Identity()
        last = None
        if output_gate != "none":
            last, width = getattr(mixer, "output_projection", None), d_model
            if last is not None:  # the mixer now returns its heads, and its last layer comes after the gate
                self.proj_o = mixer.get_submodule(last)
                width = mixer.get_submodule(last).in_features
                setattr(mixer, last, nn.Identity())
            self.norm = nn.RMSNorm(width // self.n_heads if last else width, eps=NORM_EPS, **factory)
            self.proj_gate = nn.Linear(d_model, width, bias=False, **factory)
        names = getattr(mixer, "residual_projections", None)
        moved = (
            None if names is None else tuple("proj_o" if name == last else f"wrapped_mixer.{name}" for name in names)
        )
        self.residual_projections = moved

    def init_weights(self) -> None:
        """Set the weights that the mixer sets itself. The model calls it after its own init."""
        if hasattr(self.wrapped_mixer, "init_weights"):
            self.wrapped_mixer.init_weights()

    def forward(self, x: Tensor) -> Tensor:
        """Return the mixer's output with the options: x [B,T,D] -> [B,T,D]."""
        if x.numel() == 0:
            return empty_output(self, x)
        return self.finish(self.wrapped_mixer(self.convolve(x)[0]), x)

    def convolve(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Return what the mixer reads, silu of the convolution of tokens x [B,T,D] after a state, and the next state.

        Without a state they are the first tokens.
        """
        if self.conv is None:
            return x, state
        state = x.new_zeros(len(x), self.conv_width - 1, self.d_model) if state is None else state
        return short_conv_extend(x, self.conv.weight.squeeze(1), None, state, activation="silu")

    def finish(self, o: Tensor, x: Tensor) -> Tensor:
        """Return y [B,T,D] of what the mixer returns and of x [B,T,D]."""
        if self.proj_gate is None:
            return o
        heads = o.unflatten(-1, (-1, self.norm.weight.shape[0]))
        return self.proj_o(gate_heads(heads, x, self.norm, self.proj_gate, self.output_gate))

    def extra_repr(self) -> str:
        return f"conv_width={self.conv_width}, output_gate={self.output_gate!r}"


class _Extends(WrappedMixer):
    """Of a mixer with a state."""

    def init_state(
        self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> WrappedState:
        """Return the state before the first token: conv [B, conv_width - 1, D], zeros, and the mixer's state."""
        weight = next(self.parameters())
        shape = (batch, max(self.conv_width - 1, 0), self.d_model)
        conv = torch.zeros(shape, device=device or weight.device, dtype=dtype or weight.dtype)
        return WrappedState(conv, self.wrapped_mixer.init_state(batch, device=device, dtype=dtype))

    def extend(self, x: Tensor, state: WrappedState) -> tuple[Tensor, WrappedState]:
        """Return (y [B,T,D], state after x): forward() of tokens x [B,T,D] that follow those the state has seen."""
        check_state(state, WrappedState)
        if x.numel() == 0:
            return empty_output(self, x), WrappedState(state.conv, self.wrapped_mixer.extend(x, state.mixer)[1])
        u, conv = self.convolve(x, state.conv)
        o, after = self.wrapped_mixer.extend(u, state.mixer)
        return self.finish(o, x), WrappedState(conv, after)

    def state_size(self, seq_len: int) -> int:
        """Return how many numbers the state of one sequence holds: (conv_width - 1) D and those of the mixer."""
        return max(self.conv_width - 1, 0) * self.d_model + check_state_size(self.wrapped_mixer, seq_len)


class _Isolates(WrappedMixer):
    """Of a mixer with its own way to keep packed documents apart."""

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return forward() of each packed document by itself: x [B,T,D], cu_seqlens [n+1] -> [B,T,D]."""
        spaced, places = space_documents(x, cu_seqlens, gap=max(self.conv_width - 1, 0))
        u = self.convolve(spaced)[0].index_select(1, places).view_as(x)
        return self.finish(forward_documents(self.wrapped_mixer, u, cu_seqlens), x)


class _ExtendsDocuments(_Extends):
    """Of a mixer with its own way to read several sequences at once, each after a state."""

    def extend_documents(self, x: Tensor, cu_seqlens: Tensor, state: WrappedState) -> tuple[Tensor, WrappedState]:
        """Return (y [1,N,D], state after x): extend() of each packed document by itself (mixers/documents.py)."""
        seen, places, conv = follow_states(x, cu_seqlens, state.conv)
        u = self.convolve(seen)[0].index_select(1, places)
        o, after = self.wrapped_mixer.extend_documents(u, cu_seqlens, state.mixer)
        return self.finish(o, x), WrappedState(conv, after)


class _HasSlots(_Extends):
    """Of a mixer with its own slots, or with steps that overwrite its state."""

    def init_slots(self, count: int, capacity: int) -> "WrappedSlots":
        """Return empty slots for `count` sequences of at most `capacity` tokens (mixers/slots.py)."""
        return WrappedSlots(self, self.init_state(count).conv, init_slots(self.wrapped_mixer, count, capacity))


class _ShowsAttention(WrappedMixer):
    """Of a mixer with an attention matrix. The matrix is that of the tokens after the convolution."""

    def attention_map(self, x: Tensor) -> Tensor:
        """Return the mixer's attention matrix: x [B,T,D] -> [B,H,T,T]."""
        return self.wrapped_mixer.attention_map(self.convolve(x)[0])

    def apply_attention(self, attention: Tensor, x: Tensor) -> Tensor:
        """Return the output [B,T,D] for x [B,T,D] if the matrix were `attention` [B,H,T,T]."""
        return self.finish(self.wrapped_mixer.apply_attention(attention, self.convolve(x)[0]), x)


class _HasSimilarity(WrappedMixer):
    """Of a mixer whose weights are a function of q . k."""

    def attention_scores(self, x: Tensor) -> Tensor:
        """Return the scaled product of every query and key: x [B,T,D] -> [B,H,T,T]."""
        return self.wrapped_mixer.attention_scores(self.convolve(x)[0])

    def similarity(self, scores: Tensor) -> Tensor:
        """Return the weight of a pair before it is divided by the sum: any shape -> the same shape."""
        return self.wrapped_mixer.similarity(scores)


class WrappedSlots:
    """The slots of a mixer, and the last inputs of the convolution before it: conv [count, conv_width - 1, D]."""

    def __init__(self, mixer: WrappedMixer, conv: Tensor, slots: Slots) -> None:
        self._mixer, self._conv, self._slots, self.grows = mixer, conv, slots, slots.grows

    def put(self, slot: int, state: WrappedState, length: int) -> None:
        """Copy the state of one sequence into a slot."""
        self._conv[slot].copy_(state.conv[0])
        self._slots.put(slot, state.mixer, length)

    def get(self, slot: int, length: int) -> WrappedState:
        """Return a copy of the state in a slot."""
        return WrappedState(self._conv[slot : slot + 1].clone(), self._slots.get(slot, length))

    def step(self, x: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Return y [count,1,D] of one more token per slot, and overwrite the states."""
        u, conv = self._mixer.convolve(x, self._conv)
        self._conv.copy_(conv)
        return self._mixer.finish(self._slots.step(u, lengths, longest), x)

    def step_fused(self, x: Tensor, norm: Norm, lengths: Tensor, longest: int) -> Tensor:
        """Return x + mixer(norm(x)) [count,D] of one more token x [count,D] per slot, and overwrite the states.

        The mixer's own part is fused if its slots have `step_heads`.
        """
        y = normalise(x, norm).unsqueeze(1)
        u, conv = self._mixer.convolve(y, self._conv)
        self._conv.copy_(conv)
        if not isinstance(self._slots, HasStepHeads):
            return x + self._mixer.finish(self._slots.step(u, lengths, longest), y).squeeze(1)
        o = self._slots.step_heads(u.squeeze(1), None, lengths, longest)
        if self._mixer.proj_gate is None:
            return self._slots.project_heads(o, x)
        return x + self._mixer.finish(o.unsqueeze(1), y).squeeze(1)

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of `capacity` tokens."""
        self._slots.reserve(capacity)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that hold the states."""
        return [self._conv, *self._slots.tensors()]


def wrap(
    mixer: nn.Module,
    d_model: int,
    *,
    conv_width: int = 0,
    output_gate: OutputGate = "none",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return the mixer with a short convolution of `conv_width` taps and an output gate; the mixer itself with neither.

    What the mixer can do (a state, slots, documents, an attention matrix), the result can do.
    """
    if not conv_width and output_gate == "none":
        return mixer
    abilities = (
        (_HasSlots, isinstance(mixer, Extendable) and (isinstance(mixer, HasSlots) or hasattr(mixer, "extend_"))),
        (_ExtendsDocuments, isinstance(mixer, Extendable) and isinstance(mixer, ExtendsDocuments)),
        (_Extends, isinstance(mixer, Extendable)),
        (_Isolates, isinstance(mixer, Isolating)),
        (_ShowsAttention, isinstance(mixer, HasAttentionMap)),
        (_HasSimilarity, isinstance(mixer, HasSimilarity)),
    )
    cls = _class_of(tuple(part for part, has in abilities if has))
    return cls(mixer, d_model, conv_width, output_gate, device, dtype)


@cache
def _class_of(parts: tuple[type[WrappedMixer], ...]) -> type[WrappedMixer]:
    return type("WrappedMixer", (*parts, WrappedMixer), {"__module__": __name__})
