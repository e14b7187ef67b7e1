"""What a language model's run measures at its end, against the same windows measured directly."""

import math
from pathlib import Path

import pytest
import torch

from rebased.analysis.perplexity import summarise
from rebased.analysis.text_scores import ALL, TextScores
from rebased.data import Corpus
from rebased.evaluate.text import evaluate_text
from rebased.files import without_nan
from rebased.models import LanguageModel, LMConfig
from rebased.train.lm.measure import by_distance, measure
from rebased.train.world import World
from tiny_lm_run import TINY, write_text
from tolerances import TRAINED


@pytest.mark.parametrize(("max_windows", "rows"), [(3, [0, 3, 7]), (None, list(range(11))), (99, list(range(11)))])
def test_the_measured_windows_are_spread(tmp_path: Path, max_windows: int | None, rows: list[int]) -> None:
    windows = Corpus(write_text(tmp_path / "text")).windows("valid", 16)
    torch.manual_seed(0)
    model = LanguageModel(LMConfig.model_validate(TINY["model"] | {"max_len": 16})).eval()
    calls: list[tuple[int, int]] = []
    found = measure(
        model, windows, max_windows, 2, "fp32", World(0, 1, torch.device("cpu")), lambda *at: calls.append(at)
    )
    expected = evaluate_text(model, windows, rows=rows)
    assert (calls[0], calls[-1]) == ((0, len(rows)), (len(rows), len(rows)))
    assert found["tokens"] == expected.tokens()
    assert found["all"]["loss"] == pytest.approx(expected.mean(ALL), rel=TRAINED)
    assert found.get("windows") == ("spread" if len(rows) < len(windows) else None)
    assert [
        (at["nearest"], at["farthest"], at["tokens"], at["loss"], at["perplexity"]) for at in found["by_distance"]
    ] == [
        (
            nearest,
            farthest,
            kind.tokens,
            pytest.approx(kind.nats, rel=TRAINED),
            pytest.approx(kind.perplexity, rel=TRAINED),
        )
        for nearest, farthest, kind in summarise(expected).by_distance
    ]
    assert len(found["by_distance"]) > 1


def test_classes_without_tokens_are_left_out_and_numbers_are_finite() -> None:
    distances = torch.tensor([[0, 1, 1, 4, 8]])
    losses = torch.tensor([[9.0, 1.0, 2.0, 710.0, torch.nan]])
    scores = TextScores.of(losses, distances, torch.ones_like(losses, dtype=torch.bool))
    near, far, farthest = without_nan(by_distance(scores))
    assert near == {"nearest": 1, "farthest": 1, "tokens": 2, "loss": 1.5, "perplexity": math.exp(1.5)}
    assert far == {"nearest": 4, "farthest": 7, "tokens": 1, "loss": 710.0, "perplexity": None}
    assert farthest == {"nearest": 8, "farthest": 15, "tokens": 1, "loss": None, "perplexity": None}
    none = TextScores.of(losses, torch.zeros_like(distances), torch.ones_like(losses, dtype=torch.bool))
    assert by_distance(none) == []
