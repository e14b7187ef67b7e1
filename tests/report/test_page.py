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
from rebased.report import Page, Section, demo_page, learning_curves, state_growth, write_page
from rebased.report.demo import findings

RUNS = [
    *(fake_run("rebased", [0.2, 0.6 + seed / 10000], seed=seed) for seed in (42, 43)),
    *(fake_run("based", [0.1, 0.3 + seed / 10000], seed=seed) for seed in (42, 43)),
    *(fake_run("conv_attention", [0.5, 0.995], seed=seed) for seed in (42, 43)),
]


def test_the_demo_page_is_whole() -> None:
    html = demo_page(RUNS, "rebased demo").to_html()
    reader = assert_self_contained(html)
    assert "0.604 (0.604–0.604)" in reader.texts["td"]
    assert "rebased demo" in reader.texts["code"]
    assert "rebased train --config rebased-seed42/config.yaml --out again" in reader.texts["code"]
    assert "commit 0123456789; torch 2.9, Python 3.11, Linux; A CPU, 2 cores" in "".join(reader.texts["footer"])
    assert "$" not in html.split("<body>")[1].split("<script")[0]  # no placeholder is left
    data, _ = reader.texts["script"]
    assert json.loads(data) == {run.folder: run.lines for run in RUNS}


def test_pairs_have_a_section_where_they_vary() -> None:
    assert "By number of pairs" not in demo_page(RUNS, "").to_html()
    assert "By number of pairs" in demo_page([fake_run(pairs=[4, 8]), fake_run("based")], "").to_html()


def test_findings_keep_to_the_runs() -> None:
    text = " ".join(findings(RUNS))
    assert "ReBased recalled 60.4% of what it was asked." in text
    assert "ConvAttention recalled 99.5% of what it was asked, and was done after 2 epochs." in text
    assert "In these runs ReBased is ahead of Based" in text
    overlap = [fake_run("rebased", [0.3]), fake_run("rebased", [0.6], seed=43), fake_run("based", [0.5])]
    assert "these runs do not decide" in " ".join(findings(overlap))
    near = [fake_run("rebased", [0.992]), fake_run("based", [0.991])]
    assert "these runs do not decide" in " ".join(findings(near))


def test_text_from_outside_cannot_break_out() -> None:
    evil = "</script><script>alert(1)</script>"
    html = Page("<i>", "a & b", [Section("<u>", "")], evil, {evil: [evil]}).to_html()
    assert "alert(1)</script>" not in html
    assert "<title>&lt;i&gt;</title>" in html
    assert "<h2>&lt;u&gt;</h2>" in html
    Reader(html)


@pytest.mark.parametrize("draw", [learning_curves, state_growth])
def test_figures(draw: Any) -> None:
    svg = draw(RUNS)
    assert svg == draw(RUNS)
    words = {"".join(element.itertext()).strip() for element in ElementTree.fromstring(f"<div>{svg}</div>").iter()}
    assert {"ReBased", "Based", "ConvAttention"} <= words
    assert "var(--series-0)" in svg
    assert re.findall(r"#0[123][0-9a-f]{4}", svg) == []  # colours that stand for the page's were all replaced


def test_curves_are_the_records() -> None:
    """The line of a run rises where its accuracies do: in SVG the ratio of heights is that of accuracies."""
    svg = learning_curves([fake_run(accuracies=[0.0, 0.5, 1.0])])
    path = re.search(r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none; stroke: var\(--series-0\)', svg)
    assert path is not None
    heights = [float(point.split()[1]) for point in re.findall(r"[ML] ([\d.]+ [\d.]+)", path[1])]
    assert len(heights) == 3
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2])
    assert heights[0] > heights[2]


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
