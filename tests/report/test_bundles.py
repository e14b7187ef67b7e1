"""Reports over bundles of many people: repeated runs, rules that ended runs."""

from pathlib import Path

from fake_records import fake_run
from rebased.report.page import describe_origin
from rebased.report.prose import describe_given_up
from rebased.report.report import Report, find_repeats, repeat_table, warn_about_repeats
from rebased.report.synthetic.cells import build_results
from rebased.report.synthetic.tables import results_table
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
    said = "whose settings have another digest"
    assert not any(said in text for text in Report(Collection(runs=[run, stranger])).warnings)
    run.lines[0]["config"]["train"]["lr"] = 0.5
    assert any(text.startswith(f"1 record {said}") for text in Report(Collection(runs=[run, stranger])).warnings)


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
    rows = {row[0]: row[3:7] for row in results_table(results).rows}  # the rate, those it was compared with, on seeds
    assert rows["ReBased"] == ("0.01", "0.001, 0.01", "42, 43", "5")
    assert rows["Based"] == ("0.001", "0.001, 0.01", "42, 43", "2")
    assert rows["Attention"] == ("0.001", "0.001", "42, 43", "2")
    uneven_ones = Report(Collection(runs=uneven)).warnings
    assert "In 1 cell some learning rates have fewer seeds than others. They could not be chosen." in uneven_ones
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
