"""Every public class, function, method and property of the package has a docstring, its own or an inherited one."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import rebased

OPTIONAL = (  # packages that some modules need, and that an installation may lack
    "triton",
    "transformers",
    "lm_eval",
    "fastapi",
    "orjson",
    "uvicorn",
    "starlette",
    "prometheus_client",
)


def modules() -> Iterator[ModuleType]:
    """All modules of the package; those whose optional package is missing are left out."""
    for found in pkgutil.walk_packages(rebased.__path__, "rebased."):
        if found.name == "rebased.__main__":  # importing it runs the command
            continue
        try:
            yield importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in OPTIONAL:
                raise


def documented(definition: Any, owner: type | None = None) -> bool:
    """True if the package has a docstring for it. A class needs its own; a method may inherit one from a base class.

    Docstrings that NamedTuple and dataclass generate do not count, nor those of base classes from other packages.
    """
    if inspect.isclass(definition):
        text = definition.__dict__.get("__doc__")
        generated = not text or text.startswith(f"{definition.__name__}(")  # as NamedTuple and dataclass write it
        return not generated
    if owner is None:
        return bool(inspect.getdoc(definition))
    package, name = owner.__module__.split(".")[0], definition.__name__
    ours = [base for base in owner.__mro__ if base.__module__.split(".")[0] == package]
    return any(inspect.getdoc(base.__dict__[name]) for base in ours if name in base.__dict__)


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that the class itself defines."""
    for name, member in cls.__dict__.items():
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        if isinstance(member, property):
            member = member.fget
        member = getattr(member, "func", member)  # cached_property
        if not name.startswith("_") and inspect.isfunction(member):
            yield name, member


def undocumented(module: ModuleType) -> Iterator[str]:
    """The public definitions of a module that have no docstring."""
    for name, definition in vars(module).items():
        if name.startswith("_") or getattr(definition, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(definition):
            if not documented(definition):
                yield f"{module.__name__}.{name}"
            for member_name, member in members(definition):
                if not documented(member, definition):
                    yield f"{module.__name__}.{name}.{member_name}"
        elif inspect.isfunction(inspect.unwrap(definition)) and not documented(definition):
            yield f"{module.__name__}.{name}"


def test_every_public_definition_has_a_docstring() -> None:
    missing = [name for module in modules() for name in undocumented(module)]
    assert not missing, f"{len(missing)} public definitions have no docstring:\n" + "\n".join(missing)


def test_a_missing_docstring_is_found() -> None:
    module = ModuleType("sample")
    source = '''
from typing import NamedTuple
import torch
class Pair(NamedTuple):
    a: int
class Layer(torch.nn.Module):
    """A layer."""
    def forward(self, x): ...
    def size(self): ...
    @property
    def width(self): ...
class Sized(Layer):
    """It inherits."""
    def size(self):
        """Returns the size."""
class Narrow(Sized):
    """The docstring of size is inherited, that of width is nowhere."""
    def size(self): ...
    @property
    def width(self): ...
def bare(): ...
def _private(): ...
'''
    exec(source, vars(module))
    want = ["Pair", "Layer.forward", "Layer.size", "Layer.width", "Narrow.width", "bare"]
    assert list(undocumented(module)) == [f"sample.{name}" for name in want]
