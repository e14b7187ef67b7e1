"""Models without memory for their weights, on the meta device: to count parameters and to check shapes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

from rebased.models.config import LMConfig
from rebased.models.language_model import LanguageModel

_DRAWS = {init.normal_, init.uniform_, init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_}


def shape_of(config: LMConfig) -> LanguageModel:
    """Return the model of a config on the meta device: all shapes, no weights. It takes milliseconds."""
    with torch.device("meta"), _NothingIsDrawn():
        return LanguageModel(config)


class _NothingIsDrawn(TorchFunctionMode):
    """Skips the drawing of random weights. On the meta device it does nothing, but torch would import its compiler for
    it, which takes two seconds."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func in _DRAWS:
            return args[0] if args else given["tensor"]
        return func(*args, **given)
