"""The folder of a run: one run, one process at a time, nothing ever overwritten by another."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rebased.config import read_yaml, short
from rebased.files import replacing
from rebased.runs.base_config import BaseRunConfig

CONFIG = "config.yaml"
LOCK = ".lock"
SHOWN = 6  # differences; of a run of another kind there are dozens


class FolderInUse(ValueError):
    """Another process works there."""


@contextmanager
def run_folder(folder: Path, config: BaseRunConfig, *, resume: bool) -> Iterator[str]:
    """Within the block the folder is this run's alone. Yields the run's digest.

    Refused if the folder holds anything but this run, or this run without `resume`; then nothing in it has changed. A
    run may be resumed with other execution settings; its digest stays that of the config that it began with.
    """
    _check(folder, config, resume)
    with locked(folder):
        _check(folder, config, resume)  # again: another process may have come and gone since
        if not (folder / CONFIG).exists():
            with replacing(folder / CONFIG) as file:
                file.write(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).encode())
        yield type(config).model_validate(read_yaml(folder / CONFIG)).digest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder if need be, and let no other process into this block meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        except OSError as error:
            raise FolderInUse(
                f"{folder} is in use by another process; wait until it ends, or choose another folder (--out)"
            ) from error
        yield


def _check(folder: Path, config: BaseRunConfig, resume: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose a folder (--out)")
    there = folder / CONFIG
    if there.exists():
        found = _differences(_completed(read_yaml(there), type(config)), config.model_dump(mode="json"))
        differences = [line for key, line in found.items() if key not in config.execution]
        if differences:
            more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
            raise ValueError(
                f"{folder} holds another run: {'; '.join(differences[:SHOWN])}{more}. "
                "Use its settings to resume it, or choose another folder (--out)"
            )
        if not resume:
            raise ValueError(f"{folder} holds this run; add --resume to go on, or choose another folder (--out)")
    elif folder.exists() and any(not name.startswith(".") for name in os.listdir(folder)):
        raise ValueError(f"{folder} is not empty and not a run's (no {CONFIG}); choose another folder (--out)")


def _completed(tree: dict[str, Any], cls: type[BaseRunConfig]) -> dict[str, Any]:
    """A written config with the defaults of fields that did not exist then; as it is where `cls` cannot read it."""
    try:
        return cls.model_validate(tree).model_dump(mode="json")
    except ValidationError:
        return tree


def _differences(there: Any, here: Any, at: str = "") -> dict[str, str]:
    """The keys in which two configs differ, each with both values in words."""
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        there, here = dict(enumerate(there)), dict(enumerate(here))
    if isinstance(there, dict) and isinstance(here, dict):
        keys = dict.fromkeys([*there, *here])
        found: dict[str, str] = {}
        for key in keys:
            found |= _differences(there.get(key), here.get(key), f"{at}.{key}".lstrip("."))
        return found
    return {} if there == here else {at: f"{at} is {short(there)} there and {short(here)} here"}
