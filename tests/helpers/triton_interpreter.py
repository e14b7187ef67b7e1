"""Runs files of tests with Triton's kernels interpreted on the CPU.

Whether a kernel is interpreted is decided when its module is imported, so these tests need a process of their own.
Their files are in tests/ops/interpreted: pytest finds them only when they are named, by `run_interpreted` or by hand
(`TRITON_INTERPRET=1 pytest tests/ops/interpreted/scan.py`).
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path


def why_not_interpreted() -> str | None:
    """Why Triton's interpreter cannot run here; None if it can.

    The interpreter of Triton 3.5 and 3.6 turns arrays of one element into int, which numpy 2.4 and newer refuse.
    """
    import numpy
    import triton
    from triton.runtime import interpreter

    try:
        int(numpy.ones(1))  # type: ignore[call-overload]
    except TypeError:
        if "int(self.handle.data)" in inspect.getsource(interpreter):
            return f"the interpreter of Triton {triton.__version__} does not work with numpy {numpy.__version__}"
    return None


def run_interpreted(*files: Path, all_cases: bool = False) -> subprocess.CompletedProcess[str]:
    """Run these files of tests in a process of their own; its exit status and output."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *["--all"] * all_cases, *map(str, files)]
    return subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
