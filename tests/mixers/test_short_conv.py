"""The gated short convolution against torch's own, and against its formula."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from rebased.mixers import ShortConv
from tolerances import assert_near

B, T, D = 2, 9, 6


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 9])
def test_is_a_depthwise_conv1d_with_a_gate_and_a_skip(width: int, length: int) -> None:
    mixer = ShortConv(D, width=width).double()
    x = torch.randn(B, length, D, dtype=torch.float64)
    padded = functional.pad(x.transpose(1, 2), (width - 1, 0))
    conv = functional.conv1d(padded, mixer.conv.weight, mixer.conv.bias, groups=D).transpose(1, 2)
    gate = x @ mixer.projection.weight.T + mixer.projection.bias
    assert_near(mixer(x), conv * gate + x, width, D)


def test_is_its_formula() -> None:
    mixer = ShortConv(D).double()
    u = torch.randn(B, T, D, dtype=torch.float64)
    taps = mixer.conv.weight[:, 0]  # [D,3], the last one meets the present token
    for t in range(T):
        conv = mixer.conv.bias + sum(taps[:, 2 - w] * u[:, t - w] for w in range(3) if t - w >= 0)
        expected = conv * (u[:, t] @ mixer.projection.weight.T + mixer.projection.bias) + u[:, t]
        assert_near(mixer(u)[:, t], expected, 3, D)


def test_taps_0_1_0_hand_on_the_previous_token() -> None:
    """With a gate of one: y_t = u_{t-1} + u_t, the fixed first layer of the paper's Table 3."""
    mixer = ShortConv(D)
    with torch.no_grad():
        mixer.conv.weight.copy_(torch.tensor([0.0, 1.0, 0.0]).expand(D, 1, 3))
        nn.init.zeros_(mixer.conv.bias)
        nn.init.zeros_(mixer.projection.weight)
        nn.init.ones_(mixer.projection.bias)
    u = torch.randn(B, T, D)
    previous = torch.cat([torch.zeros(B, 1, D), u[:, :-1]], dim=1)
    assert torch.equal(mixer(u), previous + u)  # products with 0 and 1 are exact


def test_parameters_and_state() -> None:
    mixer = ShortConv(D)
    assert sum(p.numel() for p in mixer.parameters()) == D * D + 5 * D
    assert mixer.state_size(1) == mixer.state_size(1000) == 2 * D


def test_bad_arguments_and_states_are_named() -> None:
    with pytest.raises(ValueError, match="width 0"):
        ShortConv(D, width=0)
    mixer = ShortConv(D)
    with pytest.raises(ValueError, match=r"state \[2, 2, 6\]; got .* \[3, 2, 6\]"):
        mixer.extend(torch.randn(B, T, D), mixer.init_state(B + 1))
