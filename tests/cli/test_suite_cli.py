"""rebased suite: a user's own mixer on a small suite, from the command to the page."""

import json
import re
import shlex
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from command_line import rebased
from fake_suite import TREE, small_suite, suite_runs
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
    Path("own.py").write_text(OWN)
    ahead = OWN.replace("suite_cli_own", "suite_cli_ahead").replace("class Own", "class Ahead")
    Path("ahead.py").write_text(ahead.replace("self.down(x).cumsum(1))", "self.down(x).flip(1).cumsum(1))"))
    Path("empty.py").write_text("")
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
    assert "rebased suite small.yaml own.py:Own --known known.jsonl.gz --workers 1" in page
    assert len(Path("runs/suite-small/runs.csv").read_text().splitlines()) == 1 + 4 + 2 * 4
    assert suite(*words, "--json", "again.json") == 0  # nothing is trained twice
    assert "0 to train" in capsys.readouterr().out
    assert read("again.json")["cells"] == found["cells"]


def test_without_a_mixer_the_page_shows_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: nothing is trained or timed."""
    monkeypatch.delattr("rebased.cli.suite.time_steps")
    known = small_suite(**yaml.safe_load(Path("small.yaml").read_text()))
    write_bundle(list(suite_runs(known, {"ReBased": 0.5})), Path("known.jsonl.gz"))
    assert suite("small.yaml", "--known", "known.jsonl.gz", "--json", "found.json") == 0
    assert read("found.json")["places"] == {"ReBased": 1}
    assert suite("small.yaml", "rebased", "--dry-run", "--workers", "1") == 0  # its folder also takes runs


def test_a_dry_run_without_a_mixer_says_that_nothing_would_be_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite("small.yaml", "--dry-run") == 0
    assert "nothing would be trained: name a mixer, or all" in capsys.readouterr().out


def test_a_page_in_a_hurry_is_written_without_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C the reader waits for the page."""
    known = small_suite(**yaml.safe_load(Path("small.yaml").read_text()))
    write_bundle(list(suite_runs(known, {"ReBased": 0.5})), Path("known.jsonl.gz"))
    monkeypatch.setattr("rebased.cli.suite.run_sweep", lambda *_, **__: (130, None))
    monkeypatch.delattr("rebased.cli.suite.time_steps")
    assert suite("small.yaml", "rebased", "--known", "known.jsonl.gz") == 130
    assert "The training steps were not timed" in Path("runs/suite-small/report.html").read_text()


def test_a_time_too_short_for_any_run_ends_with_a_page_and_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("small.yaml", "rebased", "--workers", "1", "--json", "found.json")
    with monkeypatch.context() as late:
        an_hour_ago = time.monotonic() - 3600
        late.setattr("rebased.cli.time", SimpleNamespace(monotonic=lambda: an_hour_ago))
        assert suite(*words, "--for", "59m") == 75
    said = re.search(r"none fits into --for 59 min: .*; go on with: rebased suite (.*)", capsys.readouterr().out)
    assert said
    assert not read("found.json")["complete"]
    assert Path("runs/suite-small/report.html").exists()
    assert suite(*shlex.split(said[1])) == 0
    assert read("found.json")["complete"]


def test_shipped_results_are_known_and_not_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their path is this machine's, and must not stand on a page."""
    monkeypatch.setattr("rebased.cli.suite.MODELS", tmp_path / "shipped")
    monkeypatch.setattr("rebased.cli.suite.CONFIGS", tmp_path)
    known = small_suite(**yaml.safe_load(Path("small.yaml").read_text()))
    write_bundle(list(suite_runs(known, {"ReBased": 0.5})), tmp_path / "shipped" / "suite-small.jsonl.gz")
    assert suite("small.yaml", "rebased", "--workers", "1", "--json", "found.json") == 0  # nothing is left to train
    assert read("found.json")["places"] == {"ReBased": 1}
    page = Path("runs/suite-small/report.html").read_text()
    assert "rebased suite small.yaml rebased --workers 1" in page
    assert str(tmp_path) not in page


def test_a_users_file_with_the_name_of_a_shipped_suite_has_its_own_folder_and_results(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("small.yaml").rename("quick.yaml")
    assert suite("quick.yaml") == 2
    assert "quick.yaml has the name of a suite that comes with the package" in capsys.readouterr().err
    assert suite("quick.yaml", "--out", "mine", "--json", "found.json") == 0
    assert read("found.json")["cells"] == []
    assert not Path("runs").exists()


@pytest.mark.parametrize("when", ["in a run", "between two"])
def test_ctrl_c_while_steps_are_timed_still_leaves_a_page(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(tree: object) -> list[float]:
        if when == "in a run":
            return []  # the run has noticed, and has ended
        raise KeyboardInterrupt

    known = small_suite(**yaml.safe_load(Path("small.yaml").read_text()))
    write_bundle(list(suite_runs(known, {"ReBased": 0.5})), Path("known.jsonl.gz"))
    monkeypatch.setattr("rebased.cli.suite.time_steps", interrupted)
    assert suite("small.yaml", "rebased", "--known", "known.jsonl.gz", "--json", "found.json") == 130
    assert read("found.json")["complete"]
    assert "The training steps were not timed" in Path("runs/suite-small/report.html").read_text()


def test_a_dry_run_says_how_long_it_will_take_and_trains_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite("small.yaml", "rebased", "--dry-run", "--workers", "1") == 0
    out = capsys.readouterr().out
    assert "6 runs: 0 done, 4 to train" in out  # the other two have a rate that will not be chosen
    assert "timed just now" in out
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("small.yaml", "rebsed"), "the suite has no mixer 'rebsed'; did you mean 'ReBased'? (or FILE:NAME)"),
        (("small.yaml", "own.py:Owm"), "own.py registers no mixer 'Owm'; did you mean 'Own'?"),
        (("small.yaml", "empty.py:Own"), "empty.py registers no mixer 'Own'; decorate your class with"),
        (("small.yaml", "own.py"), "own.py: which mixer in this file? write own.py:NAME"),
        (
            ("small.yaml", "ahead.py:Ahead"),
            "ahead.py:Ahead fails its contract: never_looks_ahead[at=1]: the output before position 1, after",
        ),
        (("small.yaml", "rebased", "--gpu"), "--gpu: torch sees no GPU here; leave it out to train on the CPU"),
        (("small.yaml", "none.py:Own"), "none.py: there is no such file"),
        (("smal", "rebased"), "no shipped config has this name"),
        (("small.yaml", "rebased", "--workers", "0"), "--workers 0: give 1 or more"),
    ],
)
def test_mistakes_are_named(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rebased.cli.suite.has_gpu", lambda: False)
    assert suite(*words) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""  # nothing was promised before


def test_a_check_that_does_not_matter_to_a_suite_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """Its state is fp32 even for fp64: a suite trains in fp32."""
    single = OWN.replace("suite_cli_own", "suite_cli_single").replace(
        "self.key_width)\n\n", "self.key_width).float()\n\n"
    )
    single = single.replace(
        "return self.up(self.down(x).cumsum(1))", "return self.extend(x, self.init_state(len(x)))[0]"
    )
    single = single.replace("self.up(sums)", "self.up(sums.to(x.dtype))").replace(
        "state.unsqueeze(1) + ", "state[:, None] + "
    )
    Path("single.py").write_text(single.replace("self.down(x).cumsum(1)\n", "self.down(x).float().cumsum(1)\n"))
    assert suite("small.yaml", "single.py:Own", "--dry-run", "--workers", "1") == 0
    assert re.search(r"single\.py:Own fails \d+ checks? that matter elsewhere", capsys.readouterr().err)


def test_check_takes_the_name_of_the_class_as_a_suite_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert rebased("check", "own.py:Own") == 0
    assert "mixer suite_cli_own: " in capsys.readouterr().out


def test_a_mixer_without_a_state_is_told_at_once_that_it_gets_no_place(capsys: pytest.CaptureFixture[str]) -> None:
    stateless = OWN.replace("suite_cli_own", "suite_cli_stateless").replace("def state_size", "def size")
    Path("stateless.py").write_text(stateless)
    assert suite("small.yaml", "stateless.py:Own", "--dry-run", "--workers", "1") == 0
    assert "Own has no state_size: its recall is shown, and it gets no place" in capsys.readouterr().out
