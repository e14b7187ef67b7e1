"""The public face of polynomial attention: checks what it is given and takes one of the paths."""

from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

from rebased.ops.backend import Backend, accumulate_dtype, choose_path, has_triton
from rebased.ops.polynomial import chunked, recurrent, reference, summary
from rebased.ops.polynomial.state import Coefficients, PolyState, feature_count, init_poly_state

REBASED: Coefficients = (0.0, 0.0, 1.0)
BASED: Coefficients = (1.0, 1.0, 0.5)
EPS = 1e-12
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PLAIN_TORCH: dict[Backend, ModuleType] = {"reference": reference, "recurrent": recurrent, "chunked": chunked}


def poly_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    coefficients: Coefficients,
    scale: float | None = None,
    eps: float = EPS,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Causal attention with similarity c0 + c1 s + c2 s^2, s = scale * (q . k); linear in T.

    q, k [B,T,H,K] and v [B,T,H,V] give o [B,T,H,V]. `scale` is K ** -0.5 unless given. With `cu_seqlens` [N+1]
    (B = 1) the row holds N documents, document n at positions cu_seqlens[n] to cu_seqlens[n+1], and none sees another.
    """
    coefficients, scale = _check(q, k, v, coefficients, scale)
    path = _path(backend, q)
    if cu_seqlens is None:
        return path.attend(q, k, v, coefficients=coefficients, scale=scale, eps=eps)
    _check_cu_seqlens(cu_seqlens, q)
    if path not in _PLAIN_TORCH.values():
        return path.attend(q, k, v, coefficients=coefficients, scale=scale, eps=eps, cu_seqlens=cu_seqlens)
    documents = [
        path.attend(q[:, i:j], k[:, i:j], v[:, i:j], coefficients=coefficients, scale=scale, eps=eps)
        for i, j in pairwise(_bounds(cu_seqlens, q.shape[1]))
        if i < j
    ]
    return torch.cat(documents, dim=1)


def poly_attention_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: PolyState | None,
    *,
    coefficients: Coefficients,
    scale: float | None = None,
    eps: float = EPS,
    backend: Backend = "auto",
) -> tuple[Tensor, PolyState]:
    """poly_attention of tokens that follow those a state has seen (None: no tokens); also gives the state after them.

    Prefill and decoding are this one function, at T = a prompt's length and T = 1. Differentiable in the state too.
    """
    coefficients, scale = _check(q, k, v, coefficients, scale)
    if state is None:
        B, _, H, K = q.shape
        state = init_poly_state(B, H, K, v.shape[3], coefficients, device=q.device, dtype=q.dtype)
    _check_state(state, q, v, coefficients)
    path = _path(backend, q)
    return path.extend(q, k, v, state, coefficients=coefficients, scale=scale, eps=eps)


def poly_state(k: Tensor, v: Tensor, *, coefficients: Coefficients) -> PolyState:
    """The state that these tokens alone leave behind: k [B,T,H,K], v [B,T,H,V]. Differentiable.

    States of parts of a sequence add up: poly_attention_extend(q, k, v, the sum over all earlier parts) is what
    poly_attention gives for this part. So parts can be computed side by side, in processes of their own.
    """
    coefficients, _ = _check(k, k, v, coefficients, None)
    return summary.summarise(k, v, coefficients=coefficients)


def _path(backend: Backend, q: Tensor) -> ModuleType:
    """The path a call takes; "auto" leaves to the chunked one what the kernels do not take."""
    name = choose_path(backend, q.device)
    if name != "triton":
        return _PLAIN_TORCH[name]
    if not has_triton():
        raise ValueError("backend 'triton' needs Triton: pip install triton, or use 'auto' or 'chunked'")
    from rebased.ops.polynomial import gpu  # here, because importing rebased.ops must not import Triton
    from rebased.ops.polynomial.gpu.plan import MAX_KEY_WIDTH

    beyond_kernels = q.dtype == torch.float64 or q.shape[3] > MAX_KEY_WIDTH
    return chunked if backend == "auto" and beyond_kernels else gpu


def _check(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, scale: float | None
) -> tuple[Coefficients, float]:
    """One clear ValueError for whatever is wrong; else the coefficients and the scale as plain floats."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, T, H, width], four axes; it has shape {list(x.shape)}")
        if x.dtype not in _FLOATS:
            raise ValueError(f"{name} has dtype {x.dtype}; use float16, bfloat16, float32 or float64")
    if q.shape[:3] != k.shape[:3] or q.shape[:3] != v.shape[:3]:
        raise ValueError(
            "q, k and v must agree in B, T and H; their shapes are "
            f"{list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have the same width K; q has {q.shape[3]} and k has {k.shape[3]}")
    if 0 in q.shape or 0 in v.shape:
        raise ValueError(f"no axis may be empty; q is {list(q.shape)}, v is {list(v.shape)}")
    if not (q.dtype == k.dtype == v.dtype):
        raise ValueError(f"q, k and v must share one dtype; they have {q.dtype}, {k.dtype} and {v.dtype}")
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v must be on one device; they are on {q.device}, {k.device} and {v.device}")
    if len(coefficients) != 3:
        raise ValueError(f"coefficients are (c0, c1, c2); got {len(coefficients)} numbers: {coefficients}")
    c0, c1, c2 = (float(c) for c in coefficients)
    if c0 == c1 == c2 == 0:
        raise ValueError("coefficients (0, 0, 0) make every similarity zero; ReBased is (0, 0, 1), Based (1, 1, 0.5)")
    return (c0, c1, c2), float(q.shape[3] ** -0.5 if scale is None else scale)


def _check_state(state: PolyState, q: Tensor, v: Tensor, coefficients: Coefficients) -> None:
    B, _, H, K = q.shape
    F, V = feature_count(K, coefficients), v.shape[3]
    if not isinstance(state, PolyState):
        raise ValueError(f"the state must be a PolyState (init_poly_state makes one); got {type(state).__name__}")
    if list(state.kv.shape) != [B, H, F, V] or list(state.z.shape) != [B, H, F]:
        raise ValueError(
            f"this state is of another shape: kv {list(state.kv.shape)}, z {list(state.z.shape)}; these inputs need "
            f"kv {[B, H, F, V]}, z {[B, H, F]} (F = {F} for K = {K} and coefficients {coefficients})"
        )
    if state.kv.dtype != accumulate_dtype(q.dtype) or state.z.dtype != accumulate_dtype(q.dtype):
        raise ValueError(f"a state for {q.dtype} inputs is {accumulate_dtype(q.dtype)}; this one is {state.kv.dtype}")
    if state.kv.device != q.device or state.z.device != q.device:
        raise ValueError(f"the state is on {state.kv.device} and the inputs are on {q.device}; move one of them")


def _check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    """All but the numbers themselves, for which the host would have to wait on a GPU."""
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs documents into one row, so B must be 1; it is {q.shape[0]}")
    if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be whole numbers [0, ..., T], one axis; got shape {list(cu_seqlens.shape)}")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and the inputs are on {q.device}; move one of them")


def _bounds(cu_seqlens: Tensor, T: int) -> list[int]:
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != T or any(i > j for i, j in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {T}; it is {bounds[:4]} ... {bounds[-1]}")
    return bounds
