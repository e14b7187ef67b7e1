"""Which path a call takes, and in which dtypes it computes. The one file that asks what hardware there is.

An operator called with backend="auto" asks here which of its paths to take. The answer can be overridden for some
lines of code (`with use_backend("reference"): ...`) or for a process (REBASED_BACKEND=reference).
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, wraps
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

Backend = Literal["auto", "reference", "recurrent", "chunked", "triton"]
Function = TypeVar("Function", bound=Callable[..., Any])
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


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host (nested lists, an array) as a tensor on a device. The host does not wait for a GPU."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@cache
def shared_memory() -> int:
    """Bytes of shared memory that a program of a kernel may have, on every GPU here; a Hopper's if there is none."""
    found = [
        getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", SMALLEST_SHARED_MEMORY)
        for index in range(gpu_count() if has_gpu() else 0)
    ]
    return min(found, default=227 * 1024)


SMALLEST_SHARED_MEMORY = 99 * 1024
"""Of GPUs from Ampere on."""


TRITON = (3, 5)  # the oldest that the kernels take; torch 2.9 brings it
CAPABILITY = (8, 0)  # of the oldest NVIDIA GPUs that the kernels are compiled for: Ampere


def has_triton() -> bool:
    """True if the package triton is installed, in a version that the kernels take."""
    return ("triton" in sys.modules or find_spec("triton") is not None) and _is_new_enough()


@cache
def _is_new_enough() -> bool:
    try:
        installed = version("triton")
    except PackageNotFoundError:  # under another name, such as triton-windows
        return True
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdecimal())
    if numbers >= TRITON:
        return True
    _log.warning(
        "Triton %s is older than %d.%d, which the GPU kernels need: torch computes without", installed, *TRITON
    )
    return False


def triton_interpreted() -> bool:
    """True if Triton's interpreter runs the kernels on CPU tensors (for tests)."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def untraced(function: Function) -> Function:
    """Keep torch.compile out of a function: what it calls runs as written."""
    disabled = torch._disable_dynamo(function)  # unlike torch.compiler.disable it does not import torch._dynamo here

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call  # type: ignore[return-value]


def in_torch_func() -> bool:
    """True inside a transform of torch.func (vmap, grad, ...). torch.compile traces these transforms itself."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


@cache
def _log_once(path: str, device_type: str, reason: str | None) -> None:
    _log.info("backend 'auto' on %s takes the %r path%s", device_type, path, f": {reason}" if reason else "")


def why_no_kernels(device: torch.device) -> str | None:
    """Why the Triton kernels do not run here on this device; None if they do."""
    if reason := _why_not_on(device):
        return reason
    return None if has_triton() else "the kernels need Triton {}.{} or newer".format(*TRITON)


@cache
def _why_not_on(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "the kernels need an NVIDIA GPU"
    if torch.version.hip is not None:  # a GPU of AMD is called cuda, too
        return "the kernels are for NVIDIA GPUs, and this one is of AMD"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return "the kernels need compute capability {}.{}, and this GPU has {}.{}".format(*CAPABILITY, *capability)
    return None


def choose_path(backend: Backend, device: torch.device) -> Backend:
    """The path that a call with this backend takes on this device: never "auto".

    Raises ValueError if the backend, or the one in REBASED_BACKEND, is unknown, or if it is "triton" and the GPU is not
    one that the kernels run on.
    """
    _check_backend(backend)
    if backend == "auto":
        chosen = _override.get() or os.environ.get("REBASED_BACKEND", "auto")
        _check_backend(chosen)
        reason = None
        if chosen == "auto":
            reason = why_no_kernels(device)
            chosen = "chunked" if reason else "triton"
        _log_once(chosen, device.type, reason)
        backend = chosen  # type: ignore[assignment]
    if backend == "triton" and device.type == "cuda" and (reason := _why_not_on(device)):
        raise ValueError(f"backend 'triton' on {device}: {reason}; use backend='auto' or 'chunked'")
    return backend


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


def kernel_path(backend: Backend, x: Tensor, offset: int = 0) -> Backend:
    """The path of an operator over x: "reference" (also for "recurrent"), "chunked" or "triton".

    Every operator but polynomial attention asks here. The kernels compute in fp32, so "auto" takes the chunked path for
    fp64, and for sequences whose offsets do not fit into 32 bits: `offset` is how far apart two numbers of one sequence
    are at most. An x without elements always takes a path in plain torch: there is nothing to launch a kernel for.

    Raises ValueError if the backend is unknown, or is "triton" and x is fp64, too large or not on a GPU.
    """
    path = choose_path(backend, x.device)
    if path != "triton":
        return "reference" if path == "recurrent" else path
    reason = None
    if x.dtype == torch.float64:
        reason = "compute in fp32; for float64 inputs"
    elif offset >= 2**31:
        reason = f"take sequences of fewer than 2**31 numbers; this one has {offset:,} (tokens times channels):"
    if reason and backend == "triton":
        raise ValueError(f"the Triton kernels {reason} use backend='chunked' or 'auto'")
    if not reason and not (x.is_cuda or triton_interpreted()):
        raise ValueError(f"the Triton kernels need CUDA tensors; these are on {x.device}: use backend='chunked'")
    return "chunked" if reason or x.numel() == 0 else path


def matmul_dtype(x: Tensor, weight: Tensor | None = None) -> torch.dtype:
    """The dtype in which torch multiplies x (by `weight` if given): that of autocast under autocast, fp64 excepted."""
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    if dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return dtype


def autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[None]:
    """Inside, products of layers are in `dtype`; weights, norms, sums and the residual stream keep theirs.

    None: that of the weights. Each weight is cast once per forward pass, so a cache of casts would only hold memory.
    """
    return torch.autocast(device.type, dtype, enabled=dtype is not None, cache_enabled=False)


def without_autocast(function: Function) -> Function:
    """A decorator: under autocast, too, the function computes in the dtype of its tensors, the first of which tells the
    device."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        first = args[0] if args else next(iter(options.values()), None)
        kind = first.device.type if isinstance(first, Tensor) and not first.is_meta else "cpu"
        if not torch.is_autocast_enabled(kind):
            return function(*args, **options)
        with torch.autocast(kind, enabled=False):
            return function(*args, **options)

    return call  # type: ignore[return-value]


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of states and sums for inputs of `dtype`: fp64 for fp64, fp32 for all others."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def available_memory() -> int | None:
    """Bytes of main memory that this process can still get; None if the system does not say.

    It is the least of what the machine has free (swap included) and what a container may use.
    """
    found = [_free_memory(), _limit_of_container()]
    return min((size for size in found if size is not None), default=None)


def check_memory(needed: int, what: str) -> None:
    """Raise ValueError if `needed` bytes are more than `available_memory`. `what` needs them, and the remedy is its.

    A lower bound of what is needed is enough: the check is there to refuse what cannot work before it is begun.
    """
    available = available_memory()
    if available is not None and needed > available:
        raise ValueError(
            f"{what} at least {_in_bytes(needed)} of memory, and {_in_bytes(available)} are available; "
            "choose smaller sizes"
        )


def _free_memory() -> int | None:
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return 1024 * sum(int(lines[key].split()[0]) for key in ("MemAvailable", "SwapFree"))
    except (OSError, ValueError, KeyError):  # not Linux: what there is at all
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError, AttributeError):
            return None


def _limit_of_container() -> int | None:
    """What the control groups (v2) of this process leave it; their file caches can be freed, so these do not count."""
    try:
        own = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2].strip("/")
    except (OSError, IndexError):
        return None
    root, left = Path("/sys/fs/cgroup"), []
    for group in [root / own, *(root / own).parents]:
        try:
            limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
            cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
            left += [] if limit == "max" else [max(0, int(limit) - used + int(cached))]
        except (OSError, ValueError, KeyError):
            continue
    return min(left, default=None)


def _in_bytes(size: int) -> str:
    """A size in words: "12.3 GB (12,345,678,901 bytes)", "1e+30 bytes"."""
    if size >= 10**18:
        return f"{size:.2g} bytes"
    name, unit = ("TB", 10**12) if size >= 10**12 else ("GB", 10**9) if size >= 10**9 else ("MB", 10**6)
    return f"{size / unit:,.1f} {name} ({size:,} bytes)"
