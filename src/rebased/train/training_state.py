"""Everything that a step changes: weights, AdamW's moments, random numbers. A checkpoint holds it as whole tensors, so
any number of processes can go on with it."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from rebased.models import LanguageModel
from rebased.train.checkpoint import read_state
from rebased.train.optimiser import MOMENTS, set_step
from rebased.train.world import World


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
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} is of another architecture than this code builds ({reason}); resume with the code that wrote "
            "it (record.jsonl names the commit), or start the run again in another folder"
        ) from error
    set_step(optimiser, step)


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
