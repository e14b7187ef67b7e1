"""Runs files of tests with Triton's kernels interpreted on the CPU.

Whether a kernel is interpreted is decided when its module is imported, so these tests need a process of their own.
Their files are called interpreted_*.py: pytest finds them only when they are named, by `run_interpreted` or by hand
(`TRITON_INTERPRET=1 pytest tests/ops/interpreted_scan.py`).
"""

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(*files: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    return subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
