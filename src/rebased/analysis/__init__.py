"""Pure functions of numbers: means and intervals, paired tests, choice of rates, perplexity, attention maps.

The names below arrive on first use: statistics need scipy, a sweep or a training run does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rebased.analysis.attention import soft_iou
    from rebased.analysis.paired import Comparison, compare, compare_all, holm, in_words, wilcoxon_limit
    from rebased.analysis.selection import Choice, choose_lr, expected_validation_performance
    from rebased.analysis.spread import Spread, describe

__all__ = [
    "Choice",
    "Comparison",
    "Spread",
    "choose_lr",
    "compare",
    "compare_all",
    "describe",
    "expected_validation_performance",
    "holm",
    "in_words",
    "soft_iou",
    "wilcoxon_limit",
]

_HOME = {
    "attention": ("soft_iou",),
    "paired": ("Comparison", "compare", "compare_all", "holm", "in_words", "wilcoxon_limit"),
    "selection": ("Choice", "choose_lr", "expected_validation_performance"),
    "spread": ("Spread", "describe"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'rebased.analysis' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"rebased.analysis.{_MODULE_OF[name]}"), name)
    return value
