"""One training step on a synthetic task: micro batches, gradient, AdamW. The host never waits for the device."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from rebased.models import IGNORE, LanguageModel
from rebased.ops.backend import autocast
from rebased.runs.run_config import Compile, Precision
from rebased.tasks import Questions
from rebased.train.cuda_graph import CudaGraphs
from rebased.train.oom import update
from rebased.train.precision import autocast_dtype


class Step:
    """Trains on some rows of the questions: `step(questions, rows)` returns [mean loss, number of labels]."""

    def __init__(
        self,
        model: LanguageModel,
        optimiser: Optimizer,
        *,
        micro_batch: int | None = None,
        precision: Precision = "fp32",
        compile: Compile = "none",
    ) -> None:
        self.model, self.optimiser = model, optimiser
        self.micro_batch, self.precision = micro_batch, precision
        self.loss_at = torch.compile(model.loss_at, dynamic=False) if compile == "model" else model.loss_at
        if compile == "blocks":
            for block in model.blocks:
                block.compile(dynamic=False)

    def __call__(self, questions: Questions, rows: Tensor) -> Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        outcome = self.backward(questions.take(rows))
        update(self.optimiser)
        return outcome

    def backward(self, batch: Questions) -> Tensor:
        """Add the gradient of the mean loss over all labels of the batch, computed micro_batch rows at a time.

        Returns [2] in fp64: that mean loss and the number of labels. The loss of each micro batch is divided by the
        labels of the whole batch, because a mean of means would give labels in small micro batches a larger weight.
        """
        labels = (batch.targets != IGNORE).sum()
        mean = torch.zeros((), dtype=self.model.embedding.weight.dtype, device=labels.device)
        for part in batch.split(self.micro_batch or len(batch.inputs)):
            with autocast(autocast_dtype(self.precision), labels.device):
                loss = self.loss_at(*part) / labels
            loss.backward()
            mean += loss.detach()
        return torch.stack([mean.double(), labels.double()])


class CapturedStep:
    """A Step that is replayed as a CUDA graph. There is one graph per segment and number of rows.

    So the smaller last batch of an epoch has a graph of its own.
    """

    def __init__(self, step: Callable[[Questions, Tensor], Tensor], device: torch.device) -> None:
        self.step, self._graphs = step, CudaGraphs(device)

    def __call__(self, questions: Questions, rows: Tensor) -> Tensor:
        """The result of the step. The next call overwrites it."""
        key = questions.inputs.data_ptr(), len(rows)
        return self._graphs.run(key, partial(self.step, questions), rows)
