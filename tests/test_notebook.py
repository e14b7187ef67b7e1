"""The notebook: its outputs are saved, and its code runs, here with so few steps that nothing is learnt."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from forked_python import run_code

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "docs" / "notebooks" / "first_hour.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
LONG, SHORT = "QUICK = False", "QUICK = True"


def test_it_was_run_from_top_to_bottom_without_errors() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1)), "run `make notebook`"
    assert [output for cell in CELLS for output in cell["outputs"] if output["output_type"] == "error"] == []
    assert any("image/png" in output.get("data", {}) for cell in CELLS for output in cell["outputs"])


def test_its_code_runs(tmp_path: Path) -> None:
    code = "\n\n".join("".join(cell["source"]) for cell in CELLS)
    assert code.count(LONG) == 1
    result = run_code(code.replace(LONG, SHORT), tmp_path, MPLBACKEND="agg", TMPDIR=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "recalls" in result.stdout
    assert "after 2 steps" in result.stdout


@pytest.mark.release
@pytest.mark.skipif(find_spec("nbconvert") is None, reason="the extra `docs` is not installed: `make docs` installs it")
def test_it_can_be_run_as_a_notebook(tmp_path: Path) -> None:
    short = tmp_path / "short.ipynb"
    short.write_text(NOTEBOOK.read_text().replace(LONG, SHORT))
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", str(short)]
    subprocess.run(command, check=True, capture_output=True)
    assert "after 2 steps" in short.read_text()
