"""Every example runs; so do the scripts behind the documentation's figures."""

import re
from pathlib import Path

import pytest

from forked_python import ROOT, run_pytest, run_script

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ARGUMENTS = {"own_mixer.py": [], "own_task.py": ["1"]}  # one epoch of training shows that it runs
SAYS = {
    "layer.py": "106,080 numbers",
    "own_mixer.py": r"epoch 1/6 (.|\n)*running_mean recalls 4\d%\n(.|\n)*rebased recalls (9\d|100)%",
    "own_task.py": "ReBased gets",
    "decode.py": "100 tokens decoded",
    "miscompiled_kernel.py": "W = 64: 8 products, all descriptors are sound",
}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.release] * (path.name in ARGUMENTS), id=path.name) for path in EXAMPLES],
)
def test_example(path: Path) -> None:
    if "import triton" in path.read_text():
        pytest.importorskip("triton")
    result = run_script(path, *ARGUMENTS.get(path.name, []))
    assert result.returncode == 0, result.stderr
    assert re.search(SAYS.get(path.name, ""), result.stdout)
    assert result.stdout


def test_the_example_of_a_mixer_keeps_the_contract() -> None:
    """Every part of it, a state to generate from included."""
    contract = ROOT / "tests" / "mixers" / "test_contract.py"
    result = run_pytest("--mixer", f"{ROOT / 'examples' / 'own_mixer.py'}:running_mean", str(contract))
    assert result.returncode == 0, result.output
    assert "has no init_state, extend" not in result.output


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("kernels", ["kernels"]),
        ("speed", ["speed"]),
        pytest.param("scaling", ["scaling", "serving"], marks=pytest.mark.release),
    ],
)
def test_the_figure_can_be_made_again(name: str, figures: list[str], tmp_path: Path) -> None:
    result = run_script(ROOT / "docs" / "images" / f"make_{name}.py", str(tmp_path))
    assert result.returncode == 0, result.stderr
    for figure in figures:
        for theme in ("light", "dark"):
            assert "<svg" in (tmp_path / f"{figure}-{theme}.svg").read_text()
            assert (ROOT / "docs" / "images" / f"{figure}-{theme}.svg").is_file()
