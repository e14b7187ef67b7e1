"""The public functions of polynomial attention: they check their inputs and choose a path."""

import logging
import math
from functools import cache, lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rebased.ops.backend import (
    Backend,
    accumulate_dtype,
    choose_path,
    has_triton,
    in_torch_func,
    untraced,
    without_autocast,
)
from rebased.ops.derivatives import in_forward_mode, refuse_forward_mode, refuse_transforms
from rebased.ops.polynomial import chunked, recurrent, reference, summary
from rebased.ops.polynomial.gates import check_log_decay
from rebased.ops.polynomial.state import (
    AnyCoefficients,
    Coefficients,
    PolyState,
    feature_count,
    init_poly_state,
    layout,
)

REBASED: Coefficients = (0.0, 0.0, 1.0)
BASED: Coefficients = (1.0, 1.0, 0.5)
EPS = 1e-12
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_log = logging.getLogger("rebased")
_PLAIN_TORCH: dict[Backend, ModuleType] = {"reference": reference, "recurrent": recurrent, "chunked": chunked}


@without_autocast
def poly_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    coefficients: AnyCoefficients,
    scale: float | None = None,
    eps: float = EPS,
    log_decay: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """Causal attention with the similarity c0 + c1 s + c2 s^2, s = scale * (q . k), in time linear in T:

        o_i = sum_{j<=i} sim_ij v_j / (sum_{j<=i} sim_ij + eps)

    Args:
        q: queries [B, T, H, K], float16, bfloat16, float32 or float64. B and T may be 0.
        k: keys [B, T, H, K], in the dtype and on the device of q.
        v: values [B, T, H, V], in the dtype and on the device of q.
        coefficients: (c0, c1, c2), not all zero. ReBased is REBASED = (0, 0, 1), Based is BASED = (1, 1, 0.5). Or a
            tensor [3] of a float dtype on the device of q, which may want gradients; its values are not checked.
        scale: factor of q . k; None means K ** -0.5.
        eps: added to the denominator, at least 0; default 1e-12.
        log_decay: [B, T, H], numbers g of at most 0, or None. With it the past fades: sim_ij is multiplied by
            e^(g_(j+1) + ... + g_i). Its dtype is that of q or fp32. On a GPU the numbers are not checked.
        cu_seqlens: integers [N+1] that rise from 0 to T, or None. With it (B must be 1) the row holds N documents,
            document n at positions cu_seqlens[n] to cu_seqlens[n+1], and no document sees another. On a GPU the numbers
            are not checked, because the host would have to wait for them.
        causal: False: the sums are over all j, as in an encoder. It is plain torch on every device, two products per
            row and head, and takes neither log_decay nor cu_seqlens.
        backend: "reference" is the equation, quadratic in T, and differentiable any number of times; "recurrent" goes
            token by token; "chunked" is linear in T in plain torch; "triton" needs a GPU, K up to 128 and no float64;
            "auto" is "triton" where it can be, else "chunked". Coefficients in a tensor have no kernel: "auto" is then
            "chunked" on a GPU too; complete_square is a way around it if all similarities are positive.

    Returns:
        o [B, T, H, V] in the dtype of v. Half precision is computed in fp32; autocast changes nothing (cast q, k and v
        to compute in half precision). Differentiable in q, k, v and log_decay. With
        torch.func.grad and torch.func.vmap use any backend but "triton" ("auto" does so); with a log_decay "reference"
        or "recurrent".

        A sum of similarities beyond the range of fp32, 3.4e38, gives NaN: for REBASED that is |s| above 1.8e19, so q
        and k of 1e10 overflow (with the kernels |q . k| above 1.8e19, with log_decay on a GPU |s| above 1e10; kernels
        give NaN, or 0 where values are small); fp64 has room. A NaN or an infinity in q, k or v at one token never
        reaches another row, head or document, and on a CPU no earlier token. On a GPU one in v also reaches the earlier
        tokens of its tile of 64 ("triton") or 128 ("chunked"); with log_decay, "chunked" has tiles of 64 on every
        device. docs/math.md says what holds for gradients.

    Raises:
        ValueError: if shapes, dtypes, devices or numbers are not as above, or the backend is unknown or cannot take
            these tensors.
        TypeError: if cu_seqlens is not a tensor.
    """
    coefficients, scale, eps = _check(q, k, v, coefficients, scale, eps)
    if not causal:
        if log_decay is not None or cu_seqlens is not None or backend == "triton":
            raise ValueError(
                "causal=False takes neither log_decay nor cu_seqlens, and has no kernel: call it once per document, "
                "with backend='auto'"
            )
        choose_path(backend, q.device)  # refuses an unknown one
        return recurrent.attend_all(q, k, v, coefficients=coefficients, scale=scale, eps=eps)
    path = _path(backend, q, coefficients, log_decay)
    _refuse_transforms(path, coefficients)
    gate, numbers = _gate(log_decay, k), {"coefficients": coefficients, "scale": scale, "eps": eps}
    if cu_seqlens is None:
        return path.attend(q, k, v, **numbers, **gate)
    check_cu_seqlens(cu_seqlens, q)
    if not _is_plain_torch(path):
        return path.attend(q, k, v, **numbers, **gate, cu_seqlens=cu_seqlens)
    return _attend_documents(path, q, k, v, cu_seqlens, numbers, gate)


@untraced
def _attend_documents(
    path: ModuleType, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, numbers: dict[str, Any], gate: dict[str, Any]
) -> Tensor:
    """The output of packed documents, one after the other. It is not compiled: no two batches have equal lengths."""
    documents = [
        path.attend(q[:, i:j], k[:, i:j], v[:, i:j], **numbers, **{name: g[:, i:j] for name, g in gate.items()})
        for i, j in pairwise(document_bounds(cu_seqlens, q))
        if i < j or q.shape[1] == 0
    ]
    return torch.cat(documents, dim=1)


@without_autocast
def poly_attention_at(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    *,
    coefficients: AnyCoefficients,
    scale: float | None = None,
    eps: float = EPS,
    log_decay: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """poly_attention at n positions of each row only: each query with all keys up to its position, n T in all.

    Args:
        q: queries [B, n, H, K], those of the wanted positions alone; dtypes as in poly_attention. B and n may be 0.
        k, v: keys [B, T, H, K] and values [B, T, H, V], in the dtype and on the device of q.
        positions: integers [B, n] from 0 to T - 1, on the device of q: where each query stands. They are not checked,
            because the host would have to wait for them.
        coefficients, scale, eps, log_decay: as in poly_attention; log_decay is that of the keys, [B, T, H].
        backend: "triton" needs a GPU, K up to 128, no float64 and no log_decay; "auto" is "triton" where it can be. All
            others take the equation, in memory of n T numbers per row and head.

    Returns:
        o [B, n, H, V] in the dtype of v, differentiable in q, k and v. On a GPU a NaN or an infinity in v may reach
        earlier positions of its row.
    """
    coefficients, scale, eps = _check(k, k, v, coefficients, scale, eps)
    wanted = (k.shape[0], *q.shape[1:2], *k.shape[2:])
    if q.shape != wanted or q.dtype != k.dtype or q.device != k.device:
        raise ValueError(
            f"q {list(q.shape)} must be [B, n, H, K] as k {list(k.shape)} is [B, T, H, K], in its dtype and on its "
            f"device; they are {q.dtype} on {q.device} and {k.dtype} on {k.device}"
        )
    if positions.shape != q.shape[:2] or positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"positions must be [B, n] = {list(q.shape[:2])}, int32 or int64; they are {list(positions.shape)}, "
            f"{positions.dtype}"
        )
    path = _path(backend, q, coefficients, log_decay)
    if _is_plain_torch(path) or (log_decay is not None and backend == "auto"):
        path = reference
    elif log_decay is not None:
        raise ValueError("chosen queries with log_decay have no kernel; use backend='auto' or 'reference'")
    numbers = {"coefficients": coefficients, "scale": scale, "eps": eps, **_gate(log_decay, k)}
    return path.attend_at(q, k, v, positions.long(), **numbers)


def poly_at_pays(
    x: Tensor, n: int, key_width: int, value_width: int, *, coefficients: AnyCoefficients, backend: Backend = "auto"
) -> bool:
    """True if poly_attention_at of n queries per row is faster than poly_attention of all.

    Args:
        x: [B, T, ...], a tensor with the dtype and on the device of q, k and v.
        n: queries per row that are wanted.
        key_width, value_width: K and V.
        coefficients, backend: as in poly_attention.

    Returns:
        False in plain torch, where all queries are fast and the sums have always been in the same order.
    """
    if choose_path(backend, x.device) != "triton" or not has_triton() or isinstance(coefficients, Tensor):
        return False
    from rebased.ops.polynomial.gpu.plan import MAX_KEY_WIDTH, selection_pays

    if x.numel() == 0 or x.dtype == torch.float64 or key_width > MAX_KEY_WIDTH or in_torch_func():
        return False
    return selection_pays(n, x.shape[1], key_width, value_width, coefficients[0] != 0 or coefficients[1] != 0)


@without_autocast
def poly_attention_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: PolyState | None,
    *,
    coefficients: AnyCoefficients,
    scale: float | None = None,
    eps: float = EPS,
    log_decay: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, PolyState]:
    """poly_attention of tokens that follow those a state has seen, and the state after them.

    Prefill and decoding are this one function: T is the length of the prompt, or 1.

    Args:
        q, k, v, coefficients, scale, eps, log_decay, backend: as in poly_attention.
        state: the PolyState before these tokens, kv [B, H, F, V] and z [B, H, F], fp32 (fp64 for fp64 inputs); None
            means that there are no earlier tokens.
        cu_seqlens: as in poly_attention: the row holds N documents, none of them empty. The state then has N rows, one
            per document, before and after.

    Returns:
        o [B, T, H, V] in the dtype of v, and the PolyState after the last token. Both are differentiable, also in
        `state`.
    """
    coefficients, scale, eps = _check(q, k, v, coefficients, scale, eps)
    B, _, H, K = q.shape
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, q)
        B = len(cu_seqlens) - 1
    if state is None:
        state = init_poly_state(B, H, K, v.shape[3], coefficients, device=q.device, dtype=q.dtype)
    _check_state(state, q, v, coefficients, B)
    path, gate = _path(backend, q, coefficients, log_decay), _gate(log_decay, k)
    _refuse_transforms(path, coefficients)
    numbers = {"coefficients": coefficients, "scale": scale, "eps": eps}
    if cu_seqlens is None:
        return path.extend(q, k, v, state, **numbers, **gate)
    if not _is_plain_torch(path):
        return path.extend(q, k, v, state, **numbers, **gate, cu_seqlens=cu_seqlens)
    bounds = document_bounds(cu_seqlens, q)
    empty = [n for n, (i, j) in enumerate(pairwise(bounds)) if i == j]
    if empty and q.shape[1] > 0:
        raise ValueError(f"poly_attention_extend takes no empty document; document {empty[0]} of cu_seqlens is empty")
    documents = [
        path.extend(
            q[:, i:j], k[:, i:j], v[:, i:j], PolyState(state.kv[n : n + 1], state.z[n : n + 1]),
            **numbers, **{name: g[:, i:j] for name, g in gate.items()},
        )
        for n, (i, j) in enumerate(pairwise(bounds))
    ]  # fmt: skip
    outputs, states = zip(*documents, strict=True)
    return torch.cat(outputs, dim=1), PolyState(*(torch.cat(each) for each in zip(*states, strict=True)))


@without_autocast
def poly_attention_extend_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: PolyState,
    *,
    coefficients: AnyCoefficients,
    scale: float | None = None,
    eps: float = EPS,
    log_decay: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """poly_attention_extend of one token that overwrites the state: a step of decoding that reads and writes it once.

    Args:
        q, k, v, coefficients, scale, eps, log_decay, backend: as in poly_attention, with T = 1. In plain torch all
            backends take the recurrent path.
        state: the PolyState before the token, as in poly_attention_extend, with contiguous tensors. It becomes the
            state after the token.

    Returns:
        o [B, 1, H, V] in the dtype of v. There are no gradients.
    """
    coefficients, scale, eps = _check(q, k, v, coefficients, scale, eps)
    _check_state(state, q, v, coefficients, q.shape[0])
    if q.shape[1] != 1:
        raise ValueError(f"one token at a time can overwrite a state; q has {q.shape[1]}: use poly_attention_extend")
    if not (state.kv.is_contiguous() and state.z.is_contiguous()):
        raise ValueError("only a contiguous state can be overwritten; use poly_attention_extend")
    path = _path(backend, q, coefficients, log_decay)
    step = recurrent.extend_ if _is_plain_torch(path) else path.extend_
    with torch.no_grad():
        return step(q, k, v, state, coefficients=coefficients, scale=scale, eps=eps, **_gate(log_decay, k))


@without_autocast
def poly_attention_map(
    q: Tensor,
    k: Tensor,
    *,
    coefficients: AnyCoefficients,
    scale: float | None = None,
    eps: float = EPS,
    log_decay: Tensor | None = None,
) -> Tensor:
    """The matrix A of poly_attention, o_i = sum_j A_ij v_j, computed as the equation says: quadratic in T.

    Args:
        q, k, coefficients, scale, eps, log_decay: as in poly_attention.

    Returns:
        A [B, H, T, T], zero for j > i, in fp32 (fp64 for fp64 inputs). Row i sums to den_i / (den_i + eps).
    """
    coefficients, scale, eps = _check(q, k, k, coefficients, scale, eps)
    return reference.attention_matrix(q, k, coefficients=coefficients, scale=scale, eps=eps, **_gate(log_decay, k))


@without_autocast
def poly_state(k: Tensor, v: Tensor, *, coefficients: AnyCoefficients) -> PolyState:
    """The state after these tokens alone, without outputs.

    States of shards of a sequence add up: poly_attention_extend(q, k, v, sum of the states of all earlier shards) is
    what poly_attention gives for this shard. So shards can be computed side by side, each in its own process.

    Args:
        k: keys [B, T, H, K], float16, bfloat16, float32 or float64. B and T may be 0.
        v: values [B, T, H, V], in the dtype and on the device of k.
        coefficients: (c0, c1, c2), as in poly_attention.

    Returns:
        A PolyState with kv [B, H, F, V] and z [B, H, F], fp32 (fp64 for fp64 inputs). Differentiable once.
    """
    coefficients, _, _ = _check(k, k, v, coefficients, None, EPS)
    refuse_transforms("poly_state")
    return summary.summarise(k, v, coefficients=layout(coefficients))


@cache
def _note_learned_coefficients() -> None:
    _log.warning(
        "coefficients in a tensor have no GPU kernel: polynomial attention takes the slower chunked path; if all "
        "similarities are positive, rebased.ops.complete_square is a way around it"
    )


def _gate(log_decay: Tensor | None, k: Tensor) -> dict[str, Tensor]:
    """The argument of a path for a gate, checked; none without a gate."""
    if log_decay is None:
        return {}
    check_log_decay(log_decay, k)
    return {"log_decay": log_decay}


def _path(backend: Backend, q: Tensor, coefficients: AnyCoefficients, log_decay: Tensor | None = None) -> ModuleType:
    """The module that computes a call; "auto" takes the chunked one for what the kernels cannot take."""
    name = choose_path(backend, q.device)
    if q.numel() == 0:
        return reference  # B or T is 0: nothing to compute, and autograd needs a graph all the same
    if isinstance(coefficients, Tensor):
        if log_decay is not None and name in ("triton", "chunked"):
            raise ValueError("log_decay does not go with coefficients in a tensor; use backend='reference' or numbers")
        if backend == "triton":
            raise ValueError("coefficients in a tensor have no kernel; use backend='auto' or 'chunked'")
        if name == "triton":
            _note_learned_coefficients()
        return chunked if name == "triton" else _PLAIN_TORCH[name]
    if name != "triton":
        return _PLAIN_TORCH[name]
    if not has_triton():
        raise ValueError("backend 'triton' needs Triton 3.5 or newer: install it, or use 'auto' or 'chunked'")
    from rebased.ops.polynomial import gpu  # here, because importing rebased.ops must not import Triton
    from rebased.ops.polynomial.gpu.plan import MAX_KEY_WIDTH

    transformed = in_torch_func() or in_forward_mode()
    if transformed and backend == "triton":
        remedy = "'reference'" if in_forward_mode() else "'chunked'"
        raise ValueError(f"torch.func transforms (vmap, grad) cannot go through Triton kernels; use backend={remedy}")
    beyond_kernels = q.dtype == torch.float64 or q.shape[3] > MAX_KEY_WIDTH or transformed
    return chunked if backend == "auto" and beyond_kernels else gpu


def _is_plain_torch(path: ModuleType) -> bool:
    """Asks by identity: torch.compile cannot trace == of two modules."""
    return path is reference or path is recurrent or path is chunked


def _refuse_transforms(path: ModuleType, coefficients: AnyCoefficients) -> None:
    if path is chunked:
        refuse_forward_mode("the chunked path of polynomial attention")
        if isinstance(coefficients, Tensor):
            refuse_transforms("the chunked path of polynomial attention with learnt coefficients")


def _check(
    q: Tensor, k: Tensor, v: Tensor, coefficients: AnyCoefficients, scale: float | None, eps: float
) -> tuple[AnyCoefficients, float, float]:
    """The coefficients (plain floats, or the tensor), the scale and eps as plain floats; or one clear ValueError."""
    numbers = None if isinstance(coefficients, Tensor) else coefficients
    kinds = (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype), (q.device, k.device, v.device)
    # Sizes that are symbols, and numbers that could change and stay the same object, are not looked up.
    plain = scale is None and type(eps) is float and type(numbers) is tuple and set(map(type, numbers)) == {float}
    known = plain and {*map(type, q.shape), *map(type, v.shape)} == {int} and not torch.compiler.is_compiling()
    checked, scale, eps = (_check_kinds if known else _check_kinds.__wrapped__)(*kinds, numbers, scale, eps)
    return _check_tensor(coefficients, q) if isinstance(coefficients, Tensor) else checked, scale, eps


@lru_cache(maxsize=1024)
def _check_kinds(
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
    coefficients: Coefficients | None,
    scale: float | None,
    eps: float,
) -> tuple[Any, float, float]:
    """_check of shapes, dtypes, devices and numbers, cached: for short sequences it takes a tenth of a call's time."""
    q, k, v = shapes
    for name, shape, dtype in zip("qkv", shapes, dtypes, strict=True):
        if len(shape) != 4:
            raise ValueError(f"{name} must be [B, T, H, width], four axes; it has shape {list(shape)}")
        if dtype not in _FLOATS:
            raise ValueError(f"{name} has dtype {dtype}; use float16, bfloat16, float32 or float64")
    if q[:3] != k[:3] or q[:3] != v[:3]:
        raise ValueError(f"q, k and v must agree in B, T and H; their shapes are {list(q)}, {list(k)} and {list(v)}")
    if q[3] != k[3]:
        raise ValueError(f"q and k must have the same width K; q has {q[3]} and k has {k[3]}")
    if 0 in q[2:] or 0 in v[2:]:
        raise ValueError(f"no axis may be empty, except B and T; q is {list(q)}, v is {list(v)}")
    if not (dtypes[0] == dtypes[1] == dtypes[2]):
        raise ValueError("q, k and v must share one dtype; they have {}, {} and {}".format(*dtypes))
    if not (devices[0] == devices[1] == devices[2]):
        raise ValueError("q, k and v must be on one device; they are on {}, {} and {}".format(*devices))
    checked = None if coefficients is None else _check_numbers(coefficients)
    scale, eps = float(q[3] ** -0.5 if scale is None else scale), float(eps)
    if not math.isfinite(scale):
        raise ValueError(f"scale must be a finite number; it is {scale} (None means K ** -0.5)")
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps must be a number of at least 0; it is {eps} (the default is {EPS})")
    return checked, scale, eps


def _check_numbers(coefficients: Coefficients) -> Coefficients:
    if len(coefficients) != 3:
        raise ValueError(f"coefficients are (c0, c1, c2); got {len(coefficients)} numbers: {coefficients}")
    c0, c1, c2 = (float(c) for c in coefficients)
    if c0 == c1 == c2 == 0:
        raise ValueError("coefficients (0, 0, 0) make every similarity zero; ReBased is (0, 0, 1), Based (1, 1, 0.5)")
    if not (math.isfinite(c0) and math.isfinite(c1) and math.isfinite(c2)):
        raise ValueError(f"coefficients must be finite numbers; they are {coefficients}")
    return c0, c1, c2


def _check_tensor(coefficients: Tensor, q: Tensor) -> Tensor:
    """Checks all but the values: on a GPU the host would have to wait for them."""
    if coefficients.shape != (3,) or coefficients.dtype not in _FLOATS:
        raise ValueError(
            f"coefficients in a tensor must be (c0, c1, c2), shape [3], of a float dtype; they are "
            f"{list(coefficients.shape)}, {coefficients.dtype}"
        )
    if coefficients.device != q.device:
        raise ValueError(f"coefficients are on {coefficients.device} and q is on {q.device}; move one of them")
    return coefficients


def _check_state(state: PolyState, q: Tensor, v: Tensor, coefficients: AnyCoefficients, B: int) -> None:
    _, _, H, K = q.shape
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


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError unless q, k and v go together, as in poly_attention."""
    _check(q, k, v, REBASED, None, EPS)


def check_cu_seqlens(cu_seqlens: Tensor, q: Tensor) -> None:
    """Raises ValueError or TypeError unless cu_seqlens goes with q. Its numbers are not checked: on a GPU the host
    would have to wait for them."""
    if not isinstance(cu_seqlens, Tensor):
        kind = type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens must be a tensor of whole numbers; got a {kind}: pass torch.tensor(cu_seqlens)")
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs documents into one row, so B must be 1; it is {q.shape[0]}")
    if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 2:
        raise ValueError(f"cu_seqlens must be whole numbers [0, ..., T], one axis; got shape {list(cu_seqlens.shape)}")
    if cu_seqlens.device != q.device:
        raise ValueError(f"cu_seqlens is on {cu_seqlens.device} and the inputs are on {q.device}; move one of them")


def document_bounds(cu_seqlens: Tensor, q: Tensor) -> list[int]:
    """cu_seqlens as a list; ValueError or TypeError if it is not as in poly_attention."""
    check_cu_seqlens(cu_seqlens, q)
    bounds, T = cu_seqlens.tolist(), q.shape[1]
    if bounds[0] != 0 or bounds[-1] != T or any(i > j for i, j in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {T}; it is {bounds[:4]} ... {bounds[-1]}")
    return bounds
