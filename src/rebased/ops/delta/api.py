"""The public functions of the delta rule: they check their inputs and choose a path."""

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rebased.ops.backend import Backend, accumulate_dtype, in_torch_func, kernel_path, without_autocast
from rebased.ops.delta import reference
from rebased.ops.delta.documents import each_document
from rebased.ops.derivatives import in_forward_mode
from rebased.ops.polynomial import chunked_recurrence
from rebased.ops.polynomial.api import check_cu_seqlens, check_inputs, document_bounds
from rebased.ops.polynomial.chunked_recurrence import Rule
from rebased.ops.polynomial.gates import bounded, check_beta, check_log_decay
from rebased.ops.polynomial.state import Coefficients, feature_count

Degree = Literal[1, 2]
"""Of the similarity of a query and a key: q . k, or its square."""
UNIT_EPS = 1e-6  # added to the squared length of a key that is normalised, as in the code of DeltaNet
UNIT_TOLERANCE = 1e-2  # how far the length of a key that came normalised may be from 1: rounding in bf16 is 0.4 %
_log = logging.getLogger("rebased")


class _Call(NamedTuple):
    """A call of the delta rule, checked."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None
    log_decay: Tensor | None
    coefficients: Coefficients
    normalise: bool
    backend: Backend


def delta_coefficients(degree: Degree, key_width: int, centred: bool = False) -> Coefficients:
    """(c0, c1, c2) of the similarity: s, s^2, or centred (s^2 - 1/K) / (1 - 1/K), which is zero on average."""
    if type(degree) is not int or degree not in get_args(Degree):
        raise ValueError(f"degree must be 1 or 2; it is {degree!r}")
    if not centred:
        return (0.0, 1.0, 0.0) if degree == 1 else (0.0, 0.0, 1.0)
    if degree == 1 or key_width < 2:
        raise ValueError(
            f"only squares of keys with a width of at least 2 can be centred; not degree {degree}, width {key_width}"
        )
    return -1 / (key_width - 1), 0.0, key_width / (key_width - 1)


def init_delta_state(
    batch: int,
    heads: int,
    key_width: int,
    value_width: int,
    *,
    degree: Degree = 1,
    centred: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The state before the first token: zeros [B, H, F, V], fp32 (fp64 for inputs of this dtype).

    F, the number of features of a key of width K, is K for degree 1, K (K + 1) / 2 for degree 2, and one more if the
    squares are centred.
    """
    features = feature_count(key_width, delta_coefficients(degree, key_width, centred))
    return torch.zeros(batch, heads, features, value_width, device=device, dtype=accumulate_dtype(dtype))


@without_autocast
def delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None = None,
    *,
    degree: Degree = 1,
    centred: bool = False,
    normalise: bool = True,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attention whose state is corrected by each token, in time linear in T:

        S' = e^g S,    S = S' + beta phi(k) (v - S'^T phi(k))^T,    o = S^T phi(q)

    With beta = 1 the state returns v for this key afterwards, whatever it returned before; with beta = 0 it stays.
    phi(k) = k for degree 1: without a decay this is DeltaNet, with one Gated DeltaNet (a decay per channel: KDA). For
    degree 2 phi(q) . phi(k) = (q . k)^2. There is no denominator: a norm should follow.

    Args:
        q: queries [B, T, H, K], float16, bfloat16, float32 or float64. B and T may be 0.
        k: keys [B, T, H, K], in the dtype and on the device of q.
        v: values [B, T, H, V], in the dtype and on the device of q.
        beta: [B, T, H], from 0 to 2, in the dtype of q or fp32. Above 1 the old value is overshot, which lets a state
            change its sign. None: v is added as it is, S = S' + phi(k) v^T (gated linear attention, Mamba-2).
        log_decay: g [B, T, H], at most 0; or [B, T, H, K], one per channel, for degree 1; or None, nothing fades.
        degree: 1 (default) or 2.
        centred: with degree 2, take (s^2 - 1/K) / (1 - 1/K) in place of s^2: it is zero on average, and 1 for s = 1.
        normalise: True (default): q and k are divided by their lengths. The rule needs keys of length 1; with False
            they must have it, unless beta is None.
        cu_seqlens: as in poly_attention: the row holds documents that do not see each other. The kernels take all at
            once, each from a chunk of its own; plain torch takes one after the other (delta_packs).
        backend: "reference" and "recurrent" go token by token; "chunked" is plain torch in chunks, on every device;
            "triton" is kernels, for a beta, no decay or one per head, and keys as wide as 128 (degree 1) or 16 (degree
            2, not centred); "auto" is "triton" on a GPU if its kernels take the call, else "chunked".

    Returns:
        o [B, T, H, V] in the dtype of v, differentiable in all tensors. Half precision is computed in fp32; the
        kernels multiply bf16 as bf16 and keep sums and states in fp32. A NaN in v or a gate may reach earlier tokens of
        its chunk, 64 tokens.

    Raises:
        ValueError: if shapes, dtypes, devices or numbers are not as above. On a GPU the numbers of beta, log_decay and
            the lengths of keys are not checked.
    """
    call = _check(q, k, v, beta, log_decay, degree, centred, normalise, backend)
    rows, (_, _, H, K) = _rows(q, cu_seqlens), q.shape
    if (cu_seqlens is None or q.numel() > 0) and _path(call) == "triton":
        from rebased.ops.delta.gpu import operators

        assert beta is not None
        rule: Any = {"degree": degree, "normalise": normalise, "eps": UNIT_EPS}
        return operators.attend(q, k, v, call.log_decay, beta, **rule, cu_seqlens=cu_seqlens)
    state = init_delta_state(rows, H, K, v.shape[3], degree=degree, centred=centred, device=q.device, dtype=q.dtype)
    return _extend(call, state, cu_seqlens)[0]


@without_autocast
def delta_attention_extend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    state: Tensor,
    log_decay: Tensor | None = None,
    *,
    degree: Degree = 1,
    centred: bool = False,
    normalise: bool = True,
    cu_seqlens: Tensor | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]:
    """delta_attention of tokens that follow those a state has seen, and the state after them.

    Args:
        state: [B, H, F, V] as init_delta_state makes it; with cu_seqlens one row per document.
        q, k, v, beta, log_decay, degree, centred, normalise, cu_seqlens, backend: as in delta_attention.

    Returns:
        o [B, T, H, V] in the dtype of v, and the state after the last token. Both are differentiable, also in `state`.
    """
    call = _check(q, k, v, beta, log_decay, degree, centred, normalise, backend)
    _check_state(state, call, _rows(q, cu_seqlens))
    return _extend(call, state, cu_seqlens)


@without_autocast
def delta_attention_extend_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    state: Tensor,
    log_decay: Tensor | None = None,
    *,
    degree: Degree = 1,
    centred: bool = False,
    normalise: bool = True,
    backend: Backend = "auto",
) -> Tensor:
    """delta_attention_extend without gradients, which overwrites the state. One token on a GPU is one kernel.

    Args:
        state: contiguous, otherwise as in delta_attention_extend.
        q, k, v, beta, log_decay, degree, centred, normalise, backend: as in delta_attention.

    Returns:
        o [B, T, H, V] in the dtype of v.
    """
    call = _check(q, k, v, beta, log_decay, degree, centred, normalise, backend)
    _check_state(state, call, len(q))
    if not state.is_contiguous():
        raise ValueError("a state that is overwritten must be contiguous; pass state.contiguous()")
    with torch.no_grad():
        if _is_step(call, state):
            from rebased.ops.delta.gpu.decode import decode_

            return decode_(*call[:5], state, *call.coefficients, normalise, UNIT_EPS)
        o, after = _extend(call, state, None)
        state.copy_(after)
    return o


def delta_packs(
    q: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    *,
    degree: Degree = 1,
    centred: bool = False,
    backend: Backend = "auto",
) -> bool:
    """True if delta_attention of these takes packed documents at once, not one after the other."""
    coefficients = delta_coefficients(degree, q.shape[3], centred)
    return _path(_Call(q, q, v, beta, log_decay, coefficients, True, backend)) == "triton"


def _check_state(state: Tensor, call: _Call, rows: int) -> None:
    q, v = call.q, call.v
    wanted = [rows, q.shape[2], feature_count(q.shape[3], call.coefficients), v.shape[3]]
    if not isinstance(state, Tensor):
        raise ValueError(f"the state must be a tensor (init_delta_state makes one); got {type(state).__name__}")
    if list(state.shape) != wanted or state.dtype != accumulate_dtype(q.dtype) or state.device != q.device:
        raise ValueError(
            f"the state must be {wanted}, {accumulate_dtype(q.dtype)} on {q.device}, as init_delta_state makes it; it "
            f"is {list(state.shape)}, {state.dtype} on {state.device}"
        )


def _rows(q: Tensor, cu_seqlens: Tensor | None) -> int:
    """The rows of a state."""
    if cu_seqlens is None:
        return len(q)
    check_cu_seqlens(cu_seqlens, q)
    return len(cu_seqlens) - 1


def _extend(call: _Call, state: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v, beta, log_decay, coefficients, normalise, _ = call
    if cu_seqlens is None and _is_step(call, state):
        from rebased.ops.delta.gpu.decode import decode

        return decode(q, k, v, beta, log_decay, state, *coefficients, normalise, UNIT_EPS)
    name = _path(call)
    if name == "triton":
        from rebased.ops.delta.gpu import operators

        rule: Any = {"degree": _degree(coefficients), "normalise": normalise, "eps": UNIT_EPS}
        path: Any = partial(operators.extend, **rule, cu_seqlens=cu_seqlens)
    else:
        recur = reference.recur if name == "reference" else chunked_recurrence.recur
        path = partial(_in_torch, recur, coefficients, normalise)
    if q.numel() == 0:
        return v.to(v.dtype, copy=True), state
    if cu_seqlens is None or name == "triton":
        return path(q, k, v, log_decay, beta, state)
    outputs, after = each_document(path, (q, k, v, log_decay, beta), state, document_bounds(cu_seqlens, q))
    return torch.cat(outputs, dim=1), after


def _check(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None,
    degree: Degree, centred: bool, normalise: bool, backend: Backend,
) -> _Call:  # fmt: skip
    """The call, with the coefficients of the similarity; or one clear ValueError."""
    check_inputs(q, k, v)
    coefficients = delta_coefficients(degree, q.shape[3], centred)
    if log_decay is not None:
        check_log_decay(log_decay, k, channels=degree == 1)
        log_decay = bounded(log_decay)
    if beta is not None:
        check_beta(beta, k)
        if not normalise and k.device.type == "cpu" and not torch.compiler.is_compiling() and not in_torch_func():
            _check_lengths(k)
    return _Call(q, k, v, beta, log_decay, coefficients, normalise, backend)


def _check_lengths(k: Tensor) -> None:
    off = (k.detach().double().norm(dim=-1) - 1).abs().nan_to_num(nan=0.0)  # a NaN reaches the output by itself
    if k.numel() and (far := float(off.max())) > UNIT_TOLERANCE:
        raise ValueError(
            f"the delta rule needs keys of length 1; one is off by {far:.2g}: leave normalise=True, or divide them"
        )


def _is_step(call: _Call, state: Tensor) -> bool:
    """True for one token without gradients on a GPU: one kernel takes it, whatever its widths and gates are."""
    if call.q.shape[1] != 1 or torch.compiler.is_compiling() or in_torch_func() or in_forward_mode():
        return False
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*call[:5], state)):
        return False
    return kernel_path(call.backend, call.q) == "triton"


def _degree(coefficients: Coefficients) -> Degree:
    return 1 if coefficients[2] == 0 else 2


def _path(call: _Call) -> Backend:
    """What computes a call: "reference", "chunked", or "triton" if the kernels take it."""
    name = kernel_path(call.backend, call.q)
    if name != "triton" or (reason := _why_no_kernel(call)) is None:
        return name
    if call.backend == "triton":
        raise ValueError(f"the kernels of the delta rule do not take {reason}; use backend='auto' or 'chunked'")
    _note_no_kernel(reason)
    return "chunked"


def _why_no_kernel(call: _Call) -> str | None:
    """What of a call the kernels do not take; None if they take it."""
    from rebased.ops.delta.gpu.operators import takes

    K, V = call.q.shape[3], call.v.shape[3]
    if call.beta is None:
        return "beta=None"
    if call.log_decay is not None and call.log_decay.ndim == 4:
        return "a decay per channel"
    if call.coefficients[0] != 0:
        return "centred squares"
    if not takes(call.q, V, _degree(call.coefficients)):
        return f"keys of width {K} with values of width {V} in {str(call.q.dtype).removeprefix('torch.')}"
    if in_torch_func() or in_forward_mode():
        return "transforms of torch.func"
    return None


def _in_torch(
    recur: Callable[..., tuple[Tensor, Tensor]],
    coefficients: Coefficients,
    normalise: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(q.dtype)
    q, k, values = (x.to(dtype) for x in (q, k, v))
    if normalise:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS) for x in (q, k))
    gates = [None if x is None else x.to(dtype) for x in (log_decay, beta)]
    o, state = recur(q, k, values, *gates, state, Rule(coefficients, 1.0, dtype))
    return o.to(v.dtype), state


@cache
def _note_no_kernel(reason: str) -> None:
    _log.warning("the kernels of the delta rule do not take %s: plain torch in chunks computes it", reason)
