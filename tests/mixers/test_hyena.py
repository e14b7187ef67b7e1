"""Hyena against its formula with the direct sum, its filter, and its state, which grows."""

import math

import pytest
import torch
from torch.nn import functional

from rebased.mixers import RWKV, Hyena
from rebased.models import LanguageModel, preset
from tolerances import assert_near

B, T, D = 2, 13, 6


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_is_its_formula() -> None:
    mixer = Hyena(D, 16).double()
    x = torch.randn(B, T, D, dtype=torch.float64)
    padded = functional.pad(mixer.in_proj(x).transpose(1, 2), (2, 0))
    conv = functional.conv1d(padded, mixer.conv.weight, mixer.conv.bias, groups=3 * D).transpose(1, 2)
    x1, x2, v = conv.split(D, dim=-1)
    z, h = v * x1, mixer.filter(T)
    long = torch.stack([sum(h[t - s] * z[:, s] for s in range(t + 1)) for t in range(T)], dim=1)
    assert_near(mixer(x), mixer.out_proj((long + mixer.skip * z) * x2), D, 3, 2 * T, D)


def test_filter_is_its_formula() -> None:
    length = 16
    taps = Hyena(D, length).double().filter
    with torch.no_grad():
        taps.omega.uniform_(0.5, 2)
    for t in (0, 1, 7, 15):
        angle = 1e-4 * 2 * math.pi * t / length
        h = torch.tensor([t / (length - 1), math.cos(angle), -math.sin(angle)], dtype=torch.float64)
        for layer in taps.layers:
            h = torch.sin(taps.omega * layer(h))
        rates = torch.linspace(-math.log(0.01) / 1.5, -math.log(0.01) / 0.3, D, dtype=torch.float64)
        expected = taps.out(h) * torch.exp(-t / (length - 1) * rates)
        assert_near(taps(length)[t], expected, 3, 64, 64, 64, size=0.1)
    assert_near(taps(5), taps(length)[:5], 3, 64, 64, 64)  # a shorter sequence has the same filter, cut


def test_a_model_in_half_precision_still_tells_positions_apart() -> None:
    mixer = Hyena(D, 4096).bfloat16()
    assert mixer.filter(4096).dtype == torch.float32
    assert len(mixer.filter(4096)[:, 0].unique()) > 4000


def test_start_and_size() -> None:
    model = LanguageModel(preset("hyena", d_model=64, max_len=128))
    mixer = model.blocks[0].mixer
    assert torch.equal(mixer.filter.omega, torch.ones(64))
    assert 0.6 < float(mixer.skip.detach().std()) < 1.4
    assert float(mixer.out_proj.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert float(mixer.in_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert mixer.state_size(100) - mixer.state_size(99) == 64  # one number per channel and token
    assert mixer.state_size(0) == 2 * 3 * 64


def test_longer_than_the_filter_is_refused() -> None:
    mixer, x = Hyena(D, 12), torch.randn(B, T, D)
    with pytest.raises(ValueError, match=r"13 tokens are more than the 12 that Hyena's filter .* max_len >= 13"):
        mixer(x)
    _, state = mixer.extend(x[:, :12], mixer.init_state(B))
    with pytest.raises(ValueError, match="13 tokens are more than the 12"):
        mixer.extend(x[:, 12:], state)


def test_bad_arguments_and_states_are_named() -> None:
    with pytest.raises(ValueError, match="width 0 of the short convolution is out of range; choose 1 to 64"):
        Hyena(D, 16, width=0)
    with pytest.raises(ValueError, match="max_len 0 and filter_hidden 64"):
        Hyena(D, 0)
    mixer, x = Hyena(D, 16), torch.randn(B, T, D)
    with pytest.raises(ValueError, match=r"must be a HyenaState .* got RWKVState"):
        mixer.extend(x, RWKV(D, 0, 2).init_state(B))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[3, 2, 18\]"):
        mixer.extend(x, mixer.init_state(3))
