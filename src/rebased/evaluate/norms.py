"""Gamma and beta of queries and keys during training: mean, standard deviation and histogram, for the record."""

from typing import Any

import numpy as np
import torch

from rebased.mixers import unwrap
from rebased.models import LanguageModel

BINS = 16


@torch.no_grad()
def norm_statistics(model: LanguageModel) -> dict[str, dict[str, Any]]:
    """{"1": {"q.gamma": {"mean", "sd", "low", "high", "counts"}, ...}} by layer, of mixers that have `qk_parameters`.

    `sd` is over features; `counts` are those of 16 equal bins from `low` to `high`. Empty for a model without such
    parameters. The weights are copied from their device once. Where they are sharded over processes, all must call it.
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
        counts, edges = np.histogram(numbers, BINS)
        four = {"mean": numbers.mean(), "sd": numbers.std(), "low": edges[0], "high": edges[-1]}
        rounded = {key: float(f"{value:.6g}") for key, value in four.items()}
        statistics.setdefault(layer, {})[name] = rounded | {"counts": counts.tolist()}
    return statistics
