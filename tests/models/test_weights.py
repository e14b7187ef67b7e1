"""model.safetensors: what is saved is what is loaded, and nothing else is."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file

from rebased.models import LanguageModel
from rebased.models.weights import load_model, save_model
from tiny_run import tiny

PER_HEAD = {"model": {"mixers": {1: {"norm_axis": "per_head"}}}}  # here q and k share the parameters of one norm


@pytest.mark.parametrize("changes", [{}, PER_HEAD])
def test_round_trip(tmp_path: Path, changes: dict) -> None:
    model = LanguageModel(tiny(changes).model).eval()
    save_model(model, tmp_path)
    state = torch.get_rng_state()
    loaded = load_model(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert not loaded.training
    assert loaded.config == model.config
    tokens = torch.arange(12)[None]
    assert torch.equal(loaded(tokens), model(tokens))
    first = (tmp_path / "model.safetensors").read_bytes()
    save_model(loaded, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == first


def test_what_is_not_a_model_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.safetensors is not there.*--resume"):
        load_model(tmp_path)
    path = tmp_path / "model.safetensors"
    save_model(LanguageModel(tiny().model), tmp_path)
    data = path.read_bytes()
    tensors = load(data)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_model(path)
    save_file(tensors, path)
    with pytest.raises(ValueError, match="does not say which model it holds"):
        load_model(path)
    about = {"format": "rebased-1", "model": tiny({"model": {"d_model": 16}}).model.model_dump(mode="json")}
    save_file(tensors, path, metadata={"rebased": json.dumps(about)})
    with pytest.raises(ValueError, match=r"does not fit its own config: blocks\.0.* is \[8"):
        load_model(path)
    about["model"]["mixers"][0]["name"] = "unheard_of"  # type: ignore[index]
    save_file(tensors, path, metadata={"rebased": json.dumps(about)})
    with pytest.raises(ValueError, match="unknown mixer 'unheard_of'"):
        load_model(path)
