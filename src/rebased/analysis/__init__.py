"""Pure functions of numbers: means and intervals, paired tests, choice of rates, perplexity, attention maps."""

from rebased.analysis.attention import soft_iou
from rebased.analysis.budget import expected_validation_performance
from rebased.analysis.paired import Comparison, compare, compare_all, holm, in_words, sign_test, wilcoxon_limit
from rebased.analysis.selection import Choice, choose_lr
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
    "sign_test",
    "soft_iou",
    "wilcoxon_limit",
]
