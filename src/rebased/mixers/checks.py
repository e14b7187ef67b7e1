"""Checks of what goes into a mixer and what comes out of it. Each raises a ValueError that names the mixer."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from rebased.mixers.contract import describe_mixer, unwrap

_PACKAGE = __name__.partition(".")[0]


def is_own(cls: type) -> bool:
    """Return whether a class is a user's own: not of this package."""
    return cls.__module__.partition(".")[0] != _PACKAGE


class MixerFailed(ValueError):
    """A user's own mixer raised an error. The message names the mixer, its file, the line and the error."""


@contextmanager
def named_errors(mixer: nn.Module | type[nn.Module], where: str) -> Iterator[None]:
    """Inside, an error of a user's own mixer (or of its class) is raised as MixerFailed, which says where it failed.

    Errors of the package's own mixers stay as they are.
    """
    cls = mixer if isinstance(mixer, type) else type(unwrap(mixer))
    try:
        yield
    except Exception as error:
        if not (is_own(cls) and is_own(type(error))):
            raise
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_globals.get("__name__") == cls.__module__]
        line = f" (line {lines[-1]})" if lines else ""
        reason = ": ".join(filter(None, (type(error).__name__, str(error))))
        raise MixerFailed(f"{describe_mixer(mixer)} failed {where}{line}: {reason}") from error


def check_input(mixer: nn.Module, x: Tensor, weight: Tensor) -> None:
    """Check that x is [B,T,D] and matches the layer that reads it, whose weight is [any, D]: width, dtype, device.

    Under autocast any floating dtype will do.
    """
    layer = type(mixer).__name__
    if not isinstance(x, Tensor):
        raise ValueError(f"{layer} expects a tensor x [B, T, {weight.shape[1]}]; got {type(x).__name__}")
    if x.ndim != 3 or x.shape[2] != weight.shape[1]:
        raise ValueError(f"{layer} expects x of shape [B, T, {weight.shape[1]}]; its shape is {list(x.shape)}")
    if x.device != weight.device:
        raise ValueError(f"x is on {x.device} and the weights of {layer} are on {weight.device}; move one of them")
    if x.dtype != weight.dtype and not (x.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
        raise ValueError(
            f"x is {x.dtype} and the weights of {layer} are {weight.dtype}; convert one of them, "
            f"for example x.to({weight.dtype})"
        )


def check_state(state: Any, kind: type) -> None:
    """Check that a state is of the class that init_state makes."""
    if not isinstance(state, kind):
        raise ValueError(f"the state must be a {kind.__name__} (init_state makes one); got {type(state).__name__}")


def check_output(mixer: nn.Module, x: Tensor, y: Any, method: str = "forward") -> Tensor:
    """Return y if it is a tensor with the shape, device and dtype of x [B,T,D]; else say whose method is wrong.

    Under autocast any floating dtype will do.
    """
    if not isinstance(y, Tensor):
        raise ValueError(
            f"{describe_mixer(mixer)} returned a {type(y).__name__}; {method} must return one tensor of x's shape "
            f"[B, T, D] = {list(x.shape)}"
        )
    if y.shape != x.shape:
        raise ValueError(
            f"{describe_mixer(mixer)} returned the shape {list(y.shape)}; {method} must return x's shape [B, T, D] = "
            f"{list(x.shape)}"
        )
    if y.device != x.device:
        raise ValueError(f"{describe_mixer(mixer)} returned a tensor on {y.device}; x is on {x.device}")
    if y.dtype != x.dtype and not (y.is_floating_point() and torch.is_autocast_enabled(x.device.type)):
        raise ValueError(f"{describe_mixer(mixer)} returned {y.dtype}; {method} must return x's dtype, {x.dtype}")
    return y


def check_extended(mixer: nn.Module, x: Tensor, result: Any, method: str = "extend") -> tuple[Tensor, Any]:
    """Return (y, state) if that is what `extend` returned for x [B,T,D]; else say whose method is wrong."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(
            f"{describe_mixer(mixer)} returned a {type(result).__name__}; {method} must return (y, state), y of x's "
            f"shape [B, T, D] = {list(x.shape)}"
        )
    return check_output(mixer, x, result[0], method), result[1]


def call_init_state(mixer: Any, batch: int) -> Any:
    """Return mixer.init_state(batch). An error of a user's own mixer is named."""
    with named_errors(mixer, "in init_state"):
        return mixer.init_state(batch)


def call_extend(mixer: Any, x: Tensor, state: Any) -> tuple[Tensor, Any]:
    """Return mixer.extend(x, state), (y, state after x [B,T,D]), checked. An error of a user's own mixer is named."""
    with named_errors(mixer, f"in extend at x {list(x.shape)} in {x.dtype}"):
        result = mixer.extend(x, state)
    return check_extended(mixer, x, result)


def check_state_size(mixer: Any, seq_len: int) -> int:
    """Return mixer.state_size(seq_len) if it is an integer of at least 0; else say whose method is wrong."""
    with named_errors(mixer, "in state_size"):
        size = mixer.state_size(seq_len)
    if not isinstance(size, Integral) or size < 0:
        raise ValueError(
            f"{describe_mixer(mixer)} returned {size!r} from state_size({seq_len}); it must return how many numbers "
            "the state of one sequence holds, an integer of at least 0"
        )
    return int(size)


def check_mixer_causality(mixer: nn.Module, x: Tensor) -> Tensor:
    """Return mixer(x) in eval mode, [B,T,D], after a check that the mixer does not look ahead.

    The tokens of x from some position on are replaced: outputs before it must stay the same. Parameters, buffers,
    training mode and random number streams are left as they are. No gradient is computed.
    """
    generator = torch.Generator().manual_seed(0)
    other = 10 * torch.randn(x.shape, generator=generator).to(x)  # large: a softmax then shows a missing mask
    T = x.shape[1]
    with torch.no_grad(), eval_mode(mixer):
        y = _run(mixer, x)
        for cut in {T // 2, T // 2 + 1} & set(range(1, T)):  # one even and one odd position
            changed = _run(mixer, torch.cat([x[:, :cut], other[:, cut:]], dim=1))
            _compare(mixer, y, changed, cut)
    return y


def is_plain(kind: type[nn.Module], *modules: nn.Module | None) -> bool:
    """Return True if every module is exactly of class `kind` and has no hooks.

    Only then may fused code read its weights instead of calling it.
    """
    return all(
        type(each) is kind and not (each._forward_hooks or each._forward_pre_hooks or each._backward_hooks)
        for each in modules
    )


def empty_output(mixer: nn.Module, x: Tensor) -> Tensor:
    """Return the output for an x [B,T,D] without tokens (B or T is 0), for operators that do not take such inputs.

    The gradient of every parameter is zero, as it is for torch's own layers.
    """
    return x * sum(parameter.sum() for parameter in mixer.parameters())


def _run(mixer: nn.Module, x: Tensor) -> Tensor:
    """Return mixer(x), run on copies of its buffers and of the random number streams: each call sees the same ones.

    An error inside a user's own mixer is named as the mixer's.
    """
    buffers = {name: buffer.clone() for name, buffer in mixer.named_buffers()}
    given, devices = x.clone(), [x.device] if x.is_cuda else []
    with named_errors(mixer, f"at x {list(x.shape)} in {x.dtype}"), torch.random.fork_rng(devices):
        y = torch.func.functional_call(mixer, buffers, (x,))
    if not torch.equal(x.nan_to_num(), given.nan_to_num()):
        raise ValueError(f"{describe_mixer(mixer)} changes its input x in place; write x = x + 1 instead of x += 1")
    return check_output(mixer, x, y)


def _compare(mixer: nn.Module, y: Tensor, changed: Tensor, cut: int) -> None:
    """Check that both outputs [B,T,D] agree before position `cut`, up to rounding. NaN agrees with NaN only."""
    # Sums over time may be rounded differently when later tokens change (an FFT mixes all of them): hundreds of units
    # of roundoff in fp32 and fp64, a few in half precision, whose sums are kept in fp32.
    tolerance = torch.finfo(y.dtype).eps * (8 if y.dtype.itemsize == 2 else 1024)
    size = max(float(each.abs().nan_to_num(0.0, posinf=0.0).max()) for each in (y, changed))
    before, after = y[:, :cut], changed[:, :cut]
    same = (before == after) | (before.isnan() & after.isnan())
    differences = (after - before).abs().masked_fill(same, 0).nan_to_num(nan=torch.inf).amax((0, 2))  # [cut]
    if float(differences.max()) > tolerance * size:
        position = int(differences.argmax())
        raise ValueError(
            f"{describe_mixer(mixer)} looks ahead: its output at position {position} changes by "
            f"{float(differences[position]):.2g} when x changes from position {cut} on; the output at t may depend on "
            "x[:, :t+1] only"
        )


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode (no dropout) during the block, and each part back into its own mode afterwards."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, training in modes:
            each.training = training
