"""What Windows does not have is not needed to import the package, nor to train in one process (like_windows.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rebased.runs.record import read_record
from tiny_run import TINY

IMPORTS = """
import pkgutil, rebased
missing = "datasets fastapi lm_eval orjson prometheus_client ray transformers triton uvicorn".split()
for module in pkgutil.walk_packages(rebased.__path__, "rebased.", onerror=print):
    try:
        __import__(module.name)
    except ModuleNotFoundError as error:  # an extra that is not installed
        assert error.name.partition(".")[0] in missing, module.name
print("imported")
"""
USE = """
import contextlib, sys
from pathlib import Path
from rebased.cli import main
from rebased.files import FolderInUse, locked
folder = Path("locked")
for _ in range(2):
    with locked(folder):
        try:
            with locked(folder):
                print("locked twice")
        except FolderInUse:
            print("in use")
for option in ([], ["--resume"]):
    with contextlib.suppress(SystemExit):
        main(["train", "--config", "tiny.yaml", "--out", "run", *option])
with contextlib.suppress(SystemExit):
    main(["sweep", "sweeps/table1-cpu", "--out", "sweep"])
"""


def python(code: str, folder: Path) -> str:
    """All that a script prints on what passes for Windows: default encodings are not UTF-8 there."""
    path = folder / "script.py"
    path.write_text(code, encoding="utf-8")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "cp1252"}
    command = [sys.executable, str(Path(__file__).parent / "helpers" / "like_windows.py"), str(path)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **locale},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="cp1252",
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
def test_every_module_is_imported(tmp_path: Path) -> None:
    assert python(IMPORTS, tmp_path) == "imported\n"


@pytest.mark.slow
@pytest.mark.release
def test_folders_are_locked_and_runs_trained_in_one_process(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY), encoding="utf-8")
    lines = python(USE, tmp_path).splitlines()
    assert lines[:2] == ["in use", "in use"]
    assert read_record(tmp_path / "run")[-1]["type"] == "end"
    assert sum("test accuracy" in line for line in lines) == 2  # trained, and found complete
    assert "Windows cannot fork processes" in lines[-1]
