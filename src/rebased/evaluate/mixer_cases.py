"""Mixers at a small size, random inputs, and comparisons: what the checks of the mixer contract are made of."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from rebased.evaluate.checks import NotApplicable, require
from rebased.mixers import can_extend, check_output
from rebased.models.block import build_mixer
from rebased.models.config import LMConfig

B, T, D = 3, 21, 48  # 48 is a multiple of 1, 2, 3, 4, 6, 8, 12, 16 and 24 heads
MAX_LEN = 64
SUMS = (D, D, T, 153, D)
"""Lengths of the sums in any mixer: projection in, norm or convolution, tokens, features or states, projection out."""
CONDITION = 8.0
"""Norms, gates and denominators of a few random tokens make numbers some times larger, of which some cancel."""
MARGIN = 8.0


def tolerance(dtype: torch.dtype) -> float:
    """The largest error that passes, divided by the largest expected number (at least 1).

    A sum of n random roundings is off by about sqrt(n) unit roundoffs. A mixer in bf16 or fp16 sums in fp32, and rounds
    what it stores, some eight times in a row, each time by at most two unit roundoffs.
    """
    exact = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    stored = 0.0 if dtype in (torch.float32, torch.float64) else 8 * torch.finfo(dtype).eps
    return MARGIN * exact * CONDITION * sum(math.sqrt(n) for n in SUMS) + stored


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return the mixer as a model builds it, in eval mode: dropout would hide what the checks look for."""
    return build_mixer(LMConfig(d_model=D, max_len=MAX_LEN, mixers=(name,)), layer=1).to(dtype).eval()


def build_extendable(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return the mixer if it has a state. Raises NotApplicable otherwise."""
    mixer = build(name, dtype)
    if not can_extend(mixer):
        raise NotApplicable(f"mixer {name!r} has no init_state, extend and state_size")
    return mixer


def random_inputs(batch: int = B, length: int = T, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random x [batch, length, D]: the same numbers in every dtype, but for rounding."""
    return torch.randn(batch, length, D, dtype=torch.float64).to(dtype)


def checked_forward(mixer: nn.Module, x: Tensor) -> Tensor:
    """Return mixer(x), checked: one tensor with the shape, dtype and device of x."""
    return check_output(mixer, x, mixer(x))


def state_after(mixer: Any, x: Tensor) -> Any:
    """Return the mixer's state after the tokens x [1,T,D]; T may be 0."""
    state = mixer.init_state(1)
    return mixer.extend(x, state)[1] if x.shape[1] else state


def require_near(actual: Tensor, expected: Tensor, what: str) -> None:
    """Raise AssertionError unless two tensors have one shape and differ by no more than `tolerance`."""
    require(actual.shape == expected.shape, f"{what}: shape {list(actual.shape)}, expected {list(expected.shape)}")
    if actual.numel() == 0:
        return
    differences = (actual.detach().double() - expected.detach().double()).abs()
    not_finite = int((~differences.isfinite()).sum())
    require(not not_finite, f"{what}: {not_finite} of {differences.numel()} numbers are NaN or infinite")
    largest = float(differences.max())
    allowed = tolerance(actual.dtype) * max(1.0, float(expected.detach().abs().max()))
    require(largest <= allowed, f"{what}: the largest difference is {largest:.2g}; at most {allowed:.2g} is allowed")


def require_same_function(mixer: nn.Module, x: Tensor, actual: Tensor, expected: Tensor, what: str) -> None:
    """Check that two outputs agree, and so do their gradients in x and in every parameter."""
    leaves = {"x": x, **dict(mixer.named_parameters())}
    weights = torch.randn(expected.shape, dtype=expected.dtype)
    actual_grads, expected_grads = (
        torch.autograd.grad((y * weights).sum(), list(leaves.values())) for y in (actual, expected)
    )
    require_near(actual, expected, what)
    for key, got, wanted in zip(leaves, actual_grads, expected_grads, strict=True):
        require_near(got, wanted, f"{what}: the gradient of {key}")
