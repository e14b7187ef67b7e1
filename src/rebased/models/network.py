"""The network of a language model: embeddings, layers with a repeated pattern of mixers, and a tied head."""

import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rebased.mixers import (
    Slots,
    call_init_state,
    can_extend,
    check_mixer_causality,
    check_state_size,
    find_residual_projections,
    mixer_name,
    named_errors,
    positions_in_documents,
    rows_at,
    start_numbers,
)
from rebased.models.block import Block
from rebased.models.config import LMConfig
from rebased.models.norm import build_norm
from rebased.models.readout import LastReadout
from rebased.ops import IGNORE, embed, linear_cross_entropy
from rebased.ops.backend import to_device
from rebased.ops.invariance import GRID, is_batch_invariant


class LMState(NamedTuple):
    """The state of a model after the tokens it has read."""

    position: int  # number of tokens read
    layers: tuple[Any, ...]  # the state of each layer's mixer


class Network(nn.Module):
    """What a LanguageModel computes, which adds to this how it writes text: see its arguments and methods there."""

    blocks: Sequence[Block]
    recompute = False

    def __init__(
        self, config: LMConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(config.vocab_size, config.d_model, **factory)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_len, config.d_model, **factory) if learned else None
        self.dropout = nn.Dropout(config.embed_dropout)
        self.blocks = nn.ModuleList(  # type: ignore[assignment]
            Block(config, layer, **factory) for layer in range(config.n_layers)
        )
        self.norm = build_norm(config.norm, config.d_model, **factory)
        self.readout = LastReadout(config.d_model, **factory) if config.readout == "last" else None
        self.init_weights()

    def init_weights(self) -> None:
        """Draw all weights of nn.Linear and nn.Embedding from N(0, 0.02); set biases to 0.

        Layers that write into the residual stream have N(0, 0.02 / sqrt(2 n_layers)): those that a mixer and the MLP
        declare as `residual_projections`. A mixer's own `init_weights`, if it has one, is called last.
        """
        residual = {
            layer
            for block in self.blocks
            for owner in (block.mixer, block.mlp)
            for layer in find_residual_projections(owner)
        }
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = 0.02 / math.sqrt(2 * self.config.n_layers) if module in residual else 0.02
                nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            if hasattr(block.mixer, "init_weights"):
                with named_errors(block.mixer, "in init_weights"):
                    block.mixer.init_weights()

    def hidden(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return the last layer's features after the final norm: tokens [B,T] -> [B,T,D].

        `cu_seqlens` [n+1], int32 or int64, says where documents begin in the B*T tokens (every row begins one); its
        last number is B*T. Each document is then computed as if it were alone: none sees another, and positions count
        from its own first token. Inside `rebased.ops.batch_invariant` it is not possible.
        """
        if is_batch_invariant() and tokens.numel():
            if cu_seqlens is not None:
                raise ValueError("batch_invariant reads each row by itself; leave out cu_seqlens")
            return self._hidden_by_rows(tokens)
        x = self._embed(tokens, 0, cu_seqlens)
        for block in self.blocks:
            if self.recompute and self.training:
                x = checkpoint(block, x, cu_seqlens, use_reentrant=False)
            else:
                x = block(x, cu_seqlens)
        return self.norm(x) if self.readout is None else self.readout(self.norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of these features: [..., D] -> [..., vocab]."""
        return functional.linear(hidden, self.embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return all logits: tokens [B,T] -> [B,T,vocab]. Training uses `loss`, which never holds all of them."""
        return self.logits(self.hidden(tokens))

    def hidden_at_labels(
        self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the features [n,D] and the labels [n] of the labelled positions only, from tokens and labels [B,T]."""
        if tokens.shape != labels.shape:
            raise ValueError(f"tokens {list(tokens.shape)} and labels {list(labels.shape)} must have one shape")
        asked = labels != IGNORE
        return self.hidden(tokens, cu_seqlens)[asked], labels[asked]

    def loss(self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Return the mean cross-entropy over the labelled positions: tokens, labels [B,T] -> [], fp32 (fp64 for fp64).

        The label of a position stands at the position itself; it is IGNORE where there is none. `cu_seqlens` as in
        `hidden`. Without any label the result is NaN, as torch's cross_entropy is.
        """
        hidden, targets = self.hidden_at_labels(tokens, labels, cu_seqlens)
        return linear_cross_entropy(hidden, self.embedding.weight, targets) / len(targets)

    def hidden_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return `hidden` at these positions of each row only: tokens [B,T], positions [B,n] -> [B*n,D].

        It is faster than `hidden`: what follows the last mixer works on each position by itself, so the others are left
        out there. On a GPU ReBased and Based leave them out too (mixers/contract.py).
        """
        if is_batch_invariant() or self.readout is not None:
            return rows_at(self.hidden(tokens), positions)
        x = self._embed(tokens, start=0)
        *blocks, last = self.blocks
        for block in blocks:
            x = block(x)
        return self.norm(last.feed(last.mix_at(x, positions)))

    def loss_at(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropies at positions [B,n] of tokens [B,T], [] in fp32 (fp64 for fp64).

        Targets [B,n] of IGNORE count for nothing. The host does not wait for the device.
        """
        return linear_cross_entropy(self.hidden_at(tokens, positions), self.embedding.weight, targets.flatten())

    def init_state(self, batch: int) -> LMState:
        """Return the state before the first token, for `batch` sequences, on the device of the weights."""
        if self.readout is not None:
            raise ValueError(
                "a model with readout 'last' needs the whole sequence: it can be trained, but not generate"
            )
        for block in self.blocks:
            if not can_extend(block.mixer):
                raise ValueError(
                    f"mixer {mixer_name(block.mixer)!r} has no init_state, extend and state_size: it can be trained "
                    "and measured, but not generate; docs/add_a_mixer.md shows how to add them"
                )
        return LMState(0, tuple(call_init_state(block.mixer, batch) for block in self.blocks))

    def extend(self, tokens: Tensor, state: LMState) -> tuple[Tensor, LMState]:
        """Return (features [B,T,D], state after tokens) of tokens [B,T] that follow those the state has seen.

        Prefill is one call with many tokens, decoding one call per token. `logits` turns features into logits.
        """
        if len(state.layers) != len(self.blocks):
            raise ValueError(f"a state of {len(state.layers)} layers does not fit a model of {len(self.blocks)}")
        x = self._embed(tokens, start=state.position)
        layers = []
        for block, layer in zip(self.blocks, state.layers, strict=True):
            x, layer = block.extend(x, layer)
            layers.append(layer)
        return self.norm(x), LMState(state.position + tokens.shape[1], tuple(layers))

    def extend_documents(
        self, documents: Sequence[Sequence[int]], states: Sequence[LMState]
    ) -> tuple[list[Tensor], list[LMState]]:
        """Return (features [T,D], state after it) of each document, tokens that follow those its state has seen.

        It is `extend` of each by itself, up to rounding, in one pass over all of them. No document is empty, and the
        states are those of one sequence each.
        """
        lengths, weight = [len(document) for document in documents], self.embedding.weight
        if len(documents) != len(states) or 0 in lengths or not lengths:
            raise ValueError(
                f"{len(states)} states do not fit documents of {lengths[:8]} tokens; give one per document"
            )
        tokens = to_device([token for document in documents for token in document], torch.int64, weight.device)
        x = embed(tokens.unsqueeze(0), weight)  # [1,N,D]
        ends = [state.position + length for state, length in zip(states, lengths, strict=True)]
        if self.positions is not None:
            self.check_positions(max(ends))
            places = [place for end, length in zip(ends, lengths, strict=True) for place in range(end - length, end)]
            x = x + self.positions(to_device(places, torch.int64, weight.device))
        x = self.dropout(x)
        layers: list[Sequence[Any]] = []
        cu_seqlens = start_numbers(lengths, weight.device)
        for number, block in enumerate(self.blocks):
            x, after = block.extend_documents(x, lengths, [state.layers[number] for state in states], cu_seqlens)
            layers.append(after)
        found = [LMState(end, of_layers) for end, of_layers in zip(ends, zip(*layers, strict=True), strict=True)]
        return list(self.norm(x)[0].split(lengths)), found

    def extend_packed(self, tokens: Tensor, places: Tensor, cu_seqlens: Tensor, states: Sequence[Any]) -> list[Any]:
        """Return the states after packed documents, one per layer, of n rows each: extend_documents without features.

        tokens [N], places [N] (where a token stands in its sequence), cu_seqlens [n+1], and states before them. Every
        mixer reads documents at once (mixers/documents.py). Nothing depends on numbers of the host but N and n.
        """
        x = embed(tokens.unsqueeze(0), self.embedding.weight)  # [1,N,D]
        if self.positions is not None:
            x = x + self.positions(places)
        after = []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block.extend_packed(x, cu_seqlens, state)
            after.append(state)
        return after

    def step(self, tokens: Tensor, layers: Sequence[Slots], lengths: Tensor, longest: int) -> Tensor:
        """Return the features [S,D] of one more token [S] per slot, and overwrite the slots, one per layer.

        `lengths` [S] int64 says how many tokens each slot has read, `longest` is at least the largest plus 1
        (mixers/slots.py).
        """
        x = embed(tokens.unsqueeze(1), self.embedding.weight)  # [S,1,D]
        if self.positions is not None:
            x = x + self.positions(lengths).unsqueeze(1)
        for block, slots in zip(self.blocks, layers, strict=True):
            x = block.step(x, slots, lengths, longest)
        return self.norm(x)[:, 0]

    def state_size(self, seq_len: int) -> int:
        """Return how many numbers the state of one sequence holds after seq_len tokens, over all layers."""
        return sum(check_state_size(block.mixer, seq_len) for block in self.blocks)

    def num_parameters(self) -> int:
        """Return the number of parameters, the tied head counted once."""
        return sum(p.numel() for p in self.parameters())

    def _hidden_by_rows(self, tokens: Tensor) -> Tensor:
        """Return `hidden` of each row by itself, in chunks of GRID tokens; the last is filled up, as far as it goes."""
        T = tokens.shape[1]
        end = max(T, min(T + -T % GRID, self.config.length_limit or sys.maxsize))
        rows = []
        for row in functional.pad(tokens, (0, end - T)).split(1):
            state, features = self.init_state(1), []
            for chunk in row.split(GRID, dim=1):
                made, state = self.extend(chunk, state)
                features.append(made)
            rows.append(torch.cat(features, dim=1))
        return torch.cat(rows)[:, :T]

    def _embed(self, tokens: Tensor, start: int, cu_seqlens: Tensor | None = None) -> Tensor:
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [B, T]; their shape is {list(tokens.shape)}")
        weight = self.embedding.weight
        if tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens are {tokens.dtype}; use int64 or int32, for example tokens.long()")
        if tokens.device != weight.device:
            raise ValueError(f"tokens are on {tokens.device} and the model is on {weight.device}; move one of them")
        if self.positions is None:
            return self.dropout(embed(tokens, weight))
        end = start + tokens.shape[1]
        self.check_positions(end)
        if cu_seqlens is None:
            return self.dropout(embed(tokens, weight, self.positions.weight[start:end]))
        return self.dropout(embed(tokens, weight) + self.positions(positions_in_documents(cu_seqlens, tokens)))

    def check_positions(self, end: int) -> None:
        """Raise ValueError if so many tokens are more than the learned positions."""
        if self.positions is not None and end > self.config.max_len:
            raise ValueError(
                f"{end} tokens are more than the {self.config.max_len} learned positions; "
                f"build the model with max_len >= {end}, or with positions 'none'"
            )


@torch.no_grad()
def check_causality(model: Network) -> None:
    """Raise a ValueError that names the first mixer of the model that looks ahead, fails or returns a wrong shape.

    One short sequence of random tokens (at most 32) goes through the layers, on the model's device and in its
    dtype. Each mixer is then called again with later tokens changed: its earlier outputs must stay the same. Weights,
    buffers, training mode and random number streams are left as they are. Call it before torch.compile and before
    weights are distributed.
    """
    config, weight = model.config, model.embedding.weight
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (1, min(32, config.max_len)), generator=generator).to(weight.device)
    x = weight[tokens]
    if model.positions is not None:
        x = x + model.positions.weight[: tokens.shape[1]]
    for block in model.blocks:
        x = block.feed(x + check_mixer_causality(block.mixer, block.norm1(x)))
