"""One layer of the model: a mixer over time, then an MLP over features, each with a norm before it and a residual."""

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rebased.mixers import (
    CONTEXT,
    Slots,
    call_extend,
    check_extended,
    check_output,
    extend_documents,
    forward_documents,
    mixer_class,
    named_errors,
    rows_at,
    wrap,
)
from rebased.models.config import LMConfig
from rebased.models.norm import LayerNorm, RMSNorm, build_norm
from rebased.ops.backend import matmul_dtype


class MLP(nn.Module):
    """Two linear layers with a GELU between them: [..., D] -> [..., D], with `hidden` features inside."""

    residual_projections = ("fc2",)

    def __init__(self, d_model: int, hidden: int, **factory: Any) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d_model, hidden, **factory), nn.Linear(hidden, d_model, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return fc2(gelu(fc1(x))): [..., D] -> [..., D]."""
        return self.fc2(nn.functional.gelu(self.fc1(x)))


class SwiGLU(nn.Module):
    """Three linear layers without biases: [..., D] -> [..., D], with `hidden` features inside."""

    residual_projections = ("fc2",)

    def __init__(self, d_model: int, hidden: int, **factory: Any) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d_model, 2 * hidden, bias=False, **factory)  # the gate, then the values
        self.fc2 = nn.Linear(hidden, d_model, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Return fc2(silu(a) * b) with a, b the halves of fc1(x): [..., D] -> [..., D]."""
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(nn.functional.silu(gate) * value)


def build_mlp(config: LMConfig, **factory: Any) -> nn.Module:
    """Return the MLP of a layer, the identity if there is none; `factory` as in torch.nn.Linear."""
    D, hidden = config.d_model, config.mlp_ratio * config.d_model
    if not hidden:
        return nn.Identity()
    if config.mlp == "swiglu":  # three matrices in place of two: two thirds of the width, up to a multiple of 8
        return SwiGLU(D, -(-2 * hidden // 24) * 8, **factory)
    return MLP(D, hidden, **factory)


def build_mixer(config: LMConfig, layer: int, **factory: Any) -> nn.Module:
    """Return the mixer of this layer (from 0), with weights on `device` in `dtype` (torch's defaults unless given).

    A mixer without the arguments `device` and `dtype` is built under `torch.device(device)`, then converted.
    """
    spec = config.mixer_of(layer)
    cls = mixer_class(spec.name)
    wanted = inspect.signature(cls).parameters
    context = dict(zip(CONTEXT, (config.d_model, layer, config.n_layers, config.max_len), strict=True))
    factory = {key: value for key, value in factory.items() if value is not None}
    supplied = {key: value for key, value in (context | factory).items() if key in wanted}
    untaken = {key: value for key, value in factory.items() if key not in wanted}
    build_on = torch.device(untaken["device"]) if "device" in untaken else nullcontext()
    with build_on, named_errors(cls, "in its constructor"):
        mixer = cls(**supplied, **spec.arguments())
    mixer = mixer.to(**untaken) if untaken else mixer
    return wrap(mixer, config.d_model, **spec.options(), **factory)


class Block(nn.Module):
    """One layer: u = x + Mixer(norm1(x)), then x' = u + MLP(norm2(u)).

    Without an MLP (mlp_ratio 0) the second line is u + norm2(u), as in the paper's MQAR models: the identity replaces
    the MLP; norm and residual stay. Mamba's block (config.block "mamba") is the first line only, with an RMSNorm.

    Args:
        config: the model's config.
        layer: number of this layer, from 0. It chooses the mixer (config.mixer_of).
        factory: device and dtype, as in torch.nn.Linear.
    """

    mixer: Any  # a torch module under the mixer contract
    norm2: LayerNorm | RMSNorm | None
    mlp: nn.Module

    def __init__(self, config: LMConfig, layer: int, **factory: Any) -> None:
        super().__init__()
        D, is_mamba = config.d_model, config.block == "mamba"
        self.norm1 = build_norm("rms" if is_mamba else config.norm, D, **factory)
        self.mixer = build_mixer(config, layer, **factory)
        self.norm2 = None if is_mamba else build_norm(config.norm, D, **factory)
        self.mlp = build_mlp(config, **factory)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return the layer's output: x [B,T,D] -> [B,T,D]. Arguments as in `mix`."""
        return self.feed(self.mix(x, cu_seqlens))

    def mix(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return u = x + Mixer(norm1(x)), [B,T,D] -> [B,T,D]: the only place where positions meet.

        With `cu_seqlens` [n+1] packed documents do not see each other (mixers/documents.py).
        """
        y = self.norm1(x, dtype=matmul_dtype(x))
        if cu_seqlens is None:
            return x + check_output(self.mixer, y, self.mixer(y))
        return x + check_output(self.mixer, y, forward_documents(self.mixer, y, cu_seqlens), "forward_documents")

    def mix_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return mix(x) at these positions of each row only: x [B,T,D], positions [B,n] -> [B*n,D].

        A mixer that is faster without the others leaves them out (mixers/contract.py).
        """
        if hasattr(self.mixer, "attends_at") and self.mixer.attends_at(x, positions.shape[1]):
            y = self.norm1(x, dtype=matmul_dtype(x))
            return rows_at(x, positions) + self.mixer.forward_at(y, positions).flatten(0, 1)
        return rows_at(self.mix(x), positions)

    def feed(self, u: Tensor) -> Tensor:
        """Return x' = u + MLP(norm2(u)), [..., D] -> [..., D], each position by itself."""
        if self.norm2 is None:
            return u
        if isinstance(self.mlp, nn.Identity):
            return self.norm2(u, residual=True)
        return u + self.mlp(self.norm2(u, dtype=matmul_dtype(u)))

    def extend(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return (x' [B,T,D], state after x) for tokens x [B,T,D] that follow those the mixer's state has seen."""
        x1 = self.norm1(x)
        y, state = call_extend(self.mixer, x1, state)
        return self.feed(x + y), state

    def extend_documents(
        self, x: Tensor, lengths: Sequence[int], states: Sequence[Any], cu_seqlens: Tensor
    ) -> tuple[Tensor, list[Any]]:
        """Return (x' [1,N,D], states after x) for packed documents x [1,N,D] that each follow a state of the mixer."""
        y, states = extend_documents(self.mixer, self.norm1(x), lengths, states, cu_seqlens)
        return self.feed(x + y), states

    def extend_packed(self, x: Tensor, cu_seqlens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return (x' [1,N,D], state after x) for packed documents, with one row of the mixer's state for each."""
        x1 = self.norm1(x)
        y, state = check_extended(
            self.mixer, x1, self.mixer.extend_documents(x1, cu_seqlens, state), "extend_documents"
        )
        return self.feed(x + y), state

    def step(self, x: Tensor, slots: Slots, lengths: Tensor, longest: int) -> Tensor:
        """Return x' [S,1,D] of one more token x [S,1,D] per slot, and overwrite the slots (mixers/slots.py)."""
        x1 = self.norm1(x)
        return self.feed(x + check_output(self.mixer, x1, slots.step(x1, lengths, longest), "step"))
