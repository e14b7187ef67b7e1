"""ReBased language models for Hugging Face transformers, in one file that needs torch and transformers alone.

`rebased lm export` copies it beside the weights, and `from_pretrained(folder, trust_remote_code=True)` runs it. It has
the mixers ReBased, Based, softmax attention and the gated short convolution. The package `rebased` computes the same
with fast kernels (`import rebased.models.hf`), has more mixers, and trains such models.

Shapes: B rows, T tokens, D width of the model, H heads, K width of queries and keys, V of values, F features of a key.
A mixer maps (x [B,T,D], keep, state) to (y [B,T,D], state). `keep` [B,T] is False at padding, which has no influence;
None means that there is none. `state` is a tuple of tensors with one row per sequence, None before the first token.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Cache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

CHUNK = 64  # tokens whose similarities are computed pair by pair
CHECKSUMS = "checksums.json"
IGNORE = -100  # a label that does not count
NO_LIMIT = -1  # transformers' word for a cache without a longest sequence
LACKING = ("inputs_embeds", "output_hidden_states", "output_attentions")  # arguments of other models

State = tuple[Tensor, ...]


# --- polynomial attention ---------------------------------------------------------------------------------------------


def pair_products(x: Tensor) -> Tensor:
    """x_a^2, and sqrt(2) x_a x_b for a < b: [..., K] -> [..., K(K+1)/2], so that phi(q) . phi(k) = (q . k)^2."""
    a, b = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    return x[..., a] * x[..., b] * torch.where(a == b, 1.0, 2.0).to(x.dtype).sqrt()


def features(x: Tensor, coefficients: Any, scale: float | None = None) -> Tensor:
    """1, x and its pair products, those with a coefficient: [..., K] -> [..., F]. Those of a query (with a scale) are
    weighted, so that phi(q) . phi(k) = c0 + c1 s + c2 s^2 with s = scale * (q . k)."""
    terms = enumerate(zip(coefficients, (torch.ones_like(x[..., :1]), x, pair_products(x)), strict=True))
    return torch.cat([term if scale is None else c * scale**d * term for d, (c, term) in terms if c != 0], dim=-1)


def poly_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    state: State | None,
    coefficients: Any,
    scale: float,
    eps: float,
) -> tuple[Tensor, State]:
    """o_i = sum_{j<=i} sim_ij v_j / (sum_{j<=i} sim_ij + eps) with sim = c0 + c1 s + c2 s^2, in time linear in T.

    q, k [B,T,H,K], v [B,T,H,V] -> o [B,T,H,V]. The state is the sum over all tokens so far of phi(k) [v, 1]:
    [B,H,F,V+1], of one size whatever their number, in at least fp32.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    q, k, u = (x.transpose(1, 2).to(wide) for x in (q, k, v))  # [B,H,T,.]
    u = functional.pad(u, (0, 1), value=1.0)  # [v, 1]: numerator and denominator in one product
    if keep is not None:
        u = u * keep[:, None, :, None]
    c0, c1, c2 = coefficients
    total: Any = None if state is None else state[0]
    outputs = []
    for q_, k_, u_ in zip(*(x.split(CHUNK, dim=2) for x in (q, k, u)), strict=True):
        s = scale * (q_ @ k_.mT)
        o = (c0 + s * (c1 + c2 * s)).tril() @ u_
        added = features(k_, coefficients).mT @ u_  # [B,H,F,V+1]
        outputs.append(o if total is None else o + features(q_, coefficients, scale) @ total)
        total = added if total is None else total + added
    o = torch.cat(outputs, dim=2)
    return (o[..., :-1] / (o[..., -1:] + eps)).to(v.dtype).transpose(1, 2), (total,)


class Based(nn.Module):
    """Linear attention with the similarity 1 + s + s^2 / 2, s = q . k / sqrt(K)."""

    def __init__(
        self,
        d_model: int,
        n_heads: int = 12,
        key_width: int = 16,
        value_width: int | None = None,
        eps: float = 1e-12,
        backend: str = "auto",  # of the package; here there is one
    ) -> None:
        super().__init__()
        self.n_heads, self.key_width, self.eps, self.scale = n_heads, key_width, eps, key_width**-0.5
        values = n_heads * (value_width or d_model // n_heads)
        self.proj_q = nn.Linear(d_model, n_heads * key_width, bias=False)
        self.proj_k = nn.Linear(d_model, n_heads * key_width, bias=False)
        self.proj_v = nn.Linear(d_model, values, bias=False)
        self.proj_o = nn.Linear(values, d_model, bias=False)

    def coefficients(self) -> Any:
        """Return (c0, c1, c2)."""
        return 1.0, 1.0, 0.5

    def transform(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k [B,T,H*K] as their products are taken: [B,T,H,.]."""
        return q.unflatten(-1, (self.n_heads, -1)), k.unflatten(-1, (self.n_heads, -1))

    def forward(self, x: Tensor, keep: Tensor | None = None, state: State | None = None) -> tuple[Tensor, State]:
        """Return y [B,T,D] and the state after x [B,T,D]."""
        q, k = self.transform(self.proj_q(x), self.proj_k(x))
        v = self.proj_v(x).unflatten(-1, (self.n_heads, -1))
        o, state = poly_attention(q, k, v, keep, state, self.coefficients(), self.scale, self.eps)
        return self.proj_o(o.flatten(-2)), state


class AffineNorm(nn.Module):
    """Normalisation in `groups`, scale and shift over the last axis, each optional (qk_transform)."""

    def __init__(self, width: int, transform: str, norm: str, groups: int) -> None:
        super().__init__()
        self.normalise, self.norm, self.groups = "norm" in transform, norm, groups
        self.weight = nn.Parameter(torch.ones(width)) if transform in ("scale", "affine", "norm_affine") else None
        self.bias = nn.Parameter(torch.zeros(width)) if transform in ("affine", "norm_affine") else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the transformed x: [..., width] -> [..., width]."""
        if self.normalise:
            x = x.unflatten(-1, (self.groups, -1))
            width = x.shape[-1:]
            x = functional.layer_norm(x, width) if self.norm == "layer" else functional.rms_norm(x, width, eps=1e-5)
            x = (x * width[0] ** -0.5 if self.norm == "l2" else x).flatten(-2)
        if self.weight is not None:
            x = x * self.weight
        return x if self.bias is None else x + self.bias


class ReBased(Based):
    """Linear attention with the similarity s^2 of normalised, scaled and shifted q and k (arXiv 2402.10644)."""

    def __init__(
        self,
        d_model: int,
        n_heads: int = 12,
        key_width: int = 16,
        value_width: int | None = None,
        qk_transform: str = "norm_affine",
        norm_axis: str = "joint",
        norm: str = "layer",
        kernel: str = "square",
        eps: float = 1e-12,
        backend: str = "auto",
    ) -> None:
        super().__init__(d_model, n_heads, key_width, value_width, eps)
        self.per_head, self.kernel = norm_axis == "per_head", kernel
        width = key_width if self.per_head else n_heads * key_width
        groups = n_heads if norm_axis == "each_head" else 1
        self.ln_q = AffineNorm(width, qk_transform, norm, groups)
        if not self.per_head:  # there q, k and all heads share one
            self.ln_k = AffineNorm(width, qk_transform, norm, groups)
        self.kernel_logits = nn.Parameter(torch.zeros(3)) if kernel == "learned" else None
        if kernel == "fourth":  # s^4 is the square of (pair products of q) . (pair products of k) / K
            self.scale = 1 / key_width

    def coefficients(self) -> Any:
        """Return (0, 0, 1), or the learnt ones: c0 and c2 positive, 0 <= c1 <= 2 sqrt(c0 c2)."""
        if self.kernel_logits is None:
            return 0.0, 0.0, 1.0
        logits = self.kernel_logits.to(torch.promote_types(self.kernel_logits.dtype, torch.float32))
        c0, c2 = functional.softplus(logits[0]), functional.softplus(logits[2])
        return c0, 2 * (c0 * c2).sqrt() * logits[1].sigmoid(), c2

    def transform(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return q and k [B,T,H*K] after their norms: [B,T,H,.]."""
        if self.per_head:
            q, k = (self.ln_q(x) for x in super().transform(q, k))
        else:
            q, k = super().transform(self.ln_q(q), self.ln_k(k))
        return (pair_products(q), pair_products(k)) if self.kernel == "fourth" else (q, k)


# --- the other mixers, blocks and the network -------------------------------------------------------------------------


def rotate(x: Tensor, first: int) -> Tensor:
    """Return x [B,H,T,W] with each pair (x_i, x_{i+W/2}) rotated by its position's angle; the first position is given.

    Attention depends on distances only, so padding may count as positions.
    """
    T, W = x.shape[2:]
    rates = 10_000.0 ** (-torch.arange(0, W, 2, device=x.device, dtype=torch.float64) / W)
    angles = torch.arange(first, first + T, device=x.device, dtype=torch.float64).unsqueeze(1) * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Attention(nn.Module):
    """Causal softmax attention. Its state, keys and values of all tokens, grows."""

    def __init__(
        self,
        d_model: int,
        n_heads: int = 1,
        qkv_bias: bool = True,
        out_bias: bool = True,
        qk_norm: bool = False,
        rotary: bool = False,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.n_heads, self.rotary, self.dropout = n_heads, rotary, dropout
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=qkv_bias)
        self.out_proj = nn.Linear(d_model, d_model, bias=out_bias)
        self.q_norm = nn.RMSNorm(d_model // n_heads, eps=1e-5) if qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(d_model // n_heads, eps=1e-5) if qk_norm else nn.Identity()

    def forward(self, x: Tensor, keep: Tensor | None = None, state: State | None = None) -> tuple[Tensor, State]:
        """Return y [B,T,D] and the state (k, v [B,H,S,W], keep [B,S]) after x [B,T,D]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)  # each [B,H,T,W]
        q, k, past = self.q_norm(q), self.k_norm(k), 0 if state is None else state[0].shape[2]
        if self.rotary:
            q, k = rotate(q, past), rotate(k, past)
        keep = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if keep is None else keep
        if state is not None:
            k, v = torch.cat([state[0], k], dim=2), torch.cat([state[1], v], dim=2)
            keep = torch.cat([state[2], keep], dim=1)
        T, S = q.shape[2], k.shape[2]
        earlier = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        itself = earlier.triu(S - T)  # padding sees itself: a row without any key would be NaN
        dropout = self.dropout if self.training else 0.0
        mask = (earlier & keep[:, None, None]) | itself
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        return self.out_proj(o.transpose(1, 2).flatten(-2)), (k, v, keep)


class ShortConv(nn.Module):
    """Gated short convolution: y = conv(x) * (P x + b) + x. Its state is the last width - 1 inputs."""

    def __init__(self, d_model: int, width: int = 3) -> None:
        super().__init__()
        self.width = width
        self.projection = nn.Linear(d_model, d_model)
        self.conv = nn.Conv1d(d_model, d_model, width, groups=d_model)

    def forward(self, x: Tensor, keep: Tensor | None = None, state: State | None = None) -> tuple[Tensor, State]:
        """Return y [B,T,D] and the state [B,width-1,D] after x [B,T,D]."""
        new = x if keep is None else x * keep.unsqueeze(-1)
        before = x.new_zeros(x.shape[0], self.width - 1, x.shape[2]) if state is None else state[0]
        seen = torch.cat([before, new], dim=1)
        return self.conv(seen.mT).mT * self.projection(x) + x, (seen[:, seen.shape[1] - self.width + 1 :],)


MIXERS = {"rebased": ReBased, "based": Based, "attention": Attention, "short_conv": ShortConv}
NOT_HERE = ("name", "conv_width", "output_gate")  # no arguments; a model that uses the last two is not exported so


class MLP(nn.Module):
    """fc2(gelu(fc1(x))); or, gated and without biases, fc2(silu(a) * b) with a, b the halves of fc1(x)."""

    def __init__(self, d_model: int, hidden: int, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.fc1 = nn.Linear(d_model, 2 * hidden if gated else hidden, bias=not gated)
        self.fc2 = nn.Linear(hidden, d_model, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output: [..., D] -> [..., D]."""
        if not self.gated:
            return self.fc2(functional.gelu(self.fc1(x)))
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(functional.silu(gate) * value)


def build_norm(kind: str, width: int) -> nn.Module:
    """Return the norm of this kind over the last axis."""
    return nn.RMSNorm(width, eps=1e-5) if kind == "rms" else nn.LayerNorm(width)


def build_mlp(model: dict[str, Any]) -> nn.Module:
    """Return the MLP of a layer, the identity if there is none."""
    D, hidden = model["d_model"], model["mlp_ratio"] * model["d_model"]
    if not hidden:
        return nn.Identity()
    gated = model.get("mlp") == "swiglu"
    return MLP(D, -(-2 * hidden // 24) * 8 if gated else hidden, gated)


class Block(nn.Module):
    """u = x + Mixer(norm1(x)), then u + MLP(norm2(u)); u + norm2(u) without an MLP; Mamba's block is u alone."""

    def __init__(self, model: dict[str, Any], mixer: dict[str, Any]) -> None:
        super().__init__()
        D, is_mamba = model["d_model"], model["block"] == "mamba"
        norm = model.get("norm", "layer")  # config.json of an earlier version has none
        self.norm1 = build_norm("rms" if is_mamba else norm, D)
        self.mixer = MIXERS[mixer["name"]](D, **{name: value for name, value in mixer.items() if name not in NOT_HERE})
        self.norm2 = None if is_mamba else build_norm(norm, D)
        self.mlp = build_mlp(model)

    def forward(self, x: Tensor, keep: Tensor | None, state: State | None) -> tuple[Tensor, State]:
        """Return the layer's output [B,T,D] and the mixer's state after x [B,T,D]."""
        y, state = self.mixer(self.norm1(x), keep, state)
        u = x + y
        return u if self.norm2 is None else u + self.mlp(self.norm2(u)), state


class Network(nn.Module):
    """Embeddings, blocks with a repeated pattern of mixers, and a head that is the embedding."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        self.max_len, mixers = model["max_len"], model["mixers"]
        self.embedding = nn.Embedding(model["vocab_size"], model["d_model"])
        learned = model.get("positions", "learned") == "learned"
        self.positions = nn.Embedding(self.max_len, model["d_model"]) if learned else None
        self.dropout = nn.Dropout(model["embed_dropout"])
        self.blocks = nn.ModuleList(Block(model, mixers[i % len(mixers)]) for i in range(model["n_layers"]))
        self.norm = build_norm(model.get("norm", "layer"), model["d_model"])

    def forward(self, tokens: Tensor, keep: Tensor | None, cache: "RebasedCache") -> Tensor:
        """Return features [B,T,D] of tokens [B,T] that follow those in the cache, which reads them."""
        x = self.embedding(tokens)
        new = torch.ones_like(tokens) if keep is None else keep.long()
        lengths = new.sum(1) if cache.lengths is None else cache.lengths + new.sum(1)
        if self.positions is not None:
            if (end := int(lengths.max())) > self.max_len:
                raise ValueError(f"{end} tokens are more than the {self.max_len} learned positions of this model")
            places = (lengths - new.sum(1)).unsqueeze(1) + new.cumsum(1) - 1
            x = x + self.positions(places.clamp(min=0))
        x, states = self.dropout(x), []
        for block, state in zip(self.blocks, cache.states or [None] * len(self.blocks), strict=True):
            x, state = block(x, keep, state)
            states.append(state)
        cache.states, cache.lengths, cache.columns = states, lengths, cache.columns + tokens.shape[1]
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., vocab] of features [..., D]."""
        return functional.linear(hidden, self.embedding.weight)


# --- transformers -----------------------------------------------------------------------------------------------------


class RebasedConfig(PretrainedConfig):
    """The config of a model: the dict `model` says everything; the other names are what other tools ask for."""

    model_type = "rebased"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, model: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.model = model or {}
        kwargs.setdefault("tie_word_embeddings", True)  # some versions tie no weights at all without it
        super().__init__(**kwargs)


class RebasedCache(Cache):
    """The states of all layers, and the number of tokens that each row has read.

    `get_seq_length` counts columns of the batch, padding included, because `generate` cuts its input there.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.states: list[Any] = []
        self.lengths: Any = None
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch that were read, padding included."""
        return self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: nothing bounds the cache."""
        return NO_LIMIT

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """The name of `get_max_length` in some versions of transformers."""
        return NO_LIMIT

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(columns after a query of this length, 0)."""
        return self.columns + int(query_length), 0

    @property
    def is_compileable(self) -> bool:
        """False: a state is replaced and not overwritten."""
        return False

    @property
    def batch_size(self) -> int:
        """Rows."""
        return 0 if self.lengths is None else len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(tensor.nbytes for state in self.states for tensor in state)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i be what row beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        indices = indices.to(self.lengths.device)
        self.states = [tuple(tensor.index_select(0, indices) for tensor in state) for state in self.states]
        self.lengths = self.lengths[indices]

    def crop(self, *_: Any, **__: Any) -> None:
        """Raise: a state of constant size cannot forget its last tokens."""
        raise NotImplementedError("the state of a linear mixer cannot be cropped: assisted generation is not possible")


def find_tokens(mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Where a batch has tokens, by its attention mask (1 for tokens): [batch,length], bool. None: everywhere.

    Raises ValueError if a row has none, or gaps between them: padding stands at the beginning or at the end.
    """
    if mask is None:
        return None
    if mask.ndim != 2 or mask.shape[0] != batch or mask.shape[1] < length:
        raise ValueError(
            f"attention_mask is {list(mask.shape)}; it must be [{batch}, {length}], 1 for tokens, 0 for padding"
        )
    keep = mask[:, mask.shape[1] - length :].bool()
    if keep.all():
        return None
    begins = functional.pad(keep, (1, 0))[:, :-1].logical_not() & keep
    if (begins.sum(1) > 1).any():
        raise ValueError("attention_mask has gaps between the tokens of a row; pad at the beginning or at the end only")
    if not keep.any(1).all():
        row = int((~keep.any(1)).nonzero()[0])
        raise ValueError(f"row {row} of attention_mask has no tokens; give each row at least one")
    return keep


class RebasedForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model as transformers knows models: from_pretrained, save_pretrained, generate, Trainer, pipelines."""

    config_class = RebasedConfig
    base_model_prefix = "model"
    cache_class: type[RebasedCache] = RebasedCache
    _is_stateful = True  # a state cannot be rolled back
    _supports_cache_class = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self._build(config)
        self.post_init()

    def _build(self, config: Any) -> Any:
        return Network(config.model)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As of every PreTrainedModel; then writes the checksums of the weights to checksums.json."""
        super().save_pretrained(save_directory, *args, **kwargs)
        folder = Path(save_directory)
        found = {path.name: _sha256(path) for path in sorted(folder.glob("*.safetensors"))}
        (folder / CHECKSUMS).write_text(json.dumps(found, indent=1))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As of every PreTrainedModel. The weights of a folder must have the checksums that were saved with them.

        Raises ValueError if they do not. A folder without checksums.json is loaded with a warning.
        """
        folder = Path(str(pretrained_model_name_or_path)) / kwargs.get("subfolder", "")
        if folder.is_dir():
            _check_weights(folder)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes the cache

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: weights are loaded, or drawn where the module is made."""

    def get_input_embeddings(self) -> nn.Module:
        """The embedding, which is the head too."""
        return self.model.embedding

    def get_output_embeddings(self) -> None:
        """None: the head is the embedding."""
        return None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RebasedCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, and a loss where there are labels.

        Args:
            input_ids: tokens [B,T].
            attention_mask: [B,T], or [B,columns so far + T] with a cache: 1 for tokens, 0 for padding.
            past_key_values: a cache that an earlier call returned; the tokens follow those it has read.
            labels: [B,T], the tokens themselves: the model predicts labels[:, t + 1] at t. -100 marks those that do not
                count; so does padding.
            use_cache: whether to return a cache. Default: only if one is given.
            logits_to_keep: compute logits of the last so many positions only; 0: of all. Or the positions.
            num_items_in_batch: what the sum of losses is divided by. Default: the number of labels.
            others: what trainers and tokenizers give other models, such as token_type_ids. It changes nothing.
        """
        lacking = [name for name in LACKING if others.get(name) is not None and others[name] is not False]
        if lacking or input_ids is None:
            given = f"; got {', '.join(lacking)}" if lacking else ""
            raise ValueError(f"this model takes input_ids, and returns logits, a loss and a cache{given}")
        keep = find_tokens(attention_mask, *input_ids.shape)
        if past_key_values is not None and not isinstance(past_key_values, self.cache_class):
            given = type(past_key_values).__name__
            raise ValueError(f"past_key_values is a {given}; give one that this model returned")
        cache = self._new_cache() if use_cache and past_key_values is None else past_key_values
        if cache is not None and cache.columns and cache.batch_size != len(input_ids):
            raise ValueError(
                f"the cache has {cache.batch_size} rows and input_ids {len(input_ids)}; they must be the same"
            )
        hidden = self._hidden(input_ids, keep, cache)
        loss = None if labels is None else self._loss(hidden, labels, attention_mask, num_items_in_batch)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.model.logits(hidden[:, kept]) if loss is None or not self.training else None
        output = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
        return output if return_dict in (None, True) else output.to_tuple()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: RebasedCache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `generate` calls `forward` with: the columns that the cache has not read yet."""
        if past_key_values is not None:
            input_ids = input_ids[:, past_key_values.get_seq_length() :]
        return {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "use_cache": kwargs.get("use_cache", True),
            "logits_to_keep": kwargs.get("logits_to_keep") or 0,
        }

    def _new_cache(self) -> RebasedCache:
        return RebasedCache()

    def _hidden(self, tokens: Tensor, keep: Tensor | None, cache: RebasedCache | None) -> Tensor:
        """Features [B,T,D] of tokens [B,T] that follow those in the cache, which reads them."""
        if cache is not None and keep is not None and (cache.columns or not keep[:, -1].all()):
            raise ValueError("a cache needs padding on the left, in its first columns: tokenizer.padding_side = 'left'")
        return self.model(tokens, keep, RebasedCache() if cache is None else cache)

    def _loss(self, hidden: Tensor, labels: Tensor, mask: Tensor | None, num_items: Tensor | int | None) -> Tensor:
        targets = labels[:, 1:]
        if mask is not None:  # padding is no label, and predicts none
            targets = targets.masked_fill(~(mask[:, 1:] & mask[:, :-1]).bool(), IGNORE)
        asked = targets != IGNORE
        total = self._sum_of_losses(hidden[:, :-1][asked], targets[asked])
        return total / (asked.sum() if num_items is None else num_items)

    def _sum_of_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The sum of the cross-entropies of features [n,D] and targets [n], in at least fp32."""
        logits = self.model.logits(hidden)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return functional.cross_entropy(logits.to(wide), targets, reduction="sum")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_weights(folder: Path) -> None:
    """Raises ValueError if the weights in a folder are not those that were saved."""
    path = folder / CHECKSUMS
    if not path.exists():
        logging.get_logger(__name__).warning(f"{folder} has no {CHECKSUMS}: damaged weights would not be noticed")
        return
    try:
        expected = dict(json.loads(path.read_text()))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for file in sorted({*expected, *(each.name for each in folder.glob("*.safetensors"))}):
        if not (folder / file).is_file() or _sha256(folder / file) != expected.get(file):
            raise ValueError(
                f"{folder / file} is not what was saved with the model: it is damaged or was replaced. Export the "
                f"model again, or remove {CHECKSUMS} if the weights were changed on purpose"
            )
