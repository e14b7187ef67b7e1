"""Context parallelism: processes share one sequence, each with a stretch of its tokens and all of the weights.

Every process is given the same whole batch and computes its own stretch of it. What a mixer needs of the stretches
before it is gathered once a layer, and a gradient goes back the way its value came. For ReBased and Based that is one
state of constant size, so a sequence costs as little to share as its length is great; attention hands on every key.

    context = ContextParallel()                   # of the default group, after init_process_group
    loss = context.loss(model, tokens, labels)    # this process's summand of the mean loss
    loss.backward()
    context.sum_gradients(model.parameters())     # now they are those of the whole, everywhere
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
    """The processes of a group (default: all), in the order of their ranks, from the first token to the last."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        if not distributed.is_initialized():
            raise ValueError("context parallelism needs processes: start them with torchrun and init_process_group")
        self.group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self._agreed = False
        # A compiler would see that the first process uses nothing of what it gathers, leave the gathering out of its
        # backward, and let the others wait. Here and not as a decorator, since it imports all of dynamo.
        self.earlier: GatherEarlier = torch.compiler.disable(self._earlier)

    def share(self, x: Tensor) -> Tensor:
        """This process's stretch of time: [B,T] -> [B,T/size]."""
        T = x.shape[1]
        if T % self.size:
            raise ValueError(f"{T} tokens cannot be shared equally by {self.size} processes; choose a multiple of them")
        return x.chunk(self.size, dim=1)[self.rank]

    def hidden(self, model: LanguageModel, tokens: Tensor) -> Tensor:
        """`model.hidden` at this process's stretch: tokens [B,T] (all of them) -> [B,T/size,D]."""
        own = self.share(tokens)
        self._check_agreement(tokens)
        return model.hidden(own, shard=Shard(start=self.rank * own.shape[1], gather_earlier=self.earlier))

    def loss(self, model: LanguageModel, tokens: Tensor, labels: Tensor) -> Tensor:
        """This process's summand of `model.loss(tokens, labels)`: tokens, labels [B,T], the whole of both."""
        if tokens.shape != labels.shape:
            raise ValueError(f"tokens {list(tokens.shape)} and labels {list(labels.shape)} must have one shape")
        hidden = self.hidden(model, tokens).flatten(0, 1)
        loss = linear_cross_entropy(hidden, model.embedding.weight, self.share(labels).flatten())
        return loss / (labels != IGNORE).sum()

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of all processes, in place."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        for work in [distributed.all_reduce(each, group=self.group, async_op=True) for each in gradients]:
            assert work is not None
            work.wait()

    def total(self, summand: Tensor) -> Tensor:
        """The sum over all processes, without gradients: the loss to report."""
        total = summand.detach().clone()
        distributed.all_reduce(total, group=self.group)
        return total

    def _earlier(self, own: Tensor) -> Tensor:
        if own.numel() == 0:
            return own.new_empty(0, *own.shape)
        return _Gather.apply(own, self.group, self.size)[: self.rank]

    def _check_agreement(self, tokens: Tensor) -> None:
        """Once, at the first batch: processes that read different data would train on a nonsense sequence."""
        if self._agreed:
            return
        places = torch.arange(1, tokens.numel() + 1, device=tokens.device)
        mark = torch.stack([(tokens.flatten() * places).sum(), places[-1], places[tokens.shape[1] - 1]])
        marks = [torch.empty_like(mark) for _ in range(self.size)]
        distributed.all_gather(marks, mark, group=self.group)
        if not all(torch.equal(each, marks[0]) for each in marks):
            raise ValueError(
                "the processes of a context-parallel group were given different tokens; each of them needs the same "
                "whole batch, so let the order of the data depend on the group, not on the rank"
            )
        self._agreed = True


class _Gather(torch.autograd.Function):
    """[...] -> [size, ...], in the order of ranks; back, each process adds up what the others want of its own.

    A process that uses nothing of it (the first one) still takes part in the backward, where all of them meet, because
    an empty slice of the result is a part of its graph too.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: ProcessGroup | None, size: int) -> Tensor:
        ctx.group = group
        gathered = own.new_empty(size, *own.shape)
        distributed.all_gather(list(gathered.unbind()), own.contiguous(), group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None]:
        wanted = torch.empty_like(gradients, memory_format=torch.contiguous_format)
        distributed.all_to_all_single(wanted, gradients.contiguous(), group=ctx.group)
        return wanted.sum(0), None, None
