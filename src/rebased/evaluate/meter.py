"""Accuracy of recall: exact counts over labelled tokens, overall and by number of pairs and length."""

from collections import Counter
from collections.abc import Callable

from torch import Tensor

from rebased.tasks.mqar import IGNORED


def count_correct(predictions: Tensor, labels: Tensor) -> tuple[int, int]:
    """(correct, total) over labelled tokens. Any shape, the same for both: [B,T], or [L] labelled positions alone."""
    if predictions.shape != labels.shape:
        raise ValueError(
            f"predictions {list(predictions.shape)} and labels {list(labels.shape)} differ in shape: "
            "give the predicted token at each label, e.g. logits.argmax(-1)"
        )
    labelled = labels != IGNORED
    return int(((predictions == labels) & labelled).sum()), int(labelled.sum())


class RecallMeter:
    """Adds up the counts of batches; each token weighs the same, whatever the sizes of the batches."""

    def __init__(self) -> None:
        self._correct: Counter[tuple[int, int]] = Counter()  # (seq_len, kv_pairs) -> tokens
        self._total: Counter[tuple[int, int]] = Counter()

    def update(self, seq_len: int, kv_pairs: int, correct: int, total: int) -> None:
        if not 0 <= correct <= total:
            raise ValueError(f"correct must lie between 0 and total, got correct={correct}, total={total}")
        self._correct[seq_len, kv_pairs] += correct
        self._total[seq_len, kv_pairs] += total

    def accuracy(self) -> float:
        return self._accuracy_by(lambda seq_len, kv_pairs: 0)[0]

    def by_pairs(self) -> dict[int, float]:
        return self._accuracy_by(lambda seq_len, kv_pairs: kv_pairs)

    def by_length(self) -> dict[int, float]:
        return self._accuracy_by(lambda seq_len, kv_pairs: seq_len)

    def _accuracy_by(self, key: Callable[[int, int], int]) -> dict[int, float]:
        correct: Counter[int] = Counter()
        total: Counter[int] = Counter()
        for (seq_len, kv_pairs), count in self._total.items():
            correct[key(seq_len, kv_pairs)] += self._correct[seq_len, kv_pairs]
            total[key(seq_len, kv_pairs)] += count
        if not total.total():
            raise ValueError("no labelled token was counted yet: call update first")
        return {name: correct[name] / total[name] for name in sorted(total) if total[name]}
