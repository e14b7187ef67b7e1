"""rebased suite: a user's own mixer on a small suite, from the command to the page."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from command_line import rebased
from fake_suite import TREE, small_suite, suite_runs
from rebased.mixers import contract
from rebased.runs.collect import collect, write_bundle

suite = partial(rebased, "suite")

OWN = """
from torch import nn
from rebased.mixers import register_mixer


@register_mixer("suite_cli_own")
class Own(nn.Module):
    def __init__(self, d_model: int, key_width: int = 4):
        super().__init__()
        self.key_width = key_width
        self.down, self.up = nn.Linear(d_model, key_width), nn.Linear(key_width, d_model)

    def forward(self, x):
        return self.up(self.down(x).cumsum(1))

    def init_state(self, batch, *, device=None, dtype=None):
        return self.down.weight.new_zeros(batch, self.key_width)

    def extend(self, x, state):
        sums = state.unsqueeze(1) + self.down(x).cumsum(1)
        return self.up(sums), sums[:, -1]

    def state_size(self, seq_len):
        return self.key_width
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(contract, "_REGISTER", dict(contract._REGISTER))  # what own.py registers is for a test alone
    Path("own.py").write_text(OWN)
    small = {"tasks": {"MQAR": TREE["tasks"]["MQAR"]}, "state_bytes": [512], "score_seeds": [11, 12]}
    Path("small.yaml").write_text(yaml.safe_dump(TREE | small))


def read(name: str) -> dict[str, Any]:
    return json.loads(Path(name).read_text())


@pytest.mark.usefixtures("untimed")
def test_a_users_mixer_is_trained_sized_and_compared_with_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    known = small_suite(**yaml.safe_load(Path("small.yaml").read_text()))
    write_bundle(list(suite_runs(known, {"ReBased": 0.5, "Linear": 0.1})), Path("known.jsonl.gz"))
    words = ("small.yaml", "own.py:Own", "--known", "known.jsonl.gz", "--workers", "1")
    assert suite(*words, "--bundle", "mine.jsonl.gz", "--json", "found.json") == 0
    found = read("found.json")
    assert (found["complete"], found["page"]) == (True, "runs/suite-small/report.html")
    assert set(found["places"]) == {"Own", "ReBased", "Linear"}
    (cell,) = (cell for cell in found["cells"] if cell["mixer"] == "Own")
    assert (cell["state_bytes"], len(cell["recall"]), cell["complete"]) == (512, 2, True)
    own = [run for run in collect([Path("mine.jsonl.gz")]).runs if run.settings["suite"]["mixer"] == "Own"]
    assert len(own) == 4  # two rates with the first seed, then two fresh seeds at the better one
    assert {run.settings["model"]["mixers"][1]["key_width"] for run in own} == {128}
    assert found["sentences"][0] in capsys.readouterr().out
    page = Path("runs/suite-small/report.html").read_text()
    assert "rebased suite small.yaml own.py:Own --workers 1" in page
    assert len(Path("runs/suite-small/runs.csv").read_text().splitlines()) == 1 + 4 + 2 * 4
    assert suite(*words, "--json", "again.json") == 0  # nothing is trained twice
    assert "0 to train" in capsys.readouterr().out
    assert read("again.json")["cells"] == found["cells"]


def test_without_a_mixer_the_page_shows_what_is_known() -> None:
    known = small_suite(**yaml.safe_load(Path("small.yaml").read_text()))
    write_bundle(list(suite_runs(known, {"ReBased": 0.5})), Path("known.jsonl.gz"))
    assert suite("small.yaml", "--known", "known.jsonl.gz", "--json", "found.json") == 0
    assert read("found.json")["places"] == {"ReBased": 1}


def test_shipped_results_are_known_and_not_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their path is this machine's, and must not stand on a page."""
    monkeypatch.setattr("rebased.cli.suite.MODELS", tmp_path / "shipped")
    known = small_suite(**yaml.safe_load(Path("small.yaml").read_text()))
    write_bundle(list(suite_runs(known, {"ReBased": 0.5})), tmp_path / "shipped" / "suite-small.jsonl.gz")
    assert suite("small.yaml", "rebased", "--workers", "1", "--json", "found.json") == 0  # nothing is left to train
    assert read("found.json")["places"] == {"ReBased": 1}
    page = Path("runs/suite-small/report.html").read_text()
    assert "rebased suite small.yaml rebased --workers 1" in page
    assert str(tmp_path) not in page


def test_a_dry_run_says_how_long_it_will_take_and_trains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite("small.yaml", "rebased", "--dry-run", "--workers", "1") == 0
    out = capsys.readouterr().out
    assert "6 runs: 0 done" in out
    assert "timed just now" in out
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("small.yaml", "rebsed"), "the suite has no mixer 'rebsed'; did you mean 'ReBased'? (or FILE:NAME)"),
        (("small.yaml", "own.py:Other"), "own.py registers no mixer 'Other'; decorate your class with"),
        (("small.yaml", "none.py:Own"), "none.py: there is no such file"),
        (("smal", "rebased"), "no shipped config has this name"),
        (("small.yaml", "rebased", "--workers", "0"), "--workers 0: give 1 or more"),
    ],
)
def test_mistakes_are_named(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert suite(*words) == 2
    assert message in capsys.readouterr().err
