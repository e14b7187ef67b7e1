"""A trained model as one file, model.safetensors. Its metadata holds the config that rebuilds it, and a checksum.

The checksum covers the config and the name, dtype, shape and bytes of every tensor. It is compared whenever a model is
loaded.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rebased.config import explain
from rebased.files import NotSaved, parse_json, refuse_pipe, replacing
from rebased.models.config import LMConfig
from rebased.models.language_model import LanguageModel
from rebased.models.shapes import check_model_fits

WEIGHTS = "model.safetensors"
FORMAT = "rebased-1"
CHECKSUM = "sha256"
REMEDY = "copy it again from where it was made, or train it again"


def save_model(model: LanguageModel, folder: Path) -> None:
    """Write the model's weights, config and checksum to folder/model.safetensors. Equal models give equal files."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in _tensors(model).items()}
    about = {"format": FORMAT, "model": model.config.model_dump(mode="json")}
    about[CHECKSUM] = _checksum(about, tensors, tensors.__getitem__)
    path = folder / WEIGHTS
    try:
        with replacing(path) as file:
            # One metadata entry only: safetensors writes several in a random order.
            file.write(save(tensors, metadata={"rebased": json.dumps(about, sort_keys=True)}))
    except OSError as error:
        raise NotSaved(
            f"{path} could not be saved: {error.strerror}; the checkpoint beside it is whole: make room, then resume "
            "the run"
        ) from error


def load_model(path: Path | str, device: torch.device | str = "cpu") -> LanguageModel:
    """Return the trained model of a run's folder, or of one model.safetensors file, on `device` and in eval mode.

    Raises ValueError if the file's checksum is not that of its contents, or if its tensors are not those of the model
    that its config describes. Weights that were saved in half precision are returned in fp32. Random number streams
    are left as they are.
    """
    path = _file(path)
    try:
        with safe_open(path, framework="pt") as file:
            about = _about(path, file.metadata())
            if _checksum(about, file.keys(), file.get_tensor) != about[CHECKSUM]:
                raise ValueError(f"{path} is damaged: its checksum is not that of its contents; {REMEDY}")
            model = _build(path, about["model"])
            there = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict; mapped, not read
            if any(tensor.dtype == torch.float64 for tensor in there.values()):
                model = model.double()
            own = _tensors(model)
            if odd := [name for name in own.keys() | there.keys() if not _are_alike(there.get(name), own.get(name))]:
                kinds = f"{_kind(there.get(min(odd)))} in the file and {_kind(own.get(min(odd)))} in the model"
                raise ValueError(
                    f"{path} does not fit its own config: {min(odd)} is {kinds} ({len(odd)} such); it was written by "
                    "other code, or damaged"
                )
            with torch.no_grad():
                for name, tensor in own.items():
                    tensor.copy_(there[name])
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}; {REMEDY}") from error
    return model.to(device).eval()


def model_checksum(path: Path | str) -> str:
    """Return the checksum that a run's folder or a model.safetensors names."""
    path = _file(path)
    with safe_open(path, framework="pt") as file:
        return str(_about(path, file.metadata())[CHECKSUM])


def _file(path: Path | str) -> Path:
    path = Path(path)
    if path.is_dir():
        path = path / WEIGHTS
        if not path.exists():
            raise ValueError(f"{path} is not there: it is written when a run ends; finish it with --resume")
    if path.exists():
        refuse_pipe(path)
    return path


def _about(path: Path, metadata: dict[str, str] | None) -> dict[str, Any]:
    """Our entry of a file's metadata."""
    about = parse_json((metadata or {}).get("rebased", "{}"), f"{path}: its metadata")
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        if (path.parent / "config.json").is_file():
            raise ValueError(f"{path} is an export for transformers; give the folder of the run that it was made from")
        remedy = f"give a {WEIGHTS} that `rebased train` or `rebased lm train` wrote"
        raise ValueError(f"{path} does not say which model it holds; {remedy}")
    if about.keys() != {"format", "model", CHECKSUM}:
        raise ValueError(f"{path} is damaged: its metadata has the entries {', '.join(about)}; {REMEDY}")
    return about


def _checksum(about: dict[str, Any], names: Iterable[str], get_tensor: Callable[[str], Tensor]) -> str:
    """The SHA-256 of the metadata and of the tensors, which are read one at a time. Tensors are on the CPU."""
    sha256 = hashlib.sha256(json.dumps({key: about[key] for key in ("format", "model")}, sort_keys=True).encode())
    for name in sorted(names):
        tensor = get_tensor(name)
        sha256.update(f"\n{json.dumps(name)} {tensor.dtype} {list(tensor.shape)}\n".encode())
        if tensor.numel():
            sha256.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def _build(path: Path, config: dict[str, Any]) -> LanguageModel:
    """The model of a config, with initial weights."""
    try:
        with torch.random.fork_rng(devices=[]):  # they are drawn and then overwritten
            known = LMConfig.model_validate(config)
            check_model_fits(known)
            return LanguageModel(known)
    except ValidationError as error:
        raise ValueError(f"{path}: the model's config is not one that this version knows: {explain(error)}") from error


def _are_alike(a: Tensor | None, b: Tensor | None) -> bool:
    """True if both are there, of one shape, and of one dtype or both floating (the checksum covers the dtype)."""
    if a is None or b is None or a.shape != b.shape:
        return False
    return a.dtype == b.dtype or (a.is_floating_point() and b.is_floating_point())


def _tensors(model: LanguageModel) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer once, under its first name (a mixer may share parameters)."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: named[name].detach() for name in model.state_dict() if name in named}


def _kind(tensor: Tensor | None) -> str:
    """The shape and dtype of a tensor: "[64, 64] float32"."""
    if tensor is None:
        return "missing"
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
