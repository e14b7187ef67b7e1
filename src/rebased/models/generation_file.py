"""A generation under way as one file: states, tokens and settings in a safetensors file with a checksum."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from rebased.config import Config, explain
from rebased.data.tokenizer import Tokenizer
from rebased.files import parse_json, replacing
from rebased.mixers import map_tensors, mixer_name, tensors_of
from rebased.models.config import LMConfig
from rebased.models.decoder import Decoder
from rebased.models.generation import Ending, FinishReason, Generation, Progress, Snapshot
from rebased.models.language_model import LanguageModel, LMState
from rebased.models.sampling import Sampling
from rebased.models.weights import weights_digest

FORMAT = "rebased-generation-1"


class _Sequence(Config):
    """A sequence without its tokens, which are tensors."""

    prompt: int = Field(gt=0)  # how many tokens
    tokens: int = Field(ge=0)
    finish_reason: FinishReason | None
    slot: int | None = Field(ge=0)
    delivered: int = Field(ge=0)


class _About(Config):
    """What the file says about its tensors."""

    format: str
    model: LMConfig
    weights: str  # weights_digest of the model
    tokenizer: str | None
    sampling: dict[str, Any]
    ending: dict[str, Any]
    slots: int = Field(gt=0)
    keep_states: bool
    batch_invariant: bool = False
    sequences: tuple[_Sequence, ...] = Field(min_length=1)


def save_generation(generation: Generation, path: Path | str) -> None:
    """Write a generation to a file, from which `load_generation` goes on, equal to the bit. It can go on here too.

    The file is whole or not there at all. It holds no code.
    """
    here, model = generation.snapshot(), generation.model
    about = _About(
        format=FORMAT,
        model=model.config,
        weights=weights_digest(model),
        tokenizer=None if generation.tokenizer is None else generation.tokenizer.name,
        sampling=asdict(here.sampling),
        ending=asdict(here.ending),
        slots=here.slots,
        keep_states=here.keep_states,
        batch_invariant=here.batch_invariant,
        sequences=tuple(
            _Sequence(
                prompt=len(each.prompt),
                tokens=len(each.tokens),
                finish_reason=each.finish_reason,
                slot=each.slot,
                delivered=each.delivered,
            )
            for each in here.sequences
        ),
    )
    tensors = {
        "tokens": torch.tensor([token for each in here.sequences for token in (*each.prompt, *each.tokens)]),
        "logprobs": torch.tensor([x for each in here.sequences for x in each.logprobs], dtype=torch.float64),
    }
    for number, state in here.states.items():
        for layer, each in enumerate(state.layers):
            _check_saveable(model, layer, each)
            for leaf, tensor in enumerate(tensors_of(each)):
                tensors[f"state.{number}.{layer}.{leaf}"] = (
                    tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
                )
    text = about.model_dump_json()
    metadata = json.dumps({"about": text, "sha256": _checksum(text, tensors)})
    with replacing(Path(path)) as file:
        file.write(save(tensors, metadata={"rebased": metadata}))


def load_generation(path: Path | str, model: LanguageModel, tokenizer: Tokenizer | None = None) -> Generation:
    """Return the generation in a file, ready to go on with the model, and the tokenizer, that began it.

    Raises ValueError if the file is damaged or not one of `save_generation`, or if the model is another one.
    """
    path = Path(path)
    about, tensors = _read(path)
    if about.model != model.config:
        raise ValueError(f"{path} was begun by a model of another config; give the one that began it")
    if about.weights != weights_digest(model):
        raise ValueError(
            f"{path} was begun by a model with other weights, or in another dtype; give the one that began it"
        )
    if tokenizer is not None and tokenizer.name != about.tokenizer:
        raise ValueError(f"{path} was begun with the tokenizer {about.tokenizer}; this one is {tokenizer.name}")
    try:
        sampling, ending = Sampling(**about.sampling), Ending(**{**about.ending, "stop": tuple(about.ending["stop"])})
        sequences = _sequences(about, tensors)
        states = {
            number: _state(model, tensors, number, len(each.prompt) + len(each.tokens) - 1)
            for number, each in enumerate(sequences)
            if each.in_slot or any(name.startswith(f"state.{number}.") for name in tensors)
        }
        flags = (about.keep_states, about.batch_invariant)
        here = Snapshot(sampling, ending, about.slots, sequences, states, *flags)
        return Generation(model, here, tokenizer)
    except (TypeError, KeyError, IndexError) as error:  # the checksum is right, so other code wrote it
        raise ValueError(f"{path} is not what this version writes: {type(error).__name__}: {error}") from error


def _read(path: Path) -> tuple[_About, dict[str, Tensor]]:
    if not path.is_file():
        raise ValueError(f"{path} is not a file; give one that a generation was saved to")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = (file.metadata() or {}).get("rebased", "{}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
    found = parse_json(metadata, f"{path}: its description")
    if not isinstance(found, dict) or not isinstance(found.get("about"), str):
        raise ValueError(f"{path} holds no generation; give a file that one was saved to")
    if found.get("sha256") != _checksum(found["about"], tensors):
        raise ValueError(f"{path} is damaged: its checksum is another one; copy it again from where it was made")
    try:
        about = _About.model_validate_json(found["about"])
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error)}") from error
    if about.format != FORMAT:
        raise ValueError(f"{path}: format {about.format!r} is not {FORMAT!r}, which this version reads")
    return about, tensors


def _checksum(about: str, tensors: dict[str, Tensor]) -> str:
    """SHA-256 over the description and all tensors, with their names, dtypes and shapes."""
    digest = hashlib.sha256(about.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sequences(about: _About, tensors: dict[str, Tensor]) -> list[Progress]:
    tokens, logprobs = tensors["tokens"].tolist(), tensors["logprobs"].tolist()
    sequences, at, made = [], 0, 0
    for each in about.sequences:
        middle, end = at + each.prompt, at + each.prompt + each.tokens
        sequences.append(
            Progress(
                prompt=tokens[at:middle],
                tokens=tokens[middle:end],
                logprobs=logprobs[made : made + each.tokens],
                finish_reason=each.finish_reason,
                slot=each.slot,
                delivered=each.delivered,
            )
        )
        at, made = end, made + each.tokens
    slots = [each.slot for each in sequences if each.slot is not None and each.in_slot]
    if at != len(tokens) or made != len(logprobs) or len(set(slots)) != len(slots) or max([0, *slots]) >= about.slots:
        raise IndexError("its sequences and its tokens do not belong together")
    return sequences


def _state(model: LanguageModel, tensors: dict[str, Tensor], number: int, length: int) -> LMState:
    """Return the state of one sequence, in the nesting that the model's mixers give to theirs."""
    device = model.embedding.weight.device
    layers = []
    shapes = Decoder(model, 1, capacity=max(1, length)).layers
    for layer, slots in enumerate(shapes):
        expected = slots.get(0, length)
        own = iter(range(sum(1 for _ in tensors_of(expected))))

        def take(like: Tensor, layer: int = layer, own: Any = own) -> Tensor:
            name = f"state.{number}.{layer}.{next(own)}"
            found = tensors[name]
            if found.dtype != like.dtype or found.ndim != like.ndim or found.shape[:1] != like.shape[:1]:
                raise TypeError(f"{name} is {found.dtype} {list(found.shape)}, not {like.dtype} {list(like.shape)}")
            return found.to(device)

        layers.append(map_tensors(take, expected))
    return LMState(length, tuple(layers))


def _check_saveable(model: LanguageModel, layer: int, state: Any) -> None:
    """Raise ValueError if a state holds anything but tensors: only those can be saved."""
    if isinstance(state, dict | list | tuple):
        for child in state.values() if isinstance(state, dict) else state:
            _check_saveable(model, layer, child)
    elif not isinstance(state, Tensor):
        name = mixer_name(model.blocks[layer].mixer)
        raise ValueError(f"the state of mixer {name!r} holds a {type(state).__name__}; only tensors can be saved")
