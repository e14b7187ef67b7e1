"""Verdicts on compiled kernels, kept in a folder for later processes on the same machine."""

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from rebased.files import read_json, replacing, seal, unseal
from rebased.ops.backend import has_gpu
from rebased.ops.comparison import Errors, tensors_of

_VERSION = 1  # of what is compared and how: another number makes old verdicts void
_LARGEST_FILE = 2**16

_log = logging.getLogger("rebased")
_verdicts: dict[str, bool] = {}


@cache
def machine() -> dict[str, str]:
    """What a compiled kernel runs on: the GPU, its driver, torch and Triton."""
    found = {"torch": torch.__version__, "triton": triton.__version__}
    if has_gpu():
        about = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu"] = f"{about.name} (sm_{about.major}{about.minor})"
        try:
            found["driver"] = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        except (OSError, IndexError):  # not Linux
            found["cuda"] = str(torch.version.cuda)
    return found


def cache_folder() -> Path:
    """Where verdicts are kept: REBASED_CACHE, or a folder of the user's cache."""
    if chosen := os.environ.get("REBASED_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rebased"


def verdict_key(operator: str, args: tuple[Any, ...], codes: Iterable[str]) -> str:
    """The name of a verdict. It holds the size as a power of two: longer data take other paths through the code."""
    extent = [size.bit_length() for x in tensors_of(args)[:1] for size in x.shape]
    said = [_VERSION, operator, extent, sorted(codes), machine()]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def find_verdict(key: str) -> bool | None:
    """True for right kernels, False for wrong ones; None if they were not judged."""
    if key not in _verdicts:
        try:
            found = unseal(read_json(cache_folder() / "kernels" / f"{key}.json", _LARGEST_FILE))
            _verdicts[key] = bool(found["right"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or none that can be used
            return None
    return _verdicts[key]


def keep_verdict(key: str, right: bool, operator: str, kernels: Iterable[str], errors: Errors) -> None:
    """Keeps it for this process and, if the folder can be written, for later ones."""
    _verdicts[key] = right
    worst = {name: error if error < 1e30 else "inf" for name, error in errors.items()}
    verdict = seal({"right": right, "operator": operator, "kernels": sorted(kernels), "errors": worst, **machine()})
    try:
        folder = cache_folder() / "kernels"
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / f"{key}.json") as file:
            file.write(json.dumps(verdict).encode())
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        _log.debug("a verdict on kernels is not kept: %s", error)
