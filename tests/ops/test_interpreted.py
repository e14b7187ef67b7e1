"""The tests in tests/ops/interpreted, in a process in which kernels are interpreted."""

from pathlib import Path

import pytest

from triton_interpreter import run_interpreted, why_not_interpreted


@pytest.mark.slow
def test_every_kernel_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    """In one process: to start one, and to import what traces graphs, takes ten seconds."""
    if reason := why_not_interpreted():
        pytest.skip(reason)
    files = sorted((Path(__file__).parent / "interpreted").glob("*.py"))
    done = run_interpreted(*files, all_cases=pytestconfig.getoption("--all"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
