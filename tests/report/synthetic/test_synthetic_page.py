"""The page of runs on synthetic tasks: sections as the data allow, warnings, and what is embedded."""

import csv
import json
import re
import statistics
from typing import Any
from xml.etree import ElementTree

import pytest

from fake_records import fake_run
from page_reader import assert_self_contained
from rebased.paper.reference import PAPER
from rebased.report.drawing import SERIES
from rebased.report.page import Page
from rebased.report.report import Report
from rebased.report.synthetic.figures import accuracy_by_width, byte_ticks, dodge, mean_curves
from rebased.report.synthetic.page import SyntheticReport
from rebased.report.synthetic.tables import difference_of, width_table
from rebased.runs.collect import Collection
from rebased.runs.finished import Run


def sweep(**more: Any) -> list[Run]:
    return [
        fake_run(model, [0.1, level + width / 1000 - lr + seed / 1e4], seed=seed, lr=lr, d_model=width, **more)
        for model, level in (("rebased", 0.8), ("based", 0.5))
        for width in (24, 48)
        for lr in (1e-3, 1e-2)
        for seed in (42, 43, 44)
    ]


def headings(report: Report) -> list[str]:
    return [section.heading for section in report.page("Title", "rebased report x").sections]


@pytest.fixture(scope="module")
def report() -> Report:
    return Report(Collection(runs=sweep(seq_len=256, pairs=(32, 64))))


@pytest.fixture(scope="module")
def page(report: Report) -> Page:
    return report.page("Title", "rebased report x")


def test_sections(page: Page) -> None:
    assert [section.heading for section in page.sections] == [
        "",
        "Accuracy by width",
        "Paired comparisons: over all widths together",
        "Paired comparisons: at each width",
        "Accuracy by tuning budget",
        "Accuracy by state size",
        "Learning curves",
        "Accuracy by pairs",
        "All results",
        "All runs",
        "How to make this page again",
    ]


def test_the_page_is_whole_and_holds_its_data(report: Report, page: Page) -> None:
    html = page.to_html()
    reader = assert_self_contained(html)
    data = json.loads(reader.texts["script"][0])
    assert [run["digest"] for run in data["runs"]] == [run.digest for run in report.found.runs]
    first, run = data["runs"][0], report.found.runs[0]
    config = data["configs"][first["config"]]
    config["train"] |= {"lr": first["lr"], "seed": first["seed"]}
    assert config == run.settings
    assert first["test"] == [round(accuracy, 4) for accuracy in run.accuracies]
    assert len(data["configs"]) == 4
    assert data["results"][0]["test"]["mean"] == pytest.approx(SyntheticReport(report.found).results.cells[0].test.mean)
    assert "0.827 ± 0.000" in reader.texts["td"]
    assert "rebased report x" in reader.texts["code"]
    assert len(html) < 500_000


def test_every_figure_is_sound_and_says_its_models(page: Page) -> None:
    figures = re.findall(r"<figure .*?</figure>", page.to_html(), flags=re.DOTALL)
    assert len(figures) == 5
    for figure in figures:
        words = {"".join(element.itertext()).strip() for element in ElementTree.fromstring(figure).iter()}
        assert {"ReBased", "Based"} <= words
        panels = re.findall(r'<svg role="img".*?</svg>', figure, flags=re.DOTALL)
        assert len(panels) == (1 if "by model width" in figure or "by bytes of state" in figure else 2)
        assert all("var(--series-0)" in panel and "var(--series-1)" in panel for panel in panels)


def test_one_run_makes_a_page() -> None:
    single = Report(Collection(runs=[fake_run()]))
    assert headings(single) == ["", "Warnings", "Accuracy by width", "Accuracy by state size", "Learning curves",
                                "All results", "All runs", "How to make this page again"]  # fmt: skip
    assert single.warnings == ["1 cell of 1 with one seed only: no spread, no test."]


def test_a_run_that_recalled_nothing_makes_a_page() -> None:
    dead = Report(Collection(runs=[fake_run(accuracies=[], status="diverged")]))
    assert "Learning curves" not in headings(dead)
    assert "0.000" in dead.page("Title", "x").to_html()


def test_a_mixer_that_is_not_known_here_has_no_state_size() -> None:
    run = fake_run()
    run.settings["model"]["mixers"][1] = {"name": "my_mixer", "knob": 3}
    report = Report(Collection(runs=[run]))
    assert list(map(str, SyntheticReport(report.found).results.models)) == ["short_conv + my_mixer"]
    assert "Accuracy by state size" not in headings(report)
    both = Report(Collection(runs=[run, fake_run(seed=43)])).page("Title", "x")
    (body,) = [section.body for section in both.sections if section.heading == "Accuracy by state size"]
    assert "<p>Not shown: short_conv + my_mixer. The size of a state" in body


def test_the_papers_values_stand_beside_ours() -> None:
    report = Report(Collection(runs=sweep(seq_len=256, pairs=(32,))), values=PAPER)
    html = report.page("Title", "x").to_html()
    assert "<td>0.59 ± 0.06</td>" in html
    assert "epochs 5 instead of 64; 10 examples instead of 100,000." in html
    assert report.summary[-1].startswith(
        "The paper has a value for 4 of these 4 cells: 0 agree within 0.1 by two one-sided tests, 3 differ, 1 are too"
    )


def test_cells_with_other_heads_are_not_counted_as_the_papers() -> None:
    one_head = fake_run(seq_len=256, pairs=(32,), changes={"model": {"mixers": {1: {"n_heads": 1}}}})
    assert (
        Report(Collection(runs=[*sweep(seq_len=256, pairs=(32,)), one_head]), values=PAPER)
        .summary[-1]
        .startswith(
            "The paper has a value for 4 of these 5 cells, not counting 1 with other heads than the authors' code: 0 a"
        )
    )


def test_a_verdict_counts_what_was_tested_alone() -> None:
    def verdicts(runs: list[Run]) -> list[str]:
        return [text for text in Report(Collection(runs=runs)).summary if text.startswith("At each width")]

    one = [fake_run(model, [level]) for model, level in (("rebased", 0.8), ("based", 0.5))]
    assert verdicts(one) == ["At each width: 1 comparison, none of them tested (one seed, or no spread between seeds)."]
    more = [fake_run(m, [level + s / 1e4], seed=s) for m, level in (("rebased", 0.8), ("mamba", 0.1)) for s in (43, 44)]
    more[0] = fake_run(accuracies=[0.81], seed=43)
    assert verdicts([*one, *more]) == [
        "At each width: ReBased is better in 1 (Mamba) and worse in 0 of 2 comparisons, 0 undecided, 1 not tested (one "
        "seed, or no spread between seeds). Measured on the test split; paired t test, Holm p < 0.05."
    ]


def test_nothing_is_decided_about_a_model_that_never_learned() -> None:
    """It is behind by 0.6 on every seed, and the same at another rate: it was not trained, so it lost to nobody."""
    levels = (("rebased", 0.6), ("based", 0.4), ("mamba", 0.033))
    runs = [
        fake_run(model, [level + s / 1e3 * (model == "based")], seed=s, lr=lr)
        for model, level in levels
        for s in (42, 43, 44)
        for lr in (1e-3, 1e-2)
    ]
    for run in runs:
        run.epochs[0]["test"]["accuracy"] += run.seed / 1e5 * (run.model == "Mamba")
    report = Report(Collection(runs=runs))
    assert report.summary[1].startswith(
        "At each width: ReBased is better in 1 (Based) and worse in 0 of 2 comparisons, 0 undecided, 1 with a model "
        "that never learned."
    )
    dead = next(row for row in report.tables()["compared_at_each_width"].to_records() if "Mamba" in row["comparison"])
    assert [value for name, value in dead.items() if name.endswith((" p", " p*"))] == [None] * 4
    effects = re.search(r'<figure data-name="effects">.*?</figure>', report.page("Title", "x").to_html(), re.DOTALL)[0]
    assert "ReBased − Based" in effects
    assert "Mamba" not in effects


def test_a_page_opens_with_at_most_five_sentences_and_a_plot() -> None:
    many = [run for length in (32, 64, 96, 128, 160, 192) for run in sweep(seq_len=length)]
    for run in many:
        run.epochs[-1]["test"]["accuracy"] += run.seed / 1e4 * (run.model == "Based")  # not the same for all seeds
    top = Report(Collection(runs=many)).page("Title", "x").sections[0].body
    assert top.index("</ul>") < top.index("<svg") < top.index("<details>")
    assert top[: top.index("</ul>")].count("<li>") == 5
    assert "Show 3 more sentences" in top


def test_a_page_without_reference_values_does_not_speak_of_a_paper(page: Page) -> None:
    assert "paper" not in re.sub(r"<style>.*?</style>|<script.*?</script>", "", page.to_html(), flags=re.DOTALL)


def test_mamba_with_its_own_initialization_has_no_value_of_the_paper() -> None:
    papers, own = (fake_run("mamba", [0.1], seq_len=128, pairs=(16,), d_model=64) for _ in range(2))
    for mixer in papers.settings["model"]["mixers"]:
        mixer["dt_init"] = "paper"
    assert PAPER.of(papers).values["accuracy"].mean == 0.73
    assert "accuracy" not in PAPER.of(own).values


def test_every_warning() -> None:
    runs = [
        fake_run(seed=42),
        fake_run(seed=43, commit="f" * 40),
        fake_run(seed=44, status=None),
        fake_run(seed=45, status="failed"),
        fake_run(seed=46, status="diverged", accuracies=[]),
        fake_run(seed=42, lr=1e-2, accuracies=(0.1, 0.6)),
    ]
    found = Collection(
        runs,
        files=9,
        damaged_lines=3,
        damaged_files=["a/record.jsonl"],
        nameless=1,
        other=2,
        other_names=["b (its lr)", "c (its seed)"],
        repeated=4,
    )
    assert Report(found).warnings == [
        "3 damaged lines skipped, in a/record.jsonl.",
        "1 record left out: the first line is not readable, in a/record.jsonl.",
        "2 records left out because no run on a synthetic task or of a language model has such settings: b (its lr), "
        "c (its seed).",
        "4 records left out: of runs that were found already. One record of each run counts, a whole one if there is "
        "one.",
        "The runs were made with 2 versions of the code, which may cause differences between them. "
        "0.1.0 0123456789: 5 runs; 0.1.0 ffffffffff: 1 run.",
        "1 run unfinished: in no result, but in the list of all runs.",
        "1 run failed: in no result, but in the list of all runs.",
        "1 run diverged. Each counts with the best accuracy it had reached. 1 of them diverged before "
        "the end of the first epoch and count with 0.",
        "In 1 cell some learning rates have fewer seeds than others. They could not be chosen.",
    ]


def test_where_models_outnumber_colours_settings_have_panels_of_their_own() -> None:
    runs = [
        fake_run(model, [0.5], seed=seed, d_model=width, changes={"model": {"mixers": {1: {"n_heads": heads}}}})
        for model in ("rebased", "based", "conv_attention")
        for heads in (1, 2, 12)
        for width in (24, 48)
        for seed in (42, 43)
    ]
    few = accuracy_by_width(SyntheticReport(Collection(runs=runs[:24])).results).to_html()
    assert "ReBased (n_heads 2)" in few
    assert "n_heads 2</p>" not in few
    many = accuracy_by_width(SyntheticReport(Collection(runs=runs)).results).to_html()
    for heads in (1, 2, 12):
        assert f"<p>T = 32, 4 pairs, n_heads {heads}</p>" in many
    assert many.count("</svg>ReBased</li>") == 1


def test_tables_for_files() -> None:
    tables = Report(Collection(runs=[*sweep(), *sweep(seq_len=64, pairs=(4, 8))])).tables()
    assert list(tables) == [
        "results",
        "by_width_T_32_4_pairs",
        "by_width_T_64_4_pairs_T_64_4_8_pairs",
        "compared_over_all_widths_together",
        "compared_at_each_width",
        "budgets",
        "by_pairs",
        "runs",
    ]
    for table in tables.values():
        assert len(set(table.head)) == len(table.head)  # so that a data frame has a name for each column
        assert {len(row) for row in table.rows} == {len(table.head)}


def test_latex_takes_every_name() -> None:
    kernels = ("none", "norm", "scale", "affine", "norm_affine")
    runs = [
        fake_run(accuracies=[0.5], seed=seed, changes={"model": {"mixers": {1: {"qk_transform": kernel}}}})
        for kernel in kernels
        for seed in (42, 43)
    ]
    for table in Report(Collection(runs=[*runs, *sweep(seq_len=256, pairs=(32, 64))])).tables().values():
        assert table.to_latex().isascii()


def test_a_row_of_panels_is_a_task() -> None:
    runs = [fake_run(seq_len=length, d_model=width) for length in (32, 64) for width in (12, 24, 36, 48)]
    assert '<div class="panels columns-4">' in mean_curves(SyntheticReport(Collection(runs=runs)).results).to_html()
    assert '<div class="panels columns-3">' in mean_curves(SyntheticReport(Collection(runs=runs[:7])).results).to_html()


def test_sizes_of_states_have_ticks_of_their_own() -> None:
    assert byte_ticks([5000, 5000]) == [5000]
    assert byte_ticks([5000, 7000]) == [5000, 7000]
    assert byte_ticks([900, 5000]) == [1024, 2048, 4096]
    assert byte_ticks([1024, 2**20]) == [2.0**power for power in (10, 13, 16, 19)]


def test_bars_of_one_place_stand_beside_each_other() -> None:
    aside = dodge([16, 48], ["a", "b", "c"])
    assert 0.9 < aside["a"] < aside["b"] == 1 < aside["c"] < 1.1
    assert dodge([24], ["a", "b"]) == {"a": 1, "b": 1}  # a place alone has no neighbours


def test_a_mean_over_one_width_is_not_told() -> None:
    narrow = [run for run in sweep() if run.d_model == 24]
    several, one = (
        width_table(SyntheticReport(Collection(runs=runs)).results, "T = 32, 4 pairs") for runs in (sweep(), narrow)
    )
    assert several.head == ("model", "D = 24", "D = 48", "mean")
    assert one.head == ("model", "D = 24")
    assert [len(row) for row in one.rows] == [2, 2]


def test_what_sets_both_apart_is_said_once() -> None:
    assert difference_of("ReBased (n_heads 2)", "Based (n_heads 2)") == "ReBased − Based (n_heads 2)"
    assert difference_of("ReBased (n_heads 12)", "(γx)² (n_heads 2)") == "ReBased (n_heads 12) − (γx)² (n_heads 2)"
    assert difference_of("ReBased", "(γx)²") == "ReBased − (γx)²"


def idle(chance_level: float = 0.04, **more: Any) -> list[Run]:
    """Runs of two models that guess: the task has 32 values, so guessing gives 1/32."""
    return [
        fake_run(model, [chance_level], seed=seed, **more) for model in ("rebased", "based") for seed in (42, 43, 44)
    ]


def test_nobody_learned_and_nobody_is_ranked() -> None:
    report = Report(Collection(runs=idle()))
    assert len(report.summary) == 1
    assert report.summary[0].startswith(
        "T = 32, 4 pairs: no model learned this task. The best of 6 runs has test accuracy 0.040, and guessing gives"
    )
    assert not any("compar" in heading for heading in headings(report))
    assert not any(name.startswith("compared") for name in report.tables())
    some = Report(Collection(runs=[*idle(), *sweep(seq_len=64)]))
    assert some.summary[0].startswith("Perhaps trained too short: 12 of 12 runs")  # those of the task that was learned
    assert "no model learned" in some.summary[1]
    assert some.summary[2].startswith("T = 64, 4 pairs: ReBased 0.8")
    assert {row[1] for row in some.tables()["compared_at_each_width"].rows} == {"T = 64, 4 pairs"}
    assert Report(Collection(runs=idle(0.09))).summary[0].startswith("T = 32, 4 pairs: Based 0.090, ReBased 0.090")


def test_runs_that_did_not_learn_are_counted_by_model_and_learning_rate() -> None:
    learned = [fake_run(model, [0.5], seed=seed, lr=3e-3) for model in ("rebased", "based") for seed in (42, 43)]
    failed = [fake_run("based", [accuracy], seed=seed, lr=1e-2) for accuracy, seed in ((0.03, 42), (0.09, 43))]
    report = Report(Collection(runs=[*learned, *failed, *idle(seq_len=64)]))  # nobody learns T = 64
    table = report.tables()["not_learned"]
    assert table.head == ("model", "task", "D", "lr 0.003", "lr 0.01", "all")
    assert [(row[0], *row[2:]) for row in table.rows] == [
        ("Based", "24", "0 of 2", "1 of 2", "1 of 4"),
        ("ReBased", "24", "0 of 2", "–", "0 of 2"),
    ]
    html = report.page("Title", "x").to_html()
    assert "Runs that did not learn" in html
    assert "1 of 6 runs did not learn: " in html
    assert "Based 1 of 4, ReBased 0 of 2." in html
    assert "not_learned" not in Report(Collection(runs=learned)).tables()
    assert "not_learned" not in Report(Collection(runs=idle())).tables()


def test_runs_that_nobody_can_compare_are_told() -> None:
    apart = [fake_run("rebased", [0.5], seed=42), fake_run("based", [0.5], seed=43)]
    assert "Nothing is compared: no two models have runs on the same task" in Report(Collection(runs=apart)).summary[-1]
    assert "Nothing is compared" not in " ".join(Report(Collection(runs=[fake_run()])).summary)


def test_chance_is_drawn_and_named(page: Page) -> None:
    small = Report(Collection(runs=sweep()))
    for name, panels in small.figures().items():
        assert "chance 0.031</li>" in panels.to_html(), name
    run = fake_run()
    run.settings["task"]["name"] = "a_task_of_mine"
    assert run.chance is None
    assert "chance" not in mean_curves(SyntheticReport(Collection(runs=[run])).results).to_html()


def test_points_say_what_they_are() -> None:
    html = accuracy_by_width(SyntheticReport(Collection(runs=sweep())).results).to_html()
    titles = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="6"><title>([^<]*)</title>', html)
    assert [text for *_, text in titles] == [
        f"{model}, D = {width}: {level + width / 1000 - 0.001 + 0.0043:.3f} ± 0.000, 3 seeds, lr 0.001"
        for model, level in (("Based", 0.5), ("ReBased", 0.8))
        for width in (24, 48)
    ]
    drawn = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)" style="fill: var\(--series', html)
    for (x, y, _), (at_x, at_y) in zip(titles, drawn, strict=True):
        assert (float(x), float(y)) == pytest.approx((float(at_x), float(at_y)), abs=0.1)


def test_every_run_has_its_whole_name() -> None:
    runs = [
        fake_run(seed=seed, status=status, changes={"model": {"mixers": {1: {"n_heads": heads}}}})
        for heads in (1, 2)
        for seed, status in ((42, "done"), (43, None))
    ]
    table = Report(Collection(runs=runs)).tables()["runs"]
    assert [row[1:3] for row in table.rows] == [
        (f"ReBased (n_heads {heads})", "T = 32, 4 pairs") for heads in (1, 1, 2, 2)
    ]


def test_csv_has_exact_numbers_one_per_column_and_nothing_where_nothing_is() -> None:
    runs = [
        fake_run("rebased", [0.1 + seed / 7], seed=seed, seq_len=256, pairs=(32,), d_model=24) for seed in (0, 1, 2)
    ]
    tables = Report(Collection(runs=[*runs, fake_run("mamba", [0.5], seq_len=256, pairs=(32,))]), values=PAPER).tables()
    first, second = csv.DictReader(tables["by_width_T_256_32_pairs"].to_csv().splitlines())
    assert list(first) == ["model", "D = 24", "D = 24 sd", "paper", "paper sd"]
    assert float(first["D = 24"]) == statistics.fmean(0.1 + seed / 7 for seed in (0, 1, 2))
    assert float(first["D = 24 sd"]) == statistics.stdev(0.1 + seed / 7 for seed in (0, 1, 2))
    assert (first["paper"], first["paper sd"]) == ("0.59", "0.06")
    assert (second["D = 24"], second["D = 24 sd"], second["paper"], second["paper sd"]) == ("0.5", "", "", "")
    results = list(csv.DictReader(tables["results"].to_csv().splitlines()))
    assert results[1]["95% from"] == results[1]["held out"] == ""
    assert float(results[0]["95% from"]) < float(results[0]["test"])
    assert "–" not in "".join(table.to_csv() for table in tables.values())


def test_two_seeds_have_no_interval() -> None:
    table = Report(Collection(runs=[run for run in sweep() if run.seed < 44])).tables()["results"]
    assert {row[table.head.index("95% from")] for row in table.rows} == {"–"}
    assert "–" not in {row[table.head.index("sd")] for row in table.rows}


def test_latex_has_the_columns_of_a_paper() -> None:
    tables = Report(Collection(runs=sweep())).tables()
    text = tables["results"].to_latex()
    assert "\nmodel & D & lr & seeds & test & sd \\\\\n" in text  # the task is the same, and nothing was held out
    assert text.splitlines()[1] == "\\begin{adjustbox}{max width=\\columnwidth}"
    assert max(table.to_latex().splitlines()[2].count("r") for table in tables.values()) <= 11


@pytest.mark.parametrize(("kind", "begin"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_a_figure_is_a_file(kind: Any, begin: bytes) -> None:
    panels = accuracy_by_width(SyntheticReport(Collection(runs=[*sweep(), *sweep(seq_len=64)])).results)
    data = panels.to_file(kind)
    assert data.startswith(begin)
    assert data == panels.to_file(kind)  # the same records, the same bytes
    if kind == "svg":
        assert SERIES[0].encode() in data
        assert b"T = 64, 4 pairs" in data
        assert b"chance" in data
