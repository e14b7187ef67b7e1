"""The judge of the torture accepts what a command may do, and nothing else; inputs are functions of their seed."""

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import yaml
from tests.torture.inputs import mutate_json, mutate_tree, mutate_words, mutate_yaml
from tests.torture.outcome import Outcome, judge

FINE = Outcome(code=0, signal=None, seconds=1.0, memory=2**29, interrupted=False, output="wrote report.html\n")


@pytest.mark.parametrize(
    "outcome",
    [
        FINE,
        FINE._replace(code=2, output="error: x.yaml is empty\n"),
        FINE._replace(code=2, output="error: x.yaml: a: is missing\nb: is missing\n"),
        FINE._replace(code=130, interrupted=True, output="760 parameters on cpu, 5 steps, from step 0\n"),
        FINE._replace(output="\x1b[31merror\x1b[0m"),
    ],
)
def test_what_a_command_may_do(outcome: Outcome) -> None:
    assert judge(outcome) is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"output": "Traceback (most recent call last):"}, "Traceback"),
        ({"code": 1, "output": "error: KeyError: 1 (not your fault: ...)"}, "not your fault"),
        ({"output": "\x1b]0;title\x07"}, "x1b"),
        ({"code": 1, "output": "error: x\nframe #0: c10::Error"}, "frame #0"),
        ({"code": None, "signal": 11}, "signal 11"),
        ({"code": 99}, "ended with 99"),
        ({"code": 2, "output": ""}, "shows 0 errors"),
        ({"memory": 2**34}, "16.0 GiB"),
        ({"code": 130, "interrupted": True, "output": ""}, "not done"),
    ],
    ids=str,
)
def test_what_it_may_not(change: dict[str, object], problem: str) -> None:
    found = judge(FINE._replace(**change))  # type: ignore[arg-type]
    assert found is not None
    assert problem in found


def test_an_input_is_a_function_of_its_seed() -> None:
    tree = {"train": {"lr": 0.1, "seeds": [1, 2]}, "model": {"mixers": ["rebased"]}}
    before = yaml.safe_dump(tree)

    def made(seed: int) -> list[object]:
        random = Random(seed)
        return [
            mutate_yaml(random, tree),
            mutate_json(random, tree),
            mutate_words(random, ["train", "--config", "x"], ["--out"]),
            repr(mutate_tree(random, tree)),
        ]

    assert made(3) == made(3)
    assert len({str(made(seed)) for seed in range(50)}) > 40
    assert yaml.safe_dump(tree) == before


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see what a command takes")
@pytest.mark.parametrize("trials", [15, pytest.param(40, marks=pytest.mark.release)])
def test_a_slice_of_the_torture(trials: int) -> None:
    """The same trials every time. `make torture` runs as many as you have minutes for."""
    words = [sys.executable, "-m", "tests.torture", "--minutes", "5", "--seed", "0", "--kills", "0.4"]
    words += ["--count", str(trials)]
    root = Path(__file__).parents[1]
    made = subprocess.run(words, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout + made.stderr
    assert f"{trials} trials, 0 broke something" in made.stdout
