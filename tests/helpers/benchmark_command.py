"""Benchmarks run as commands: tests import nothing from them."""

from forked_python import ROOT, Done, run_script

BENCHMARKS = ROOT / "benchmarks"


def benchmark(name: str, *words: str, patch: str = "") -> Done:
    """Run `python benchmarks/NAME.py WORDS`. `patch` is code that the same process runs before."""
    return run_script(BENCHMARKS / f"{name}.py", *words, patch=patch)


def succeed(name: str, *words: str, patch: str = "") -> str:
    """The stdout of a benchmark that must exit with 0."""
    answer = benchmark(name, *words, patch=patch)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout
