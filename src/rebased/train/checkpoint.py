"""Checkpoints: always one whole checkpoint, and a pointer to it.

A checkpoint is the file checkpoint-<step>.pt with everything that a step changes: weights, AdamW's moments and random
numbers, as whole tensors, so any number of processes can go on with it. checkpoint.json, the pointer, is written after
it and has its checksum. It also holds the run's progress, and the size and checksum of the record at that moment. The
former checkpoint is deleted last. A process that is killed in between leaves the former one in force. Nothing is
deleted before another checkpoint was found whole.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW

from rebased.files import NotSaved, describe_file, read_json, replacing, seal, unseal
from rebased.models import LanguageModel
from rebased.train.optimiser import MOMENTS
from rebased.train.world import World

POINTER = "checkpoint.json"
FORMAT = 3  # of the pointer and of the file
REMEDY = "restore it, or start the run again in another folder"


class Pointer(NamedTuple):
    """What checkpoint.json says."""

    step: int
    digest: str  # of the run
    name: str  # of the file
    file: dict[str, Any]  # {"bytes": ..., "sha256": ...} of the file
    progress: dict[str, Any]
    record: dict[str, Any]  # {"bytes": ..., "sha256": ...} of the record


def save_checkpoint(
    folder: Path,
    state: dict[str, Any],
    world: World,
    *,
    digest: str,
    progress: dict[str, Any],
    record: dict[str, Any],
) -> None:
    """Write a checkpoint of progress["step"], point to it, and delete the former one. Rank 0 writes.

    state: what `collect_state` returned.
    record: {"bytes": ..., "sha256": ...} of the record as it is now.
    """
    path = folder / f"checkpoint-{progress['step']}.pt"

    def write() -> None:
        try:
            with replacing(path) as file:
                torch.save({"format": FORMAT, **state}, file)
            pointer = Pointer(progress["step"], digest, path.name, describe_file(path), progress, record)
            with replacing(folder / POINTER) as file:
                file.write(json.dumps(seal({"format": FORMAT, **pointer._asdict()}), indent=2).encode() + b"\n")
        except (OSError, RuntimeError) as error:
            raise _not_saved(folder, path, error) from error
        delete_others(folder, path.name)

    world.on_rank_zero(write)


def find_checkpoint(folder: Path, world: World, *, digest: str) -> Pointer | None:
    """The pointer to the checkpoint, after its checksum was compared; None: there is no checkpoint yet."""

    pointer = world.together(lambda: read_pointer(folder))
    if pointer is None:
        return None
    path = folder / pointer.name

    def check() -> None:
        if pointer.digest != digest:
            raise ValueError(f"{path} belongs to another run, {pointer.digest}; this one is {digest}; {REMEDY}")
        if not path.exists():
            raise ValueError(f"{path} is missing, though {POINTER} names it; {REMEDY}")
        if describe_file(path) != pointer.file:
            raise ValueError(f"{path} is damaged: its checksum is not the one in {POINTER}; {REMEDY}")

    world.on_rank_zero(check)
    return pointer


def read_pointer(folder: Path) -> Pointer | None:
    """What checkpoint.json says; None where there is no such file. ValueError where it is damaged."""
    path = folder / POINTER
    if not path.exists():
        return None
    try:
        tree = read_json(path)
        if tree["format"] != FORMAT:
            raise ValueError(f"it is of format {tree['format']}, and this version reads {FORMAT}")
        about = unseal(tree)
        pointer = Pointer(**{key: about[key] for key in Pointer._fields})
        if Path(pointer.name).name != pointer.name:
            raise ValueError("it names a file outside of this folder")
        return pointer
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {str(error).removeprefix(f'{path} ')}; {REMEDY}") from error


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint's file holds: tensors and plain types, so that it can be read without trusting it."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle, zip and torch each have their own
        raise ValueError(f"{path} is not a checkpoint that torch can read safely; {REMEDY}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise ValueError(f"{path} is not a checkpoint of format {FORMAT}, which this version reads; {REMEDY}")
    return state


def _not_saved(folder: Path, path: Path, error: BaseException) -> NotSaved:
    """A full disk, with what is left and what to do."""
    former = read_pointer(folder)
    kept = f"the one of step {former.step} is whole" if former else "there is no earlier one"
    delete_others(folder, former.name if former else "")
    reason = str(getattr(error, "strerror", None) or error).splitlines()[0]
    return NotSaved(f"{path} could not be saved: {reason}; {kept}: make room, then resume the run")


def delete_others(folder: Path, keep: str) -> None:
    """Delete all checkpoints but the one of this name, which must be whole, and what killed processes left."""
    for path in [*folder.glob("checkpoint-*"), *folder.glob(".checkpoint-*")]:
        if path.name != keep:
            path.unlink(missing_ok=True)


def collect_state(model: LanguageModel, optimiser: AdamW, world: World) -> dict[str, Any]:
    """The state, for `save_checkpoint`. All processes must call this; rank 0 gets the tensors, on its CPU if they are
    sharded over processes."""
    whole = {name: _whole(tensor, world) for name, tensor in _tensors(model, optimiser).items()}
    on_gpu = world.device.type == "cuda"
    return {
        "tensors": whole,
        "random": torch.get_rng_state(),
        "random_gpu": torch.cuda.get_rng_state(world.device) if on_gpu else None,
    }


@torch.no_grad()
def restore_state(path: Path, step: int, model: LanguageModel, optimiser: AdamW, world: World) -> None:
    """Restore in place the state after this step from its file. Raises ValueError if it is of another model."""
    state, own = read_state(path), _tensors(model, optimiser)
    try:
        found: dict[str, Tensor] = state["tensors"]
        there, here = ({name: _kind(each) for name, each in tensors.items()} for tensors in (found, own))
        if different := sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name)):
            name = different[0]
            raise ValueError(
                f"{name} is {there.get(name)} there and {here.get(name)} here; {len(different)} tensors differ"
            )
        for name, tensor in own.items():
            tensor.copy_(_sharded(found[name], tensor))
        torch.set_rng_state(state["random"])
        if world.device.type == "cuda" and state["random_gpu"] is not None:
            torch.cuda.set_rng_state(state["random_gpu"], world.device)
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:  # its content may be a stranger's
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} is of another architecture than this code builds ({reason}); resume with the code that wrote "
            "it (record.jsonl names the commit), or start the run again in another folder"
        ) from error
    for moments in optimiser.state.values():
        moments["step"].fill_(step)  # every parameter gets a gradient in every step


def _tensors(model: LanguageModel, optimiser: AdamW) -> dict[str, Tensor]:
    """Weights, buffers and moments by name. The names are the same for any number of processes."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    kept = model.state_dict().keys()  # once: it visits all modules
    state = {f"model.{name}": tensor.detach() for name, tensor in named.items() if name in kept}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state |= {f"{moment}.{name}": optimiser.state[parameter][moment] for moment in MOMENTS}
    return state


def _whole(tensor: Tensor, world: World) -> Tensor:
    """The tensor with the shards of all processes. Ranks other than 0 keep nothing of it."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    whole: Tensor = tensor.full_tensor()
    return whole.cpu() if world.is_rank_zero else whole.new_empty(0)


def _sharded(whole: Tensor, like: Any) -> Tensor:
    """The whole tensor, divided among processes as `like` is."""
    if not hasattr(like, "full_tensor"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)


def _kind(tensor: Tensor) -> str:
    """A shape and dtype in words: "[64, 64] float32"."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
