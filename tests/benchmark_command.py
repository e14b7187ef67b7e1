"""Benchmarks run as commands: tests import nothing from them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


def benchmark(name: str, *words: str, patch: str = "") -> subprocess.CompletedProcess[str]:
    """Run `python benchmarks/NAME.py WORDS` and return its exit status, stdout and stderr.

    `patch` is code that the same interpreter runs before, to break something of the package.
    """
    path = str(BENCHMARKS / f"{name}.py")
    command = [path, *words]
    if patch:
        code = f"{patch}\nimport runpy, sys\nsys.argv = {command!r}\nrunpy.run_path({path!r}, run_name='__main__')\n"
        command = ["-c", code]
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def succeed(name: str, *words: str, patch: str = "") -> str:
    """The stdout of a benchmark that must exit with 0."""
    answer = benchmark(name, *words, patch=patch)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout
