"""Reading prompts: chunk by chunk between steps, from a kept state on where there is one, and scored where asked."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rebased.models.job import Job, Scored
from rebased.models.network import LMState, Network
from rebased.models.prefixes import GRID, PrefixStates
from rebased.models.prompt_graph import PromptGraphs
from rebased.ops.backend import to_device
from rebased.ops.invariance import GRID as CHUNK_GRID

SCORED_AT_ONCE = 256  # tokens of a prompt whose logits are held at once


@dataclass(eq=False)
class Reading:
    """A prompt of a job that is being read, for all the prompts of the job that are equal to it."""

    job: Job
    numbers: list[int]  # of these prompts
    state: LMState
    marks: deque[int]  # numbers of tokens after which the state is kept, rising
    cached: int  # tokens that a kept state had read
    scores: list[Scored]

    @property
    def prompt(self) -> list[int]:
        """The tokens."""
        return self.job.prompts[self.numbers[0]]

    @property
    def left(self) -> int:
        """How many tokens are to be read, without the last one: the first step reads that."""
        return len(self.prompt) - 1 - self.state.position


class PromptReader:
    """Reads prompts with a model, and keeps states in `prefixes`.

    With `batch_invariant` each prompt is read by itself, and its chunks begin at multiples of CHUNK_GRID tokens, where
    states are kept too: the state after a prompt is then a function of the prompt alone, to the bit. `graphs` reads
    what fits into them, but for prompts that are scored.
    """

    def __init__(
        self, model: Network, prefixes: PrefixStates, batch_invariant: bool, graphs: PromptGraphs | None
    ) -> None:
        self._model, self._prefixes, self._by_itself = model, prefixes, batch_invariant
        self._graphs = None if batch_invariant else graphs
        self._grid = CHUNK_GRID if batch_invariant else 1
        self._empty = model.init_state(1)  # states are values: all prompts begin with the same one

    def begin(self, job: Job, number: int) -> Reading:
        """Begin with a prompt of a job, where a kept state ends."""
        prompt, given = job.prompts[number], job.marks[number] if job.marks else ()
        state, scores, shared = self._empty, list[Scored](), 0
        if job.score_prompts:  # every token has to be read
            scores = [Scored(prompt[0], None, [])]
        else:
            found = self._prefixes.find(prompt[:-1], self._grid)
            state, shared = found.state or state, found.shared
        marks = {mark // self._grid * self._grid for mark in (*given, shared)} | {len(prompt) - 1}
        rising = deque(sorted(mark for mark in marks if state.position < mark < len(prompt)))
        return Reading(job, [number], state, rising, state.position, scores)

    @torch.no_grad()
    def read(self, readings: Sequence[Reading], budget: float) -> int:
        """Read up to `budget` tokens of these prompts in one pass, each no further than its next mark.

        Earlier ones come first. Returns how many tokens were read: with batch_invariant whole chunks, so the last of
        them may pass the budget. An error changes nothing.
        """
        pieces: list[tuple[Reading, int, int]] = []
        count, most_prompts = 0, len(readings)
        if self._graphs is not None:
            budget, most_prompts = min(budget, self._graphs.most_tokens), self._graphs.most_prompts
        for reading in readings:
            start, left = reading.state.position, reading.left
            if len(pieces) == most_prompts:
                break
            if self._by_itself:
                stop = start + min(left, self._grid) if count < budget else start
            else:
                stop = int(min(start + left, start + budget - count, *reading.marks))
            if stop > start:
                pieces.append((reading, start, stop))
                count += stop - start
        features, states = self._extend(pieces)
        scores = [
            self._score(found, reading.prompt[start + 1 : stop + 1], reading.job.top or 0)
            if found is not None and reading.job.score_prompts
            else []
            for found, (reading, start, stop) in zip(features, pieces, strict=True)
        ]
        marked = []
        for (reading, _, stop), state, some in zip(pieces, states, scores, strict=True):
            reading.state = state
            reading.scores += some
            if reading.marks and reading.marks[0] == stop:
                reading.marks.popleft()
                marked.append((reading.prompt[:stop], state))
        self._prefixes.keep(marked)
        return count

    def _extend(self, pieces: Sequence[tuple[Reading, int, int]]) -> tuple[Sequence[Tensor | None], list[LMState]]:
        """Return (features [T,D] if it is scored, state after it) of each piece, tokens start to stop of a prompt."""
        documents = [reading.prompt[start:stop] for reading, start, stop in pieces]
        states = [reading.state for reading, *_ in pieces]
        scores = any(reading.job.score_prompts for reading, *_ in pieces)
        if self._graphs is not None and self._graphs.works and pieces and not scores:
            return [None] * len(pieces), self._graphs.read(documents, states)
        if len(pieces) > 1 and not self._by_itself:
            return self._model.extend_documents(documents, states)
        features, device = list[Tensor](), self._model.embedding.weight.device
        for number, tokens in enumerate(documents):
            hidden, states[number] = self._model.extend(to_device([tokens], torch.int64, device), states[number])
            features.append(hidden[0])
        return features, states

    def _score(self, hidden: Tensor, targets: list[int], top: int) -> list[Scored]:
        """Return the log-probabilities of tokens `targets` [T], predicted by features [T,D]."""
        scores: list[Scored] = []
        for start in range(0, len(targets), SCORED_AT_ONCE):
            rows = targets[start : start + SCORED_AT_ONCE]
            scores += score_rows(self._model.logits(hidden[start : start + len(rows)]), rows, top)
        if any(not math.isfinite(each.logprob or 0.0) for each in scores):
            raise ValueError("the model's logits are not finite")
        return scores


def begin_alike(one: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if a state after the beginning of one prompt may serve the other, which then waits for it."""
    shared = min(GRID, len(one) - 1, len(other) - 1)
    return shared > 0 and one[:shared] == other[:shared]


def score_rows(logits: Tensor, tokens: list[int], top: int) -> list[Scored]:
    """Return the log-probabilities of tokens [N] under logits [N,V], each with the `top` most probable tokens."""
    logprobs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    best = logprobs.topk(min(top, logprobs.shape[1]))
    values, indices = best.values.tolist(), best.indices.tolist()
    return [
        Scored(token, logprob, list(zip(index, value, strict=True)))
        for token, logprob, value, index in zip(tokens, chosen, values, indices, strict=True)
    ]
