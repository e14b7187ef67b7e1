"""--import: load a user's Python file or module, so that the mixers and tasks it registers are known."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

from cyclopts import Parameter

Imports = Annotated[tuple[str, ...], Parameter(name="--import", negative="", show_default=False)]
"""The option --import, which can be given several times."""


def import_user_code(name: str, said: str | None = None) -> ModuleType:
    """Import a file (`my_mixers.py`) or a module (`package.module`, also from the current folder) and return it.

    Errors begin with `said`. Default: "--import NAME".
    """
    path, said = Path(name), said or f"--import {name}"
    try:
        if path.suffix != ".py":
            sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(name)
        if not path.is_file():
            raise ValueError(f"{said}: there is no such file")
        module_name = f"imported_{path.stem}"
        spec = importlib.util.spec_from_file_location(module_name, path)
        if spec is None or spec.loader is None:
            raise ValueError(f"{said}: Python cannot load this file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
        return module
    except ValueError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ValueError(
            f"{said} failed: {type(error).__name__}: {error} (--debug shows where it comes from)"
        ) from error


def registered_as(name: str) -> str | None:
    """The name that a mixer is registered under, given that name or the name of its class; None if there is none."""
    from rebased.mixers import mixer_class, mixer_names  # torch, which commands that list things do without

    return next((each for each in mixer_names() if name in (each, mixer_class(each).__name__)), None)


def import_all(names: tuple[str, ...]) -> None:
    """Import every file or module. Workers call it first, so that they know what the command itself knows."""
    for name in names:
        import_user_code(name)
