"""The tensors of a language model's checkpoint. All processes write it together; any number of them can read it."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.optim import AdamW

from rebased.models import LanguageModel
from rebased.train.checkpoint import POINTER, REMEDY, read_pointer
from rebased.train.optimiser import MOMENTS
from rebased.train.world import World


def save_tensors(path: Path, model: LanguageModel, optimiser: AdamW, world: World) -> list[Path]:
    """Write weights and AdamW moments into the folder `path`. Returns the files that this process wrote."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process needs no process group
        try:
            dcp.save(_tensors(model, optimiser), storage_writer=dcp.FileSystemWriter(path), no_dist=world.size == 1)
        except dcp.CheckpointException as error:  # wraps the errors of all processes: raise the first
            raise next(iter(error.failures.values()))[0] if error.failures else error from error
    written = sorted(path.glob(f"__{world.rank}_*"))
    return [*written, path / ".metadata"] if world.is_rank_zero else written


def load_tensors(path: Path, model: LanguageModel, optimiser: AdamW, world: World) -> None:
    """Restore in place, from the folder `path`, what `save_tensors` wrote. Raises ValueError if it holds anything else.

    checkpoint.json beside `path` names the files that may be read; their checksums have been compared.
    """
    state = _tensors(model, optimiser)
    world.together(lambda: _check_contents(path, state))

    def load() -> None:
        try:
            dcp.load(state, storage_reader=SafeReader(path), no_dist=world.size == 1)
        except dcp.CheckpointException as error:
            raise ValueError(f"{path} holds tensors that cannot be read: {_reason(error)}; {REMEDY}") from error

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        world.together(load)


def _reason(error: dcp.CheckpointException) -> str:
    """The first line of the error in the first process that had one. torch shows the traceback of each."""
    first = next(iter(error.failures.values()))[0]
    lines = str(first).splitlines() or [""]
    return f"{type(first).__name__}: {lines[0][:200]}"


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint without trusting it.

    torch reads the tensors safely, but the table of contents with pickle. Here that pickle may name only the classes
    that a table of contents consists of, and files of the checkpoint's own folder.
    """

    def read_metadata(self, *_: Any, **__: Any) -> dcp.Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata: dcp.Metadata = _Unpickler(file).load()
        for name in _file_names(metadata):
            if Path(name).name != name:
                raise ValueError(f"it names {name!r}, which is outside of the checkpoint")
        return metadata


def _file_names(metadata: dcp.Metadata) -> set[str]:
    """The files that a table of contents names."""
    return {info.relative_path for info in metadata.storage_data.values()}


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
        ("pathlib._local", "PosixPath"),  # its module in Python 3.13
    }
)


class _Unpickler(pickle.Unpickler):
    """Allows the classes of _NAMES and torch's dtypes.

    Names are compared as a whole: a dotted name such as `os.system` would reach whatever a module has imported.
    """

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or (module, name) in _NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint")


def _tensors(model: LanguageModel, optimiser: AdamW) -> dict[str, Tensor]:
    """Everything that a step changes, by name. The names are the same for any number of processes."""
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    kept = model.state_dict().keys()  # once: it walks through all modules
    state = {f"model.{name}": tensor.detach() for name, tensor in named.items() if name in kept}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state |= {f"{moment}.{name}": optimiser.state[parameter][moment] for moment in MOMENTS}
    return state


def _check_contents(path: Path, state: dict[str, Tensor]) -> None:
    """Raise ValueError unless the table of contents names exactly these tensors, and only files with a checksum."""
    pointer = read_pointer(path.parent)
    try:
        metadata = SafeReader(path).read_metadata()
        for name in _file_names(metadata):
            if pointer is None or f"{path.name}/{name}" not in pointer.files:
                raise ValueError(f"it names {name!r}, of which {POINTER} has no checksum")
        in_file = {
            name: _kind(about.size, about.properties.dtype)
            for name, about in metadata.state_dict_metadata.items()
            if isinstance(about, dcp.TensorStorageMetadata) and _is_complete(about)
        }
    except Exception as error:  # pickle raises many kinds
        raise ValueError(f"{path} has a table of contents that cannot be read safely: {error}; {REMEDY}") from error
    in_model = {name: _kind(tensor.shape, tensor.dtype) for name, tensor in state.items()}
    different = sorted(name for name in in_file.keys() | in_model.keys() if in_file.get(name) != in_model.get(name))
    if different:
        name = different[0]
        raise ValueError(
            f"{path} is of another architecture than this code builds: {name} is {in_file.get(name)} there and "
            f"{in_model.get(name)} here ({len(different)} such); resume with the code that wrote it (record.jsonl "
            "names the commit), or start the run again in another folder"
        )


def _is_complete(about: dcp.TensorStorageMetadata) -> bool:
    """Whether the chunks of a tensor have as many elements as the tensor."""
    return sum(chunk.sizes.numel() for chunk in about.chunks) == about.size.numel()


def _kind(size: torch.Size, dtype: torch.dtype) -> str:
    """A shape and dtype in words: "[64, 64] float32"."""
    return f"{list(size)} {str(dtype).removeprefix('torch.')}"
