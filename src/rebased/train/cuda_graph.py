"""A training step as one CUDA graph: the host says "again" instead of launching some hundred kernels one by one.

Small models are launch-bound otherwise. What the step reads and writes stays where it is: weights, gradients, moments,
the learning rate (a tensor), the data and a buffer for the row numbers. Dropout draws from torch's generator, which
counts on with every replay as it would have without a graph, so a checkpoint means the same in both.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rebased.tasks import Questions

WARM_UP = 3  # steps of each shape before it is captured: kernels are compiled, moments and workspaces made


class _Graph(NamedTuple):
    graph: Any
    questions: Questions  # kept, so that nothing else can take its address
    rows: Tensor
    outcome: Tensor


class CapturedStep:
    """Takes the place of a step on a GPU. A shape (a segment, a number of rows) runs as it is three times, real steps
    of the training, and is captured when it comes again; the smaller last batch of an epoch has a graph of its own."""

    def __init__(self, step: Callable[[Questions, Tensor], Tensor]) -> None:
        self.step = step
        self._seen: Counter[tuple[int, int]] = Counter()
        self._graphs: dict[tuple[int, int], _Graph] = {}

    def __call__(self, questions: Questions, rows: Tensor) -> Tensor:
        """The outcome is overwritten by the next call."""
        shape = questions.inputs.data_ptr(), len(rows)
        if shape not in self._graphs:
            self._seen[shape] += 1
            if self._seen[shape] <= WARM_UP:
                return self.step(questions, rows)
            self._graphs[shape] = self._capture(questions, rows)
        captured = self._graphs[shape]
        captured.rows.copy_(rows)
        captured.graph.replay()
        return captured.outcome

    def _capture(self, questions: Questions, rows: Tensor) -> _Graph:
        """Record one step, which is not executed. Graphs share their memory: they never run at the same time."""
        graph, rows = torch.cuda.CUDAGraph(), rows.clone()
        pool = next((other.graph.pool() for other in self._graphs.values()), None)
        try:
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
                outcome = self.step(questions, rows)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error.__context__ or error).splitlines()[0]
            raise ValueError(
                f"this model's training step cannot be captured as a CUDA graph ({reason}): something in it waits for "
                "the GPU or copies from the host. Train without: --train.capture false"
            ) from error
        return _Graph(graph, questions, rows, outcome)


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
