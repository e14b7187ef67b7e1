"""One step of training: gradients of the whole batch, however it is cut, and AdamW; nothing waits for the device."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from rebased.models import IGNORE, LanguageModel
from rebased.runs.synthetic_config import Precision
from rebased.tasks import Questions
from rebased.train.oom import update


class Step:
    """Trains on some rows of the questions: `step(questions, rows) -> [mean loss, labels]`."""

    def __init__(
        self,
        model: LanguageModel,
        optimiser: Optimizer,
        *,
        micro_batch: int | None = None,
        precision: Precision = "fp32",
        compiled: bool = False,
    ) -> None:
        self.model, self.optimiser = model, optimiser
        self.micro_batch, self.precision = micro_batch, precision
        self.loss_at = torch.compile(model.loss_at, dynamic=False) if compiled else model.loss_at

    def __call__(self, questions: Questions, rows: Tensor) -> Tensor:
        self.optimiser.zero_grad(set_to_none=True)
        outcome = self.backward(questions.take(rows))
        update(self.optimiser)
        return outcome

    def backward(self, batch: Questions) -> Tensor:
        """Add the gradient of the mean loss over all labelled tokens of the batch, micro_batch rows at a time.

        A mean of the parts' means would weigh a label in a short part more than one in a long part. Gives [2] in fp64:
        that mean, and the number of labels.
        """
        labels = (batch.targets != IGNORE).sum()
        mean = torch.zeros((), dtype=self.model.embedding.weight.dtype, device=labels.device)
        for part in batch.split(self.micro_batch or len(batch.inputs)):
            with autocast(self.precision, labels.device):
                loss = self.loss_at(*part) / labels
            loss.backward()
            mean += loss.detach()
        return torch.stack([mean.double(), labels.double()])


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[None]:
    """bf16: products in bf16, weights, norms, sums and the residual stream in fp32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """Within the block fp32 products are TF32 if the precision is tf32 and fp32 if not, whatever was set before."""
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(former)


@contextmanager
def onednn_as_it_was() -> Iterator[None]:
    """torch turns oneDNN off for the whole process at the first bf16 product that the CPU has no instructions for.
    Products in fp32 then round differently: without this, what a later run computes would depend on this one."""
    former = torch.backends.mkldnn.enabled
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = former
