"""Launches Triton kernels: on the device that holds the data, and the second time without looking at it all again.

Triton asks every argument of every launch what it is, to find the kernel that it compiled for such arguments: tens of
microseconds, and a short sequence takes less on the GPU. Here a kernel is found by whatever could make it another one:
all constants, whole numbers as they are, of a tensor its dtype and whether its address is aligned.
"""

from typing import Any

import torch

LARGEST = 4096  # kernels that are remembered, each for its own numbers
ALIGNED = 16  # bytes; Triton loads more at once from such addresses

_remembered: dict[tuple[Any, ...], tuple[Any, list[Any]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """kernel[grid](*args, **constants), where the first argument is a tensor."""
    if not args[0].is_cuda:  # the interpreter
        kernel[grid](*args, **constants)
        return
    device = args[0].get_device()
    if device != torch.cuda.current_device():  # Triton launches on the current one, wherever the data is
        with torch.cuda.device(device):
            launch(kernel, grid, *args, **constants)
        return
    key = (kernel, device, tuple(constants), *constants.values(), *map(_kind, args))
    found = _remembered.get(key)
    if found is not None:
        compiled, rest = found
        compiled[(*grid, 1, 1)[:3]](*args, *rest)
        return
    compiled = kernel[grid](*args, **constants)
    if len(_remembered) >= LARGEST:
        _remembered.clear()
    _remembered[key] = compiled, [constants[name] for name in kernel.arg_names[len(args) :]]


def _kind(x: Any) -> Any:
    """What of an argument a kernel may be compiled for."""
    if x is None or type(x) is int:
        return x
    return float if type(x) is float else (x.dtype, x.data_ptr() % ALIGNED == 0)
