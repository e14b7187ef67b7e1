"""Every interpreted_*.py beside this file, in one process in which kernels are interpreted."""

from pathlib import Path

from triton_interpreter import run_interpreted


def test_every_kernel_in_the_interpreter() -> None:
    done = run_interpreted(*sorted(Path(__file__).parent.glob("interpreted_*.py")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
