"""Models without memory for their weights, on the meta device: to count parameters and to check shapes and sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

from rebased.mixers import MixerFailed
from rebased.models.block import Block
from rebased.models.config import LMConfig
from rebased.models.language_model import LanguageModel
from rebased.ops.backend import check_memory

_DRAWS = {init.normal_, init.uniform_, init.kaiming_uniform_, Tensor.normal_, Tensor.uniform_}


def shape_of(config: LMConfig) -> LanguageModel:
    """Return the model of a config on the meta device: all shapes, no weights. It takes milliseconds.

    A user's own mixer may need real tensors. Then the model has weights, and lies on the CPU.
    """
    try:
        with _without_weights():
            return LanguageModel(config)
    except MixerFailed:
        with torch.random.fork_rng(devices=[]):
            return LanguageModel(config)


def weight_bytes(config: LMConfig) -> int:
    """Return the bytes of a model's weights in fp32. Only one layer per mixer of the pattern is built, without memory.

    Raises ValueError if a tensor would have more than 2**63 bytes, or a mixer refuses its arguments.
    """
    numbers, period = 0, len(config.mixers)
    with _without_weights():
        for layer in range(period):
            block = Block(config, layer)
            repeats = -(-(config.n_layers - layer) // period)
            numbers += repeats * sum(parameter.numel() for parameter in block.parameters())
    return 4 * numbers + _embedding_bytes(config)


def check_model_fits(config: LMConfig, copies: int = 1, more: int = 0) -> None:
    """Raise ValueError if the main memory cannot hold a model's weights, `copies` times, and `more` bytes beside them.

    A mixer that cannot be built without weights is not counted.
    """
    what = f"a model of d_model {config.d_model} and {config.n_layers} layers needs"
    check_memory(copies * _embedding_bytes(config), what)  # first, since layers as wide may have sizes that overflow
    try:
        needed = weight_bytes(config)
    except Exception as error:
        if isinstance(error, ValueError) and not isinstance(error, MixerFailed):
            raise
        needed = 0  # a user's own mixer may need real tensors: it is built with weights soon
    check_memory(copies * needed + more, what)


def _embedding_bytes(config: LMConfig) -> int:
    return 4 * (config.vocab_size + config.max_len) * config.d_model


@contextmanager
def _without_weights() -> Iterator[None]:
    """Inside, layers are made on the meta device. Sizes that no tensor can have raise ValueError."""
    try:
        with torch.device("meta"), _NothingIsDrawn():
            yield
    except (RuntimeError, TypeError, OverflowError, MixerFailed) as error:
        if "overflow" not in str(error.__cause__ or error).lower():
            raise
        raise ValueError("the model has a weight of more than 2**63 bytes; choose smaller sizes") from error


class _NothingIsDrawn(TorchFunctionMode):
    """Skips the drawing of random weights. On the meta device it does nothing, but torch would import its compiler for
    it, which takes two seconds."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
