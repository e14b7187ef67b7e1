"""One language model against each of the others on the same seeds."""

from collections.abc import Mapping, Sized
from typing import NamedTuple

from rebased.analysis import Comparison, compare_all
from rebased.report.lm.models import PARTS, LanguageModels, kind_in


class Difference(NamedTuple):
    """The difference in perplexity between two models on one part of the tokens."""

    reference: str
    other: str
    part: str  # a key of PARTS
    same_code: bool  # otherwise the code may cause the difference
    found: Comparison  # of reference - other: a negative mean favours the reference


def choose_reference(models: Mapping[str, Sized], wanted: str | None) -> str:
    """The model that the others are compared with; `models` has the runs of each.

    `wanted` is a name or a kind ("ReBased"). By default, and if no model has that name, it is the ReBased with most
    runs, or else the first model.
    """
    for choice in (wanted, "ReBased"):
        if choice is not None and choice in models:
            return choice
        if alike := [name for name in models if kind_in(name) == choice]:
            return max(alike, key=lambda name: len(models[name]))
    return next(iter(models))


def compare_models(found: LanguageModels, wanted: str | None = None) -> list[Difference]:
    """The reference against each other model, for all, AR and non-AR tokens. All p values are corrected together."""
    reference = choose_reference(found.models, wanted)
    about, pairs = [], []
    for other in found.models:
        if other != reference and found.models[other].keys() & found.models[reference].keys():
            runs = [run for model in (reference, other) for run in found.models[model].values()]
            for part in PARTS:
                about.append((reference, other, part, len({run.code for run in runs}) == 1))
                pairs.append((found.values(reference, part), found.values(other, part)))
    return [Difference(*what, one) for what, one in zip(about, compare_all(pairs), strict=True)]
