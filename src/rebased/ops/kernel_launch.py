"""Launches Triton kernels: on the device that holds the data, and the second time without looking at it all again.

Triton asks every argument of every launch what it is, to find the kernel that it compiled for such arguments: tens of
microseconds, and a short sequence takes less on the GPU. Here a kernel is found by whatever could make it another one:
all constants, whole numbers as they are, of a tensor its dtype and whether its address is aligned.
"""

from functools import cached_property
from typing import Any, TypeVar

import torch

LARGEST = 4096  # launches that are remembered, and of each as many kernels
ALIGNED = 16  # bytes; Triton loads more at once from such addresses

Found = TypeVar("Found")
_remembered: dict[tuple[Any, ...], "Launch"] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """kernel[grid](*args, **constants), where the first argument is a tensor."""
    key = (kernel, tuple(constants), *constants.values())
    found = _remembered.get(key)
    if found is None:
        found = _keep(_remembered, key, Launch(kernel, grid, **constants))
    found.on(grid, args)


class Launch:
    """A kernel with its grid, its last numbers and its constants. Who keeps one, as long as sizes stay the same, has
    only what it is called with looked at: the arguments before, of which the first is a tensor."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], *numbers: float, **constants: Any) -> None:
        self._kernel, self._grid, self._numbers, self._constants = kernel, grid, numbers, constants
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, *args: Any) -> None:
        self.on(self._grid, args)

    def on(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        """Another grid makes no other kernel."""
        if not args[0].is_cuda:  # the interpreter
            self._search(grid, args)
            return
        device = args[0].get_device()
        if device != torch.cuda.current_device():  # Triton launches on the current one, wherever the data is
            with torch.cuda.device(device):
                self.on(grid, args)
            return
        key = (device, *map(_kind, args))
        compiled = self._compiled.get(key)
        if compiled is None:
            _keep(self._compiled, key, self._search(grid, args))
        else:
            compiled[(*grid, 1, 1)[:3]](*args, *self._rest)

    def _search(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> Any:
        return self._kernel[grid](*args, *self._numbers, **self._constants)

    @cached_property
    def _rest(self) -> list[Any]:
        """What follows: numbers, and constants in the kernel's order."""
        return [*self._numbers, *(self._constants[name] for name in self._kernel.arg_names if name in self._constants)]


def _kind(x: Any) -> Any:
    """What of an argument a kernel may be compiled for."""
    if x is None or type(x) is int:
        return x
    return float if type(x) is float else (x.dtype, x.data_ptr() % ALIGNED == 0)


def _keep(memory: dict[tuple[Any, ...], Found], key: tuple[Any, ...], found: Found) -> Found:
    if len(memory) >= LARGEST:
        memory.clear()
    memory[key] = found
    return found
