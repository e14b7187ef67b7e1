"""Gamma and beta of queries and keys during training: mean and standard deviation over features, for the record."""

from typing import Any

import torch

from rebased.mixers import unwrap
from rebased.models import LanguageModel


@torch.no_grad()
def norm_statistics(model: LanguageModel) -> dict[str, dict[str, Any]]:
    """{"1": {"q.gamma": {"mean", "sd"}, ...}} by layer, of mixers that have `qk_parameters`; else empty.

    The weights are copied from their device once. Where they are sharded over processes, all must call it.
    """
    found = {
        f"{layer}/{name}": parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        for layer, block in enumerate(model.blocks)
        for name, parameter in getattr(unwrap(block.mixer), "qk_parameters", dict)().items()
    }
    if not found:
        return {}
    values = torch.cat([parameter.detach().flatten().float() for parameter in found.values()]).cpu()
    statistics: dict[str, dict[str, Any]] = {}
    for place, part in zip(found, values.split([each.numel() for each in found.values()]), strict=True):
        layer, _, name = place.partition("/")
        numbers = part.double().numpy()
        both = {"mean": numbers.mean(), "sd": numbers.std()}
        statistics.setdefault(layer, {})[name] = {key: float(f"{value:.6g}") for key, value in both.items()}
    return statistics
