"""ReBased linear attention (arXiv 2402.10644): operator, layers, language model and MQAR lab.

The names below are here for convenience and arrive on first use: `import rebased` alone does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rebased.mixers import (
        Based,
        DeltaReBased,
        ReBased,
        ShortConv,
        SoftmaxAttention,
        mixer_names,
        register_mixer,
    )
    from rebased.models import LanguageModel, LMConfig, preset, preset_names
    from rebased.ops import (
        BASED,
        REBASED,
        PolyState,
        delta_attention,
        init_poly_state,
        poly_attention,
        poly_attention_extend,
    )
    from rebased.tasks import MQAR, Task, register_task

__version__ = "0.1.0"

__all__ = [
    "BASED",
    "MQAR",
    "REBASED",
    "Based",
    "DeltaReBased",
    "LMConfig",
    "LanguageModel",
    "PolyState",
    "ReBased",
    "ShortConv",
    "SoftmaxAttention",
    "Task",
    "delta_attention",
    "init_poly_state",
    "mixer_names",
    "poly_attention",
    "poly_attention_extend",
    "preset",
    "preset_names",
    "register_mixer",
    "register_task",
]

_HOME = {
    "rebased.mixers": (
        "Based",
        "DeltaReBased",
        "ReBased",
        "ShortConv",
        "SoftmaxAttention",
        "mixer_names",
        "register_mixer",
    ),
    "rebased.models": ("LMConfig", "LanguageModel", "preset", "preset_names"),
    "rebased.ops": (
        "BASED",
        "REBASED",
        "PolyState",
        "delta_attention",
        "init_poly_state",
        "poly_attention",
        "poly_attention_extend",
    ),
    "rebased.tasks": ("MQAR", "Task", "register_task"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rebased' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
