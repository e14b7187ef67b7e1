"""AdamW's schedule is the paper's."""

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from rebased.runs.schedule import epoch_lr
from rebased.train.optimiser import set_lr


def test_cosine_is_that_of_torch_stepped_once_an_epoch() -> None:
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-3)
    schedule = CosineAnnealingLR(optimiser, T_max=64, eta_min=0.0)
    for epoch in range(64):
        assert epoch_lr(3e-3, epoch, 64) == pytest.approx(schedule.get_last_lr()[0], rel=1e-9, abs=1e-15)
        optimiser.step()
        schedule.step()


def test_a_rate_that_is_a_tensor_is_written_where_it_is() -> None:
    """A captured step reads the learning rate from one address."""
    rate = torch.tensor(0.1)
    optimiser = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=rate)
    set_lr(optimiser, 0.25)
    assert rate == 0.25
    assert optimiser.param_groups[0]["lr"] is rate
