"""shape_of gives the names and shapes of the real model."""

import pytest
import torch
from torch import nn

from rebased.mixers import register_mixer
from rebased.models import LanguageModel, LMConfig, check_model_fits, preset, shape_of
from rebased.models.presets import mqar_preset_names
from rebased.models.shapes import weight_bytes


@pytest.mark.parametrize("name", mqar_preset_names())
def test_every_weight_has_its_shape_and_no_memory(name: str) -> None:
    config = preset(name, d_model=48, max_len=32)
    shape, model = shape_of(config), LanguageModel(config)
    wanted = {key: (tensor.shape, tensor.dtype) for key, tensor in model.state_dict().items()}
    assert {key: (tensor.shape, tensor.dtype) for key, tensor in shape.state_dict().items()} == wanted
    assert {tensor.device.type for tensor in shape.state_dict().values()} == {"meta"}


def test_models_that_are_built_afterwards_are_drawn_as_ever() -> None:
    config = preset("mamba", d_model=48, max_len=32)
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append(LanguageModel(config).state_dict())
        shape_of(config)
    for name, tensor in drawn[0].items():
        assert torch.equal(tensor, drawn[1][name]), name
    assert drawn[0]["embedding.weight"].std() > 0


@pytest.mark.parametrize("name", mqar_preset_names())
def test_bytes_of_weights_are_counted_without_building_the_model(name: str) -> None:
    config = preset(name, d_model=48).model_copy(update={"n_layers": 5})
    final_norm = 2 * config.d_model
    assert weight_bytes(config) == 4 * (LanguageModel(config).num_parameters() - final_norm)


def test_a_users_mixer_that_needs_real_tensors_is_not_counted() -> None:
    @register_mixer("own")
    class Own(nn.Module):
        def __init__(self, d_model: int, *, width: int = 8) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(d_model, width))
            self.largest = float(self.weight.detach().max())

    config = LMConfig(d_model=48, n_layers=1, mixers=("own",))
    check_model_fits(config)
    assert LanguageModel(config).blocks[0].mixer.largest == 1
    before = torch.get_rng_state()
    shape = shape_of(config)
    assert torch.equal(torch.get_rng_state(), before)
    assert shape.num_parameters() == LanguageModel(config).num_parameters()
    with pytest.raises(ValueError, match=r"^the model has a weight of more than 2\*\*63 bytes; choose smaller sizes$"):
        check_model_fits(LMConfig(d_model=48, n_layers=1, mixers=({"name": "own", "width": 2**61},)))
