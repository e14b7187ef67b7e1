"""The loss on text that is not trained on, fast enough to be asked for while a run is under way."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule

from rebased.data import Windows
from rebased.models import IGNORE
from rebased.train.lm.step import LMStep, to_device


class Validation(NamedTuple):
    loss: float  # nats a token
    tokens: int


@torch.no_grad()
def validate(step: LMStep, windows: Windows, rows: Sequence[int], batch_size: int) -> Validation:
    """Mean loss over the given windows, shared by all processes; sums over batches in fp64, in the same order always.

    The model is left in the mode it was in. What is compiled for training is not compiled again for this: it would take
    longer than most evaluations.
    """
    loss, world, (mine_is, shares) = step.loss, step.world, step.share
    training = loss.training
    loss.eval()
    sums, labels = [], 0
    with torch.compiler.set_stance("force_eager"):
        for first in range(0, len(rows), batch_size * shares):
            mine = rows[first : first + batch_size * shares][mine_is::shares]
            # Sharded weights are gathered by all processes together: one that has nothing to do comes along.
            batch = step.own(windows.batch(mine if len(mine) else rows[:1]))
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
