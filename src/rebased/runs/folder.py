"""The folder of a run: it holds one run, and one process at a time works in it."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rebased.config import read_yaml, short
from rebased.files import locked, replacing
from rebased.runs.run_config import RunConfig

CONFIG = "config.yaml"
SHOWN = 6  # differences named in an error: two runs of different kinds differ in dozens of keys


@contextmanager
def run_folder(folder: Path, config: RunConfig, *, resume: bool) -> Iterator[str]:
    """Hold the folder of the run that `config` describes during the block; a new folder is made and gets config.yaml.

    Yields the run's digest. A run may be resumed with other execution settings; its digest stays that of the config
    that it began with. Raises ValueError, and changes nothing, if the folder holds anything else, or this run and
    `resume` is False.
    """
    _check(folder, config, resume)
    with locked(folder):
        _check(folder, config, resume)  # again: another process may have used the folder before the lock was taken
        if not (folder / CONFIG).exists():
            with replacing(folder / CONFIG) as file:
                file.write(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).encode())
        yield type(config).model_validate(read_yaml(folder / CONFIG)).digest()


def check_holds(folder: Path, file: str, whose: str, besides: Collection[str] = ()) -> None:
    """Raise ValueError unless `folder` is new, empty but for names `besides`, or has this file, which marks a run or a
    sweep."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose a folder (--out)")
    names = (
        [name for name in os.listdir(folder) if not name.startswith(".") and name not in besides]
        if folder.exists()
        else []
    )
    if names and file not in names:
        raise ValueError(f"{folder} is not empty and not {whose} (no {file}); choose another folder (--out)")


def _check(folder: Path, config: RunConfig, resume: bool) -> None:
    check_holds(folder, CONFIG, "a run's")
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


def _completed(tree: dict[str, Any], cls: type[RunConfig]) -> dict[str, Any]:
    """A written config with the defaults of fields that did not exist then; as it is where `cls` cannot read it."""
    try:
        return cls.model_validate(tree).model_dump(mode="json")
    except ValidationError:
        return tree


def _differences(there: Any, here: Any, at: str = "") -> dict[str, str]:
    """{dotted key: a phrase with both values} for each key in which two configs differ."""
    if isinstance(there, list) and isinstance(here, list) and len(there) == len(here):
        there, here = dict(enumerate(there)), dict(enumerate(here))
    if isinstance(there, dict) and isinstance(here, dict):
        keys = dict.fromkeys([*there, *here])
        found: dict[str, str] = {}
        for key in keys:
            found |= _differences(there.get(key), here.get(key), f"{at}.{key}".lstrip("."))
        return found
    return {} if there == here else {at: f"{at} is {short(there)} there and {short(here)} here"}
