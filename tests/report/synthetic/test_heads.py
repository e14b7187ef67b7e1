"""How many heads the paper may have used: only what was run with every number of them tells."""

from typing import Any

from fake_records import fake_run
from rebased.paper.reference import PAPER
from rebased.report.synthetic.cells import build_results
from rebased.report.synthetic.heads import cells_by_heads
from rebased.report.synthetic.narrative import heads_verdict
from rebased.runs.finished import Run


def runs_of(heads: int, accuracy: float, d_model: int = 24, model: str = "rebased") -> list[Run]:
    """Three seeds around an accuracy."""
    changes = {"model": {"mixers": {1: {"n_heads": heads}}}}
    shape: dict[str, Any] = {"seq_len": 256, "pairs": (32,), "d_model": d_model, "changes": changes}
    return [fake_run(model, [accuracy + 0.01 * (seed - 43)], seed=seed, **shape) for seed in (42, 43, 44)]


def test_distances() -> None:
    # Table 1 has 0.59 for ReBased and 0.45 for Based at D = 24, and 0.99 at D = 48
    rebased = [*runs_of(1, 0.79), *runs_of(12, 0.58)]
    runs = [*rebased, *runs_of(1, 0.35, model="based"), *runs_of(12, 0.45, model="based"), *runs_of(1, 0.5, 48)]
    places = cells_by_heads(build_results(runs, PAPER))
    assert list(places) == ["T = 256, 32 pairs, D = 24"]
    assert heads_verdict(places) == (
        "Nearest to the paper on average: 12 heads. Mean distance from the paper's values, and cells that agree with "
        "them: 1 head 0.150, 0 of 2; 12 heads 0.005, 1 of 2. This ranks numbers and is no test: the nearest was picked "
        "by them, and the cells are not independent."
    )
    assert "1 head 0.200, 0 of 1; 12 heads 0.010, 1 of 1." in heads_verdict(
        cells_by_heads(build_results(rebased, PAPER))
    )


def test_nothing_to_tell() -> None:
    assert cells_by_heads(build_results([*runs_of(1, 0.5), *runs_of(12, 0.5, 48)])) == {}
    unknown = cells_by_heads(build_results([run for n in (1, 2) for run in runs_of(n, 0.5, d_model=36)], PAPER))
    assert "The paper has no value" in heads_verdict(unknown)
