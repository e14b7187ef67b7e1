"""A pass over prompts as a CUDA graph: launching its kernels one by one takes the host longer than the GPU computes.

A graph has fixed sizes, so a pass is filled up to DOCUMENTS documents, and to one of SIZES tokens and FILLING more.
What fills it up is computed and thrown away.
"""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from rebased.mixers import ExtendsDocuments, call_init_state, has_rows, map_tensors, split_rows, tensors_of
from rebased.models.network import LMState, Network
from rebased.models.step_graph import WARM_UP, StepGraphs
from rebased.ops.backend import to_device

_log = logging.getLogger("rebased")

SIZES = (512, 1024, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384, 24_576, 32_768)  # tokens of prompts in a pass
FILLING = 64  # tokens; no document is empty
DOCUMENTS = 33  # the last one always fills up


def reads_in_graphs(model: Network) -> bool:
    """Return True if every mixer reads several documents at once, after states of one row each."""
    mixers = [block.mixer for block in model.blocks]
    return all(isinstance(mixer, ExtendsDocuments) and has_rows(mixer) for mixer in mixers)


class PromptGraphs:
    """Reads prompts with a model for which `reads_in_graphs` is True, in passes of at most `limit` tokens.

    It is Network.extend_documents without the features, up to rounding. Without `capture`, which needs a GPU, passes
    are filled up, too, and computed one kernel after the other.

    Attributes: `most_tokens` and `most_prompts` of one pass.
    """

    most_prompts = DOCUMENTS - 1

    @torch.inference_mode(False)  # its tensors are written to later, whatever the mode is then
    def __init__(self, model: Network, limit: int, *, capture: bool = True) -> None:
        self._model, device = model, model.embedding.weight.device
        self.sizes = [size for size in SIZES if size <= limit] or [SIZES[0]]
        self.most_tokens = self.sizes[-1]
        N = self.most_tokens + FILLING
        self._tokens, self._places = (torch.zeros(N, dtype=torch.int64, device=device) for _ in range(2))
        self._starts = torch.zeros(DOCUMENTS + 1, dtype=torch.int32, device=device)
        self._before, self._after = (
            [map_tensors(torch.clone, call_init_state(block.mixer, DOCUMENTS)) for block in model.blocks]
            for _ in range(2)
        )
        self._graphs = StepGraphs(self._compute, device, required=False, what="pass over prompts") if capture else None

    @property
    def works(self) -> bool:
        """Whether passes can be captured, as far as known."""
        return self._graphs is None or self._graphs.captures

    def warm_up(self) -> None:
        """Capture the passes of all sizes for which there is memory, up to the first that cannot be captured."""
        first, count = self._model.init_state(1), self.most_prompts
        longest = self._model.config.length_limit or self.most_tokens
        for number, size in enumerate(self.sizes):
            try:
                for _ in range(WARM_UP + 1):
                    self.read([[0] * min(size // count, longest)] * count, [first] * count)
            except torch.OutOfMemoryError:
                if not number:
                    raise
                self.sizes = self.sizes[:number]
                self.most_tokens = self.sizes[-1]
                _log.warning(
                    "memory is too small for %d tokens of prompts at once; %d are read", size, self.most_tokens
                )
                break
            if not self.works:
                break

    @torch.no_grad()
    def read(self, documents: Sequence[Sequence[int]], states: Sequence[LMState]) -> list[LMState]:
        """Return the state after each document, tokens that follow those its state has seen; none is empty."""
        lengths, count = [len(document) for document in documents], len(documents)
        N = FILLING + self.sizes[bisect_left(self.sizes, sum(lengths))]
        starts = np.cumsum([0, *lengths, *[1] * (DOCUMENTS - count)])
        starts[-1] = N
        tokens, places = np.zeros((2, N), dtype=np.int64)
        for (begin, end), document, state in zip(pairwise(starts), documents, states, strict=False):
            tokens[begin:end], places[begin:end] = document, np.arange(state.position, state.position + end - begin)
        self._model.check_positions(
            max(state.position + len(each) for each, state in zip(documents, states, strict=True))
        )
        for mine, given in ((self._tokens, tokens), (self._places, places), (self._starts, starts)):
            mine[: len(given)].copy_(to_device(given, mine.dtype, mine.device))
        for number, before in enumerate(self._before):
            columns = zip(*(tensors_of(state.layers[number]) for state in states), strict=True)
            for mine, rows in zip(tensors_of(before), columns, strict=True):
                torch.cat(rows, out=mine[:count])
        (self._compute if self._graphs is None else self._graphs.run)(N)
        layers = [split_rows(map_tensors(lambda x: x[:count].clone(), after), count) for after in self._after]
        return [
            LMState(state.position + lengths[n], tuple(layer[n] for layer in layers)) for n, state in enumerate(states)
        ]

    @torch.no_grad()
    def _compute(self, N: int) -> None:
        """What a graph of N tokens holds: it reads and writes only tensors that stay where they are."""
        after = self._model.extend_packed(self._tokens[:N], self._places[:N], self._starts, self._before)
        for mine, given in zip(tensors_of(self._after), tensors_of(after), strict=True):
            mine.copy_(given)
