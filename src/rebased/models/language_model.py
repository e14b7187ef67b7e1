"""The one model of this project: embeddings, a tiled pattern of mixers, a tied head."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rebased.mixers import Earlier, can_divide, can_extend, mixer_name, positions_in_documents
from rebased.models.block import Block
from rebased.models.config import LMConfig
from rebased.models.norm import LayerNorm
from rebased.ops import IGNORE, embed, linear_cross_entropy


class LMState(NamedTuple):
    """What a model remembers of the tokens it has read."""

    position: int
    layers: tuple[Any, ...]


class Part(NamedTuple):
    """Where a part of a sequence that several processes share stands in it, and how it hears of the parts before."""

    start: int
    earlier: Earlier


class LanguageModel(nn.Module):
    blocks: Sequence[Block]
    recompute = False
    """Gradient checkpointing: keep the inputs of blocks alone, and compute what is inside again in the backward."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_len, config.d_model)
        self.dropout = nn.Dropout(config.embed_dropout)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))  # type: ignore[assignment]
        self.norm = LayerNorm(config.d_model)
        self.init_weights()

    def init_weights(self) -> None:
        """Linear and Embedding N(0, 0.02), biases 0; what writes into the residual stream under the name `out_proj` or
        `fc2` is smaller by sqrt(2 n_layers). A mixer with an `init_weights` of its own has the last word."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                writes = name.rsplit(".", 1)[-1] in ("out_proj", "fc2")
                std = 0.02 / math.sqrt(2 * self.config.n_layers) if writes else 0.02
                nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            if hasattr(block.mixer, "init_weights"):
                block.mixer.init_weights()

    def hidden(self, tokens: Tensor, cu_seqlens: Tensor | None = None, part: Part | None = None) -> Tensor:
        """The last layer's features after the final norm: tokens [B,T] -> [B,T,D].

        `cu_seqlens` [n+1] is where documents begin in the B*T tokens (every row begins one), and B*T. Given it, each
        document is computed as if it were alone: none sees another, and positions count from its own first token.
        With `part` the tokens are a part of longer sequences, shared among processes (train/text/context_parallel.py).
        """
        if part is not None:
            self._check_divisible(cu_seqlens)
        x = self._embed(tokens, 0 if part is None else part.start, cu_seqlens)
        earlier = None if part is None else part.earlier
        again = self.recompute and self.training
        for block in self.blocks:
            x = (
                checkpoint(block, x, cu_seqlens, earlier, use_reentrant=False)
                if again
                else block(x, cu_seqlens, earlier)
            )
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., vocab], for the positions one asks about."""
        return functional.linear(hidden, self.embedding.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """All logits: tokens [B,T] -> [B,T,vocab]. Training does not come here: see `loss` and `logits_at_labels`."""
        return self.logits(self.hidden(tokens))

    def hidden_at_labels(
        self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`hidden` [n,D] and labels [n] of the labelled positions alone, tokens and labels [B,T]."""
        if tokens.shape != labels.shape:
            raise ValueError(f"tokens {list(tokens.shape)} and labels {list(labels.shape)} must have one shape")
        asked = labels != IGNORE
        return self.hidden(tokens, cu_seqlens)[asked], labels[asked]

    def logits_at_labels(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The logits [n,vocab] and labels [n] of the labelled positions alone: [B,T,vocab] is never built."""
        hidden, targets = self.hidden_at_labels(tokens, labels)
        return self.logits(hidden), targets

    def loss(self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Mean cross-entropy over the labelled positions (label at the position itself; IGNORE elsewhere)."""
        hidden, targets = self.hidden_at_labels(tokens, labels, cu_seqlens)
        return linear_cross_entropy(hidden, self.embedding.weight, targets) / len(targets)

    def hidden_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """`hidden` at these positions of each row alone: tokens [B,T], positions [B,n] -> [B*n,D].

        What follows the last mixer looks at one position at a time, so it need not see the others.
        """
        x = self._embed(tokens, start=0)
        *blocks, last = self.blocks
        for block in blocks:
            x = block(x)
        u = last.mix(x)
        starts = torch.arange(0, u.shape[0] * u.shape[1], u.shape[1], device=u.device)
        u = u.flatten(0, 1).index_select(0, (positions + starts.unsqueeze(1)).flatten())
        return self.norm(last.feed(u))

    def loss_at(self, tokens: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        """The sum of the cross-entropies at positions [B,n] of tokens [B,T]; a target [B,n] of IGNORE counts for
        nothing. Nothing here waits for the device."""
        return linear_cross_entropy(self.hidden_at(tokens, positions), self.embedding.weight, targets.flatten())

    def init_state(self, batch: int) -> LMState:
        for block in self.blocks:
            if not can_extend(block.mixer):
                raise ValueError(
                    f"mixer {mixer_name(block.mixer)!r} has no init_state, extend and state_size: it can be trained "
                    "and measured, but not read piece by piece; docs/add_a_mixer.md shows how to add them"
                )
        return LMState(0, tuple(block.mixer.init_state(batch) for block in self.blocks))

    def extend(self, tokens: Tensor, state: LMState) -> tuple[Tensor, LMState]:
        """`hidden` of tokens that follow those the state has seen, and the state after them: prefill and decoding."""
        if len(state.layers) != len(self.blocks):
            raise ValueError(f"a state of {len(state.layers)} layers does not fit a model of {len(self.blocks)}")
        x = self._embed(tokens, start=state.position)
        layers = []
        for block, layer in zip(self.blocks, state.layers, strict=True):
            x, layer = block.extend(x, layer)
            layers.append(layer)
        return self.norm(x), LMState(state.position + tokens.shape[1], tuple(layers))

    def state_size(self, seq_len: int) -> int:
        """How many numbers the state of one sequence holds after seq_len tokens."""
        return sum(block.mixer.state_size(seq_len) for block in self.blocks)

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def _check_divisible(self, cu_seqlens: Tensor | None) -> None:
        if cu_seqlens is not None:
            raise ValueError("processes that share a sequence cannot keep its documents apart; leave out cu_seqlens")
        for block in self.blocks:
            if not can_divide(block.mixer):
                raise ValueError(
                    f"mixer {mixer_name(block.mixer)!r} has no forward_part, so processes cannot share a sequence; "
                    "choose other mixers, or another way to train in parallel"
                )

    def _embed(self, tokens: Tensor, start: int, cu_seqlens: Tensor | None = None) -> Tensor:
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be [B, T]; their shape is {list(tokens.shape)}")
        end = start + tokens.shape[1]
        if end > self.config.max_len:
            raise ValueError(
                f"{end} tokens are more than the {self.config.max_len} learned positions; "
                f"build the model with max_len >= {end}"
            )
        if cu_seqlens is None:
            positions = self.positions.weight[start:end]
        else:
            positions = self.positions(positions_in_documents(cu_seqlens, tokens))
        return self.dropout(embed(tokens, self.embedding.weight) + positions)
