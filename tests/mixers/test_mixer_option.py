"""`pytest --mixer NAME`: the contract suite over a user's own mixer passes and fails as it should."""

from pathlib import Path

import pytest

from forked_python import run_pytest
from mixer_option import find_mixer

GOOD = """
import torch
from rebased import register_mixer

@register_mixer("running_mean")
class RunningMean(torch.nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.out = torch.nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.out(x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None])
"""
LOOKS_AHEAD = GOOD.replace("x.cumsum(1)", "x.flip(1).cumsum(1).flip(1)")


def test_own_mixer_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(GOOD)
    result = run_pytest("--mixer", f"{tmp_path / 'own.py'}:running_mean", "tests/mixers")
    assert result.returncode == 0, result.output
    assert "failed" not in result.stdout
    assert "mixer 'running_mean' has no init_state, extend and state_size" in result.stdout  # the reason for skipping
    assert "deselected" in result.stdout


def test_a_mixer_that_looks_ahead_fails(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(LOOKS_AHEAD)
    result = run_pytest("--mixer", f"{tmp_path / 'own.py'}:running_mean", "-k", "ahead", "tests/mixers")
    assert result.returncode == 1, result.output
    assert "4 failed" in result.output


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
