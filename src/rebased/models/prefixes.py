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

    States that were read together share memory, which counts as long as one of them is kept. One that is found again is
    copied first: it may stay long. Copying all of them would take longer than reading them does.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.bytes = limit, 0
        self._holders: Counter[int] = Counter()  # how many states hold each piece of memory, by its address
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
                state = self._own(digests[length])
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
        states = [state for _, state in fitting]
        if sum(_memory(states).values()) > min(sum(map(state_bytes, states)), self.limit // 2):
            states = [_copy(state) for state in states]  # they are parts of something larger, or would drop most others
        for (tokens, _), state in zip(fitting, states, strict=True):
            self._put(_digests(tokens, [len(tokens)])[0], state)

    def _own(self, digest: bytes) -> LMState:
        """Return a state that is used again, in memory of its own."""
        state = self._states[digest]
        if sum(_memory([state]).values()) > state_bytes(state):
            state = _copy(state)
        self._put(digest, state)
        return state

    def _put(self, digest: bytes, state: LMState) -> None:
        """Make a state the most recently used one, and drop others that have no room beside it."""
        if digest in self._states:
            self._drop(digest)
        self._states[digest] = state
        self._lengths[state.position] += 1
        for address, size in _memory([state]).items():
            self.bytes += 0 if address in self._holders else size
            self._holders[address] += 1
        while self.bytes > self.limit:
            self._drop(next(iter(self._states)))

    def _drop(self, digest: bytes) -> None:
        state = self._states.pop(digest)
        self._lengths -= Counter([state.position])
        for address, size in _memory([state]).items():
            self._holders[address] -= 1
            if not self._holders[address]:
                del self._holders[address]
                self.bytes -= size


def state_bytes(state: LMState) -> int:
    """Return the bytes of all tensors of a state."""
    return sum(tensor.nbytes for tensor in tensors_of(state.layers))


def _memory(states: Sequence[LMState]) -> dict[int, int]:
    """Return the bytes of all memory that states hold, by address: as a part of a larger tensor one holds all of it."""
    storages = (tensor.untyped_storage() for state in states for tensor in tensors_of(state.layers))
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _copy(state: LMState) -> LMState:
    return LMState(state.position, map_tensors(torch.clone, state.layers))


def _digests(tokens: Sequence[int], lengths: Iterable[int]) -> list[bytes]:
    """Return the digest of the first n tokens for each n in `lengths`, which rise."""
    content = memoryview(array("q", tokens)).cast("B")
    running, done, found = hashlib.blake2b(digest_size=32), 0, []
    for length in lengths:
        running.update(content[8 * done : 8 * length])
        done = length
        found.append(running.digest())
    return found
