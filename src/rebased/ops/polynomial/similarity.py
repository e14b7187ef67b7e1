"""The similarity of the chunked path as a function of scores, with its derivative."""

from typing import NamedTuple

import torch
from torch import Tensor

from rebased.ops.polynomial.features import Weights
from rebased.ops.polynomial.state import AnyCoefficients, Coefficients, layout


class Kernel(NamedTuple):
    """The similarity c0 + c1 s + c2 s^2 with s = scale * (x . y), as a function of s.

    The host never reads coefficients in a tensor: then all degrees count as there.
    """

    values: AnyCoefficients
    scale: float

    @property
    def coefficients(self) -> Coefficients:
        """Numbers that are zero where a degree has no features."""
        return layout(self.values)

    def similarity_(self, s: Tensor) -> Tensor:
        """c0 + c1 s + c2 s^2, written over s."""
        c0, c1, c2 = self._numbers(s.dtype)
        has_constant, has_linear, _ = self.coefficients
        sim = s.mul_(s.mul(c2).add_(c1)) if has_linear else s.square_()
        sim = sim.mul_(c2) if not has_linear and c2 != 1 else sim
        return sim.add_(c0) if has_constant else sim

    @property
    def slope_unit(self) -> float:
        """The factor that times_slope_ leaves out, because it is cheaper to multiply later."""
        _, c1, c2 = self.coefficients
        return 1.0 if c1 != 0 else 2 * c2

    def times_slope_(self, ds: Tensor, s: Tensor) -> Tensor:
        """ds * (c1 + 2 c2 s) / slope_unit, written over ds."""
        _, c1, c2 = self._numbers(s.dtype)
        return ds.mul_(s.mul(2 * c2).add_(c1) if self.coefficients[1] else s)

    @property
    def weights(self) -> Weights:
        """The weights of a query's features of degree 0, 1 and 2."""
        on_mps = isinstance(self.values, Tensor) and self.values.device.type == "mps"  # it has no fp64
        c0, c1, c2 = self._numbers(torch.float32 if on_mps else torch.float64)
        return c0, c1 * self.scale, c2 * self.scale**2

    def _numbers(self, dtype: torch.dtype) -> Weights:
        """(c0, c1, c2): floats, or three tensors [] of this dtype."""
        return tuple(self.values.to(dtype)) if isinstance(self.values, Tensor) else self.values
