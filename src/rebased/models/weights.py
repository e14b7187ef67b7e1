"""A trained model as one file, model.safetensors. Its metadata holds the config that rebuilds the model."""

import hashlib
import json
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rebased.config import explain
from rebased.files import replacing
from rebased.models.config import LMConfig
from rebased.models.language_model import LanguageModel

WEIGHTS = "model.safetensors"
FORMAT = "rebased-1"


def save_model(model: LanguageModel, folder: Path) -> None:
    """Write the model's weights and config to folder/model.safetensors. Equal models give equal files."""
    # One metadata entry only: safetensors writes several in a random order.
    about = json.dumps({"format": FORMAT, "model": model.config.model_dump(mode="json")}, sort_keys=True)
    path = folder / WEIGHTS
    try:
        with replacing(path) as file:
            file.write(save(_tensors(model), metadata={"rebased": about}))
    except OSError as error:
        raise OSError(
            f"{path} could not be saved: {error.strerror}; the checkpoint beside it is whole: make room and run "
            "again with --resume"
        ) from error


def load_model(path: Path | str, device: torch.device | str = "cpu") -> LanguageModel:
    """Return the trained model of a run's folder, or of one model.safetensors file, on `device` and in eval mode.

    Random number streams are left as they are.
    """
    path = Path(path)
    if path.is_dir():
        path = path / WEIGHTS
        if not path.exists():
            raise ValueError(f"{path} is not there: it is written when a run ends; finish it with --resume")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}; write it anew") from error
    about = json.loads(metadata.get("rebased", "{}"))
    if about.get("format") != FORMAT:
        raise ValueError(f"{path} does not say which model it holds; give a {WEIGHTS} that `rebased train` wrote")
    try:
        with torch.random.fork_rng(devices=[]):  # initial weights are drawn and then overwritten
            model = LanguageModel(LMConfig.model_validate(about["model"]))
    except ValidationError as error:
        raise ValueError(f"{path}: the model's config is not one that this version knows: {explain(error)}") from error
    own = _tensors(model)
    odd = [name for name in own.keys() | tensors.keys() if _shape(own, name) != _shape(tensors, name)]
    if odd:
        name = min(odd)
        raise ValueError(
            f"{path} does not fit its own config: {name} is {_shape(tensors, name)} in the file and "
            f"{_shape(own, name)} in the model ({len(odd)} such); it was written by other code, or damaged"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    return model.to(device).eval()


def weights_digest(model: LanguageModel) -> str:
    """Return the SHA-256 of all weights, as 64 hexadecimal digits: equal for models that compute the same."""
    digest = hashlib.sha256()
    for name, tensor in sorted(_tensors(model).items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(model: LanguageModel) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer once, under its first name (a mixer may share parameters)."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: named[name].detach() for name in model.state_dict() if name in named}


def _shape(tensors: dict[str, Tensor], name: str) -> list[int] | None:
    return list(tensors[name].shape) if name in tensors else None
