"""The page: whole, self-contained, and no louder than its records."""

from pathlib import Path

import pytest

from fake_records import fake_run
from forked_python import run_code
from page_reader import Reader
from rebased.report.drawing import GRID, INK, SERIES
from rebased.report.page import Page, Section, describe_origin, write_page

PAGE = Page("Title", "lead", [Section("Heading", "")], "footer", {})


def test_text_from_outside_cannot_break_out() -> None:
    evil = "</script><script>alert(1)</script>"
    html = Page("<i>", "a & b", [Section("<u>", "")], evil, {evil: [evil]}).to_html()
    assert "alert(1)</script>" not in html
    assert "<title>&lt;i&gt;</title>" in html
    assert "<h2>&lt;u&gt;</h2>" in html
    Reader(html)


def test_a_machine_that_does_not_tell_its_cores_is_described_without_them() -> None:
    run = fake_run(commit="0123456789ab")
    run.lines[0]["machine"] |= {"cpu": "A CPU", "cores": None, "threads": None, "gpu": None}
    run.lines[0]["code"]["dirty"] = None
    assert describe_origin([run]).endswith("; A CPU.")


def test_files_have_the_light_colours_of_the_page() -> None:
    style = PAGE.to_html().split("@media")[0]
    named = {"ink": INK, "line": GRID} | {f"series-{i}": colour for i, colour in enumerate(SERIES)}
    assert [name for name, colour in named.items() if f"--{name}: {colour};" not in style] == []


def test_a_page_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    page, path = PAGE, tmp_path / "new" / "report.html"
    write_page(page, path)
    write_page(page._replace(title="Again"), path)
    assert "<title>Again</title>" in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    path.write_text("my notes")
    with pytest.raises(ValueError, match=r"report\.html is not a page that rebased has written; move it"):
        write_page(page, path)
    assert path.read_text() == "my notes"


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from rebased.cli import main; main(['demo'])"
    answer = run_code(code, tmp_path)
    assert answer.returncode == 2
    assert answer.stderr == "error: figures need matplotlib, which is not installed: pip install 'rebased[lab]'\n"
