"""The page: whole, self-contained, and no louder than its records."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fake_records import fake_run
from page_reader import Reader, assert_self_contained
from rebased.report import Page, Section, demo_page, write_page
from rebased.report.demo import Pair, compare, findings
from rebased.report.drawing import GRID, INK, SERIES, VARIABLES
from rebased.report.figures import epochs_until, learning_curves, state_growth
from rebased.report.page import describe_origin
from rebased.runs.finished import Run, by_model

RUNS = [
    *(fake_run("rebased", [0.2, 0.6 + seed / 10000], seed=seed) for seed in (42, 43)),
    *(fake_run("based", [0.1, 0.3 + seed / 10000], seed=seed) for seed in (42, 43)),
    *(fake_run("conv_attention", [0.5, 0.995], seed=seed) for seed in (42, 43)),
]


def test_the_demo_page_is_whole() -> None:
    html = demo_page(RUNS, "rebased demo").to_html()
    reader = assert_self_contained(html)
    assert "0.604 (0.604–0.604)" in reader.texts["td"]
    assert "2 (2 to 2)" in reader.texts["td"]
    assert "ConvAttention needed fewer epochs than Based with 2 of 2 seeds" in " ".join(reader.texts["li"])
    assert "rebased demo" in reader.texts["code"]
    assert "rebased train --config rebased-seed42/config.yaml --out again" in reader.texts["code"]
    assert "commit 0123456789; torch 2.9, Python 3.11, Linux; A CPU, 2 cores" in "".join(reader.texts["footer"])
    assert "$" not in html.split("<body>")[1].split("<script")[0]  # no placeholder is left
    data, _ = reader.texts["script"]
    assert json.loads(data) == {run.folder: run.lines for run in RUNS}


def test_pairs_have_a_section_where_they_vary() -> None:
    assert "By number of pairs" not in demo_page(RUNS, "").to_html()
    assert "By number of pairs" in demo_page([fake_run(pairs=[4, 8]), fake_run("based")], "").to_html()


def runs_of(**epochs: list[int | None]) -> list[Run]:
    """Runs that reach 0.9 in these epochs, of five; one seed each, from 42 on."""
    return [
        fake_run(model, [0.95 if n == epoch else 0.2 for n in range(1, 6)], seed=seed)
        for model, values in epochs.items()
        for seed, epoch in enumerate(values, start=42)
    ]


def test_one_question_is_decided_and_other_pairs_are_counted() -> None:
    runs = runs_of(
        rebased=[2, 3, 2, 2, 3, 2, 4], based=[5, 5, None, 4, 4, None, 5], conv_attention=[1, 2, 1, 1, 1, 1, 1]
    )
    assert findings(runs) == [
        "ReBased reached accuracy 0.9 in 7 of 7 runs, after 2 (2 to 4) epochs. It recalled 95.0% of what it was asked.",
        "Based reached accuracy 0.9 in 5 of 7 runs. It recalled 73.6% of what it was asked.",
        "ConvAttention reached accuracy 0.9 in 7 of 7 runs, after 1 (1 to 2) epochs. "
        "It recalled 95.0% of what it was asked.",
        "ReBased needed fewer epochs than Based with 7 of 7 seeds. "
        "So ReBased learns this task sooner (sign test, p = 0.016).",
        "ConvAttention needed fewer epochs than ReBased with 7 of 7 seeds.",
        "ConvAttention needed fewer epochs than Based with 7 of 7 seeds.",
    ]


def test_the_test_is_explained_where_there_are_seeds_enough_for_one() -> None:
    few, many = ([*range(2, 5)], [*range(2, 5)] * 3)
    assert "p is the probability" not in demo_page(runs_of(rebased=few, based=few), "").to_html()
    assert "p is the probability" in demo_page(runs_of(rebased=many, based=many), "").to_html()


def test_pairs_are_of_the_same_seed() -> None:
    """The ranges overlap; seed by seed one model is always sooner."""
    runs = runs_of(based=[3, 4, 5, 3, 4, 5, None], rebased=[2, 3, 4, 2, 3, 4, 5])
    assert compare(by_model(runs), "Based", "ReBased") == Pair("ReBased", "Based", sooner=7, later=0, equal=0)
    some = [run for run in runs if (run.model, run.seed) not in {("Based", 42), ("ReBased", 43)}]
    assert compare(by_model(some), "Based", "ReBased").seeds == 5


@pytest.mark.parametrize(
    ("rebased", "based", "sentence"),
    [
        (
            [1, 1, 2],
            [4, 5, None],
            "ReBased needed fewer epochs than Based with 3 of 3 seeds. "
            "With 3 seeds no result can decide which learns sooner; --seeds 8 can.",
        ),
        (
            [2, 1, 3, 4, 2, 2, 2, 2],
            [1, 2, 3, 3, 1, 1, 1, 1],
            "Based needed fewer epochs than ReBased with 6 of 8 seeds and more with 1; with 1 there was no difference. "
            "These runs do not decide which learns sooner (sign test, p = 0.12).",
        ),
        (
            [None, 2],
            [None, 2],
            "ReBased and Based did not differ with any seed. "
            "With 2 seeds no result can decide which learns sooner; --seeds 8 can.",
        ),
    ],
)
def test_what_is_not_decided_is_said(rebased: list[int | None], based: list[int | None], sentence: str) -> None:
    assert findings(runs_of(rebased=rebased, based=based))[2] == sentence


def test_one_run_per_model() -> None:
    text = findings(runs_of(rebased=[3], based=[None]))
    assert text[0] == "ReBased reached accuracy 0.9 in its run, after 3 epochs. It recalled 95.0% of what it was asked."
    assert text[1] == "Based reached accuracy 0.9 in none of its runs. It recalled 20.0% of what it was asked."


def test_text_from_outside_cannot_break_out() -> None:
    evil = "</script><script>alert(1)</script>"
    html = Page("<i>", "a & b", [Section("<u>", "")], evil, {evil: [evil]}).to_html()
    assert "alert(1)</script>" not in html
    assert "<title>&lt;i&gt;</title>" in html
    assert "<h2>&lt;u&gt;</h2>" in html
    Reader(html)


@pytest.mark.parametrize("draw", [learning_curves, state_growth, lambda runs: epochs_until(runs, 0.9)])
def test_figures(draw: Any) -> None:
    svg = draw(RUNS).to_html()
    assert svg == draw(RUNS).to_html()
    words = {"".join(element.itertext()).strip() for element in ElementTree.fromstring(f"<div>{svg}</div>").iter()}
    assert {"ReBased", "Based", "ConvAttention"} <= words
    assert "var(--series-0)" in svg
    assert [colour for colour in VARIABLES if colour in svg] == []  # the page's stand in their place


def test_a_machine_that_does_not_tell_its_cores_is_described_without_them() -> None:
    run = fake_run(commit="0123456789ab")
    run.lines[0]["machine"] |= {"cpu": "A CPU", "cores": None, "threads": None, "gpu": None}
    run.lines[0]["code"]["dirty"] = None
    assert describe_origin([run]).endswith("; A CPU.")


def test_files_have_the_light_colours_of_the_page() -> None:
    style = demo_page(RUNS, "").to_html().split("@media")[0]
    named = {"ink": INK, "line": GRID} | {f"series-{i}": colour for i, colour in enumerate(SERIES)}
    assert [name for name, colour in named.items() if f"--{name}: {colour};" not in style] == []


def test_curves_are_the_records() -> None:
    """The line of a run rises where its accuracies do: in SVG the ratio of heights is that of accuracies."""
    svg = learning_curves([fake_run(accuracies=[0.0, 0.5, 1.0])]).to_html()
    path = re.search(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: var\(--series-0\)', svg)
    assert path is not None
    heights = [float(point.split()[1]) for point in re.findall(r"[ML] ([\d.]+ [\d.]+)", path[1])]
    assert len(heights) == 3
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2])
    assert heights[0] > heights[2]


def test_epochs_by_seed_are_the_records() -> None:
    """A point is as high as the epoch; that of a run that did not reach the accuracy is above the last epoch."""
    svg = epochs_until(runs_of(rebased=[1, 3], based=[5, None]), 0.9).to_html()
    points = re.findall(r'<use [^>]*y="([\d.]+)" style="fill: var\(--series-([01])\)', svg)
    assert [series for _, series in points] == ["0", "0", "1", "1"]
    first, third, fifth, never = (float(y) for y, _ in points)  # in SVG, y grows downwards
    assert first - third == pytest.approx(third - fifth, abs=1e-3)
    assert fifth - never == pytest.approx((first - third) / 2, abs=1e-3)
    assert "not within 5 epochs" in svg


def test_a_page_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    page, path = demo_page(RUNS, "rebased demo"), tmp_path / "new" / "report.html"
    write_page(page, path)
    write_page(page._replace(title="Again"), path)
    assert "<title>Again</title>" in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    path.write_text("my notes")
    with pytest.raises(ValueError, match=r"report\.html is not a page that rebased has written; move it"):
        write_page(page, path)
    assert path.read_text() == "my notes"


def test_without_matplotlib_the_error_says_what_to_install() -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from rebased.cli import main; main(['demo'])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert answer.stderr == "error: figures need matplotlib, which is not installed: pip install 'rebased[lab]'\n"
