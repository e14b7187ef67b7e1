"""Launches Triton kernels: on the device that holds the data, and the second time without looking at it all again.

Triton asks every argument of every launch what it is, to find the kernel that it compiled for such arguments: tens of
microseconds, and a short sequence takes less on the GPU. Here a kernel is found by whatever could make it another one:
all constants, whole numbers as they are, of a tensor its dtype and whether its address is aligned.
"""

from typing import Any

import torch

LARGEST = 4096  # ways to launch a kernel that are remembered, and kernels of each
ALIGNED = 16  # bytes; Triton loads more at once from such addresses

_remembered: dict[tuple[Any, ...], dict[tuple[Any, ...], tuple[Any, list[Any]]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """kernel[grid](*args, **constants), where the first argument is a tensor."""
    Launch(kernel, grid, **constants)(*args)


class Launch:
    """A kernel with its grid, its last numbers and its constants. Who keeps one, as long as sizes stay the same, has
    only what it is called with looked at: the arguments before, of which the first is a tensor."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], *numbers: float, **constants: Any) -> None:
        self._kernel, self._grid, self._numbers, self._constants = kernel, grid, numbers, constants
        key = (kernel, numbers, tuple(constants), *constants.values())  # another grid makes no other kernel
        found = _remembered.get(key)
        self._compiled = _keep(_remembered, key, {}) if found is None else found

    def __call__(self, *args: Any) -> None:
        if not args[0].is_cuda:  # the interpreter
            self._search(args)
            return
        device = args[0].get_device()
        if device != torch.cuda.current_device():  # Triton launches on the current one, wherever the data is
            with torch.cuda.device(device):
                self(*args)
            return
        key = (device, *map(_kind, args))
        found = self._compiled.get(key)
        if found is None:
            constants = [self._constants[name] for name in self._kernel.arg_names if name in self._constants]
            _keep(self._compiled, key, (self._search(args), [*self._numbers, *constants]))
            return
        compiled, rest = found
        compiled[(*self._grid, 1, 1)[:3]](*args, *rest)

    def _search(self, args: tuple[Any, ...]) -> Any:
        return self._kernel[self._grid](*args, *self._numbers, **self._constants)


def _kind(x: Any) -> Any:
    """What of an argument a kernel may be compiled for."""
    if x is None or type(x) is int:
        return x
    return float if type(x) is float else (x.dtype, x.data_ptr() % ALIGNED == 0)


def _keep(memory: dict[tuple[Any, ...], Any], key: tuple[Any, ...], found: Any) -> Any:
    if len(memory) >= LARGEST:
        memory.clear()
    memory[key] = found
    return found
