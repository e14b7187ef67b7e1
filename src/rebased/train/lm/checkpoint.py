"""The state of a language model's run on disk, written by all processes and read by any number of them.

checkpoint-<step>/ is written by torch.distributed.checkpoint, then checkpoint.json, which names it with the checksums
of its files, then the former checkpoint goes. A process that is killed in between leaves the former one in force.
"""

import hashlib
import json
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.optim import AdamW

from rebased.files import replacing
from rebased.models import LanguageModel
from rebased.train.lm.optimiser import MOMENTS, set_step
from rebased.train.lm.world import World

POINTER = "checkpoint.json"
FORMAT = "text-1"
REMEDY = "restore it, or start the run again in another folder"


def save_checkpoint(
    folder: Path, model: LanguageModel, optimiser: AdamW, world: World, *, digest: str, progress: dict[str, Any]
) -> None:
    """Weights and moments as tensors, `progress` (plain numbers, with the step) in the pointer."""
    path = folder / f"checkpoint-{progress['step']}"

    def write() -> dict[str, Any]:
        with _clearly(folder, path):
            state = _tensors(model, optimiser)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be
                dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=world.size == 1)
            return {name: _describe(path / name) for name in _written_by(path, world.rank)}

    def point(files: dict[str, Any]) -> None:
        if world.leads:
            with _clearly(folder, path), replacing(folder / POINTER) as file:
                pointer = {
                    "format": FORMAT,
                    "folder": path.name,
                    "digest": digest,
                    "progress": progress,
                    "files": files,
                }
                file.write(json.dumps(pointer, indent=2).encode() + b"\n")
            _delete_all_but(folder, path.name)

    if world.leads:
        shutil.rmtree(path, ignore_errors=True)  # of a process that was killed while it wrote
    parts = world.gather(world.together(write))
    world.together(lambda: point({name: about for part in parts for name, about in part.items()}))


def load_checkpoint(
    folder: Path, model: LanguageModel, optimiser: AdamW, world: World, *, digest: str
) -> dict[str, Any] | None:
    """Take up what was saved last and return its progress; None: there is nothing yet. What a killed process left
    beside it goes."""
    pointer = world.together(lambda: read_pointer(folder))
    if world.leads:
        _delete_all_but(folder, pointer["folder"] if pointer else None)
    if pointer is None:
        return None
    path = folder / pointer["folder"]
    state = _tensors(model, optimiser)

    def check() -> None:
        if pointer["digest"] != digest:
            raise ValueError(f"{path} belongs to another run, {pointer['digest']}; this one is {digest}; {REMEDY}")
        if world.leads:
            _check_files(path, pointer["files"])
        _check_shapes(path, state)

    world.together(check)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=SafeReader(path), no_dist=world.size == 1)
    set_step(optimiser, pointer["progress"]["step"])
    return dict(pointer["progress"])


def read_pointer(folder: Path) -> dict[str, Any] | None:
    path = folder / POINTER
    if not path.exists():
        return None
    try:
        pointer = json.loads(path.read_bytes())
        if pointer["format"] != FORMAT:
            raise ValueError(f"it is of format {pointer['format']}, and this version reads {FORMAT}")
        if any(Path(name).name != name for name in [pointer["folder"], *pointer["files"]]):
            raise ValueError("it names a file outside of this folder")
        return {key: pointer[key] for key in ("folder", "digest", "progress", "files")}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; {REMEDY}") from error


class SafeReader(dcp.FileSystemReader):
    """torch reads the tensors without trusting them, but the table of contents with pickle; here it may name nothing
    but the classes that a table of contents is made of."""

    def read_metadata(self, *_: Any, **__: Any) -> dcp.Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata: dcp.Metadata = _Unpickler(file).load()
        return metadata


_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES = frozenset(
    {
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "StorageMeta"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # where Python 3.13 keeps it
    }
)


class _Unpickler(pickle.Unpickler):
    """Names are compared whole: by a dotted one, `os.system`, a pickle gets at whatever a module has imported."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or (module, name) in _NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")


def _tensors(model: LanguageModel, optimiser: AdamW) -> dict[str, Tensor]:
    """Everything that a step changes, by name: the same names however the weights are spread."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    state = {f"model.{name}": tensor.detach() for name, tensor in named.items() if name in model.state_dict()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state |= {f"{moment}.{name}": optimiser.state[parameter][moment] for moment in MOMENTS}
    return state


def _check_files(path: Path, files: dict[str, Any]) -> None:
    for name, about in files.items():
        if not (path / name).exists():
            raise ValueError(f"{path / name} is missing, though {POINTER} names it; {REMEDY}")
        if _describe(path / name) != about:
            raise ValueError(f"{path / name} is damaged: its size or checksum is not the one in {POINTER}; {REMEDY}")


def _check_shapes(path: Path, state: dict[str, Tensor]) -> None:
    try:
        saved = SafeReader(path).read_metadata().state_dict_metadata
        there = {
            name: list(about.size) for name, about in saved.items() if isinstance(about, dcp.TensorStorageMetadata)
        }
    except Exception as error:  # pickle has many
        raise ValueError(f"{path} has a table of contents that cannot be read safely: {error}; {REMEDY}") from error
    here = {name: list(tensor.shape) for name, tensor in state.items()}
    odd = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    if odd:
        name = odd[0]
        raise ValueError(
            f"{path} is of another architecture than this code builds: {name} is {there.get(name)} there and "
            f"{here.get(name)} here ({len(odd)} such); resume with the code that wrote it (record.jsonl names the "
            "commit), or start the run again in another folder"
        )


def _written_by(path: Path, rank: int) -> list[str]:
    """The first process writes the table of contents."""
    own = sorted(file.name for file in path.glob(f"__{rank}_*"))
    return [*own, ".metadata"] if rank == 0 else own


def _describe(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


@contextmanager
def _clearly(folder: Path, path: Path) -> Iterator[None]:
    """A full disk, said with what is left and what to do."""
    try:
        yield
    except (OSError, RuntimeError, dcp.CheckpointException) as error:
        former = read_pointer(folder)
        kept = f"the one of step {former['progress']['step']} is whole" if former else "there is no earlier one"
        shutil.rmtree(path, ignore_errors=True)
        raise OSError(
            f"{path} could not be saved: {_reason(error)}; {kept}: make room and run again with --resume"
        ) from error


def _reason(error: BaseException) -> str:
    """dcp wraps what happened in each process."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(getattr(error, "strerror", None) or error).splitlines()[0]


def _delete_all_but(folder: Path, keep: str | None) -> None:
    for path in folder.glob("checkpoint-*"):
        if path.name != keep:
            shutil.rmtree(path, ignore_errors=True)
