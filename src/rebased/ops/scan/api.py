"""The selective scan of Mamba (S6): a diagonal linear recurrence whose step size and projections depend on the token.

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t,    y_t = C_t . h_t + skip x_t        h [B, D, N]

The public functions check their inputs and choose one of three paths: `reference.py` loops over T, `chunked.py` scans
chunks of tokens in log depth, `gpu.py` keeps h in registers. States are fp32, and fp64 for fp64 inputs. What Mamba
computes before and after, the step size softplus(dt + dt_bias) and the gate y silu(gate), may be asked for too: on a
GPU they are kernels of their own (`elementwise_gpu.py`).
"""

import torch
from torch import Tensor
from torch.nn import functional

from rebased.ops.backend import Backend, accumulate_dtype, kernel_path
from rebased.ops.derivatives import refuse_transforms
from rebased.ops.scan import chunked, reference

_AXES = {"dt": "btd", "A": "dn", "B": "btn", "C": "btn", "state": "bdn", "skip": "d", "dt_bias": "d", "gate": "btd"}


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    skip: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    gate: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """y_t = C_t . h_t + skip x_t with h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t and h = 0 before the first token.

    Args:
        x: [B, T, D], any float dtype; B and T may be 0. Half precision is computed in fp32.
        dt: [B, T, D], step sizes > 0; with dt_bias any numbers.
        A: [D, N], negative.
        B: [B, T, N].
        C: [B, T, N].
        skip: [D], or None for 0.
        dt_bias: [D]; if given, step sizes are softplus(dt + dt_bias).
        gate: [B, T, D]; if given, y is multiplied by silu(gate).
        backend: "reference" (or "recurrent"), "chunked", "triton", or "auto": "triton" on a GPU, else "chunked".

    Returns:
        y [B, T, D] in the dtype of x, differentiable in all tensors (once, unless the backend is "reference").
    """
    state = torch.zeros(x.shape[0], *A.shape, device=x.device, dtype=accumulate_dtype(x.dtype))
    return selective_scan_extend(x, dt, A, B, C, skip, state, dt_bias=dt_bias, gate=gate, backend=backend)[0]


def selective_scan_extend(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    skip: Tensor | None,
    state: Tensor,
    *,
    dt_bias: Tensor | None = None,
    gate: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """The selective scan of tokens that follow a state, and the state after them.

    Args:
        x, dt, A, B, C, skip, dt_bias, gate, backend: as in selective_scan.
        state: [B, D, N], fp32 (fp64 for fp64 inputs): the state before the first token.

    Returns:
        y [B, T, D] in the dtype of x, and the state [B, D, N] after the last token in the dtype of `state`. Both are
        differentiable, also in `state`.
    """
    _check(x, A, state, dt=dt, B=B, C=C, skip=skip, dt_bias=dt_bias, gate=gate)
    (_, T, D), N = x.shape, state.shape[2]
    checkpoints = -(-T // chunked.INTERVAL) * D * N
    path = kernel_path(backend, x, offset=max(T * D, checkpoints))
    if path != "reference":
        refuse_transforms(f"the {path} path of selective_scan")
    if path == "triton":
        from rebased.ops.scan import gpu

        return gpu.scan(x, dt, A, B, C, skip, state, dt_bias, gate)
    dtype = accumulate_dtype(x.dtype)
    dt = dt.to(dtype) if dt_bias is None else functional.softplus(dt.to(dtype) + dt_bias.to(dtype))
    inputs = (x.to(dtype), dt, A.to(dtype), B.to(dtype), C.to(dtype))
    scan = reference.scan if path == "reference" else chunked.scan
    y, state = scan(*inputs, state)
    if skip is not None:
        y = torch.addcmul(y, inputs[0], skip.to(dtype))
    y = y.to(x.dtype)
    return (y if gate is None else (y * functional.silu(gate)).to(x.dtype)), state


def _check(x: Tensor, A: Tensor, state: Tensor, **others: Tensor | None) -> None:
    if x.ndim != 3 or A.ndim != 2 or x.shape[2] == 0 or 0 in A.shape:
        raise ValueError(
            f"x must be [B,T,D] and A [D,N], with D and N above 0; they are {list(x.shape)} and {list(A.shape)}"
        )
    sizes = dict(zip("btdn", (*x.shape, A.shape[1]), strict=True))
    for name, value in {**others, "A": A, "state": state}.items():
        wanted = [sizes[axis] for axis in _AXES[name]]
        if value is not None and list(value.shape) != wanted:
            raise ValueError(f"{name} is {list(value.shape)}; x {list(x.shape)} with N = {sizes['n']} needs {wanted}")
    if state.dtype != accumulate_dtype(x.dtype):
        raise ValueError(f"a state for {x.dtype} inputs is {accumulate_dtype(x.dtype)}; this one is {state.dtype}")
