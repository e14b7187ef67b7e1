"""Accuracy by number of heads, beside the paper's."""

from typing import Any

from fake_records import fake_run
from rebased.paper.reference import PAPER
from rebased.report.synthetic.cells import build_results
from rebased.report.synthetic.heads import cells_by_heads
from rebased.report.synthetic.tables import heads_table
from rebased.runs.finished import Run


def runs_of(heads: int, accuracy: float, d_model: int = 24, model: str = "rebased") -> list[Run]:
    """Three seeds around an accuracy."""
    changes = {"model": {"mixers": {1: {"n_heads": heads}}}}
    shape: dict[str, Any] = {"seq_len": 256, "pairs": (32,), "d_model": d_model, "changes": changes}
    return [fake_run(model, [accuracy + 0.01 * (seed - 43)], seed=seed, **shape) for seed in (42, 43, 44)]


def test_each_number_of_heads_has_a_row_beside_the_paper() -> None:
    # Table 1 has 0.59 for ReBased and 0.45 for Based at D = 24
    runs = [*runs_of(1, 0.79), *runs_of(12, 0.58), *runs_of(1, 0.35, model="based"), *runs_of(12, 0.45, model="based")]
    places = cells_by_heads(build_results([*runs, *runs_of(1, 0.5, 48)], PAPER))
    assert list(places) == ["T = 256, 32 pairs, D = 24"]
    table = heads_table(places)
    found = {(row[0], row[table.head.index("heads")]): row[table.head.index("distance")] for row in table.rows}
    assert found == {
        ("ReBased", "1"): "0.200",
        ("ReBased", "12"): "0.010",
        ("Based", "1"): "0.100",
        ("Based", "12"): "0.000",
    }


def test_one_number_of_heads_is_nothing_to_compare() -> None:
    assert cells_by_heads(build_results([*runs_of(1, 0.5), *runs_of(12, 0.5, 48)])) == {}
