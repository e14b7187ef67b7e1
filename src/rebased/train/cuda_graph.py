"""A training step as one CUDA graph: the host replays it instead of launching some hundred kernels one by one.

Small models, and short steps of larger ones, are launch-bound otherwise. What the step reads and writes stays where it
is: weights, gradients, moments, the learning rate (a tensor) and one buffer per input. Dropout draws from torch's
generator, whose seed and count a replay reads as an ordinary step would, so a checkpoint means the same in both.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

WARM_UP = 3  # steps of each shape before it is captured: kernels are compiled, moments and workspaces made


class _Graph(NamedTuple):
    graph: Any
    inputs: tuple[Tensor, ...]
    outcome: Tensor
    step: Callable[..., Tensor]  # kept: no other tensor may take the addresses of what it refers to


class CudaGraphs:
    """Runs steps as CUDA graphs, one graph per key.

    A key names the shapes of a step's inputs and everything else that its kernels depend on. A step runs as it is three
    times, real steps of the training, and is captured when its key comes again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}

    def run(self, key: Hashable, step: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """What step(*inputs) returns; the next call overwrites it. All inputs are on the GPU while the step runs."""
        if key not in self._graphs:
            self._seen[key] += 1
            if self._seen[key] <= WARM_UP:
                return step(*(_to_device(each, self._device) for each in inputs))
            self._graphs[key] = self._capture(step, tuple(_to_device(each, self._device).clone() for each in inputs))
        captured = self._graphs[key]
        for buffer, each in zip(captured.inputs, inputs, strict=True):
            buffer.copy_(_pinned(each, self._device), non_blocking=True)
        captured.graph.replay()
        return captured.outcome

    def _capture(self, step: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> _Graph:
        """Record one step, which is not executed. Graphs share their memory: they never run at the same time."""
        graph = torch.cuda.CUDAGraph()
        pool = next((other.graph.pool() for other in self._graphs.values()), None)
        try:
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
                outcome = step(*inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error.__context__ or error).splitlines()[0]
            raise ValueError(
                f"this model's training step cannot be captured as a CUDA graph ({reason}): something in it waits for "
                "the GPU or copies from the host. Train without: --train.capture false"
            ) from error
        return _Graph(graph, inputs, outcome, step)


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return _pinned(tensor, device).to(device, non_blocking=True)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """From pinned memory the host goes on while a copy to the GPU is under way."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Within the block all work on the GPU goes to a stream of its own: the default one cannot be captured."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
