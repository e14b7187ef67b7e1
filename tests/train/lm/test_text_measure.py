"""What a language model's run measures at its end, against the same windows measured directly."""

from pathlib import Path

import pytest
import torch

from rebased.analysis.text_scores import ALL
from rebased.data import Corpus
from rebased.evaluate.text import evaluate_text
from rebased.models import LanguageModel, LMConfig
from rebased.train.lm.measure import measure
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
