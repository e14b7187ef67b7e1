"""`pytest --mixer NAME`: the contract suite over a user's own mixer fails as it should."""

from pathlib import Path

import pytest

from forked_python import run_pytest
from mixer_option import find_mixer

LOOKS_AHEAD = """
import torch
from rebased import register_mixer

@register_mixer("sum_of_what_comes")
class SumOfWhatComes(torch.nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.out(x.flip(1).cumsum(1).flip(1))
"""


def test_a_mixer_that_looks_ahead_fails(tmp_path: Path) -> None:
    """test_add_a_mixer.py shows ones that pass."""
    (tmp_path / "own.py").write_text(LOOKS_AHEAD)
    result = run_pytest("--mixer", f"{tmp_path / 'own.py'}:sum_of_what_comes", "-k", "ahead", "tests/mixers")
    assert result.returncode == 1, result.output
    assert "4 failed" in result.output
    assert "deselected" in result.output


def test_an_unknown_mixer_is_a_usage_error() -> None:
    result = run_pytest("--mixer", "rebasd")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unknown mixer 'rebasd'; did you mean 'rebased'?" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("nowhere.py:mine", "nowhere.py: there is no such file"),
        ("no_such_package:mine", "No module named 'no_such_package'"),
        ("json:mine", "unknown mixer 'mine'"),
    ],
)
def test_errors_name_what_was_not_found(wanted: str, message: str) -> None:
    with pytest.raises(pytest.UsageError, match=message):
        find_mixer(wanted)
