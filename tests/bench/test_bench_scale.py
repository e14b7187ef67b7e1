"""docs/scaling.md is fresh, and its count of bytes is what two processes send."""

import json
from pathlib import Path

import pytest

from benchmark_command import ROOT, benchmark, succeed

PAGE = ROOT / "docs" / "scaling.md"


def test_the_numbers_of_the_page_are_fresh() -> None:
    succeed("scale_report", "--check")


@pytest.mark.release
def test_a_stale_page_is_found_and_made_fresh(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text().replace("| 3.85 MB |", "| 3.86 MB |", 1))
    answer = benchmark("scale_report", "--check", "--page", str(page))
    assert answer.returncode == 1
    assert "page.md is stale: run `make figures`" in answer.stderr
    succeed("scale_report", "--page", str(page))
    assert page.read_text() == PAGE.read_text()


@pytest.mark.release
def test_two_processes_send_what_is_counted(tmp_path: Path) -> None:
    succeed("scale", "--rounds", "1", "--out", str(tmp_path))
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["steps"]
    assert len(rows) == 8
    for row in rows:  # headers come on top
        assert row["expected_bytes"] <= row["sent_bytes"] < 1.02 * row["expected_bytes"] + 4096, row
