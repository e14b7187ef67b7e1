"""The loss on text that is not trained on, fast enough to be asked for while a run is under way."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rebased.models import IGNORE
from rebased.tasks.text import Windows
from rebased.train.text.step import to_device
from rebased.train.text.world import World


class Validation(NamedTuple):
    loss: float  # nats a token
    tokens: int


@torch.no_grad()
def validate(loss: nn.Module, windows: Windows, rows: Sequence[int], batch_size: int, world: World) -> Validation:
    """Mean loss over the given windows, shared by all processes; sums over batches in fp64, in the same order always.

    `loss` gives the sum over a batch. It is left in the mode it was in. What is compiled for training is not compiled
    again for this: it would take longer than most evaluations.
    """
    training = loss.training
    loss.eval()
    sums, labels = [], 0
    with torch.compiler.set_stance("force_eager"):
        for first in range(0, len(rows), batch_size * world.size):
            mine = rows[first : first + batch_size * world.size][world.rank :: world.size]
            # Sharded weights are gathered by all processes together: one that has nothing to do comes along.
            batch = windows.batch(mine if len(mine) else rows[:1])
            if not len(mine):
                batch = batch._replace(labels=torch.full_like(batch.labels, IGNORE))
            sums.append(loss(*to_device(batch, world.device)).detach())
            labels += int((batch.labels != IGNORE).sum())
    if isinstance(loss, FSDPModule):
        loss.reshard()  # which otherwise the next backward does: until then parameters are not the optimiser's
    loss.train(training)
    nats = torch.stack(sums).double().sum()
    total, count = world.total(torch.stack([nats, torch.full_like(nats, labels)])).tolist()
    return Validation(total / count, int(count))
