"""Launches Triton kernels on the device of their data, finds compiled ones fast, and compiles several at once.

At every launch Triton inspects every argument, to find the kernel that it compiled for such arguments. That takes tens
of microseconds, more than a short sequence takes on the GPU. Here a compiled kernel is found by all that could require
another one: the constants; of an integer whether 16 divides it, and its size as a power of two; of a tensor its dtype,
its device and whether its address is aligned. A server that meets a new length in each call thus finds its kernels. A
kernel is checked anew for each power of two (self_check.py).

Both this and compiling in threads need parts of Triton that are private and change. Where they are not as known here,
every launch is plainly kernel[grid](...), and kernels are compiled one after the other.
"""

import atexit
import inspect
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from rebased.ops import self_check

knobs = getattr(triton, "knobs", None)
LARGEST = 4096  # entries of a cache: of launches, and of compiled kernels per launch
SETTLE_SECONDS = 0.02  # in which other threads can take the interpreter
ALIGNED = 16  # Triton loads more at once from addresses, and with strides, that are multiples of this
LAUNCHER = (
    "gridX", "gridY", "gridZ", "stream", "function",
    "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook", "args",
)  # fmt: skip
"""Parameters of the function that launches a compiled kernel. Until Triton 3.6 the second row is part of `args`."""

_log = logging.getLogger("rebased")
_remembered: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}
_known: dict[type, bool] = {}
_kept_to_the_end: list[Tensor] = []
_planned: ContextVar[list[tuple["Launch", tuple[Any, ...]]]] = ContextVar("planned launches")


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, overwrites: Any = (), **constants: Any) -> None:
    """Runs kernel[grid](*args, **constants) on the device of args[0], which is a tensor.

    args: the arguments of the kernel that are not constants, in order: tensors, None, int or float. overwrites: those
    tensors that the kernel both reads and writes. constants: its constexpr arguments by name, and options of the
    compiler (num_warps, num_stages, maxnreg).
    """
    Launch(kernel, grid, **constants)(*args, overwrites=overwrites)


def call_operator(operator: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Returns operator(*args); the operator is torch.library.custom_op of the function.

    Where there is nothing to differentiate or to compile, the function is called directly: torch's dispatch of an
    operator takes longer than many kernels.
    """
    differentiates = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args)
    return (operator if differentiates or torch.compiler.is_compiling() else function)(*args)


def strided_rows(x: Tensor) -> tuple[Tensor, int]:
    """x [B, T, D] as rows [B * T, D], and how far apart two rows are in memory. A copy if that is not one number."""
    rows = x.reshape(-1, x.shape[2])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


class Launch:
    """A kernel bound to its grid, its last numbers and its constants.

    Keep one per shape: each call then inspects only its tensors (dtype, alignment). It is called with the arguments
    before the numbers; the first is a tensor.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *numbers: float, **constants: Any) -> None:
        self.kernel, self.numbers, self.constants = kernel, numbers, constants
        self._grid = (*grid, 1, 1)[:3]
        kinds = tuple(_kind_and_value(number)[0] for number in numbers)
        key = (kernel, kinds, tuple(constants), *constants.values())  # the grid does not change the compiled kernel
        found = _remembered.get(key)
        self._compiled = _keep(_remembered, key, {}) if found is None else found

    @cached_property
    def _bound(self) -> tuple[Any, ...]:
        """The last arguments of every launch: the numbers, then the constants as the kernel orders them."""
        return (*self.numbers, *(self.constants[name] for name in self.kernel.arg_names if name in self.constants))

    @property
    def is_new(self) -> bool:
        """True if no kernel with such numbers and these constants has been compiled."""
        return not self._compiled

    def __call__(self, *args: Any, overwrites: tuple[Tensor, ...] = ()) -> None:
        if not args[0].is_cuda:
            if args[0].is_meta:
                _planned.get().append((self, args))
            else:  # in Triton's interpreter
                self._launch_by_triton(args)
            return
        device = args[0].get_device()
        if device != torch.cuda.current_device():  # Triton launches on the current device, not on that of the data
            with torch.cuda.device(device):
                self(*args, overwrites=overwrites)
            return
        key, passed = [], []
        for x in args:
            kind, value = _kind_and_value(x)
            key.append(kind)
            passed.append(value)
        known = tuple(key)
        found = self._compiled.get(known)
        if found is None:
            self._first(known, args, overwrites)
            return
        if _hooked():
            found[self._grid](*args, *self._bound)
        else:  # the same, without what it prepares for hooks
            stream = driver.active.get_current_stream(device)
            found.run(
                *self._grid, stream, found.function, found.packed_metadata, None, None, None, *passed, *self._bound
            )  # fmt: skip

    def _first(self, known: tuple[Any, ...], args: tuple[Any, ...], overwrites: tuple[Tensor, ...]) -> None:
        """Launches a kernel that has not been launched before, or one that only Triton can launch."""
        name = getattr(self.kernel, "__name__", "a kernel")
        when = self_check.when_to_check(name) if known not in self._compiled else "never"
        before = {x.data_ptr(): x.clone() for x in overwrites} if when == "now" else {}
        compiled = self._launch_by_triton(args)
        if when == "later":
            return
        _keep(self._compiled, known, compiled if _is_known(compiled) else None)
        if when == "now":
            self_check.note_first_launch(name, compiled, lambda: self._compiled.pop(known, None), before)

    def compile(self, args: tuple[Any, ...]) -> Any:
        """Starts to compile the kernel for such arguments; within AsyncCompileMode."""
        kinds = [x.dtype if isinstance(x, Tensor) else x for x in args]
        return self.kernel.warmup(*kinds, *self.numbers, grid=self._grid, **self.constants)

    def _launch_by_triton(self, args: tuple[Any, ...]) -> Any:
        """Launches by way of Triton; returns the compiled kernel."""
        return self.kernel[self._grid](*args, *self.numbers, **self.constants)


def compile_together(run: Callable[[], Any], device: torch.device) -> None:
    """Compiles all kernels that run() launches, at once, in threads; run() works on tensors of the device "meta".

    Only a sixth of the time of a compilation is Python, which threads would share. A kernel that cannot be compiled is
    an error when it is launched, and not before: a backward pass may never come.
    """
    if not _compiles_in_threads() or torch.cuda.is_current_stream_capturing():
        return
    launches = planned(run)
    threads = ThreadPoolExecutor(2 * len(launches))
    with torch.cuda.device(device), threads as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        kernels = [launch.compile(args) for launch, args in reversed(launches)]  # gradients take longest
        for kernel in kernels:
            if future := getattr(kernel, "future", None):  # else it was compiled before
                pool.submit(_load, future, device)


def planned(run: Callable[[], Any]) -> list[tuple[Launch, tuple[Any, ...]]]:
    """The launches of run(), which works on tensors of the device "meta", and their arguments. Nothing is launched."""
    launches: list[tuple[Launch, tuple[Any, ...]]] = []
    outer = _planned.set(launches)
    try:
        run()
    finally:
        _planned.reset(outer)
    return launches


def _load(compiled: "Future[Any]", device: torch.device) -> None:
    """Makes a kernel ready to be launched: Triton compiles a C function for that, too."""
    with torch.cuda.device(device):
        compiled.result().run  # noqa: B018


def _compiles_in_threads() -> bool:
    """True if Triton can compile in threads and leave the errors to the launches: 3.6 and newer can."""
    mode = getattr(triton, "AsyncCompileMode", None)
    return mode is not None and "ignore_errors" in inspect.signature(mode).parameters


def _is_known(compiled: Any) -> bool:
    """True if a compiled kernel can be launched as `Launch` does it. Asked once per type: there is one."""
    if type(compiled) not in _known:
        _known[type(compiled)] = _has_known_parts(compiled)
        if not _known[type(compiled)]:
            _log.info(
                "the fast launcher does not know Triton %s: every launch goes through kernel[grid], which is slower",
                triton.__version__,
            )
    return _known[type(compiled)]


def _has_known_parts(compiled: Any) -> bool:
    try:
        _ = compiled.function, compiled.packed_metadata, driver.active.get_current_stream, _hooked()
        parameters = tuple(inspect.signature(compiled.run).parameters)
    except (AttributeError, TypeError, ValueError):  # the last: a function in C
        return False
    return parameters in (LAUNCHER, (*LAUNCHER[:5], "args"))


def _hooked() -> bool:
    """True if a profiler wants to hear of every launch."""
    runtime = knobs.runtime  # type: ignore[union-attr]
    return any(getattr(hook, "calls", hook) for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook))


def _kind_and_value(x: Any) -> tuple[Any, Any]:
    """The property of an argument that a kernel may be compiled for, and the argument itself; of a tensor its address.

    Given a tensor, Triton would ask it for its address and CUDA for the memory behind that address: a microsecond for
    each. So that a tensor of another device is not taken for one that it has checked, the device is in the property.
    """
    if type(x) is int:
        return (x.bit_length(), x % ALIGNED == 0) if x > 1 else x, x
    if x is None:
        return x, x
    if type(x) is float:
        return float, x
    address = x.data_ptr()
    return (x.dtype, x.get_device(), address % ALIGNED == 0), address


def _keep(cache: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> Any:
    if len(cache) >= LARGEST:
        cache.clear()
    cache[key] = value
    return value


@atexit.register
def _settle_gradient_threads() -> None:
    """Wait until torch's gradient threads hold nothing of Python's, or Python's end may abort the process.

    The thread of a GPU lets go of a gradient function after the caller has its gradients. If Python is ending by then,
    the process dies: "terminate called without an active exception" (pytorch/pytorch, issue 190489). Another gradient,
    of tensors that stay alive, makes the thread let go of what it had before.
    """
    with suppress(Exception):  # a GPU that failed must not hide why
        for device in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
            leaf, one = (torch.ones((), device=f"cuda:{device}", requires_grad=leads) for leads in (True, False))
            result = 2 * leaf
            _kept_to_the_end.extend([leaf, one, result, *torch.autograd.grad(result, leaf, one)])
        time.sleep(SETTLE_SECONDS)
