"""flash-linear-attention's ReBased over our operators: its function, its layer, and a call that registers ours there.

Signatures and names of weights are those of its version 0.6.0. docs/flash_linear_attention.md says what differs.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.ops import REBASED, PolyState, init_poly_state, layer_norm, poly_attention, poly_attention_extend

__all__ = ["ReBasedLinearAttention", "parallel_rebased", "register"]

OPERATION = "rebased"  # the folder of the operation in fla.ops, and the key of its backends
SWITCH = "FLA_REBASED"  # an environment variable; 0 turns the registered backend off
EPS = {"parallel": None, "chunk": 1e-10, "fused_chunk": 1e-10}  # of each mode; None: the layer's own
CHUNK = 64


def parallel_rebased(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    eps: float = 1e-5,
    use_scale: bool = True,
    use_normalize: bool = True,
    return_both: bool = False,
    head_first: bool = False,
) -> Any:
    """Causal attention with the similarity s^2, in time linear in T; the signature of fla.ops.rebased.parallel_rebased.

    Args:
        q, k: [B, T, H, K], one dtype and device; any K.
        v: [B, T, H, V].
        eps: added to the sum of similarities.
        use_scale: s = q . k / sqrt(K) if True, else q . k.
        use_normalize: whether the output is divided by the sum of similarities plus eps.
        return_both: whether to return the output before the division, and the sums of similarities.
        head_first: an argument of older versions: q, k, v and the output are [B, H, T, ...].

    Returns:
        o [B, T, H, V] in the dtype of v. With return_both: o [B, H, T, V] and z [B, H, T], heads first as there.
    """
    if head_first:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if use_scale else 1.0
    o = poly_attention(q, k, v, coefficients=REBASED, scale=scale, eps=eps)
    if return_both or not use_normalize:
        z = _sums(q, k, scale)  # [B, T, H]
        o = (o * (z + eps).unsqueeze(-1)).to(v.dtype)
        if return_both:
            return o.transpose(1, 2), z.transpose(1, 2).to(v.dtype)
    return o.transpose(1, 2) if head_first else o


def _sums(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The sums of similarities z_i = sum_{j<=i} (scale q_i . k_j)^2 [B, T, H] in at least fp32, chunk by chunk."""
    T = q.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k = (functional.pad(x.to(wide), (0, 0, 0, 0, 0, -T % CHUNK)).unflatten(1, (-1, CHUNK)) for x in (q * scale, k))
    moments = torch.einsum("bnchk,bnchl->bnhkl", k, k).cumsum(1)  # [B, chunks, H, K, K]
    before = functional.pad(moments[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
    earlier = (torch.einsum("bnchk,bnhkl->bnchl", q, before) * q).sum(-1)
    here = torch.einsum("bnchk,bnjhk->bnhcj", q, k).square().tril().sum(-1).transpose(2, 3)
    return (earlier + here).flatten(1, 2)[:, :T]


class FeatureMap(nn.Module):
    """LayerNorm, scale gamma and shift beta of queries and keys, each optional; one for q, k and all heads."""

    def __init__(self, width: int, use_gamma: bool | None, use_beta: bool | None, normalize: bool | None) -> None:
        super().__init__()
        if not (normalize or use_gamma):
            raise ValueError(
                f"use_gamma={use_gamma}, use_beta={use_beta} and normalize={normalize} do not go together; set "
                "normalize or use_gamma"
            )
        self.normalize = normalize
        self.gamma = nn.Parameter(torch.ones(width)) if use_gamma else None
        self.beta = nn.Parameter(torch.zeros(width)) if use_beta else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed x: [..., width] -> [..., width] in the dtype of x."""
        if self.normalize:
            return layer_norm(x, self.gamma, self.beta, 1e-5)
        scaled = x * self.gamma.to(x.dtype)  # type: ignore[union-attr]  # the constructor asked for it
        return scaled if self.beta is None else scaled + self.beta.to(x.dtype)


class ReBasedLinearAttention(nn.Module):
    """ReBased attention with the signature and the weights of fla.layers.ReBasedLinearAttention; state dicts load both
    ways. It maps x [B, T, D] to [B, T, D] in time linear in T.

    Args:
        hidden_size: width D of x; a multiple of num_heads.
        l_max, layer_idx, kwargs: taken and not used, as there.
        feature_dim: width K of each head's queries and keys.
        num_key_value_heads: heads of keys and values, each shared by num_heads / num_key_value_heads query heads.
        num_heads: heads of queries.
        use_gamma, use_beta, normalize: scale, shift and LayerNorm of queries and keys, one for q, k and all heads.
        causal: must be True.
        eps: added to the sum of similarities in mode "parallel".
        mode: "parallel", "chunk" or "fused_chunk". All compute the same; the last two add 1e-10 to the sum instead of
            eps, as there.
    """

    def __init__(
        self,
        hidden_size: int,
        l_max: int = 2048,
        feature_dim: int = 16,
        num_key_value_heads: int = 16,
        num_heads: int = 16,
        use_gamma: bool | None = True,
        use_beta: bool | None = True,
        normalize: bool | None = True,
        causal: bool = True,
        eps: float = 1e-5,
        mode: str = "parallel",
        layer_idx: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if mode not in EPS:
            raise ValueError(f"mode {mode!r} is unknown; choose one of {', '.join(EPS)}")
        if hidden_size % num_heads or num_heads % num_key_value_heads:
            raise ValueError(
                f"hidden_size {hidden_size} must be a multiple of num_heads {num_heads}, and that one of "
                f"num_key_value_heads {num_key_value_heads}"
            )
        if not causal:
            raise ValueError("causal=False is not supported: flash-linear-attention's forward() is causal all the same")
        self.hidden_size, self.l_max, self.layer_idx, self.mode = hidden_size, l_max, layer_idx, mode
        self.feature_dim, self.num_heads, self.num_key_value_heads = feature_dim, num_heads, num_key_value_heads
        self.head_dim, self.num_kv_groups = hidden_size // num_heads, num_heads // num_key_value_heads
        self.causal, self.eps = causal, eps
        self.use_gamma, self.use_beta, self.normalize = use_gamma, use_beta, normalize
        self.feature_map = FeatureMap(feature_dim, use_gamma, use_beta, normalize)
        self.q_proj = nn.Linear(hidden_size, feature_dim * num_heads, bias=False)
        self.k_proj = nn.Linear(hidden_size, feature_dim * num_key_value_heads, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.head_dim * num_key_value_heads, bias=False)
        self.o_proj = nn.Linear(self.head_dim * num_heads, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the output [B, T, D] for hidden_states [B, T, D]. Other arguments are not used, as there."""
        o = poly_attention(*self._project(hidden_states), coefficients=REBASED, eps=self._eps)
        return self.o_proj(o.flatten(-2))

    def init_state(self, batch: int) -> PolyState:
        """Return the state before the first token, for `batch` sequences."""
        weight = self.q_proj.weight
        sizes = (batch, self.num_heads, self.feature_dim, self.head_dim)
        return init_poly_state(*sizes, REBASED, device=weight.device, dtype=weight.dtype)

    def extend(self, hidden_states: Tensor, state: PolyState) -> tuple[Tensor, PolyState]:
        """Return (output [B, T, D], state after it) of tokens that follow those the state has seen."""
        q, k, v = self._project(hidden_states)
        o, state = poly_attention_extend(q, k, v, state, coefficients=REBASED, eps=self._eps)
        return self.o_proj(o.flatten(-2)), state

    @property
    def _eps(self) -> float:
        own = EPS[self.mode]
        return self.eps if own is None else own

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.feature_dim))
        k = self.k_proj(x).unflatten(-1, (self.num_key_value_heads, self.feature_dim))
        v = self.v_proj(x).unflatten(-1, (self.num_key_value_heads, self.head_dim))
        q, k = self.feature_map(q), self.feature_map(k)
        if self.num_kv_groups > 1:
            k, v = (each.repeat_interleave(self.num_kv_groups, dim=2) for each in (k, v))
        return q, k, v


def register() -> None:
    """Register our parallel_rebased as a backend of flash-linear-attention, for code that imports it from now on.

    The library's own dispatcher then calls ours. The environment variable FLA_REBASED=0 turns ours off, and its own
    FLA_DISABLE_BACKEND_DISPATCH=1 all backends. Registering twice changes nothing. Call it before `from fla.ops.rebased
    import parallel_rebased`: a name that is already bound stays.

    Raises:
        ModuleNotFoundError: if the library is not installed.
        RuntimeError: if its version has no backends: those before 0.4.2.
    """
    try:
        theirs = importlib.import_module("fla.ops.rebased")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"flash-linear-attention is not installed here ({error}): pip install flash-linear-attention, or import "
            "parallel_rebased and ReBasedLinearAttention from rebased.compat.fla",
            name=error.name,
        ) from error
    original = theirs.parallel_rebased
    if getattr(original, "dispatches_to_rebased", False):
        return
    backends = _backends_module()

    class RebasedBackend(backends.BaseBackend):  # type: ignore[name-defined]  # the class is found at run time
        """Our parallel_rebased as the library's backends are written."""

        backend_type = package_name = "rebased"
        env_var = SWITCH
        parallel_rebased = staticmethod(parallel_rebased)

    registry = backends.BackendRegistry(OPERATION)
    registry.register(RebasedBackend())
    dispatch = registry.dispatch if hasattr(registry, "dispatch") else backends.dispatch(OPERATION)
    chosen = dispatch(original)
    chosen.dispatches_to_rebased = True
    for name, module in [*sys.modules.items()]:
        if name.startswith("fla.") and getattr(module, "parallel_rebased", None) is original:
            module.parallel_rebased = chosen  # type: ignore[attr-defined]


def _backends_module() -> ModuleType:
    """The library's module with BaseBackend and BackendRegistry: fla.backends, or fla.ops.backends before 0.6.0."""
    for name in ("fla.backends", "fla.ops.backends"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    version = getattr(sys.modules["fla"], "__version__", "?")
    raise RuntimeError(
        f"flash-linear-attention {version} has no backends: update it, or import parallel_rebased and "
        "ReBasedLinearAttention from rebased.compat.fla"
    )
