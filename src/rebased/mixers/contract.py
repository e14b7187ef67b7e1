"""What a mixer is, and the register of those that exist.

A mixer is a torch module that maps [B,T,D] to [B,T,D] and never looks ahead. `forward` is enough to train it and to
measure what it recalls. Two more methods, `init_state` and `extend`, let a model generate with it: prefill and
decoding are one method, with many tokens or with one. `forward_documents` keeps packed documents apart, and
`forward_part` lets several processes share one sequence. A constructor's signature is its schema: what a config may say
about the mixer is exactly the keyword arguments of `__init__`, less those that the model itself supplies (CONTEXT).
An argument that is added to a mixer of which there are runs already is named in a class attribute, `added_later =
("gate",)`: while it has its default, the digests of those runs stay what they were.
"""

import difflib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

CONTEXT = ("d_model", "layer", "n_layers", "max_len")
"""Constructor arguments that the model fills in for a mixer that asks for them by name."""


@runtime_checkable
class Extendable(Protocol):
    """A mixer that can also read a sequence piece by piece. A state is handed in and out, never kept in the module."""

    def init_state(self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
        """The state before the first token. `dtype` is that of x."""

    def extend(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """forward() for tokens that follow those the state has seen, and the state after them."""

    def state_size(self, seq_len: int) -> int:
        """How many numbers the state of one sequence holds after seq_len tokens."""


Earlier = Callable[[Tensor], Tensor]
"""Hands a tensor to the parts of a sequence after this one, and gives what the parts before this one handed on, in
their order: [...] -> [n, ...], with n = 0 for the first part. Differentiable; every part calls it as often."""


@runtime_checkable
class Divisible(Protocol):
    """A mixer that can compute parts of one sequence side by side, all equally long, each in a process of its own."""

    def forward_part(self, x: Tensor, earlier: Earlier) -> Tensor:
        """forward() of a whole sequence, at the tokens x [B,T,D] of this part."""


@runtime_checkable
class Isolating(Protocol):
    """A mixer with a way of its own to keep packed documents apart. Others read them one by one (documents.py)."""

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """forward() of each document by itself: x [B,T,D], and where documents begin in its B*T tokens [n+1]."""


_REGISTER: dict[str, type[nn.Module]] = {}
Class = TypeVar("Class", bound=type[nn.Module])


def register_mixer(name: str) -> Callable[[Class], Class]:
    """Class decorator: makes a mixer known to configs, commands and the contract suite under this name."""

    def register(cls: Class) -> Class:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ValueError(f"mixer {name!r} must be a class derived from torch.nn.Module; got {cls!r}")
        known = _REGISTER.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"mixer {name!r} is taken by {known.__module__}.{known.__qualname__}; choose another name")
        _REGISTER[name] = cls
        return cls

    return register


def mixer_names() -> list[str]:
    return sorted(_REGISTER)


def mixer_class(name: str) -> type[nn.Module]:
    if name not in _REGISTER:
        near = difflib.get_close_matches(name, _REGISTER, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(mixer_names())}"
        raise ValueError(
            f"unknown mixer {name!r}; {hint} (@register_mixer makes your own known, in a file given with --import)"
        )
    return _REGISTER[name]


def mixer_name(mixer: nn.Module) -> str:
    """The name a mixer is registered under."""
    return next((name for name, cls in _REGISTER.items() if cls is type(mixer)), type(mixer).__name__)


def can_extend(mixer: nn.Module) -> bool:
    return isinstance(mixer, Extendable)


def can_divide(mixer: nn.Module) -> bool:
    return isinstance(mixer, Divisible)


def count_numbers(state: Any) -> int:
    """How many numbers a state holds: a tensor, or any nesting of tuples, lists and dicts of tensors."""
    if isinstance(state, Tensor):
        return state.numel()
    if isinstance(state, dict):
        return sum(count_numbers(part) for part in state.values())
    if isinstance(state, list | tuple):
        return sum(count_numbers(part) for part in state)
    return 0
