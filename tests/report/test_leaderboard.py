"""Reports over bundles of many people: repeated runs, versions of the code, rules that ended runs, the leaderboard."""

import re
from pathlib import Path
from typing import Any

import pytest

from fake_records import fake_run
from page_reader import assert_self_contained
from rebased.cli import main
from rebased.report import Report
from rebased.report.leaderboard import Leaderboard, spaced
from rebased.report.page import describe_origin
from rebased.report.repeats import code_table, find_repeats, repeat_table, warn_about_repeats
from rebased.report.synthetic.cells import build_results
from rebased.report.synthetic.choices import choice_table, describe_choices, describe_given_up, rule_of
from rebased.runs.collect import Collection, collect, write_bundle
from rebased.runs.finished import Run


def bundle(tmp_path: Path, name: str, *runs: Run) -> Path:
    write_bundle(runs, tmp_path / name)
    return tmp_path / name


def timed(run: Run, seconds: float) -> Run:
    """The same results, trained again: only times differ."""
    again = [line | {"seconds": seconds} if line["type"] == "epoch" else line for line in run.lines]
    return Run(run.folder, again)


def test_equal_results_agree_and_different_ones_are_listed(tmp_path: Path) -> None:
    same, apart = fake_run(seed=1), fake_run(seed=2, accuracies=(0.1, 0.5))
    ours = bundle(tmp_path, "ours.jsonl.gz", same, apart, fake_run(seed=3))
    theirs = bundle(
        tmp_path, "theirs.jsonl.xz", timed(same, 9.0), fake_run(seed=2, accuracies=(0.1, 0.6)), fake_run(seed=3)
    )
    found = collect([ours, theirs])
    repeats = find_repeats(found)
    assert sorted((repeat.counted.seed, len(repeat.differing)) for repeat in repeats) == [(1, 0), (2, 1)]
    equal, different = warn_about_repeats(repeats)
    assert equal == "1 run trained more than once, with equal results."
    assert different.startswith("1 run trained more than once, with different results")
    rows = repeat_table(repeats).rows
    assert {(row[2], row[3], row[7]) for row in rows} == {
        ("2", "0.5000", "ours.jsonl.gz"),
        ("2", "0.6000", "theirs.jsonl.xz"),
    }
    assert sorted(row[4] for row in rows) == ["no", "yes"]
    headings = [section.heading for section in Report(found).page(None, "x").sections]
    assert "Runs with different results" in headings
    again = collect([bundle(tmp_path, "all.jsonl.gz", *found.runs, *found.others)])  # a bundle keeps the disagreement
    assert [len(repeat.differing) for repeat in find_repeats(again) if repeat.counted.seed == 2] == [1]


def test_settings_that_are_not_those_of_the_digest_are_named() -> None:
    run, stranger = fake_run(seed=1), fake_run(seed=2)
    stranger.lines[0]["config"]["model"]["mixers"][1]["name"] = "unknown"  # nobody can tell what its digest should be
    said = "with settings that are not those that the digest names"
    assert not any(said in text for text in Report(Collection(runs=[run, stranger])).warnings)
    run.lines[0]["config"]["train"]["lr"] = 0.5
    assert any(text.startswith(f"1 record {said}") for text in Report(Collection(runs=[run, stranger])).warnings)


def test_versions_of_the_code_are_shown_apart() -> None:
    runs = [fake_run(seed=1), fake_run(seed=2), fake_run(seed=3, commit="f" * 40)]
    table = code_table(runs)
    assert table is not None
    assert [(row[0], row[1]) for row in table.rows] == [("0.1.0 0123456789", "2"), (f"0.1.0 {'f' * 10}", "1")]
    assert code_table(runs[:2]) is None


def test_the_origin_names_each_machine_once_and_a_few_commits() -> None:
    runs = [fake_run(seed=n, commit=f"{n}" * 40) for n in range(7)]
    shown = ", ".join(f"{n}" * 10 for n in range(5))
    origin = describe_origin(runs)
    assert origin.startswith(f"Made with rebased 0.1.0, commits {shown}, ...; torch ")
    assert origin.count("torch") == 1
    assert describe_origin(runs[:1]).startswith("Made with rebased 0.1.0, commit 0000000000; torch ")


def staged() -> list[Run]:
    first = [fake_run(accuracies=(0.1, 0.4 + 10 * lr), lr=lr, seed=seed) for lr in (1e-2, 1e-3) for seed in (42, 43)]
    return [*first, *(fake_run(accuracies=(0.1, 0.2), lr=1e-2, seed=seed) for seed in (44, 45, 46))]


def test_a_page_says_how_a_rate_was_chosen() -> None:
    whole = [fake_run("based", lr=lr, seed=seed) for lr in (1e-2, 1e-3) for seed in (42, 43)]
    single = [fake_run("attention", seed=seed) for seed in (42, 43)]
    uneven = [fake_run("rwkv", lr=1e-3, seed=42), fake_run("rwkv", (0.9,), lr=1e-2, seed=43), fake_run("rwkv", seed=44)]
    results = build_results([*staged(), *whole, *single, *uneven])
    rules = {cell.model.kind: rule_of(cell) for cell in results.cells}
    assert rules == {"ReBased": "in stages", "Based": "paper's rule", "Attention": "one rate", "RWKV": "uneven"}
    rows = {row[0]: row for row in choice_table(results).rows}
    assert rows["ReBased"][2:7] == ("in stages", "0.01", "0.001, 0.01", "42, 43", "5")
    assert rows["Based"][2:7] == ("paper's rule", "0.001", "0.001, 0.01", "42, 43", "2")
    assert "1 cell, in stages: all rates were compared on the first seeds" in describe_choices(results)
    report = Report(Collection(runs=[*staged(), *whole]))
    assert not any("fewer seeds" in warning for warning in report.warnings)


def test_runs_that_a_rule_ended_are_named_with_the_rule() -> None:
    rule = {"train": {"give_up": {"below": 0.2, "after_epoch": 2}}}
    ended, went_on = fake_run(accuracies=(0.1, 0.1), changes=rule), fake_run(seed=43, changes=rule)
    ended.lines[-1]["gave_up"] = True
    (sentence,) = describe_given_up([ended, went_on])
    assert sentence.startswith(
        "1 run ended early by a rule that was set before: test accuracy still below 0.2 after epoch 2"
    )
    assert "ReBased (D = 24, lr 0.001, seed 42)." in sentence
    assert sentence in Report(Collection(runs=[ended, went_on])).warnings


def board_runs() -> list[Run]:
    """Two mixers at two widths with three seeds, and one with a single seed that is best of all."""
    levels = {("rebased", 24): 0.5, ("rebased", 48): 0.9, ("based", 24): 0.6, ("based", 48): 0.7}
    runs = [
        fake_run(model, (0.0, level), d_model=width, seed=seed)
        for (model, width), level in levels.items()
        for seed in range(3)
    ]
    return [*runs, fake_run("mamba", (0.0, 1.0), d_model=24)]


def test_the_frontier_is_what_nothing_beats_and_needs_three_seeds() -> None:
    (entries,) = Leaderboard(Collection(runs=board_runs())).boards.values()
    found = {(entry.cell.model.kind, entry.cell.d_model): entry for entry in entries}
    small, large = found["ReBased", 24].bytes, found["Based", 24].bytes
    assert small is not None
    assert large is not None
    assert small < large  # so neither of these two beats the other
    first = {place for place, entry in found.items() if entry.is_first}
    assert ("ReBased", 48) in first
    assert ("ReBased", 24) in first
    assert ("Based", 48) not in first
    assert ("Mamba", 24) not in first
    assert [entry.is_first for entry in entries] == sorted((entry.is_first for entry in entries), reverse=True)


def test_the_summary_names_the_most_accurate_on_the_frontier() -> None:
    """Not the first rows of the table, which begins with the frontier: what is below it may be as accurate."""
    (sentence,) = Leaderboard(Collection(runs=board_runs())).summary
    assert "5 results, 3 on the frontier. The most accurate of these: ReBased, D = 48: 0.900 with " in sentence
    assert "Mamba" not in sentence


def test_a_mixer_is_named_by_what_differs_on_its_own_task() -> None:
    two, twelve = (fake_run(changes={"model": {"mixers": {1: {"n_heads": n}}}}) for n in (2, 12))
    board = Leaderboard(Collection(runs=[two, twelve, fake_run(seq_len=64)]))
    names = {task: {row[0] for row in table.rows} for task, table in board.tables().items()}
    assert names["T = 32, 4 pairs"] == {"ReBased (n_heads 2)", "ReBased (n_heads 12)"}
    assert names["T = 64, 4 pairs"] == {"ReBased"}


def test_no_two_mixers_look_alike_and_each_point_says_what_it_is() -> None:
    found = [fake_run(kind, (0.0, 0.5), d_model=width) for kind in ("rebased", "based", "mamba") for width in (24, 48)]
    for n in range(9):  # more mixers than there are colours
        run = stranger(n, {"32": 4096 + n})
        run.lines[0]["config"]["model"]["mixers"] = [{"name": f"mine {n}"}]
        found.append(run)
    html = Leaderboard(Collection(runs=found)).page(None, "x").to_html()
    marks = re.findall(r"<li><svg[^>]*>(?:<path[^>]* stroke=[^>]*>)?(.*?)</svg>", html)
    assert len(marks) == len(set(marks)) == 12
    assert "<title>Based, D = 48: 0.500 with " in html
    assert html.count("</title></circle>") == 15


def test_a_task_that_nobody_learned_has_no_frontier() -> None:
    board = Leaderboard(Collection(runs=[fake_run(accuracies=(0.0, 0.001), seed=seed) for seed in range(3)]))
    ((entry,),) = board.boards.values()
    assert not entry.is_first
    assert "no model learned this task. The best of 3 runs has test accuracy 0.001" in board.summary[0]


def test_runs_that_diverged_are_named() -> None:
    runs = [fake_run(seed=seed, status="diverged") for seed in range(3)]
    assert any("3 runs diverged" in warning for warning in Leaderboard(Collection(runs=runs)).warnings)


def test_without_three_seeds_it_says_why_nothing_is_on_the_frontier() -> None:
    board = Leaderboard(Collection(runs=[fake_run(seed=seed) for seed in range(2)]))
    assert "1 result, none on the frontier, for which an entry needs three seeds." in board.summary[0]


STRANGER = "<script>alert(1)</script>$x$"


def stranger(seed: int, size: Any) -> Run:
    """A run with a mixer that this code does not know."""
    run = fake_run(seed=seed, accuracies=(0.2, 0.3))
    run.lines[0]["config"]["model"]["mixers"] = [{"name": STRANGER}]
    run.lines[0] |= {"digest": f"{seed:012x}", "state_bytes": size}
    return run


def test_a_strangers_mixer_is_ranked_by_what_its_record_says_and_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bundle(tmp_path, "ours.jsonl.gz", *board_runs())
    bundle(tmp_path, "theirs.jsonl.xz", *(stranger(seed, {"32": 4096}) for seed in range(3)))
    Path("torn.jsonl.xz").write_bytes(Path("theirs.jsonl.xz").read_bytes()[:-20])
    Path("junk.jsonl.gz").write_text("no archive")
    with pytest.raises(SystemExit) as left:
        main(["leaderboard", ".", "-o", "board.html"])
    assert not left.value.code
    captured = capsys.readouterr()
    assert "damaged line" in captured.err
    assert "torn.jsonl.xz" in captured.err
    assert "junk.jsonl.gz" in captured.err
    html = Path("board.html").read_text()
    assert_self_contained(html)
    assert "<script>alert" not in html
    assert "4,096" in html
    assert stranger(1, "lies").state_bytes(32) is None
    assert stranger(1, {"32": -5}).state_bytes(32) is None


def test_marks_of_an_axis_do_not_crowd() -> None:
    assert spaced([100, 101, 102, 200, 205, 400]) == [100, 200, 400]
    assert spaced([7]) == [7]


def test_language_models_have_no_place_on_it() -> None:
    with pytest.raises(ValueError, match="a leaderboard needs runs on synthetic tasks"):
        Leaderboard(Collection())


def test_models_for_probes_are_not_ranked() -> None:
    fixed = {"model": {"preset": "rebased", "mixers": ["previous_token", "rebased"]}}
    others = [fake_run(seed=seed, changes=fixed) for seed in (1, 2)]
    board = Leaderboard(Collection(runs=[fake_run(seed=1), *others]))
    assert [len(entries) for entries in board.boards.values()] == [1]
    assert "2 runs with a fixed first layer (previous_token), trained for probes: not ranked." in board.warnings
    with pytest.raises(ValueError, match="none is ranked"):
        Leaderboard(Collection(runs=others))


def test_unknown_mixers_lead_to_the_option_that_imports_them() -> None:
    stranger = fake_run()
    stranger.lines[0]["config"]["model"]["mixers"][1]["name"] = "unknown"
    (warning,) = (text for text in Leaderboard(Collection(runs=[stranger])).warnings if "not known here" in text)
    assert warning.endswith("give its file with --import.")
