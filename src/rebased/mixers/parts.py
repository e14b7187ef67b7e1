"""What the parts of a sequence hand on to each other where a mixer looks back at single tokens."""

from torch import Tensor

from rebased.mixers.contract import Earlier


def tokens_before(x: Tensor, earlier: Earlier, count: int) -> Tensor:
    """The last tokens of all earlier parts, `count` of them or as many as there are: x [B,T,...] -> [B,s,...]."""
    seen = earlier(_last(x, count)).transpose(0, 1).flatten(1, 2)
    return _last(seen, count)


def _last(x: Tensor, count: int) -> Tensor:
    return x[:, max(0, x.shape[1] - count) :]
