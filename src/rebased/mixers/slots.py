"""Slots: the states of many sequences of different lengths side by side, for decoding one token of each at a time.

A state that `extend` returns is a value: it can be kept, copied and continued twice. Slots are memory of a fixed size
into which such values are put. A step reads all slots and overwrites them, so nothing is allocated per token, and a
CUDA graph can replay it. Rows never see each other, so the content of an unused slot does
not matter.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rebased.mixers.checks import call_extend, call_init_state, check_state_size
from rebased.mixers.contract import describe_mixer
from rebased.ops import Norm


class Slots(Protocol):
    """The states of one mixer in `count` slots."""

    grows: bool  # whether a step reads more of a longer sequence, and `reserve` may move the tensors

    def put(self, slot: int, state: Any, length: int) -> None:
        """Copy the state of one sequence of `length` tokens, as `extend` returned it at B = 1, into a slot."""

    def get(self, slot: int, length: int) -> Any:
        """Return a copy of the state in a slot, which has read `length` tokens, in the form that `put` takes."""

    def step(self, x: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Return y [count,1,D] of one more token x [count,1,D] per slot, and overwrite the states.

        `lengths` [count] int64, on the device of x, says how many tokens each slot has read before. `longest` is at
        least the largest of them plus 1: no more of a cache needs to be read.
        """

    def reserve(self, capacity: int) -> None:
        """Make room for sequences of `capacity` tokens. What is in the slots stays."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors that hold the states."""


@runtime_checkable
class FusedSlots(Protocol):
    """Slots that compute the norm before the mixer and the residual after it too, in few kernels (rebased.ops)."""

    def step_fused(self, x: Tensor, norm: Norm, lengths: Tensor, longest: int) -> Tensor:
        """Return x + mixer(norm(x)) [count,D] of one more token x [count,D] per slot, and overwrite the states.

        x may be overwritten too. `lengths` and `longest` as in `step`.
        """


@runtime_checkable
class HasStepHeads(Protocol):
    """Fused slots. A step has two parts; wrapper.py puts an output gate between them."""

    def step_heads(self, x: Tensor, norm: Norm | None, lengths: Tensor, longest: int) -> Tensor:
        """Return the heads [count,H*V] of the mixer for norm(x), x [count,D], and overwrite the states."""

    def project_heads(self, o: Tensor, residual: Tensor) -> Tensor:
        """Return residual [count,D] plus the mixer's last projection of heads o [count,H*V]."""


@runtime_checkable
class HasSlots(Protocol):
    """A mixer with its own way to keep many states, because they grow with the sequence. Others get `FixedSlots`."""

    def init_slots(self, count: int, capacity: int) -> Slots:
        """Return empty slots for `count` sequences of at most `capacity` tokens, on the device of the weights."""


def init_slots(mixer: Any, count: int, capacity: int) -> Slots:
    """Return empty slots for `count` sequences of at most `capacity` tokens, on the device of the mixer's weights.

    `mixer` has init_state, extend and state_size. If its states grow and it has no `init_slots`, each sequence
    is stepped by itself, which is correct and slow.
    """
    if isinstance(mixer, HasSlots):
        return mixer.init_slots(count, capacity)
    if len({check_state_size(mixer, seq_len) for seq_len in (1, 2, 2**20)}) == 1 and has_rows(mixer):
        return getattr(mixer, "slots_class", FixedSlots)(mixer, count)
    return SeparateSlots(mixer, count)


class FixedSlots:
    """Slots of a mixer whose state does not grow: its state for a batch of `count` sequences.

    A mixer may have a method extend_(x, state) -> y, which overwrites the state. Otherwise `extend` is called and its
    state copied. Its attribute `slots_class` may name a subclass whose steps are fused (FusedSlots).
    """

    grows = False

    def __init__(self, mixer: Any, count: int) -> None:
        # Copies: a state may hold one tensor twice, or expanded ones, and steps write to them.
        self._mixer, self._state = mixer, map_tensors(_copy, call_init_state(mixer, count))

    def put(self, slot: int, state: Any, length: int) -> None:
        """Copy the state of one sequence into a slot."""
        self._overwrite([mine[slot : slot + 1] for mine in tensors_of(self._state)], list(tensors_of(state)))

    def put_all(self, slots: Tensor, states: Sequence[Any]) -> None:
        """Copy the states of several sequences into slots [n] int64."""
        given = list(tensors_of(join_rows(states)))
        self._check_shapes([mine[:1].expand(len(states), *mine.shape[1:]) for mine in tensors_of(self._state)], given)
        for mine, new in zip(tensors_of(self._state), given, strict=True):
            mine.index_copy_(0, slots, new.to(mine.dtype))

    def first(self, count: int) -> "FixedSlots":
        """Return the first slots: what their steps write is written here."""
        part = copy.copy(self)
        part._state = map_tensors(lambda tensor: tensor[:count], self._state)
        return part

    def get(self, slot: int, length: int) -> Any:
        """Return a copy of the state in a slot, at B = 1."""
        return map_tensors(lambda tensor: tensor[slot : slot + 1].clone(), self._state)

    def step(self, x: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Return y [count,1,D] of one more token per slot, and overwrite the states."""
        if hasattr(self._mixer, "extend_"):
            return self._mixer.extend_(x, self._state)
        y, after = call_extend(self._mixer, x, self._state)
        self._overwrite(list(tensors_of(self._state)), list(tensors_of(after)))
        return y

    def _overwrite(self, mine: list[Tensor], given: list[Tensor]) -> None:
        """Copy the tensors of a state."""
        self._check_shapes(mine, given)
        for tensor, new in zip(mine, given, strict=True):
            tensor.copy_(new)

    def _check_shapes(self, mine: list[Tensor], given: list[Tensor]) -> None:
        """Raise ValueError if the shapes of a state are not those that init_state makes."""
        if [tensor.shape for tensor in mine] != [tensor.shape for tensor in given]:
            found, made = ([list(tensor.shape) for tensor in tensors] for tensors in (given, mine))
            raise ValueError(
                f"{describe_mixer(self._mixer)}: extend returned a state with tensors of the shapes {found}, and "
                f"init_state makes {made}; by state_size it does not grow, so they must be the same"
            )

    def reserve(self, capacity: int) -> None:
        """Do nothing: the state does not grow."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the state."""
        return list(tensors_of(self._state))


class SeparateSlots:
    """Slots of any mixer: one state per sequence, stepped one after the other. No CUDA graph can capture that."""

    grows = True

    def __init__(self, mixer: Any, count: int) -> None:
        self._mixer, self._states = mixer, [call_init_state(mixer, 1) for _ in range(count)]

    def put(self, slot: int, state: Any, length: int) -> None:
        """Keep the state of one sequence. `extend` does not change it, so it need not be copied."""
        self._states[slot] = state

    def get(self, slot: int, length: int) -> Any:
        """Return the state in a slot."""
        return self._states[slot]

    def step(self, x: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """Return y [count,1,D] of one more token per slot, and replace the states."""
        outputs = []
        for slot, row in enumerate(x.split(1)):
            y, self._states[slot] = call_extend(self._mixer, row, self._states[slot])
            outputs.append(y)
        return torch.cat(outputs)

    def reserve(self, capacity: int) -> None:
        """Do nothing: each state grows by itself."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors of all states."""
        return [tensor for state in self._states for tensor in tensors_of(state)]


def grown(tensor: Tensor, size: int, dim: int) -> Tensor:
    """Return zeros in the shape of `tensor` with `size` along `dim`, the tensor copied to their beginning."""
    shape = list(tensor.shape)
    shape[dim] = size
    new = tensor.new_zeros(shape)
    new.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return new


def tensors_of(state: Any) -> Iterator[Tensor]:
    """The tensors of a state in order: a tensor, or any nesting of tuples, lists and dicts of tensors."""
    return (leaf for leaf in _leaves(state) if isinstance(leaf, Tensor))


def count_numbers(state: Any) -> int:
    """Return how many numbers a state holds: a tensor, or any nesting of tuples, lists and dicts of tensors."""
    return sum(tensor.numel() for tensor in tensors_of(state))


def map_tensors(function: Callable[[Tensor], Tensor], state: Any) -> Any:
    """A state of the same nesting, with function(tensor) in place of each tensor."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, dict):
        return {key: map_tensors(function, child) for key, child in state.items()}
    if isinstance(state, tuple) and hasattr(state, "_fields"):  # a NamedTuple
        return type(state)(*(map_tensors(function, child) for child in state))
    if isinstance(state, list | tuple):
        return type(state)(map_tensors(function, child) for child in state)
    return state


def join_rows(states: Sequence[Any]) -> Any:
    """The states of several sequences, each at B = 1 and of a fixed size, as one state of that many rows."""
    columns = [list(tensors_of(state)) for state in states]
    joined = iter([torch.cat(tensors) for tensors in zip(*columns, strict=True)])
    return map_tensors(lambda _: next(joined), states[0])


def split_rows(state: Any, count: int) -> list[Any]:
    """The inverse of `join_rows`: `count` states at B = 1, which share their memory."""
    columns = [tensor.split(1) for tensor in tensors_of(state)]  # one call per tensor, not one per row
    rows = [iter(row) for row in zip(*columns, strict=True)] if columns else [iter(())] * count
    return [map_tensors(lambda _, row=row: next(row), state) for row in rows]  # type: ignore[misc]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def has_rows(mixer: Any) -> bool:
    """Return True if the first axis of every tensor of a state is the batch, and a state is made of tensors alone."""
    leaves = list(_leaves(call_init_state(mixer, 2)))
    return all(isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == 2 for leaf in leaves)


def _leaves(state: Any) -> Iterator[Any]:
    if isinstance(state, dict | list | tuple):
        for child in state.values() if isinstance(state, dict) else state:
            yield from _leaves(child)
    else:
        yield state
