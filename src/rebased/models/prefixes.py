"""States of prompts that were read before: a prompt that begins like one of them is read from there on only."""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from rebased.mixers import map_tensors, tensors_of
from rebased.models.network import LMState

GRID = 64  # tokens; a beginning that two prompts share is noticed at multiples of this
NOTED = 65_536  # beginnings that are remembered by their digest alone


class Found(NamedTuple):
    """What is known about the beginning of a prompt."""

    state: LMState | None  # the state after as many of its tokens as possible; None: nothing is known
    shared: int  # how many of its tokens, a multiple of GRID, another prompt began with: worth to be kept; 0 if none


class PrefixStates:
    """States by the tokens that they have read, at most `limit` bytes; the least recently used are dropped first.

    Tokens are compared by a 256-bit digest, so two different beginnings are never taken for one. A state that was kept
    is a value: it can be continued any number of times.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._states: OrderedDict[bytes, LMState] = OrderedDict()
        self._lengths: Counter[int] = Counter()  # how many states have read so many tokens
        self._noted: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def find(self, tokens: Sequence[int], multiple: int = 1) -> Found:
        """Return the longest known beginning of these tokens, and note them for the next prompt.

        Its length is a multiple of `multiple`, unless it is that of all tokens.
        """
        grid = range(GRID, len(tokens) + 1, GRID) if self.limit else ()
        lengths = sorted({*grid, *(length for length in self._lengths if length <= len(tokens))})
        digests = dict(zip(lengths, _digests(tokens, lengths), strict=True))
        state, shared = None, 0
        for length in reversed(lengths):
            if digests[length] in self._states and (length % multiple == 0 or length == len(tokens)):
                self._states.move_to_end(digests[length])
                state = self._states[digests[length]]
                break
        for length in grid:
            if digests[length] in self._noted:
                shared = length
            self._noted[digests[length]] = None
            self._noted.move_to_end(digests[length])
        while len(self._noted) > NOTED:
            self._noted.popitem(last=False)
        return Found(state, shared)

    def keep(self, pairs: Sequence[tuple[Sequence[int], LMState]]) -> None:
        """Keep states, each after the tokens before it, if they fit at all."""
        fitting = [(tokens, state) for tokens, state in pairs if tokens and state_bytes(state) <= self.limit]
        for (tokens, _), state in zip(fitting, _alone([state for _, state in fitting]), strict=True):
            (digest,) = _digests(tokens, [len(tokens)])
            if digest not in self._states:
                self.bytes += state_bytes(state)
                self._lengths[len(tokens)] += 1
            self._states[digest] = state
            self._states.move_to_end(digest)
        while self.bytes > self.limit:
            _, dropped = self._states.popitem(last=False)
            self.bytes -= state_bytes(dropped)
            self._lengths -= Counter([dropped.position])


def state_bytes(state: LMState) -> int:
    """Return the bytes of all tensors of a state."""
    return sum(tensor.nbytes for tensor in tensors_of(state.layers))


def _alone(states: Sequence[LMState]) -> list[LMState]:
    """The states in memory of their own: as a part of a larger tensor one would keep all of that."""
    tensors = [tensor for state in states for tensor in tensors_of(state.layers)]
    parts = [tensor for tensor in tensors if tensor.untyped_storage().nbytes() != tensor.nbytes]
    copies = [torch.empty_like(tensor) for tensor in parts]
    if parts:
        torch._foreach_copy_(copies, parts)  # one call: a GPU takes longer to launch each than to copy it
    own = {id(part): copy for part, copy in zip(parts, copies, strict=True)}
    return [
        LMState(state.position, map_tensors(lambda each: own.get(id(each), each), state.layers)) for state in states
    ]


def _digests(tokens: Sequence[int], lengths: Iterable[int]) -> list[bytes]:
    """Return the digest of the first n tokens for each n in `lengths`, which rise."""
    content = memoryview(array("q", tokens)).cast("B")
    running, done, found = hashlib.blake2b(digest_size=32), 0, []
    for length in lengths:
        running.update(content[8 * done : 8 * length])
        done = length
        found.append(running.digest())
    return found
