"""One step of training: micro batches, one gradient, AdamW. Nothing in it makes the host wait for the device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from rebased.data import TextBatch
from rebased.models import IGNORE, LanguageModel
from rebased.ops import linear_cross_entropy
from rebased.runs.lm_config import TextTrain
from rebased.train.cuda_graph import CudaGraphs
from rebased.train.lm.context_parallel import ContextParallel
from rebased.train.lm.schedule import learning_rate
from rebased.train.oom import update
from rebased.train.optimiser import build_optimiser, make_moments, set_lr
from rebased.train.precision import choose_precision
from rebased.train.world import World


class TokenLoss(nn.Module):
    """The sum of a batch's losses as one module: what is compiled, copied to every process, or sharded."""

    def __init__(self, model: LanguageModel, precision: str, context: ContextParallel | None = None) -> None:
        super().__init__()
        self.model, self.precision, self.context = model, precision, context

    def forward(self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """tokens, labels [B,T]; of processes that share sequences each has the labels of its own stretch."""
        half = self.precision == "bf16"
        # Each weight is cast once a forward pass, so there is nothing to remember: remembered casts would outlive it.
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
            if self.context is None:
                hidden = self.model.hidden(tokens, cu_seqlens)
            else:
                hidden = self.context.hidden(self.model, tokens)
            return linear_cross_entropy(hidden.flatten(0, 1), self.model.embedding.weight, labels.flatten())


class LMStep:
    """A model made ready for its processes, and the optimiser of its weights."""

    def __init__(self, model: LanguageModel, config: TextTrain, world: World) -> None:
        self.config, self.world = config, world
        self.precision = choose_precision(config.precision, world.device)
        self.model = model.to(world.device)
        self.model.recompute = config.recompute
        self.context = ContextParallel() if world.size > 1 and config.parallel == "context" else None
        self.loss: nn.Module = self._spread(TokenLoss(self.model, self.precision, self.context))
        captured = config.capture and world.device.type == "cuda" and world.size == 1 and not config.recompute
        self.graphs = CudaGraphs(world.device) if captured else None
        self.optimiser = build_optimiser(self.model, config, decay=config.decay, capturable=captured)
        make_moments(self.optimiser)

    @property
    def share(self) -> tuple[int, int]:
        """(i, n): this process reads the i-th of n shares of a batch's sequences."""
        return (0, 1) if self.context else (self.world.rank, self.world.size)

    def own(self, batch: TextBatch) -> TextBatch:
        """A batch of this process's share of the sequences, less the labels that are other processes'."""
        return batch if self.context is None else batch._replace(labels=self.context.share(batch.labels))

    def _spread(self, loss: TokenLoss) -> nn.Module:
        """Compile first, then wrap: what is compiled stays in place, so no parameter changes its name."""
        if self.config.compile == "blocks":
            for block in self.model.blocks:
                block.compile(dynamic=False)
        elif self.config.compile == "model":
            loss.compile(dynamic=False)
        if self.world.size > 1 and self.config.parallel == "fsdp":
            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(loss)
            return loss
        if self.world.size > 1 and self.config.parallel == "ddp":
            cards = [self.world.device.index] if self.world.device.type == "cuda" else None
            return DistributedDataParallel(loss, cards, gradient_as_bucket_view=True)
        return loss

    def forget_graphs(self) -> None:
        """Give the memory of captured steps back."""
        if self.graphs is not None:
            self.graphs = CudaGraphs(self.world.device)

    def __call__(self, parts: Sequence[TextBatch], step: int) -> Tensor:
        """Train on this process's share of a batch, cut into micro batches; `step` counts from 0.

        Returns [3] in fp64 on the device: the summed loss of this process's tokens in nats, the number of its labels,
        and the norm of the whole gradient before it was clipped. The gradient is that of the mean over all labels of
        all processes.
        """
        parts = [self.own(part) for part in parts]
        labels = sum(int((part.labels != IGNORE).sum()) for part in parts)  # on the CPU still
        weight = self._weight(labels)
        set_lr(self.optimiser, learning_rate(self.config, step))
        self.loss.train()
        if self.graphs is None or any(part.cu_seqlens is not None for part in parts):  # documents differ in number
            nats, norm = self._compute(parts, weight)
        else:
            tensors = [tensor for part in parts for tensor in (part.tokens, part.labels)]
            shapes = tuple(tensor.shape for tensor in tensors)
            nats, norm = self.graphs.run(shapes, self._compute_flat, torch.as_tensor(weight), *tensors)
        return torch.stack([nats.double(), torch.full_like(nats, labels, dtype=torch.float64), norm.double()])

    def _compute_flat(self, weight: Tensor, *tensors: Tensor) -> Tensor:
        """The step with its micro batches as a flat list of tensors, as a CUDA graph takes them."""
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return torch.stack(self._compute([TextBatch(tokens, labels, None) for tokens, labels in pairs], weight))

    def _compute(self, parts: Sequence[TextBatch], weight: Tensor | float) -> tuple[Tensor, Tensor]:
        """Gradients, clipping and AdamW. Returns the summed loss and the gradient's norm."""
        self.optimiser.zero_grad(set_to_none=True)
        nats = torch.zeros((), device=self.world.device)
        for i, part in enumerate(parts):
            with self._no_talk(until_last=i < len(parts) - 1):
                value = self.loss(*to_device(part, self.world.device))
                (value * weight).backward()
            nats += value.detach()
        if self.context is not None:
            self.context.sum_gradients(self.model.parameters())
        norm = clip_grad_norm_(self.model.parameters(), self.config.clip_norm or float("inf"))
        if hasattr(norm, "full_tensor"):  # of shards
            norm = norm.full_tensor()
        update(self.optimiser)
        return nats, norm.detach()

    def _weight(self, labels: int) -> Tensor | float:
        """What a label weighs. ddp and fsdp average the processes' gradients, hence the number of processes."""
        if self.world.size == 1:
            return 1 / max(1, labels)
        everywhere = self.world.total(torch.full((), float(labels), device=self.world.device))
        return (1 if self.context else self.world.size) / everywhere.clamp(min=1)

    def _no_talk(self, until_last: bool) -> AbstractContextManager[None]:
        """Gradients are exchanged once a step, after the last micro batch."""
        if isinstance(self.loss, DistributedDataParallel) and until_last:
            return self.loss.no_sync()
        if isinstance(self.loss, FSDPModule):
            self.loss.set_requires_gradient_sync(not until_last)
        return nullcontext()


def to_device(batch: TextBatch, device: torch.device) -> TextBatch:
    """From pinned memory, so that the host goes on while the copy is under way."""
    if device.type != "cuda" or batch.tokens.is_cuda:
        return batch
    tokens, labels, cu_seqlens = (None if x is None else x.pin_memory().to(device, non_blocking=True) for x in batch)
    return TextBatch(tokens, labels, cu_seqlens)  # type: ignore[arg-type]
