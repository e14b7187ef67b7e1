"""The page of a suite: which runs choose, which are scored, who leads, and what stands on the page."""

import csv
import re
from io import StringIO
from math import inf
from pathlib import Path

import pytest

from fake_suite import fake_run_of, small_suite, suite_runs
from page_reader import assert_self_contained
from rebased.analysis.ranking import Contrast
from rebased.analysis.unpaired import Effect
from rebased.report.suite.board import Board
from rebased.report.suite.figures import recall_by_bytes
from rebased.report.suite.page import files_of, suite_page
from rebased.report.suite.sentences import describe_factor, three_sentences, verdict_of
from rebased.report.suite.tables import cell_table, effect_table, recall_table, run_table
from rebased.runs.collect import collect
from rebased.runs.finished import Run
from rebased.runs.shipped import MODELS, find_config
from rebased.runs.suite import load_suite

SUITE = small_suite()
SUITES = Path(__file__).parents[2] / "results" / "suites"
COMMITTED = {"quick": MODELS / "suite-quick.jsonl.gz", "campaign": SUITES / "campaign" / "campaign.jsonl.gz"}
TIME = "ms per 1000 tokens"


def test_rates_are_chosen_on_the_test_split_and_fresh_seeds_scored_on_the_held_out_one() -> None:
    board = Board(SUITE, list(suite_runs(SUITE, {"ReBased": 0.5})), ["ReBased"])
    assert three_sentences(board)[1] == "No other mixer has these cells."
    assert len(board.cells) == 4
    for cell in board.cells:
        assert cell.rate == 1e-2
        assert [run.seed for run in cell.scored] == [11, 12, 13, 14, 15]
        assert cell.values() == pytest.approx([0.51, 0.52, 0.53, 0.54, 0.55])
        assert cell.is_complete


def test_a_cell_without_all_rates_or_seeds_is_not_ranked() -> None:
    runs = list(suite_runs(SUITE, {"ReBased": 0.5}))
    board = Board(SUITE, [run for run in runs if run.seed != 15])
    assert not any(cell.is_complete for cell in board.cells)
    assert board.places == {}
    assert three_sentences(board)[0] == "No mixer has a complete cell yet."
    no_choice = Board(SUITE, [run for run in runs if run.lr > 1e-3])
    assert [cell.rate for cell in no_choice.cells] == [None] * 4
    assert not any(cell.scored for cell in no_choice.cells)
    assert "Recall and time" not in suite_page(no_choice, "small", "x", {"ReBased": [1.0]}, "A CPU").to_html()


def test_a_mixer_with_one_lucky_seed_does_not_lead() -> None:
    """Planted in records: one seed per cell solves the task, and the mean is the best of all."""
    lucky = []
    for run in suite_runs(SUITE, {"Delta": 0.25}):
        solved = run.seed == 13 or (run.seed == 1 and run.lr == 1e-2)  # also the seed that chooses
        lucky.append(fake_run_of(run.config, 1.0 if solved else 0.2, 1.0 if solved else 0.2))
    board = Board(SUITE, [*lucky, *suite_runs(SUITE, {"ReBased": 0.3, "Linear": 0.28})])
    assert board.overall("Delta")[0] > board.overall("ReBased")[0] > board.overall("Linear")[0]
    assert board.places["Delta"] == board.places["ReBased"] == 1
    assert "share the first" in three_sentences(board)[0]
    names = [row[0] for row in recall_table(board, 512).rows if row[1] == "1"]
    assert names == sorted(names)  # of those that share a place none stands first by its mean


def test_a_run_of_another_protocol_is_left_out_and_counted() -> None:
    other = small_suite(train={"epochs": 2, "batch_size": 32, "device": "cpu"})
    board = Board(SUITE, [*suite_runs(SUITE, {"ReBased": 0.5}), *suite_runs(other, {"Delta": 0.9})])
    assert board.mixers == ["ReBased"]
    assert board.left_out == {"made by another protocol": 28}
    assert "28 runs left out: made by another protocol." in suite_page(board, "small", "x", {}, "").to_html()


def test_of_runs_on_two_devices_one_counts_whatever_their_order_is() -> None:
    here = list(suite_runs(SUITE, {"ReBased": 0.5}))
    there = []
    for run in here:
        train = run.config.train.model_copy(update={"device": "cuda"})
        there.append(fake_run_of(run.config.model_copy(update={"train": train}), 0.9, 0.9))
    one, other = Board(SUITE, [*here, *there]), Board(SUITE, [*there, *here])
    assert {run.digest for run in one.runs} == {run.digest for run in other.runs}
    assert {run.digest for run in one.runs} == {
        min(both.digest for both in pair) for pair in zip(here, there, strict=True)
    }
    assert one.left_out == other.left_out == {"the same as another except for execution settings": 28}


def test_places_and_effects_of_clear_differences() -> None:
    board = Board(SUITE, list(suite_runs(SUITE, {"Linear": 0.1, "ReBased": 0.5, "Delta": 0.5})), ["ReBased"])
    assert board.places == {"Delta": 1, "ReBased": 1, "Linear": 3}
    square, delta = board.effects("MQAR")
    assert square.is_decided
    assert square.effect.difference == pytest.approx(0.4)
    assert not delta.is_decided
    began, _ = board.effects("MQAR", "began")
    assert (began.effect.difference, began.is_decided) == (1.0, True)
    first, second, third = three_sentences(board)
    assert "place 1 of 3 mixers, shared with Delta." in first
    assert second == "Decided: over all cells it recalls more than Linear."
    assert third.startswith("To decide the rest")
    table = effect_table(board)
    assert [row[:2] for row in table.rows] == [
        (a, b) for a in ("square", "delta") for b in ("recall", "began to learn")
    ]
    assert table.rows[1][2] == "+1.00 (+1.00 to +1.00), p < 0.001".replace(" ", "\u00a0").replace(",\u00a0", ", ")


def test_a_mixer_whose_state_has_no_set_size_is_shown_and_not_ranked() -> None:
    board = Board(SUITE, list(suite_runs(SUITE, {"Attention": 0.9, "ReBased": 0.5})), ["Attention"])
    assert board.places == {"ReBased": 1}
    assert [row[0] for row in recall_table(board, None).rows] == ["Attention"]
    first, _, third = three_sentences(board)
    assert first.endswith("it has no place, because its state has no fixed size.")
    assert third == "To compare it, give it a state whose size can be set (state_size)."
    begun = [run for run in suite_runs(SUITE, {"Delta": 0.5}) if run.seed != 15]
    first, _, third = three_sentences(Board(SUITE, begun, ["Delta"]))
    assert first.endswith("because none of its cells is complete.")
    assert third == "To compare it, go on with the same command."


def test_each_number_links_to_its_runs_and_names_are_escaped() -> None:
    name = "<script>alert(1)</script>\x1b[31m"
    strange = [rename(run, name) for run in suite_runs(SUITE, {"Delta": 0.4})]
    board = Board(SUITE, [*strange, *suite_runs(SUITE, {"ReBased": 0.5})], ["ReBased"])
    page = suite_page(board, "small", "rebased suite small", {"ReBased": [2.0]}, "A CPU").to_html()
    assert_self_contained(page)
    assert "<script>alert" not in page
    links = set(re.findall(r'href="#(runs-[^"]*)"', page))
    assert len(links) == 8
    assert all(f'id="{link}"' in page for link in links)
    assert (
        page.index(three_sentences(board)[0][:20]) < page.index("<svg") < page.index("<h2>")
    )  # three sentences, then a picture


def test_a_mixer_whose_class_is_not_known_here_is_shown_and_not_ranked() -> None:
    """Nothing here can tell the size of its state."""
    theirs = [rename(run, "Theirs") for run in suite_runs(SUITE, {"Delta": 0.9})]
    for run in theirs:
        run.lines[0]["config"]["model"]["mixers"][1]["name"] = "theirs"
    board = Board(SUITE, [*theirs, *suite_runs(SUITE, {"ReBased": 0.5})])
    assert board.places == {"ReBased": 1}
    assert [row[:2] for row in recall_table(board, 512).rows] == [("ReBased", "1"), ("Theirs", "–")]
    page = suite_page(board, "small", "x", {}, "").to_html()
    assert "Theirs: shown and not ranked. Its class is not known here, so neither is the size of its state." in page


def rename(run: Run, name: str) -> Run:
    run.lines[0]["config"]["suite"]["mixer"] = name
    return run


def test_tidy_files_have_one_row_per_run_and_per_cell() -> None:
    runs = list(suite_runs(SUITE, {"ReBased": 0.5}))
    board = Board(SUITE, runs)
    records = run_table(board).to_records()
    assert len(records) == len(runs)
    assert {row["stage"] for row in records} == {"choose", "score"}
    assert sum(row["stage"] == "score" for row in records) == 20
    assert [row[-1] for row in cell_table(board, {"ReBased": [2.0, 4.0, 3.0]}).rows] == ["3.000"] * 4
    files = files_of(board, {})
    assert list(files) == ["cells.csv", "runs.csv", "recall-by-bytes.pdf"]
    assert files["recall-by-bytes.pdf"].startswith(b"%PDF")
    page = suite_page(board, "small", "x", {}, "").to_html()
    assert all(f'href="{name}"' in page for name in files)


def test_mixers_are_ranked_on_the_same_cells() -> None:
    """A mixer with fewer cells has fewer tests, and would share the first place for that."""
    few = [run for run in suite_runs(SUITE, {"Delta": 0.1}) if run.settings["suite"]["task"] == "MQAR"]
    others = list(suite_runs(SUITE, {"ReBased": 0.5, "Linear": 0.1}))
    assert Board(SUITE, [*few, *others]).places == {"ReBased": 1, "Linear": 2}
    asked = Board(SUITE, [*few, *others], ["Delta"])  # a suite that is half done: on the cells that it has
    assert asked.places == {"ReBased": 1, "Delta": 2, "Linear": 2}
    assert "over 2 cells" in three_sentences(asked)[0]


def test_parameters_that_could_not_be_matched_are_named() -> None:
    wide = list(suite_runs(SUITE, {"Delta": 0.5}))
    for run in wide:
        run.lines[0]["parameters"] = 2300
    board = Board(SUITE, [*wide, *suite_runs(SUITE, {"ReBased": 0.5, "Linear": 0.5})], ["Delta"])
    assert three_sentences(board)[0].startswith("Delta, with 2.3 times the median of parameters, recalls 0.53")
    assert [row[-1] for row in recall_table(board, 512).rows] == ["2,300 (+130 %)", "1,000 (+0 %)", "1,000 (+0 %)"]


def test_a_factor_is_described_by_its_planned_tests_and_its_time() -> None:
    """On one task the square recalls more, on the other it makes no difference; the delta rule is undecided there."""
    level = {"Linear": 0.1, "ReBased": 0.5, "Delta": 0.5}
    runs = [run for run in suite_runs(SUITE, level) if run.settings["suite"]["task"] == "MQAR"]
    flat = suite_runs(SUITE, dict.fromkeys(level, 0.5), spread=0.001)
    runs += [run for run in flat if run.settings["suite"]["task"] == "overwriting"]
    board = Board(SUITE, runs)
    rounds = {"ReBased": [3.0, 2.4, 4.4], "Linear": [2.0, 2.0, 2.0], "Delta": [9.0, 9.0, 9.0]}
    square = describe_factor(board, "square", rounds)
    assert square == (
        "At equal bytes of state the square recalls more on MQAR (+0.40); makes no difference that matters on "
        "overwriting (+0.00, 95 % interval +0.00 to +0.00). The share of runs that begin to learn changes on MQAR "
        "(+1.00). A training step takes 1.50 times as long with it (1.20 to 2.20; 1 pair of mixers, timed "
        "here in 3 rounds)."
    )
    disturbed = describe_factor(board, "square", rounds | {"Linear": [2.0, 4.8, 2.0]})
    assert disturbed.endswith("not clear: 0.50 to 2.20 times as long (1 pair of mixers, timed here in 3 rounds).")
    assert "times as long" not in describe_factor(board, "delta", {})
    assert three_sentences(board)[1] == "Decided at equal bytes of state: the square recalls more on 1 of 2 tasks."


def test_a_factor_says_which_pairs_it_lacks() -> None:
    """A sum with a denominator and a delta rule without one differ in two factors, so they are no pair."""
    factors = {"ReBased": (False, True), "Delta": (True, False), "Normed": (False, False)}
    mixers = {
        name: {"mixer": {"name": "rebased", "n_heads": 1}, "factors": {"delta": delta, "denominator": denominator}}
        for name, (delta, denominator) in factors.items()
    }
    suite = small_suite(mixers=mixers, drawn=[])
    runs = [*suite_runs(suite, {"ReBased": 0.5, "Delta": 0.5, "Normed": 0.3})]
    normed = [run for run in runs if run.settings["suite"]["mixer"] == "Normed"]
    others = [run for run in runs if run not in normed]
    smaller = [run for run in normed if run.settings["suite"]["state_bytes"] == 512]
    assert describe_factor(Board(suite, others), "delta", {}) == (
        "What the delta rule buys is not known yet: of 2 pairs of cells that differ in it alone none is complete."
    )
    partial = describe_factor(Board(suite, [*others, *smaller]), "delta", {})
    assert partial.endswith("Pairs of cells that are complete: 1 of 2 on MQAR and overwriting.")
    board = Board(suite, runs)
    assert describe_factor(board, "denominator", {}) == (
        "At equal bytes of state the denominator recalls more on MQAR (+0.20) and overwriting (+0.20)."
    )
    assert describe_factor(board, "centred", {}) == ""


def test_a_wide_interval_is_undecided_and_a_small_difference_is_called_small() -> None:
    def verdict(difference: float, half: float, p: float) -> tuple[str, str]:
        found, interval = Effect(difference, half / 2, 100, 10, 10), (difference - half, difference + half)
        return verdict_of(Contrast("square", "no square", found, 2, p, interval))

    assert verdict(0.03, 0.2, 0.5) == ("is undecided on", "+0.03, 95 % interval -0.17 to +0.23")
    assert verdict(0.03, inf, 0.5) == ("is undecided on", "+0.03")
    assert verdict(0.03, 0.02, 0.01) == ("recalls more on", "+0.03, small")
    assert verdict(-0.3, 0.02, 0.01) == ("recalls less on", "-0.30")
    assert verdict(0.01, 0.02, 0.5)[0] == "makes no difference that matters on"


def test_a_rate_that_no_run_which_began_to_learn_has_chosen_is_marked() -> None:
    """MQAR counts as begun above 0.3 on the test split; the choosing runs of one mixer reach 0.26."""
    board = Board(SUITE, list(suite_runs(SUITE, {"ReBased": 0.5, "Delta": 0.15})))
    assert {cell.mixer for cell in board.cells if cell.is_untuned} == {"Delta"}
    marked = {row[0]: row[2].endswith(" †") for row in recall_table(board, 512).rows}
    assert marked == {"ReBased": False, "Delta": True}
    said = "In 4 cells no run that chose the rate began to learn, so the rate was not tuned (marked †): Delta (MQAR, "
    assert said in suite_page(board, "small", "x", {}, "").to_html()
    assert [row["choosing runs that began"] for row in cell_table(board, {}).to_records()] == ["2"] * 4 + ["0"] * 4


def test_runs_by_code_that_no_commit_holds_are_counted_first() -> None:
    runs = list(suite_runs(SUITE, {"ReBased": 0.5}))
    assert "changes that no commit holds" not in suite_page(Board(SUITE, runs), "small", "x", {}, "").to_html()
    runs[0].lines[0]["code"] = runs[0].lines[0]["code"] | {"dirty": True}
    page = suite_page(Board(SUITE, runs), "small", "x", {}, "").to_html()
    assert page.index("1 of 28 runs were made by code with changes that no commit holds") < page.index("<svg")


def test_partial_results_are_called_partial() -> None:
    some = Board(SUITE, list(suite_runs(SUITE, {"ReBased": 0.5})))
    assert some.unfinished == "Partial results: 4 of 14 cells are complete."
    assert some.unfinished in suite_page(some, "small", "x", {}, "").to_html()
    first = Board(
        SUITE, [run for run in suite_runs(SUITE, {"ReBased": 0.5}) if run.settings["suite"]["task"] == "MQAR"]
    )
    assert list(recall_by_bytes(first).panels) == ["MQAR"]  # no empty panel and no empty column
    assert "overwriting" not in recall_table(first, 512).head
    level = dict.fromkeys(SUITE.mixers, 0.5)
    assert Board(SUITE, list(suite_runs(SUITE, level))).unfinished == ""


@pytest.mark.parametrize(("name", "records"), COMMITTED.items())
def test_committed_results_are_of_their_protocol_and_give_their_files(name: str, records: Path) -> None:
    """All but the time of a training step, which is measured when the page is made."""
    board = Board(load_suite(find_config(Path(name), "suite")), collect([records]).runs)
    assert board.left_out == {}
    with (SUITES / name / "cells.csv").open() as file:
        written = [exact(row | {TIME: ""}) for row in csv.DictReader(file)]
    found = [exact(row) for row in csv.DictReader(StringIO(cell_table(board, {}).to_csv()))]
    assert written == found


def exact(row: dict[str, str]) -> dict[str, str]:
    """Numbers with nine digits: another CPU may round the last ones in another way."""
    return {key: f"{float(text):.9g}" if re.fullmatch(r"[\d.]+", text) else text for key, text in row.items()}
