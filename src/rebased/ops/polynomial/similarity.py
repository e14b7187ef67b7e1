"""The similarity of the chunked path as a function of scores, with its derivative: fixed or learnt coefficients."""

from typing import NamedTuple

from torch import Tensor

from rebased.ops.polynomial.features import Weights
from rebased.ops.polynomial.state import EVERY_DEGREE, Coefficients


class Kernel(NamedTuple):
    """The similarity c0 + c1 s + c2 s^2 with s = scale * (x . y), as a function of s."""

    coefficients: Coefficients
    scale: float

    def similarity_(self, s: Tensor) -> Tensor:
        """c0 + c1 s + c2 s^2, written over s."""
        c0, c1, c2 = self.coefficients
        sim = s.square_() if c1 == 0 else s.mul_(s.mul(c2).add_(c1))
        sim = sim.mul_(c2) if c1 == 0 and c2 != 1 else sim
        return sim.add_(c0) if c0 != 0 else sim

    @property
    def slope_unit(self) -> float:
        """The factor that times_slope_ leaves out, because it is cheaper to multiply later."""
        _, c1, c2 = self.coefficients
        return 1.0 if c1 != 0 else 2 * c2

    def times_slope_(self, ds: Tensor, s: Tensor) -> Tensor:
        """ds * (c1 + 2 c2 s) / slope_unit, written over ds."""
        _, c1, c2 = self.coefficients
        return ds.mul_(s.mul(2 * c2).add_(c1) if c1 != 0 else s)

    @property
    def weights(self) -> Weights:
        """The weights of a query's features of degree 0, 1 and 2."""
        c0, c1, c2 = self.coefficients
        return c0, c1 * self.scale, c2 * self.scale**2


class LearnedKernel(NamedTuple):
    """The same with coefficients in a tensor [3]. The host never reads them."""

    values: Tensor
    scale: float

    @property
    def coefficients(self) -> Coefficients:
        """Which degrees have features: all."""
        return EVERY_DEGREE

    def similarity_(self, s: Tensor) -> Tensor:
        """c0 + c1 s + c2 s^2, written over s."""
        c0, c1, c2 = self.values.to(s.dtype)
        return s.mul_(s.mul(c2).add_(c1)).add_(c0)

    @property
    def slope_unit(self) -> float:
        """1: times_slope_ leaves nothing out."""
        return 1.0

    def times_slope_(self, ds: Tensor, s: Tensor) -> Tensor:
        """ds * (c1 + 2 c2 s), written over ds."""
        _, c1, c2 = self.values.to(s.dtype)
        return ds.mul_(s.mul(2 * c2).add_(c1))

    @property
    def weights(self) -> Weights:
        """The weights of a query's features of degree 0, 1 and 2."""
        c0, c1, c2 = self.values.double() if self.values.device.type != "mps" else self.values
        return c0, c1 * self.scale, c2 * self.scale**2


AnyKernel = Kernel | LearnedKernel
