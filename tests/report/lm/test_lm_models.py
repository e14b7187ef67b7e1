"""The table of language models over seeds, from records that nobody trained."""

import json
from math import sqrt
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from command_line import rebased
from fake_records import fake_lm_run, fake_run
from rebased.paper.reference import NEOX_VOCABULARY, PAPER
from rebased.paper.values import TABLE_2
from rebased.report.lm.models import LanguageModels
from rebased.report.lm.models import compare_language_models as group_runs
from rebased.report.lm.narrative import remarks
from rebased.report.lm.tables import as_markdown, compare_tables, difference_table
from rebased.runs.collect import write_bundle
from rebased.runs.finished import Run

T_3_SEEDS = 4.302653  # the 97.5 % quantile of Student's t with two degrees of freedom


ALL = {"attention": (20.0, 20.4, 20.2), "based": (21.0, 21.6, 21.2), "rebased": (20.5, 20.7, 20.9)}


def nine() -> list[Run]:
    return [
        fake_lm_run(model, (value, value / 5, value * 3), seed=42 + i)
        for model, values in ALL.items()
        for i, value in enumerate(values)
    ]


def compare_language_models(runs: list[Run]) -> LanguageModels:
    return group_runs(runs, PAPER)


def to_markdown(found: LanguageModels) -> str:
    """What `rebased lm compare` prints if its output is no terminal."""
    return as_markdown(compare_tables(found), remarks(found))


def cells(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_means_with_intervals_and_paired_differences() -> None:
    table = to_markdown(compare_language_models(nine()[::-1]))  # in whatever order they were found
    values = ALL["rebased"]
    half = T_3_SEEDS * stdev(values) / sqrt(3)
    parameters, seeds, whole, ar, non_ar, speed, paper = cells(table, "ReBased")
    assert (parameters, seeds, speed) == ("34,000,000", "3", "1,043")
    assert whole == f"20.700 ± {half:.3f}"
    assert (ar, non_ar) == (f"4.140 ± {half / 5:.3f}", f"62.100 ± {3 * half:.3f}")
    assert paper == "16.45 / 3.67 / 56.31"
    differences = [a - b for a, b in zip(values, ALL["attention"], strict=True)]
    half = T_3_SEEDS * stdev(differences) / sqrt(3)
    assert cells(table, "ReBased - Attention")[:2] == ["3", f"+0.500 ± {half:.3f}"]
    assert cells(table, "ReBased - Attention")[-1] == "-0.17 / +0.10 / -2.26"
    assert "| ReBased - Based |" in table
    assert "1,000 tokens of neox in windows of 2,048" in table
    assert "trained alike" not in table
    assert [line.split(" | ")[0] for line in table.splitlines()[2:5]] == [f"| {name}" for name in TABLE_2]


def test_one_seed_has_no_interval_and_seeds_of_one_model_alone_are_not_paired() -> None:
    runs = [
        fake_lm_run("rebased"),
        fake_lm_run("based", (23.0, 5.0, 70.0)),
        fake_lm_run("based", (90.0, 9.0, 90.0), seed=43),
    ]
    table = to_markdown(compare_language_models(runs))
    assert cells(table, "ReBased")[2:5] == ["20.000", "4.000", "60.000"]
    assert cells(table, "ReBased - Based")[:4] == ["1", "-3.000", "-1.000", "-10.000"]
    alone = difference_table(compare_language_models([fake_lm_run("rebased"), fake_lm_run("based", seed=7)]))
    assert list(alone.rows) == []


def test_what_is_not_done_or_there_twice_is_left_out_and_named() -> None:
    again = Run("again", fake_lm_run("rebased", (99.0, 9.0, 99.0)).lines)
    torn = fake_lm_run("based", (float("inf"), 4.0, 60.0), seed=44)
    found = compare_language_models([fake_lm_run("rebased"), fake_lm_run("based", status="diverged"), again, torn])
    assert list(found.models) == ["ReBased"]
    assert "Left out, not done or there twice: based-42, based-44, again." in to_markdown(found)
    with pytest.raises(ValueError, match="none of 1 run"):
        compare_language_models([torn])


def test_settings_that_set_models_apart_are_told() -> None:
    other = fake_lm_run("rebased", settings={"model.mixers.1.n_heads": "6", "train.parallel": "ddp"})
    table = to_markdown(compare_language_models([fake_lm_run("rebased"), other]))
    assert cells(table, "ReBased (n_heads 6)")[-1] == "-"
    assert "| ReBased (n_heads 12) |" in table
    slow = fake_lm_run("based", settings={"train.lr": "3e-4", "train.eval_every": "7"})
    table = to_markdown(compare_language_models([fake_lm_run("rebased"), slow]))
    assert "Not all were trained alike: lr 0.0003 and 0.001 (text enwik8 " in table


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"sha256": "b" * 64}, "different texts, so .* a{12} in rebased-42; b{12} in based-42"),
        ({"tokens": 999}, "different numbers of measured tokens"),
        ({"windows": "spread"}, "different choices of measured windows, .* all or the first in rebased-42; spread in"),
        ({"settings": {"data.seq_len": "1024"}}, r"different data\.seq_len, .* 2048 in rebased-42; 1024 in based-42"),
    ],
)
def test_what_cannot_be_compared_is_refused(other: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare_language_models([fake_lm_run("rebased"), fake_lm_run("based", **other)])


FAR = {"based": (3.0, 5.0, 9.0), "rebased": (2.0, 4.0, 8.0)}


def by_distance(model: str, seed: int, **more: Any) -> Run:
    """A run whose record has AR tokens at three distances: FAR, and for each further seed one more."""
    return fake_lm_run(model, seed=seed, distances=[value + seed - 42 for value in FAR[model]], **more)


def test_ar_tokens_by_distance() -> None:
    found = compare_language_models([by_distance(model, seed) for model in FAR for seed in (42, 43, 44)])
    table = to_markdown(found)
    half = T_3_SEEDS / sqrt(3)  # of 2, 3, 4 as of 3, 4, 5
    assert "| AR tokens | number | Based | ReBased |" in table
    assert cells(table, "1 ago") == ["1,200", f"4.000 ± {half:.3f}", f"3.000 ± {half:.3f}"]
    assert cells(table, "4 to 7 ago") == ["1,202", f"10.000 ± {half:.3f}", f"9.000 ± {half:.3f}"]
    assert "- The distance of an AR token is the number of tokens since the window last showed" in table
    assert "left out" not in table
    row = compare_tables(found)["by_distance"].to_records()[1]
    assert (row["AR tokens nearest"], row["AR tokens farthest"], row["number"]) == (2, 3, 1201)
    assert row["ReBased"] == pytest.approx(5, abs=1e-12)


def test_a_distance_without_tokens_has_no_row() -> None:
    run = by_distance("rebased", 42)
    del run.lines[-1]["test"]["by_distance"][1]
    table = to_markdown(compare_language_models([run]))
    assert (cells(table, "1 ago"), cells(table, "4 to 7 ago")) == (["1,200", "2.000"], ["1,202", "8.000"])
    assert "2 to 3 ago" not in table


def test_older_records_have_no_table_by_distance_and_mixed_ones_are_named() -> None:
    old = [fake_lm_run(model, seed=42) for model in ("attention", "rebased")]
    table = to_markdown(compare_language_models(old))
    assert "ago" not in table
    assert "distance" not in table
    table = to_markdown(compare_language_models([*old, by_distance("rebased", 43), by_distance("based", 42)]))
    assert "| AR tokens | number | Based | ReBased |" in table
    assert cells(table, "2 to 3 ago") == ["1,201", "5.000", "5.000"]
    said = "- AR tokens by distance: 2 of 4 runs left out, whose records do not have them: attention-42, rebased-42."
    assert said in table.splitlines()


def changed(**change: Any) -> list[dict[str, Any]]:
    """AR tokens by distance of which the second is changed."""
    first, second, third = by_distance("rebased", 42).lines[-1]["test"]["by_distance"]
    return [first, second | change, third]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        7,
        "far",
        {"nearest": 1},
        [None],
        [[1, 1, 1200, 2.0]],
        changed(nearest=3),
        changed(farthest=4),
        changed(nearest=1, farthest=1),  # twice
        changed(nearest=2**30, farthest=2**31 - 1),
        changed(tokens=0),
        changed(tokens=2**60),
        changed(tokens="1201"),
        changed(perplexity=None),
        changed(perplexity=float("inf")),
        changed(perplexity=1e308),
        changed(perplexity=0),
        changed(perplexity=True),
        changed()[::-1],
        changed() * 10**5,
    ],
    ids=lambda value: repr(value[:2] if isinstance(value, list) else value)[:80],
)
def test_what_no_run_has_measured_by_distance_is_ignored(value: Any) -> None:
    run = by_distance("rebased", 42)
    run.lines[-1]["test"]["by_distance"] = value
    found = compare_language_models([run])
    assert list(compare_tables(found)) == ["models"]
    assert [each.folder for each in found.without_distances] == ["rebased-42"]


def test_a_run_with_a_perplexity_that_no_run_has_is_not_compared() -> None:
    found = [fake_lm_run("rebased", (20.0, 4.0, far), seed=seed) for far, seed in ((1e308, 42), (-1.0, 43), (60.0, 44))]
    assert [run.seed for run in compare_language_models(found).runs] == [44]


def test_the_command_reads_bundles_and_folders_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = nine()
    write_bundle(runs[:5], Path("some.jsonl.gz"))
    for run in runs[4:]:  # one of them is in both
        folder = Path("runs") / run.folder
        folder.mkdir(parents=True)
        (folder / "record.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in run.lines))
    assert rebased("lm", "compare", "some.jsonl.gz", "runs") == 0
    assert capsys.readouterr().out == to_markdown(compare_language_models(runs))
    Path("survey.json").write_text('{"name": "survey", "entries": [{"model": "ReBased", "values": {"all": 16.5}}]}')
    assert rebased("lm", "compare", "some.jsonl.gz", "runs", "--reference-values", "survey.json") == 0
    assert "survey" in capsys.readouterr().out
    write_bundle([fake_run()], Path("mqar.jsonl.gz"))
    assert rebased("lm", "compare", "some.jsonl.gz", "mqar.jsonl.gz") == 0
    assert "Left out, no language models: " in capsys.readouterr().out
    assert rebased("lm", "compare", "mqar.jsonl.gz") == 2
    message = "no record of a language model's run in mqar.jsonl.gz; 1 file read: 1 record of another kind; for those"
    assert message in capsys.readouterr().err
    assert rebased("lm", "compare", "nowhere") == 2
    assert "nowhere: there is no such file or folder" in capsys.readouterr().err


def test_a_terminal_shows_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    write_bundle(nine(), tmp_path / "nine.jsonl.gz")
    assert rebased("lm", "compare", str(tmp_path / "nine.jsonl.gz")) == 0
    out = capsys.readouterr().out
    assert "| --- |" not in out
    assert all(words in out for words in ("ReBased - Attention", "──────", "- Perplexity on split test"))


def test_the_papers_numbers_say_in_the_same_line_that_their_tokenizer_is_another() -> None:
    runs = nine()
    for run in runs:
        run.lines[0]["corpus"]["vocabulary"] = "f" * 64
    table = to_markdown(compare_language_models(runs))
    assert cells(table, "ReBased")[-1] == "16.45 / 3.67 / 56.31 (of another tokenizer)"
    assert cells(table, "ReBased - Attention")[-1] == "-0.17 / +0.10 / -2.26 (of another tokenizer)"
    for run in runs:
        run.lines[0]["corpus"]["vocabulary"] = NEOX_VOCABULARY
    assert "another tokenizer" not in to_markdown(compare_language_models(runs))
    for run in runs:
        run.lines[0]["corpus"] |= {"vocab_size": 257}
        del run.lines[0]["corpus"]["vocabulary"]
    assert "another tokenizer" in to_markdown(compare_language_models(runs))


def test_two_seeds_have_no_interval() -> None:
    runs = [fake_lm_run("rebased", seed=seed) for seed in (42, 43)]
    assert cells(to_markdown(compare_language_models(runs)), "ReBased")[2] == "20.000"


def test_json_has_exact_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_bundle(nine(), tmp_path / "nine.jsonl.gz")
    assert rebased("lm", "compare", "--json", str(tmp_path / "nine.jsonl.gz")) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = [row for row in found["models"] if row["model"] == "ReBased"]
    assert row["all"] == pytest.approx(20.7, abs=1e-12)
    assert row["all half of the 95% interval"] == pytest.approx(T_3_SEEDS * 0.2 / sqrt(3), rel=1e-6)
    assert row["paper all"] == 16.45
    assert len(found["differences"]) == 3
    assert "by_distance" not in found
    write_bundle([by_distance("rebased", 42)], tmp_path / "one.jsonl.gz")
    assert rebased("lm", "compare", "--json", str(tmp_path / "one.jsonl.gz")) == 0
    first = json.loads(capsys.readouterr().out)["by_distance"][0]
    assert first == {"AR tokens nearest": 1, "AR tokens farthest": 1, "number": 1200, "ReBased": 2.0}
