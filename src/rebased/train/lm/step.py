"""One training step of a language model: micro batches, gradient, AdamW. The host never waits for the device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from rebased.data import TextBatch
from rebased.models import IGNORE, LanguageModel
from rebased.ops import linear_cross_entropy
from rebased.ops.backend import autocast
from rebased.runs.lm_config import LMTrainConfig
from rebased.runs.run_config import Precision
from rebased.runs.schedule import step_lr
from rebased.train.cuda_graph import CudaGraphs
from rebased.train.oom import update
from rebased.train.optimiser import build_optimiser, make_moments, set_lr
from rebased.train.precision import autocast_dtype, choose_precision
from rebased.train.world import World


class TokenLoss(nn.Module):
    """The model and its loss as one module: this is what is compiled, replicated (ddp) or sharded (fsdp)."""

    def __init__(self, model: LanguageModel, precision: Precision) -> None:
        super().__init__()
        self.model, self.precision = model, precision

    def forward(self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        """The summed loss in nats, a scalar: tokens, labels [B,T]."""
        with autocast(autocast_dtype(self.precision), tokens.device):
            hidden = self.model.hidden(tokens, cu_seqlens)
            return linear_cross_entropy(hidden.flatten(0, 1), self.model.embedding.weight, labels.flatten())


class LMStep:
    """Trains a language model: the model as its processes hold it, and its optimiser."""

    def __init__(self, model: LanguageModel, config: LMTrainConfig, world: World) -> None:
        self.config, self.world = config, world
        self.precision = choose_precision(config.precision, world.device)
        self.model = model.to(world.device)
        self.model.recompute = config.recompute
        self.is_sharded = world.size > 1 and config.parallel == "fsdp"
        self.loss: Any = self._parallelise(TokenLoss(self.model, self.precision))
        use_graphs = config.capture and world.device.type == "cuda" and world.size == 1 and not config.recompute
        self.graphs = CudaGraphs(world.device) if use_graphs else None
        self.optimiser = build_optimiser(self.model, config, capturable=use_graphs)
        make_moments(self.optimiser)

    def _parallelise(self, loss: TokenLoss) -> nn.Module:
        """The loss compiled, then replicated or sharded. Compiling is done in place: parameters keep their names."""
        if self.config.compile == "blocks":
            for block in self.model.blocks:
                block.compile(dynamic=False)
        elif self.config.compile == "model":
            loss.compile(dynamic=False)
        if self.is_sharded:
            from torch.distributed.fsdp import fully_shard  # its import takes a second

            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(loss)
            return loss
        if self.world.size > 1 and self.config.parallel == "ddp":
            gpus = [self.world.device.index] if self.world.device.type == "cuda" else None
            return DistributedDataParallel(loss, gpus, gradient_as_bucket_view=True)
        return loss

    def forget_graphs(self) -> None:
        """Discard the captured steps and release their memory."""
        if self.graphs is not None:
            self.graphs = CudaGraphs(self.world.device)

    def __call__(self, parts: Sequence[TextBatch], step: int) -> Tensor:
        """Train on this process's share of a batch, given as micro batches; `step` counts from 0.

        Returns [3] in fp64 on the device: the summed loss of this process's tokens in nats, the number of its labels,
        and the norm of the whole gradient before clipping. The gradient is that of the mean loss over all labels of all
        processes.
        """
        labels = sum(int((part.labels != IGNORE).sum()) for part in parts)  # still on the CPU
        weight = self._weight(labels)
        set_lr(self.optimiser, step_lr(self.config, step))
        self.loss.train()
        if self.graphs is None or any(part.cu_seqlens is not None for part in parts):  # a graph needs fixed shapes
            nats, norm = self._compute(parts, weight)
        else:
            tensors = [tensor for part in parts for tensor in (part.tokens, part.labels)]
            shapes = tuple(tensor.shape for tensor in tensors)
            nats, norm = self.graphs.run(shapes, self._compute_flat, torch.as_tensor(weight), *tensors)
        return torch.stack([nats.double(), torch.full_like(nats, labels, dtype=torch.float64), norm.double()])

    def _compute_flat(self, weight: Tensor, *tensors: Tensor) -> Tensor:
        """`_compute` with the micro batches as a flat list of tensors, as a CUDA graph takes them. Returns [2]."""
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return torch.stack(self._compute([TextBatch(tokens, labels, None) for tokens, labels in pairs], weight))

    def _compute(self, parts: Sequence[TextBatch], weight: Tensor | float) -> tuple[Tensor, Tensor]:
        """Compute gradients, clip them, take a step of AdamW. Returns the summed loss and the gradient's norm."""
        self.optimiser.zero_grad(set_to_none=True)
        nats = torch.zeros((), device=self.world.device)
        for i, part in enumerate(parts):
            with self._gradient_sync(last=i == len(parts) - 1):
                value = self.loss(*to_device(part, self.world.device))
                (value * weight).backward()
            nats += value.detach()
        norm = clip_grad_norm_(self.model.parameters(), self.config.clip_norm or float("inf"))
        if hasattr(norm, "full_tensor"):  # gradients are sharded
            norm = norm.full_tensor()
        update(self.optimiser)
        return nats, norm.detach()

    def _weight(self, labels: int) -> Tensor | float:
        """The weight of one label's loss: 1 / labels of all processes.

        ddp and fsdp average gradients over processes, so there it is multiplied by their number.
        """
        if self.world.size == 1:
            return 1 / max(1, labels)
        all_labels = self.world.total(torch.full((), float(labels), device=self.world.device))
        return self.world.size / all_labels.clamp(min=1)

    def _gradient_sync(self, last: bool) -> AbstractContextManager[None]:
        """A context in which processes exchange gradients only if this is the `last` micro batch of the step."""
        if isinstance(self.loss, DistributedDataParallel) and not last:
            return self.loss.no_sync()
        if self.is_sharded:
            self.loss.set_requires_gradient_sync(last)
        return nullcontext()


def to_device(batch: TextBatch, device: torch.device) -> TextBatch:
    """The batch on the device. It is copied from pinned memory, so the host does not wait."""
    if device.type == "cuda" and not batch.tokens.is_cuda:
        tensors = (None if x is None else x.pin_memory().to(device, non_blocking=True) for x in batch)
        batch = TextBatch(*tensors)  # type: ignore[arg-type]
    if batch.cu_seqlens is not None:  # no two batches have as many documents: one compiled graph takes any number
        torch._dynamo.maybe_mark_dynamic(batch.cu_seqlens, 0)
    return batch
