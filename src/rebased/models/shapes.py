"""A model without the memory for its weights, to count and to check: on the meta device, and at once."""

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
    with torch.device("meta"), _NothingIsDrawn():
        return LanguageModel(config)


class _NothingIsDrawn(TorchFunctionMode):
    """There is nothing to draw on the meta device, and torch would import its whole compiler, for two seconds, to do
    nothing."""

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
