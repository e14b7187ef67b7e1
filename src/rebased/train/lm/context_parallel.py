"""Context parallelism: every process holds all weights and one shard of the tokens of each sequence.

Every process is given the same whole batch and computes its shard of it. What a mixer needs of earlier shards is
gathered once per layer; gradients are sent back to the process that a value came from. ReBased and Based gather one
state of constant size, however long the sequence is. Attention gathers all earlier keys and values.

    context = ContextParallel()                   # the default group, after init_process_group
    loss = context.loss(model, tokens, labels)    # this process's part of the mean loss
    loss.backward()
    context.sum_gradients(model.parameters())     # now every process has the gradients of the whole batch
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from rebased.mixers import GatherEarlier
from rebased.models import IGNORE, LanguageModel, Shard
from rebased.ops.cross_entropy import linear_cross_entropy


class ContextParallel:
    """Splits sequences over the processes of a group (default: all): rank 0 holds the first tokens."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        if not distributed.is_initialized():
            raise ValueError(
                "context parallelism needs a process group: start with torchrun and call init_process_group"
            )
        self.group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self._agreed = False
        # The first process uses nothing of what it gathers. A compiler would therefore drop the gather from its
        # backward pass, and the other processes would wait for ever. Disabled here and not by a decorator, which would
        # import torch._dynamo together with this module.
        self.gather_earlier: GatherEarlier = torch.compiler.disable(self._gather_earlier)

    def share(self, x: Tensor) -> Tensor:
        """This process's shard of x: [B,T] -> [B,T/size]."""
        T = x.shape[1]
        if T % self.size:
            raise ValueError(
                f"{T} tokens cannot be divided equally among {self.size} processes; choose a multiple of {self.size}"
            )
        return x.chunk(self.size, dim=1)[self.rank]

    def hidden(self, model: LanguageModel, tokens: Tensor) -> Tensor:
        """`model.hidden` of this process's shard: tokens [B,T] (the whole batch) -> [B,T/size,D]."""
        shard = self.share(tokens)
        self._check_agreement(tokens)
        start = self.rank * shard.shape[1]
        return model.hidden(shard, shard=Shard(start=start, gather_earlier=self.gather_earlier))

    def loss(self, model: LanguageModel, tokens: Tensor, labels: Tensor) -> Tensor:
        """This process's part of `model.loss(tokens, labels)`, a scalar; the parts of all processes add up to it.

        tokens, labels [B,T]: the whole batch.
        """
        if tokens.shape != labels.shape:
            raise ValueError(f"tokens {list(tokens.shape)} and labels {list(labels.shape)} must have one shape")
        hidden = self.hidden(model, tokens).flatten(0, 1)
        loss = linear_cross_entropy(hidden, model.embedding.weight, self.share(labels).flatten())
        return loss / (labels != IGNORE).sum()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over all processes."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for work in [distributed.all_reduce(each, group=self.group, async_op=True) for each in gradients]:
            assert work is not None
            work.wait()

    def total(self, part: Tensor) -> Tensor:
        """The sum of `part` over all processes, without gradients, such as the loss to report."""
        total = part.detach().clone()
        distributed.all_reduce(total, group=self.group)
        return total

    def _gather_earlier(self, x: Tensor) -> Tensor:
        """The x of all earlier shards: [...] -> [rank, ...]."""
        if x.numel() == 0:
            return x.new_empty(0, *x.shape)
        return _Gather.apply(x, self.group, self.size)[: self.rank]

    def _check_agreement(self, tokens: Tensor) -> None:
        """Raise ValueError if processes were given different tokens. Only the first batch is checked."""
        if self._agreed:
            return
        places = torch.arange(1, tokens.numel() + 1, device=tokens.device)
        checksum = torch.stack([(tokens.flatten() * places).sum(), places[-1], places[tokens.shape[1] - 1]])
        checksums = [torch.empty_like(checksum) for _ in range(self.size)]
        distributed.all_gather(checksums, checksum, group=self.group)
        if not all(torch.equal(each, checksums[0]) for each in checksums):
            raise ValueError(
                "the processes of a context-parallel group were given different tokens; give each of them the same "
                "whole batch: the order of the data must not depend on the rank"
            )
        self._agreed = True


class _Gather(torch.autograd.Function):
    """Gathers a tensor from all processes, in the order of ranks: [...] -> [size, ...].

    In the backward pass each process sums the gradients that all processes have for its tensor. The first process uses
    nothing of the result. It still takes part in the backward pass, because its empty slice is in the graph too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None, size: int) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(size, *x.shape)
        distributed.all_gather(list(gathered.unbind()), x.contiguous(), group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None]:
        received = torch.empty_like(gradients, memory_format=torch.contiguous_format)
        distributed.all_to_all_single(received, gradients.contiguous(), group=ctx.group)
        return received.sum(0), None, None
