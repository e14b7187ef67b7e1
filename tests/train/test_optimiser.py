"""One training step: gradients do not depend on how a batch is cut; AdamW and the schedule are the paper's."""

import pytest
import torch
from tiny_run import tiny
from torch.optim.lr_scheduler import CosineAnnealingLR

from rebased.models import IGNORE, LanguageModel
from rebased.tasks import Examples
from rebased.train.optimiser import backward, build_optimiser, cosine_lr, set_lr, training_step

CONFIG = tiny({"model": {"embed_dropout": 0.0}})


def make() -> tuple[LanguageModel, Examples]:
    """A batch whose rows have very different numbers of labels: a mean of means would be seen."""
    torch.manual_seed(0)
    model = LanguageModel(CONFIG.model).double()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    inputs = torch.randint(24, (10, 12))
    labels = torch.where(torch.rand(10, 12) < torch.linspace(0, 1, 10)[:, None], inputs, IGNORE)
    return model, Examples(inputs, labels)


@pytest.mark.parametrize("micro_batch", [1, 3, 5, 10, 99])
def test_accumulated_gradients_are_those_of_the_full_batch(micro_batch: int) -> None:
    model, batch = make()
    reference = model.loss(*batch)
    expected = torch.autograd.grad(reference, list(model.parameters()))
    loss = backward(model, batch, micro_batch)
    torch.testing.assert_close(loss.mean, reference.detach(), rtol=1e-12, atol=1e-12)
    assert loss.labels == (batch.labels != IGNORE).sum()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


def test_the_step_is_adamw_with_decay_on_every_parameter() -> None:
    model, batch = make()
    optimiser = build_optimiser(model, CONFIG.train)
    assert [group["weight_decay"] for group in optimiser.param_groups] == [0.1]
    assert {id(p) for p in optimiser.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    before = [parameter.detach().clone() for parameter in model.parameters()]
    training_step(model, optimiser, batch, None)
    lr = CONFIG.train.lr
    for parameter, old in zip(model.parameters(), before, strict=True):  # the first step of Adam has m = g, v = g^2
        gradient = parameter.grad
        assert gradient is not None
        new = old * (1 - lr * 0.1) - lr * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), new, rtol=1e-9, atol=1e-9)


def test_gradients_do_not_pile_up_over_steps() -> None:
    model, batch = make()
    optimiser = build_optimiser(model, CONFIG.train)
    set_lr(optimiser, 0.0)
    training_step(model, optimiser, batch, None)
    first = model.embedding.weight.grad
    training_step(model, optimiser, batch, None)
    torch.testing.assert_close(model.embedding.weight.grad, first)


def test_cosine_is_that_of_torch_stepped_once_an_epoch() -> None:
    config = CONFIG.train.model_copy(update={"epochs": 64, "lr": 3e-3})
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-3)
    schedule = CosineAnnealingLR(optimiser, T_max=64, eta_min=0.0)
    for epoch in range(64):
        assert cosine_lr(config, epoch) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9, abs=1e-15)
        optimiser.step()
        schedule.step()
