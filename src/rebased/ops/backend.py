"""Which path a call takes, and in which dtype it accumulates. The one file that asks what hardware there is.

An operator called with backend="auto" asks here which of its paths to take. The answer can be overridden for some
lines of code (`with use_backend("reference"): ...`) or for a process (REBASED_BACKEND=reference).
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
from torch import Tensor

Backend = Literal["auto", "reference", "recurrent", "chunked", "triton"]
BACKENDS: tuple[Backend, ...] = ("auto", "reference", "recurrent", "chunked", "triton")

_override: ContextVar[Backend | None] = ContextVar("rebased_backend", default=None)
_log = logging.getLogger("rebased")


def _check_backend(name: str) -> None:
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} is unknown; choose one of {', '.join(BACKENDS)}")


@contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """A context manager: inside it, every call with backend="auto" takes the path `name`.

    Raises ValueError if `name` is no backend.
    """
    _check_backend(name)
    token = _override.set(name)
    try:
        yield
    finally:
        _override.reset(token)


def has_gpu() -> bool:
    """True if torch can use a CUDA device."""
    return torch.cuda.is_available()


def gpu_count() -> int:
    """The number of CUDA devices."""
    return torch.cuda.device_count()


def splits_matmuls() -> bool:
    """True if bmm on a CPU splits each matmul of a batch among the threads; MKL gives each thread whole matmuls."""
    return not torch.backends.mkl.is_available()


def has_triton() -> bool:
    """True if the package triton is installed."""
    return "triton" in sys.modules or find_spec("triton") is not None


def triton_interpreted() -> bool:
    """True if Triton's interpreter runs the kernels on CPU tensors (for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def in_torch_func() -> bool:
    """True inside a transform of torch.func (vmap, grad, ...). torch.compile traces these transforms itself."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


@cache
def _log_once(path: str, device_type: str) -> None:
    _log.info("backend 'auto' on %s takes the %r path", device_type, path)


def choose_path(backend: Backend, device: torch.device) -> Backend:
    """The path that a call with this backend takes on this device: never "auto".

    Raises ValueError if the backend, or the one in REBASED_BACKEND, is unknown.
    """
    _check_backend(backend)
    if backend != "auto":
        return backend
    chosen = _override.get() or os.environ.get("REBASED_BACKEND", "auto")
    _check_backend(chosen)
    if chosen == "auto":
        chosen = "triton" if device.type == "cuda" and has_triton() else "chunked"
    _log_once(chosen, device.type)
    return chosen  # type: ignore[return-value]


# torch.compile cannot trace a ContextVar, a logger or an import, and need not: it asks once and keeps the answer. The
# public decorator, torch.compiler.assume_constant_result, sets the same attribute, but imports all of dynamo for it.
choose_path._dynamo_marked_constant = True  # type: ignore[attr-defined]
has_triton._dynamo_marked_constant = True  # type: ignore[attr-defined]


def choose_device(name: str) -> torch.device:
    """The device of this name: "cpu", "cuda", or "auto" for a GPU where there is one."""
    if name == "cuda" and not has_gpu():
        raise ValueError("device cuda is asked for, and torch sees no GPU here; use cpu, or auto to take what there is")
    if name == "auto":
        name = "cuda" if has_gpu() else "cpu"
    return torch.device(name)


def kernel_path(backend: Backend, x: Tensor) -> Backend:
    """The path of an operator over x: "reference" (also for "recurrent"), "chunked" or "triton".

    Every operator but polynomial attention asks here. The kernels compute in fp32, so "auto" takes the chunked path for
    fp64. An x without elements always takes a path in plain torch: there is nothing to launch a kernel for.

    Raises ValueError if the backend is unknown, or is "triton" and x is fp64 or not on a GPU.
    """
    path = choose_path(backend, x.device)
    if path == "triton" and x.dtype == torch.float64:
        if backend == "triton":
            raise ValueError("the Triton kernels compute in fp32; for float64 inputs use backend='chunked' or 'auto'")
        return "chunked"
    if path == "triton" and not (x.is_cuda or triton_interpreted()):
        raise ValueError(f"the Triton kernels need CUDA tensors; these are on {x.device}: use backend='chunked'")
    if path == "triton" and x.numel() == 0:
        return "chunked"
    return "reference" if path == "recurrent" else path


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and sums for inputs of `dtype`: fp64 for fp64, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32
