"""Which models are compared with which, on which seeds and split."""

import pytest

from fake_records import fake_run
from rebased.paper.reference import PAPER
from rebased.report.synthetic.cells import build_results
from rebased.report.synthetic.comparisons import choose_references, compare_models
from rebased.runs.finished import Run

LEVELS = {"rebased": 0.8, "based": 0.5, "mamba": 0.3}


def sweep(seeds: int = 5, **more: object) -> list[Run]:
    return [
        fake_run(model, [level + d_model / 1000 + (seed % 3) / 100], seed=seed, d_model=d_model, **more)  # type: ignore[arg-type]
        for model, level in LEVELS.items()
        for d_model in (24, 48)
        for seed in range(42, 42 + seeds)
    ]


def test_two_families() -> None:
    pooled, single = compare_models(build_results(sweep()), "ReBased")
    assert [(one.other, one.widths) for one in pooled.contrasts] == [("Based", (24, 48)), ("Mamba", (24, 48))]
    assert [(one.other, one.widths) for one in single.contrasts] == [
        ("Based", (24,)),
        ("Based", (48,)),
        ("Mamba", (24,)),
        ("Mamba", (48,)),
    ]
    assert [one.found.difference.mean for one in pooled.contrasts] == pytest.approx([0.3, 0.5])
    assert all(one.split == "test" and one.same_code for one in single.contrasts)


def test_the_held_out_split_is_compared_where_both_have_it() -> None:
    runs = [fake_run(m, [0.5, 0.6], held_out=[0.1, level], seed=s) for m, level in LEVELS.items() for s in (1, 2)]
    (single,) = compare_models(build_results(runs), "ReBased")
    assert {one.split for one in single.contrasts} == {"held out"}
    assert single.contrasts[0].found.difference.mean == pytest.approx(0.3)
    mixed = [run for run in runs if run.model != "Based"] + [fake_run("based", [0.55], seed=s) for s in (1, 2)]
    (single,) = compare_models(build_results(mixed), "ReBased")
    assert [(one.other, one.split) for one in single.contrasts] == [("Based", "test"), ("Mamba", "held out")]


def test_missing_seeds_are_left_out_and_counted() -> None:
    runs = [run for run in sweep() if not (run.model == "Based" and run.seed > 44)]
    _, single = compare_models(build_results(runs), "ReBased")
    assert single.contrasts[0].found.seeds == (42, 43, 44)
    assert single.contrasts[0].found.unpaired == 2


def test_over_widths_all_runs_that_were_not_used_are_counted() -> None:
    runs = [run for run in sweep() if not (run.model != "Mamba" and run.d_model == 48 and run.seed > 44)]
    pooled, _ = compare_models(build_results(runs), "ReBased")
    assert [(one.other, one.found.seeds, one.found.unpaired) for one in pooled.contrasts] == [
        ("Based", (42, 43, 44), 4),  # two seeds of both models at D = 24
        ("Mamba", (42, 43, 44), 6),
    ]


def test_different_code_is_told() -> None:
    runs = [fake_run(seed=1, commit="a" * 40), fake_run("based", seed=1, commit="b" * 40)]
    (single,) = compare_models(build_results(runs), "ReBased")
    assert not single.contrasts[0].same_code


def test_models_that_never_meet_are_not_compared() -> None:
    assert compare_models(build_results([fake_run(seed=1), fake_run("based", seed=2)]), "ReBased") == []
    assert compare_models(build_results([fake_run()]), "ReBased") == []


def references(runs: list[Run], wanted: str | None = None) -> dict[str, str]:
    chosen = choose_references(build_results(runs, PAPER), wanted)
    return {str(model): str(reference) for model, reference in chosen.items()}


def test_reference() -> None:
    assert references(sweep(1)) == {"Based": "ReBased", "Mamba": "ReBased"}
    assert references(sweep(1), "Mamba") == {"ReBased": "Mamba", "Based": "Mamba"}
    with pytest.raises(ValueError, match="there is no model 'Bsed' in these runs; did you mean 'Based'"):
        references(sweep(1), "Bsed")
    assert references([fake_run("mamba"), fake_run("mamba", d_model=48), fake_run("based")]) == {"Based": "Mamba"}


def test_like_is_compared_with_like() -> None:
    def heads(model: str, n: int, seed: int = 1) -> Run:
        return fake_run(model, seed=seed, changes={"model": {"mixers": {1: {"n_heads": n}}}})

    runs = [heads(model, n) for model in ("rebased", "based") for n in (1, 2, 12)]
    assert references([*runs, fake_run("mamba", seed=1)]) == {
        "ReBased (n_heads 1)": "ReBased (n_heads 12)",  # which is the paper's, and so the usual one
        "ReBased (n_heads 2)": "ReBased (n_heads 12)",
        "Based (n_heads 1)": "ReBased (n_heads 1)",
        "Based (n_heads 2)": "ReBased (n_heads 2)",
        "Based (n_heads 12)": "ReBased (n_heads 12)",
        "Mamba": "ReBased (n_heads 12)",
    }
    assert references(runs, "Based")["ReBased (n_heads 2)"] == "Based (n_heads 2)"
    (single,) = compare_models(build_results(runs))
    assert single.reference == "ReBased"
    assert [(one.reference, one.other) for one in single.contrasts][:2] == [
        ("ReBased (n_heads 1)", "Based (n_heads 1)"),
        ("ReBased (n_heads 2)", "Based (n_heads 2)"),
    ]
    (single,) = compare_models(build_results(runs), "Based (n_heads 2)")
    assert single.reference == "Based (n_heads 2)"
    assert len(single.contrasts) == 5
