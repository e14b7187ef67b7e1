"""States of prompts that were read before: a prompt that begins like one of them is read from there on only."""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

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

    def keep(self, tokens: Sequence[int], state: LMState) -> None:
        """Keep the state after these tokens, if it fits at all."""
        size = state_bytes(state)
        if not tokens or size > self.limit:
            return
        state = LMState(state.position, map_tensors(_alone, state.layers))
        (digest,) = _digests(tokens, [len(tokens)])
        if digest not in self._states:
            self.bytes += size
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


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in memory of its own: as a part of a larger one it would keep all of that."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _digests(tokens: Sequence[int], lengths: Iterable[int]) -> list[bytes]:
    """Return the digest of the first n tokens for each n in `lengths`, which rise."""
    content = memoryview(array("q", tokens)).cast("B")
    running, done, found = hashlib.blake2b(digest_size=32), 0, []
    for length in lengths:
        running.update(content[8 * done : 8 * length])
        done = length
        found.append(running.digest())
    return found
