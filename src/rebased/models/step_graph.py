"""A decoder's step as a CUDA graph: the host replays it instead of launching some hundred kernels per token.

A step works on tensors that stay where they are, so a replay reads what was put into the slots since the last one. A
step is captured when its key has come WARM_UP times: kernels are compiled by then. These are real steps; capturing
executes nothing.
"""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

WARM_UP = 3
_log = logging.getLogger("rebased")


class Stepped(NamedTuple):
    """What a step made, one number per slot. The next step overwrites it."""

    tokens: Tensor  # [S] int64: the next tokens
    logprobs: Tensor  # [S] fp32 (fp64 for fp64): their log-probabilities under the model itself, before any filter


class Fetch:
    """What a step made, on its way to the host. The device may begin with the next step meanwhile."""

    def __init__(self, made: Stepped) -> None:
        self._made, self._arrived = made, None
        if made.tokens.device.type == "cuda":
            pinned = (torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in made)
            self._made = Stepped(*(to.copy_(each, non_blocking=True) for to, each in zip(pinned, made, strict=True)))
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and log-probabilities, [S] each, as soon as they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._made.tokens.numpy(), self._made.logprobs.numpy()


class StepGraphs:
    """Runs compute(*key) as CUDA graphs, one per key, its arguments. All graphs share their memory.

    required: whether it is an error that a step cannot be captured. If not, a warning says so, and steps run as they
    are. what: the name of compute in messages.
    """

    def __init__(
        self, compute: Callable[..., Any], device: torch.device, *, required: bool = True, what: str = "step"
    ) -> None:
        if device.type != "cuda":
            raise ValueError(f"CUDA graphs need a GPU; the model is on {device}: leave out capture")
        self._compute, self._device, self._required, self._what = compute, device, required, what
        self.captures = True  # False as soon as one could not be captured
        self.clear()

    def clear(self) -> None:
        """Forget all graphs: tensors that they work on have moved."""
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._graphs: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def run(self, *key: Any) -> Any:
        """Return what compute(*key) returns."""
        if key not in self._graphs:
            self._seen[key] += 1
            if self._seen[key] > WARM_UP and self.captures:
                self._capture(key)
            if key not in self._graphs:
                return self._compute(*key)
        graph, made = self._graphs[key]
        graph.replay()
        return made

    def _capture(self, key: tuple[Any, ...]) -> None:
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other, _ in self._graphs.values()), None)
        try:
            with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=pool):
                made = self._compute(*key)
        except RuntimeError as error:
            no_memory = isinstance(error, torch.OutOfMemoryError)
            if self._required and no_memory:
                raise
            reason = str(error.__context__ or error).splitlines()[0]
            problem = f"this model's {self._what} cannot be captured as a CUDA graph ({reason})"
            if not no_memory:
                problem += ": something in it waits for the GPU or copies from the host"
            if self._required:
                raise ValueError(f"{problem}. Decode without capture") from error
            _log.warning("%s. Steps run without a CUDA graph, which is slower", problem)
            self.captures = False
        else:
            self._graphs[key] = graph, made
