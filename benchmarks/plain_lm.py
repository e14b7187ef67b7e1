"""A softmax attention model with nothing of this package in it, the peer of benchmarks/lm.py, and our parts one by one.

`plain` has the shape of `lm-attention`: torch's layers, compiled whole, logits in eight chunks, fused AdamW, no
clipping. Each further name adds one part of ours: what that part costs or saves is the difference. `easy` is not a part
of ours but another task: embeddings from N(0, 1), and each token's label is the token itself. The head is tied, so
the loss and all gradients are nearly zero from the start, and a GPU multiplies zeros with less power, at higher clocks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.models import LMConfig
from rebased.models.norm import LayerNorm
from rebased.ops import embed, linear_cross_entropy

PARTS = ("clipping", "loss", "norms", "embedding", "blocks", "easy")  # blocks: compiled one by one
CHUNKS = 8


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int, our_norms: bool) -> None:
        super().__init__()
        self.heads, self.our_norms = heads, our_norms
        norm = LayerNorm if our_norms else nn.LayerNorm
        self.before_attention, self.before_mlp = norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        how: dict[str, Any] = {"dtype": torch.bfloat16} if self.our_norms else {}
        q, k, v = self.qkv(self.before_attention(x, **how)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x, **how))))


class PlainModel(nn.Module):
    def __init__(self, shape: LMConfig, length: int, parts: set[str]) -> None:
        super().__init__()
        width, heads = shape.d_model, shape.d_model // 64 or 1
        self.parts = parts
        self.tokens, self.positions = nn.Embedding(shape.vocab_size, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads, "norms" in parts) for _ in range(shape.n_layers))
        self.norm = nn.LayerNorm(width)
        for weight in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(weight, std=1.0 if "easy" in parts else 0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        places, rows = self.positions.weight[: tokens.shape[1]], self.tokens.weight
        x = embed(tokens, rows, places) if "embedding" in self.parts else self.tokens(tokens) + places
        for block in self.blocks:
            x = block(x)
        hidden, labels = self.norm(x).flatten(0, 1), labels.flatten()
        if "loss" in self.parts:
            return linear_cross_entropy(hidden, rows, labels) / len(labels)
        head = rows.t().to(torch.bfloat16)
        pairs = zip(hidden.chunk(CHUNKS), labels.chunk(CHUNKS), strict=True)
        losses = [functional.cross_entropy((part @ head).float(), wanted) for part, wanted in pairs]
        return torch.stack(losses).mean()


def plain_step(shape: LMConfig, batch: int, length: int, device: str, parts: set[str]) -> Callable[[], None]:
    """A plain model, its optimiser and a batch; each call is one step of training."""
    torch.manual_seed(0)
    model = PlainModel(shape, length, parts).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda" or None)
    tokens = torch.randint(shape.vocab_size, (batch, length), device=device)
    labels = tokens if "easy" in parts else tokens.roll(-1, 1)
    if device == "cuda" and "blocks" in parts:
        for block in model.blocks:
            block.compile(dynamic=False)
    elif device == "cuda":
        model.compile(dynamic=False)

    def run() -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = model(tokens, labels)
        loss.backward()
        if "clipping" in parts:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    return run
