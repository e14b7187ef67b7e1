"""The tables of what was measured on MQAR, enwik8 and the mini-pile say what the committed records say."""

import csv
import math
from collections.abc import Container
from functools import cache
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from rebased.analysis.spread import Spread, describe
from rebased.paper.evidence import Evidence, read_evidence
from rebased.paper.gamma import decays_of
from rebased.paper.mqar import Group, groups_of, has_own_start
from rebased.paper.recall import FIGURE_1_MODELS, grid
from rebased.paper.reference import place_of
from rebased.paper.values import FIGURE_1, FIGURE_1_PAIRS, KERNEL_ORDER, RATES, TABLE_1, Place
from rebased.report.lm.models import compare_language_models
from rebased.report.synthetic.cells import build_results, has_learned
from rebased.runs.collect import collect
from rebased.runs.finished import Run

ROOT = Path(__file__).parents[1]
TEXT, ENWIK8 = ((ROOT / "docs" / "measurements" / name).read_text() for name in ("mqar.md", "enwik8.md"))


@cache
def evidence(*names: str) -> Evidence:
    return read_evidence([ROOT / "results" / name for name in names])


def rows_of(head: str, text: str = TEXT) -> list[list[str]]:
    """The cells of the rows of a table. `head` is how its first line begins."""
    lines = text.split(f"\n{head}", 1)[1].splitlines()[2:]
    found = takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in found]


def table_of(head: str, text: str = TEXT) -> dict[str, list[str]]:
    """The same by the first cell of each row."""
    return {first: cells for first, *cells in rows_of(head, text)}


def nearest(runs: list[Run], places: Container[Place]) -> Group:
    """The runs that are nearest to the paper's protocol."""
    return groups_of(runs, places.__contains__)[0]


def shown(spread: Spread, digits: int = 2) -> str:
    return f"{spread.mean:.{digits}f} ± {spread.sd:.{digits}f}"


def papers(place: Place) -> str:
    reading = (TABLE_1 | FIGURE_1)[place]
    sd = f" ± {reading.sd:.2f}" if reading.sd is not None else ""
    return f"{'≥ ' if reading.at_least else ''}{reading.mean:.2f}{sd}"


def heads_of(run: Run) -> int:
    return run.settings["model"]["mixers"][-1]["n_heads"]


def test_table_1() -> None:
    group = nearest(evidence("table1-t256/table1-t256.jsonl.gz").runs, TABLE_1)
    rows = table_of("| | D = 24 | paper | D = 32 | paper | D = 48")
    assert list(rows) == ["Based", *(name for name in KERNEL_ORDER if name != "Based")]
    for name, cells in rows.items():
        for d_model, ours, theirs in zip((24, 32, 48), cells[::2], cells[1::2], strict=True):
            place = Place(name, 256, 32, d_model)
            measured = place in group.cells
            assert (ours, theirs) == ((shown(group.cells[place].test), papers(place)) if measured else ("", ""))


def test_runs_of_table_1_that_did_not_learn() -> None:
    heads = "| x² | (γx)² | norm(x)² | (γx + β)² | Based | ReBased |"
    (counts,) = rows_of(heads)
    for name, count in zip(heads.strip("| ").split(" | "), counts, strict=True):
        runs = [
            run
            for run in evidence("table1-t256/table1-t256.jsonl.gz").runs
            if run.model == name and run.d_model in (24, 32) and run.lr in (3e-3, 1e-2) and heads_of(run) == 12
        ]
        assert count == f"{sum(not has_learned(run) for run in runs)} of {len(runs)}"


def test_rates_and_heads_of_table_1() -> None:
    runs = [run for run in evidence("table1-t256/table1-t256.jsonl.gz").runs if run.d_model == 32]
    rates, heads = table_of("| | 5e-4 | 1e-3"), table_of("| | 1 head | 2 heads")
    for name in ("ReBased", "Based"):
        own = [run for run in runs if run.model == name]
        by_rate = [[run for run in own if run.lr == lr and heads_of(run) == 12] for lr in RATES]
        by_heads = [[run for run in own if run.lr == 1e-2 and heads_of(run) == n] for n in (1, 2, 12)]
        assert rates[name] == [shown(describe([run.best.accuracy for run in some])) for some in by_rate]
        found = [shown(describe([run.best.accuracy for run in some])) for some in by_heads]
        assert heads[name] == [*found, papers(Place(name, 256, 32, 32))]


def test_twelve_epochs() -> None:
    group = nearest(evidence("table1-small").runs, TABLE_1)
    for name, cells in table_of("| T = 256, 32 pairs | D = 24").items():
        for d_model, ours, theirs in zip((24, 32), cells[::2], cells[1::2], strict=True):
            place = Place(name, 256, 32, d_model)
            assert (ours, theirs) == (shown(group.cells[place].test), papers(place))


def test_extrapolation() -> None:
    rows = table_of("| | 16 pairs | 32 pairs")
    cells = build_results(evidence("extrapolation-d64/extrapolation-d64.jsonl.gz").runs).cells
    assert len(cells) == len(rows)
    for cell in cells:
        by_pairs = cell.slices("by_pairs")
        assert cell.held_out is not None
        expected = [*(f"{by_pairs[pairs]:.3f}" for pairs in (16, 32, 64, 128)), shown(cell.held_out, 3)]
        assert rows[str(cell.model)] == [*expected, f"{cell.state_bytes:,}"]


def test_figure_1_and_the_rates_of_rwkv() -> None:
    runs = evidence("figure1-t256/figure1-t256.jsonl.gz", "figure1-rwkv-rates/figure1-rwkv-rates.jsonl.gz").runs
    group = nearest(runs, set(grid(FIGURE_1_MODELS)))
    mambas = build_results([run for run in runs if has_own_start(run)]).cells
    own = {place: cell for cell in mambas if (place := place_of(cell.any_run))}
    for name, cells in table_of("| | T = 128, D = 64 | paper").items():
        places = [
            Place(name, seq_len, FIGURE_1_PAIRS[seq_len], d_model) for seq_len in (128, 256) for d_model in (64, 128)
        ]
        for place, ours, theirs in zip(places, cells[::2], cells[1::2], strict=True):
            assert ours == shown((own if name == "Mamba" else group.cells)[place].test, 3)
            assert theirs == (papers(place) if place in FIGURE_1 else "")
    for d_model, name in ((64, "D = 64"), (128, "D = 128")):
        place = Place("RWKV", 128, FIGURE_1_PAIRS[128], d_model)
        by_rate = group.cells[place].runs
        means = [f"{fmean(run.best.accuracy for run in by_rate[lr].values()):.3f}" for lr in RATES]
        assert table_of("| RWKV, T = 128 |")[name] == [*means, papers(place)]


def test_gamma_beside_weight_decay() -> None:
    found = {
        (decay.place.d_model, decay.place.pairs, decay.lr): decay
        for decay in decays_of(evidence("table1-t256/table1-t256.jsonl.gz", "figure1-t256/figure1-t256.jsonl.gz"))
        if decay.place.seq_len == 256
    }
    for where, rate, epochs, gamma, alone in rows_of("| D, pairs | rate"):
        d_model, pairs = (int(words.split()[0]) for words in where.split(","))
        decay = found[d_model, pairs, float(rate)]
        assert epochs == " to ".join(map(str, sorted({min(decay.epochs), max(decay.epochs)})))
        assert (gamma, alone) == (f"{fmean(decay.gamma):.3f}", f"{fmean(decay.alone):.3f}")


def name_of(model: str, keys: str) -> str:
    """The name of a language model in the comparison."""
    heads = {"16": 12, "128": 4}
    return model if model == "Attention" else f"{model} (key_width {keys}, n_heads {heads[keys]})"


def test_six_passes_over_enwik8() -> None:
    found = compare_language_models(evidence("enwik8-six-passes/enwik8-six-passes.jsonl.gz").lm_runs)
    for model, keys, parameters, seeds, *cells in rows_of("| | keys | parameters", ENWIK8):
        name = name_of(model, keys)
        runs = found.models[name]
        assert (parameters, seeds) == (f"{next(iter(runs.values())).parameters / 1e6:.1f} million", str(len(runs)))
        for part, digits, cell in zip(("all", "ar", "non_ar"), (1, 2, 1), cells, strict=False):
            spread = describe(list(found.values(name, part).values()))
            half = f" ± {(spread.high - spread.low) / 2:.{digits}f}" if spread.n > 1 else ""
            assert cell == f"{spread.mean:.{digits}f}{half}"
    for model, *cells in rows_of("| perplexity, tokens ago", ENWIK8):
        kind, _, keys = model.partition(", keys of ")
        means = [fmean(values) for values in found.by_distance[name_of(kind, keys)].values()]
        assert cells == [f"{mean:#.3g}" if mean >= 10 else f"{mean:.2f}" for mean in means[2:]]


def test_one_pass_over_enwik8() -> None:
    found = compare_language_models(evidence("enwik8-one-pass/enwik8-one-pass.jsonl.gz").lm_runs)
    rows = table_of("| perplexity after one pass", ENWIK8)
    assert sorted(rows) == sorted(found.models)
    for model, (seeds, *cells) in rows.items():
        assert seeds == str(len(found.models[model]))
        for part, digits, cell in zip(("all", "ar", "non_ar"), (1, 1, 0), cells, strict=True):
            spread = describe(list(found.values(model, part).values()))
            assert cell == f"{spread.mean:.{digits}f} ± {(spread.high - spread.low) / 2:.{digits}f}"
    means = (rows[model][1].partition(" ")[0] for model in ("Attention", "Based", "ReBased"))
    assert f"| {', '.join(means)} |" in (ROOT / "README.md").read_text()


def test_recall_in_the_suite_campaign() -> None:
    with (ROOT / "results" / "suites" / "campaign" / "runs.csv").open() as file:
        runs = [run for run in csv.DictReader(file) if run["task"] == "MQAR"]
    rows = table_of(
        "| mixer | 9,216 bytes | 24,576 bytes", (ROOT / "docs" / "measurements" / "recall_per_byte.md").read_text()
    )
    assert set(rows) == {run["mixer"] for run in runs}
    for mixer, (*recall, learned) in rows.items():
        began = []
        for state_bytes, cell in zip(("9216", "24576"), recall, strict=True):
            own = [run for run in runs if run["mixer"] == mixer and run["state_bytes"] == state_bytes]
            spread = describe([float(run["held_out"]) for run in own if run["stage"] == "score"])
            assert cell == f"{spread.mean:.2f} ± {(spread.high - spread.low) / 2:.2f}"
            began.append(str(sum(run["began"] == "1" for run in own if run["stage"] == "choose")))
        assert learned == ", ".join(began)


def test_losses_on_the_mini_pile_with_new_seeds() -> None:
    folder = ROOT / "results" / "mini-pile"
    found: dict[tuple[str, int], list[tuple[int, dict[str, Any]]]] = {}
    for run in collect([folder / "new-seeds.jsonl.gz"]).lm_runs:
        mixer = run.settings["model"]["mixers"][-1]
        test = run.lines[-1]["test"]
        found.setdefault((mixer["name"], mixer["conv_width"]), []).append((run.settings["train"]["seed"], test))
    rows = table_of("| model | seeds 45", (ROOT / "docs" / "measurements" / "mini_pile.md").read_text())
    labels = {
        "Gated DeltaNet, with both": ("gated_delta_net", 4),
        "`delta_rebased` with a gate, with both": ("delta_rebased", 4),
        "Gated DeltaNet": ("gated_delta_net", 0),
        "Transformer of today": ("attention", 0),
        "`delta_rebased` with a gate": ("delta_rebased", 0),
    }
    assert set(rows) == set(labels)
    for label, (losses, mean, ar, perplexity) in rows.items():
        tests = [test for _, test in sorted(found[labels[label]], key=lambda each: each[0])]
        every = [test["all"]["loss"] for test in tests]
        assert losses == ", ".join(f"{loss:.2f}" for loss in every)
        assert mean.strip("*") == f"{fmean(every):.3f}"
        assert ar == f"{fmean(test['ar']['loss'] for test in tests):.3f}"
        assert perplexity == f"{math.exp(fmean(every)):.1f}"
