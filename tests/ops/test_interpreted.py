"""The tests in tests/ops/interpreted, in processes in which kernels are interpreted."""

from pathlib import Path

import pytest

from triton_interpreter import run_interpreted, why_not_interpreted

FOLDER = Path(__file__).parent / "interpreted"
POLYNOMIAL = sorted(FOLDER.glob("polynomial*.py"))
OTHERS = sorted(set(FOLDER.glob("*.py")) - set(POLYNOMIAL))
PROCESSES = {"polynomial": POLYNOMIAL, "others": OTHERS}  # each takes seconds to start


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_every_kernel_in_the_interpreter(name: str, pytestconfig: pytest.Config) -> None:
    if reason := why_not_interpreted():
        pytest.skip(reason)
    done = run_interpreted(*PROCESSES[name], all_cases=pytestconfig.getoption("--all"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
