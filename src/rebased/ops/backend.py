"""The one file that asks what hardware there is.

An operator called with backend="auto" asks here which of its paths to take; the answer can be overridden for a
block of code (`with use_backend("reference"): ...`) or for a process (REBASED_BACKEND=reference).
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch

Backend = Literal["auto", "reference", "recurrent", "chunked", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "recurrent", "chunked", "triton")

_override: ContextVar[Backend | None] = ContextVar("rebased_backend", default=None)
_log = logging.getLogger("rebased")


def check_backend(name: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} is unknown; choose one of {', '.join(BACKENDS)}")


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Within the block every call with backend="auto" takes this path instead."""
    check_backend(name)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def has_gpu() -> bool:
    return torch.cuda.is_available()


def gpu_count() -> int:
    return torch.cuda.device_count()


def splits_matmuls() -> bool:
    """Whether the CPU's bmm splits every matmul of a batch among the threads; MKL's gives each thread some of them."""
    return not torch.backends.mkl.is_available()


def has_triton() -> bool:
    return "triton" in sys.modules or find_spec("triton") is not None


def triton_interpreted() -> bool:
    """Whether Triton's kernels run on CPU tensors, in its interpreter (for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _say_once(path: str, device_type: str) -> None:
    _log.info("polynomial attention on %s takes the %r path", device_type, path)


def choose_path(backend: Backend, device: torch.device) -> Backend:
    """The path that a call with this backend takes on this device: never "auto"."""
    check_backend(backend)
    if backend != "auto":
        return backend
    chosen = _override.get() or os.environ.get("REBASED_BACKEND", "auto")
    check_backend(chosen)
    if chosen == "auto":
        chosen = "triton" if device.type == "cuda" and has_triton() else "chunked"
    _say_once(chosen, device.type)
    return chosen  # type: ignore[return-value]


# torch.compile cannot trace a ContextVar, a logger or an import, and need not: it asks once and keeps the answer. The
# public decorator, torch.compiler.assume_constant_result, sets this very attribute but imports all of dynamo for it.
choose_path._dynamo_marked_constant = True  # type: ignore[attr-defined]
has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


def choose_device(name: str) -> torch.device:
    """The device of this name: "cpu", "cuda", or "auto" for a GPU where there is one."""
    if name == "cuda" and not has_gpu():
        raise ValueError("device cuda is asked for, and torch sees no GPU here; use cpu, or auto to take what there is")
    if name == "auto":
        name = "cuda" if has_gpu() else "cpu"
    return torch.device(name)
