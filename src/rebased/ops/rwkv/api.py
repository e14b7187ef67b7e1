"""WKV, the recurrence of RWKV-4: an average of past values whose weights decay at a rate per channel.

    wkv_t = (sum_{i<t} e^{k_i - (t-1-i) r} v_i + e^{u + k_t} v_t) / (the same without v),    r = e^w > 0

The public functions check their inputs and choose one of three paths: `reference.py` loops over T, `chunked.py` works
in log depth, `gpu.py` keeps the state in registers.
"""

import torch
from torch import Tensor

from rebased.ops.backend import Backend, accumulate_dtype, kernel_path
from rebased.ops.derivatives import refuse_transforms
from rebased.ops.rwkv import chunked, reference
from rebased.ops.rwkv.state import WKVState, init_wkv_state


def wkv(k: Tensor, v: Tensor, w: Tensor, u: Tensor, *, backend: Backend = "auto") -> Tensor:
    """The averages wkv_t, with nothing before the first token.

    Args:
        k: [B, T, D], exponents of the weights, any float dtype; B and T may be 0. Half precision is computed in fp32.
        v: [B, T, D], values.
        w: [D], the logarithm of the decay rate per token.
        u: [D], added to the exponent of the present token.
        backend: "reference" (or "recurrent"), "chunked", "triton", or "auto": "triton" on a GPU, else "chunked".

    Returns:
        [B, T, D] in the dtype of v, differentiable in all four (once, unless the backend is "reference").
    """
    state = init_wkv_state(k.shape[0], k.shape[-1], device=k.device, dtype=k.dtype)
    return wkv_extend(k, v, w, u, state, backend=backend)[0]


def wkv_extend(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, state: WKVState, *, backend: Backend = "auto"
) -> tuple[Tensor, WKVState]:
    """wkv of tokens that follow a state, and the state after them.

    Args:
        k, v, w, u, backend: as in wkv.
        state: the WKVState before the first token (init_wkv_state makes an empty one).

    Returns:
        [B, T, D] in the dtype of v, and the WKVState after the last token. Both are differentiable, also in num and den
        of `state`.
    """
    _check(k, v, w, u, state)
    path = kernel_path(backend, k, offset=k.shape[1] * k.shape[2])
    if path != "reference":
        refuse_transforms(f"the {path} path of wkv")
    dtype = accumulate_dtype(k.dtype)
    rate, u = torch.exp(w.to(dtype)), u.to(dtype)
    if path == "triton":
        from rebased.ops.rwkv import gpu

        return gpu.scan(k, v, rate, u, state)
    scan = reference.scan if path == "reference" else chunked.scan
    y, state = scan(k.to(dtype), v.to(dtype), rate, u, state)
    return y.to(v.dtype), state


def _check(k: Tensor, v: Tensor, w: Tensor, u: Tensor, state: WKVState) -> None:
    if k.ndim != 3 or k.shape != v.shape or k.shape[2] == 0:
        raise ValueError(f"k and v must be [B,T,D], with D above 0; they are {list(k.shape)} and {list(v.shape)}")
    batch, _, D = k.shape
    if w.shape != (D,) or u.shape != (D,):
        raise ValueError(f"w and u must be [{D}], one number per channel; they are {list(w.shape)} and {list(u.shape)}")
    if not isinstance(state, WKVState):
        raise ValueError(f"the state must be a WKVState (init_wkv_state makes one); got {type(state).__name__}")
    if any(x.shape != (batch, D) or x.dtype != accumulate_dtype(k.dtype) for x in state):
        raise ValueError(
            f"this state is of another shape or dtype: {[list(x.shape) for x in state]}, {state.num.dtype}; "
            f"k {list(k.shape)} in {k.dtype} needs three of {[batch, D]} in {accumulate_dtype(k.dtype)}"
        )
