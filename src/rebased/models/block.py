"""One layer: a mixer over time, then an MLP over features, each behind a norm and around a residual."""

import inspect
from typing import Any

from torch import Tensor, nn

from rebased.mixers import CONTEXT, Earlier, forward_documents, mixer_class
from rebased.models.config import LMConfig
from rebased.models.norm import LayerNorm, RMSNorm, product_dtype


class MLP(nn.Module):
    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d_model, hidden)
        self.fc2 = nn.Linear(hidden, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(nn.functional.gelu(self.fc1(x)))


def build_mixer(config: LMConfig, layer: int) -> nn.Module:
    spec = config.mixer_of(layer)
    cls = mixer_class(spec.name)
    context = dict(zip(CONTEXT, (config.d_model, layer, config.n_layers, config.max_len), strict=True))
    wanted = inspect.signature(cls).parameters
    return cls(**{key: value for key, value in context.items() if key in wanted}, **spec.arguments())


class Block(nn.Module):
    """u = x + Mixer(LN1(x)),  x' = u + MLP(LN2(u)). Without an MLP the second line is u + LN2(u), as in the paper's
    MQAR models: the MLP is replaced by the identity, the norm and the residual stay. Mamba's block is the first line
    alone, with an RMSNorm."""

    mixer: Any  # a torch module under the mixer contract
    norm2: LayerNorm | None
    mlp: nn.Module

    def __init__(self, config: LMConfig, layer: int) -> None:
        super().__init__()
        D, is_mamba = config.d_model, config.block == "mamba"
        self.norm1 = RMSNorm(D, eps=1e-5) if is_mamba else LayerNorm(D)
        self.mixer = build_mixer(config, layer)
        self.norm2 = None if is_mamba else LayerNorm(D)
        self.mlp = MLP(D, config.mlp_ratio * D) if config.mlp_ratio else nn.Identity()

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, earlier: Earlier | None = None) -> Tensor:
        return self.feed(self.mix(x, cu_seqlens, earlier))

    def mix(self, x: Tensor, cu_seqlens: Tensor | None = None, earlier: Earlier | None = None) -> Tensor:
        """u, the first line: the only place where positions meet. With `cu_seqlens` documents do not see each other
        (mixers/documents.py); with `earlier` x is a part of a sequence that processes share (mixers/contract.py)."""
        y = self.norm1(x, dtype=product_dtype(x))
        if earlier is not None:
            return x + self.mixer.forward_part(y, earlier)
        return x + (self.mixer(y) if cu_seqlens is None else forward_documents(self.mixer, y, cu_seqlens))

    def feed(self, u: Tensor) -> Tensor:
        """x', the second line, each position [..., D] by itself."""
        if self.norm2 is None:
            return u
        if isinstance(self.mlp, nn.Identity):
            return self.norm2(u, residual=True)
        return u + self.mlp(self.norm2(u, dtype=product_dtype(u)))

    def extend(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        y, state = self.mixer.extend(self.norm1(x), state)
        return self.feed(x + y), state
