"""What a mixer is, and the register of all mixers.

A mixer is a torch module that maps x [B,T,D] to y [B,T,D] and never looks ahead: y[:, t] depends on x[:, :t+1] only.

- `forward(x)` is enough to train a mixer and to measure what it recalls. x has the dtype and device of the weights;
  under autocast any floating dtype. B and T may be 0.
- `init_state`, `extend` and `state_size` let a model generate with it (Extendable). Prefill and decoding are the same
  method, with many tokens or with one.
- `init_slots` keeps the states of many sequences of different lengths for decoding (HasSlots, slots.py). Only a mixer
  whose state grows needs it. `extend_` overwrites a state of fixed size, to save time; so does `slots_class`, slots
  whose steps are fused with what is around the mixer.
- `forward_documents` keeps packed documents apart (Isolating, documents.py). `extend_documents` does so for documents
  that follow states (ExtendsDocuments, documents.py): several prompts are then read at once.
- `forward_at` leaves out positions that are not wanted (AttendsAt).
- `attention_map` and `apply_attention` show where it looks (HasAttentionMap, attention_maps.py).
- `residual_projections` names the layers that write into the residual stream (find_residual_projections).
- `output_projection` names the layer that makes y of the heads, the last thing the mixer does: an output gate stands
  before it. `built_in` names options of wrapper.py that the mixer has in its own way; configs do not offer these.
- `spreads_nan` says, in words, why a NaN in x may reach earlier tokens of its row. A mixer without it keeps a NaN or an
  infinity from them, as the contract suite checks.

The constructor's signature is the schema of a mixer's config. Its arguments are the config's keys, except those that
the model fills in: CONTEXT and FACTORY.

If runs with a mixer exist, a new argument is named in a class attribute, `added_later = ("gate",)`: while it has its
default, the digests of those runs do not change.
"""

import difflib
import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

CONTEXT = ("d_model", "layer", "n_layers", "max_len")
"""Constructor arguments that the model fills in from its config, for a mixer that has them."""

FACTORY = ("device", "dtype")
"""Constructor arguments that say where and in which dtype weights are made, as in torch's layers. A mixer need not
have them. They are no config keys: the model fills them in."""

RESIDUAL_NAMES = ("out_proj", "fc2")
"""Layers with these names write into the residual stream, in a mixer that does not declare `residual_projections`."""


@runtime_checkable
class Extendable(Protocol):
    """A mixer that can read a sequence in pieces. The state is passed in and handed back, never kept in the module."""

    def init_state(self, batch: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Any:
        """Return the state before the first token, for `batch` sequences.

        `dtype` is the dtype of x. Device and dtype are those of the weights unless given.
        """

    def extend(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return (y, state after x): forward() of the tokens x [B,T,D] that follow those the state has seen."""

    def state_size(self, seq_len: int) -> int:
        """Return how many numbers the state of one sequence holds after seq_len tokens."""


@runtime_checkable
class Isolating(Protocol):
    """A mixer with its own way to keep packed documents apart. Other mixers read them one by one (documents.py)."""

    def forward_documents(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return forward() of each document by itself: x [B,T,D] -> [B,T,D].

        cu_seqlens [n+1] says where documents begin in the B*T tokens of x; its last number is B*T.
        """


@runtime_checkable
class AttendsAt(Protocol):
    """A mixer that can compute some positions of each row only: the questions of a synthetic task.

    What it computes at a position needs all tokens before it, but its queries, its output and all that follows need
    only the position itself. Of any other mixer all positions are computed, and the wanted ones taken (Block.mix_at).
    """

    def attends_at(self, x: Tensor, n: int) -> bool:
        """Return True if forward_at of n positions per row is faster than forward of x [B,T,D]."""

    def forward_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return forward() at these positions only: x [B,T,D], positions [B,n] -> [B,n,D]."""


_REGISTER: dict[str, type[nn.Module]] = {}
Class = TypeVar("Class", bound=type[nn.Module])


def register_mixer(name: str) -> Callable[[Class], Class]:
    """Return a class decorator that makes a mixer known under this name to configs, commands and the contract suite."""

    def register(cls: Class) -> Class:
        if not name.isprintable():
            raise ValueError(f"mixer {name!r} has a control character in its name; choose another name")
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise ValueError(f"mixer {name!r} must be a class derived from torch.nn.Module; got {cls!r}")
        known = _REGISTER.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"mixer {name!r} is taken by {known.__module__}.{known.__qualname__}; choose another name")
        _REGISTER[name] = cls
        return cls

    return register


def mixer_names() -> list[str]:
    """Return the names of all registered mixers, sorted."""
    return sorted(_REGISTER)


def mixer_class(name: str) -> type[nn.Module]:
    """Return the class that is registered under this name."""
    if name not in _REGISTER:
        near = difflib.get_close_matches(name, _REGISTER, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(mixer_names())}"
        raise ValueError(
            f"unknown mixer {name!r}; {hint} (@register_mixer makes your own known, in a file given with --import)"
        )
    return _REGISTER[name]


def unwrap(mixer: nn.Module) -> Any:
    """Return the mixer inside of its options (wrapper.py); a mixer without options as it is."""
    return getattr(mixer, "wrapped_mixer", mixer)


def mixer_name(mixer: nn.Module | type[nn.Module]) -> str:
    """Return the name a mixer, or its class, is registered under; the name of the class if there is none."""
    cls = mixer if isinstance(mixer, type) else type(unwrap(mixer))
    return next((name for name, known in _REGISTER.items() if known is cls), cls.__name__)


def describe_mixer(mixer: nn.Module | type[nn.Module]) -> str:
    """Return how error messages call a mixer, or its class: "mixer 'own' (class Own of own.py)"."""
    cls = mixer if isinstance(mixer, type) else type(unwrap(mixer))
    try:
        source = inspect.getfile(cls)
    except (TypeError, OSError):  # a class from a notebook or an interactive session has no file
        source = cls.__module__
    return f"mixer {mixer_name(mixer)!r} (class {cls.__qualname__} of {source})"


def named_arguments(mixer: nn.Module) -> str:
    """Return, for the repr, the constructor arguments that a mixer stores under their names."""
    names = [name for name in inspect.signature(type(mixer)).parameters if name not in FACTORY]
    return ", ".join(f"{name}={getattr(mixer, name)!r}" for name in names if hasattr(mixer, name))


def can_extend(mixer: nn.Module) -> bool:
    """Return True if the mixer has `init_state`, `extend` and `state_size`."""
    return isinstance(mixer, Extendable)


def find_residual_projections(module: nn.Module) -> list[nn.Module]:
    """Return the layers of a mixer (or MLP) that write into the residual stream. Their initial weights are smaller.

    A class declares them by their names, dotted if nested: `residual_projections = ("out_proj",)`, or `()` for none.
    If it declares nothing, they are its nn.Linear and nn.Embedding layers called "out_proj" or "fc2", at any depth.
    """
    declared = getattr(module, "residual_projections", None)
    if declared is None:
        return [
            layer
            for name, layer in module.named_modules()
            if isinstance(layer, nn.Linear | nn.Embedding) and name.rsplit(".", 1)[-1] in RESIDUAL_NAMES
        ]
    declared = (declared,) if isinstance(declared, str) else tuple(declared)
    layers = dict(module.named_modules())
    for name in declared:
        if not isinstance(layers.get(name), nn.Linear):
            known = [known for known, layer in layers.items() if isinstance(layer, nn.Linear)]
            raise ValueError(
                f"{describe_mixer(module)} declares residual_projections {declared!r}, but {name!r} is no nn.Linear of "
                f"it; its nn.Linear layers are {known}"
            )
    return [layers[name] for name in declared]


def rows_at(x: Tensor, positions: Tensor) -> Tensor:
    """Return x at these positions of each row: x [B,T,D], positions [B,n] -> [B*n,D]."""
    starts = torch.arange(0, x.shape[0] * x.shape[1], x.shape[1], device=x.device)
    return x.flatten(0, 1).index_select(0, (positions + starts.unsqueeze(1)).flatten())
