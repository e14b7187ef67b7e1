"""benchmarks/rounding.py: without roundings it is the equation, with them it is close to it."""

import pytest

from benchmark_command import benchmark, succeed

pytest.importorskip("triton")  # the kernels' package imports it, though their plan is arithmetic

LENGTHS = ("64", "2048")  # quadratic and chunked
WRONG = """
from rebased.ops.polynomial import reference
attend = reference.attend
reference.attend = lambda *inputs, **settings: 1.001 * attend(*inputs, **settings)
"""


@pytest.mark.release
def test_the_command_changes_each_rounding_in_turn() -> None:
    """It also checks itself against the equation, in fp64, and stops if it is off by 1e-4."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in succeed("rounding", *LENGTHS, "-K", "8", "--tokens", "2048").splitlines()[1:]:
        T, rest = line.split(maxsplit=1)
        found[T, rest[:22].strip()] = [float(error) / 1e3 for error in rest[22:].split()]
    assert {T for T, _ in found} == set(LENGTHS)
    assert {name for _, name in found} >= {"as the kernels do", "near_slopes in bf16", "all in bf16", "softmax"}
    for T in LENGTHS:
        for kept, plain in zip(found[T, "as the kernels do"], found[T, "all in bf16"], strict=True):
            assert 1e-3 < kept < 1e-2
            assert kept <= plain
    for kept, plain in zip(found["64", "as the kernels do"], found["64", "all in bf16"], strict=True):
        assert kept < plain


def test_it_measures_nothing_if_it_is_not_the_equation() -> None:
    answer = benchmark("rounding", "64", "--tokens", "2048", patch=WRONG)
    assert answer.returncode == 1
    assert "o without roundings is off by 1.0e-03 of the equation: nothing was measured" in answer.stderr
