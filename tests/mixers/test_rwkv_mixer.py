"""RWKV-4's time mixing against its equations, token by token, and its initial weights."""

import math

import pytest
import torch

from rebased.mixers import RWKV, Mamba, RWKVState
from rebased.models import LanguageModel, preset
from tolerances import assert_near, limit

B, T, D = 2, 11, 6


def test_is_its_equations() -> None:
    torch.manual_seed(0)
    mixer = RWKV(D, 1, 2).double()
    with torch.no_grad():
        mixer.decay.uniform_(-2, 1)
    x = torch.randn(B, T, D, dtype=torch.float64)
    keys, values, outputs = [], [], []
    previous = torch.zeros(B, D, dtype=torch.float64)
    for t in range(T):
        mixed = [mu * x[:, t] + (1 - mu) * previous for mu in (mixer.mix_k, mixer.mix_v, mixer.mix_r)]
        keys.append(mixed[0] @ mixer.proj_k.weight.T)
        values.append(mixed[1] @ mixer.proj_v.weight.T)
        r = torch.sigmoid(mixed[2] @ mixer.proj_r.weight.T)
        weights = [torch.exp(-(t - 1 - i) * mixer.decay.exp() + keys[i]) for i in range(t)]
        weights.append(torch.exp(mixer.bonus + keys[t]))
        wkv = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        outputs.append((r * wkv) @ mixer.proj_o.weight.T)
        previous = x[:, t]
    assert_near(mixer(x), torch.stack(outputs, dim=1), D, T, D)


@pytest.mark.parametrize(("layer", "n_layers"), [(0, 2), (1, 2), (0, 1), (3, 6)])
def test_start(layer: int, n_layers: int) -> None:
    mixer = RWKV(D, layer, n_layers).requires_grad_(False)
    rho0, rho1 = layer / max(n_layers - 1, 1), 1 - layer / n_layers
    for h in range(D):
        assert float(mixer.decay[h]) == pytest.approx(
            -5 + 8 * (h / (D - 1)) ** (0.7 + 1.3 * rho0), abs=limit(torch.float32, 4, condition=8)
        )
        assert float(mixer.bonus[h]) == pytest.approx(math.log(0.3) + 0.5 * ((h + 1) % 3 - 1))
        assert float(mixer.mix_k[h]) == pytest.approx((h / D) ** rho1)
        assert float(mixer.mix_v[h]) == pytest.approx((h / D) ** rho1 + 0.3 * rho0)
        assert float(mixer.mix_r[h]) == pytest.approx((h / D) ** (0.5 * rho1))


def test_the_model_supplies_the_layer_and_scales_no_projection() -> None:
    torch.manual_seed(0)
    model = LanguageModel(preset("rwkv", d_model=128))
    first, second = (block.mixer for block in model.blocks)
    assert torch.equal(first.decay, RWKV(128, 0, 2).decay)
    assert torch.equal(second.decay, RWKV(128, 1, 2).decay)
    assert float(second.proj_o.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert sum(p.numel() for p in first.parameters()) == 4 * 128**2 + 5 * 128


def test_bad_arguments_and_states_are_named() -> None:
    with pytest.raises(ValueError, match="layer 2 is not one of 2 layers"):
        RWKV(D, 2, 2)
    mixer, x = RWKV(D, 0, 2), torch.randn(B, T, D)
    with pytest.raises(ValueError, match=r"must be a RWKVState .* got MambaState"):
        mixer.extend(x, Mamba(D).init_state(B))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"another shape: \[3, 6\]; .* needs \[2, 6\]"):
        mixer.extend(x, mixer.init_state(3))
    state = RWKVState(mixer.init_state(B).last, RWKV(D + 1, 0, 2).init_state(B).wkv)
    with pytest.raises(ValueError, match=r"needs three of \[2, 6\]"):
        mixer.extend(x, state)
