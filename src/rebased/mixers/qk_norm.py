"""What happens to queries and keys before the similarity: normalisation, scale and shift, each of them optional."""

from typing import Literal

import torch
from torch import Tensor, nn

from rebased.ops import Norm, layer_norm, rms_norm

QKTransform = Literal["none", "norm", "scale", "affine", "norm_affine"]
"""What happens to q and k before the squared kernel: the rows of the paper's Table 1, in their order.
x^2, norm(x)^2, (gamma x)^2, (gamma x + beta)^2, and ReBased itself: (gamma norm(x) + beta)^2."""

QKNorm = Literal["layer", "rms", "l2"]
"""How q and k are normalised: (x - mean) / sd, x / root mean square, or x / length."""

NormAxis = Literal["joint", "each_head", "per_head"]
"""Over which features: of all heads jointly; of each head; or of each head, with one gamma and beta for q, k and all
heads."""


class AffineNorm(nn.Module):
    """A norm over the last axis in which normalisation, scale and shift are each optional.

    `transform` says which of them there are (QKTransform), `norm` which normalisation it is. With `groups` > 1 the
    features are normalised in that many groups of equal width. The output has the dtype of the input, also under
    autocast.
    """

    def __init__(
        self,
        width: int,
        transform: QKTransform,
        eps: float = 1e-5,
        *,
        norm: QKNorm = "layer",
        groups: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.transform, self.eps, self.norm, self.groups = transform, eps, norm, groups
        self.normalise = transform in ("norm", "norm_affine")
        has_scale, has_shift = transform in ("scale", "affine", "norm_affine"), transform in ("affine", "norm_affine")
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=dtype)) if has_scale else None
        self.bias = nn.Parameter(torch.zeros(width, device=device, dtype=dtype)) if has_shift else None

    @property
    def is_layer_norm(self) -> bool:
        """Whether it is a LayerNorm over all features, with or without scale and shift."""
        return self.normalise and self.norm == "layer" and self.groups == 1

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed x: [..., width] -> [..., width]."""
        if self.is_layer_norm:
            return layer_norm(x, self.weight, self.bias, self.eps)
        x = self.before_affine(x)
        if self.weight is not None:
            x = x * self.weight.to(x.dtype)
        return x if self.bias is None else x + self.bias.to(x.dtype)

    def before_affine(self, x: Tensor) -> Tensor:
        """Return x after normalisation, if there is one, and before scale and shift: [..., width] -> [..., width]."""
        if not self.normalise:
            return x
        parts = x.unflatten(-1, (self.groups, -1))
        if self.norm == "layer":
            return layer_norm(parts, None, None, self.eps).flatten(-2)
        if self.norm == "rms":
            return rms_norm(parts, None, self.eps).flatten(-2)
        return (rms_norm(parts, None, self.eps) * parts.shape[-1] ** -0.5).flatten(-2)

    def as_norm(self) -> Norm | None:
        """Return the norm as numbers, for a decoding step; None if it is the identity. Not for "l2"."""
        if self.transform == "none":
            return None
        kind = "none" if not self.normalise else "layer" if self.norm == "layer" else "rms"
        return Norm(self.weight, self.bias, self.eps, kind)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"{self.transform!r}, norm={self.norm!r}, groups={self.groups}, eps={self.eps}"
