"""The gates that attention may have, checked: log decays, and the strengths beta of the delta rule."""

import torch
from torch import Tensor

from rebased.ops.backend import in_torch_func


def check_log_decay(log_decay: Tensor, k: Tensor, *, channels: bool = False) -> None:
    """Raises ValueError unless log_decay fits keys k [B, T, H, K]: [B, T, H], or with channels [B, T, H, K] too."""
    _check_tensor("log_decay", log_decay, k, [k.shape[:3], *([k.shape] if channels else [])])
    _check_values("log_decay", log_decay, k, -torch.inf, 0.0, "at most 0 and finite: a factor e^g of at most 1")


def check_beta(beta: Tensor, k: Tensor) -> None:
    """Raises ValueError unless beta fits keys k [B, T, H, K]: [B, T, H], from 0 to 2."""
    _check_tensor("beta", beta, k, [k.shape[:3]])
    _check_values("beta", beta, k, 0.0, 2.0, "from 0 to 2: beyond, the state grows without bound")


def bounded(log_decay: Tensor) -> Tensor:
    """log_decay, clamped where its exponential is 0: larger magnitudes would cost others of a sum their digits."""
    return log_decay.clamp(min=-746.0 if log_decay.dtype == torch.float64 else -104.0)


def _check_tensor(name: str, gate: Tensor, k: Tensor, shapes: list[torch.Size]) -> None:
    if not isinstance(gate, Tensor) or gate.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        got = list(gate.shape) if isinstance(gate, Tensor) else type(gate).__name__
        raise ValueError(f"{name} must be a tensor {wanted}, as k is {list(k.shape)}; it is {got}")
    if gate.dtype not in (k.dtype, torch.float32) or gate.device != k.device:
        dtypes = " or ".join(dict.fromkeys(str(dtype) for dtype in (k.dtype, torch.float32)))
        raise ValueError(f"{name} must be {dtypes}, on {k.device}; it is {gate.dtype} on {gate.device}")


def _check_values(name: str, gate: Tensor, k: Tensor, low: float, high: float, wanted: str) -> None:
    """Checks numbers on a CPU; on a GPU the host would have to wait for them. Where the key is not finite, the gate may
    be anything: a layer has made both of a token that is not finite."""
    if gate.device.type != "cpu" or torch.compiler.is_compiling() or in_torch_func():
        return
    within = (gate >= low) & (gate <= high) & (gate > -torch.inf)
    if within.all():
        return
    wrong = ~within & _like(k.isfinite().all(-1), gate)
    if wrong.any():
        raise ValueError(f"{name} must be {wanted}; it has {gate[wrong][0].item():g}")


def _like(finite: Tensor, gate: Tensor) -> Tensor:
    """[B, T, H] -> the shape of the gate."""
    return finite.unsqueeze(-1).expand_as(gate) if gate.ndim > finite.ndim else finite
