"""Every interpreted_*.py beside this file, in processes in which kernels are interpreted."""

from pathlib import Path

import pytest

from triton_interpreter import run_interpreted, why_not_interpreted

HERE = Path(__file__).parent
POLYNOMIAL = sorted(HERE.glob("interpreted_polynomial*.py"))
OTHERS = sorted(set(HERE.glob("interpreted_*.py")) - set(POLYNOMIAL))
# Some processes that take about as long as each other, so that workers can share them; each takes seconds to start.
PROCESSES = {"polynomial": POLYNOMIAL[:1], "polynomial states and operators": POLYNOMIAL[1:]}
PROCESSES |= {"others, first half": OTHERS[::2], "others, second half": OTHERS[1::2]}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROCESSES)
def test_every_kernel_in_the_interpreter(name: str) -> None:
    if reason := why_not_interpreted():
        pytest.skip(reason)
    done = run_interpreted(*PROCESSES[name])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
