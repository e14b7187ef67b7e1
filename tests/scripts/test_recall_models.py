"""The shipped MQAR models: small, whole, what their cards say, and made by the commands that the cards give."""

import json
import shlex
from pathlib import Path

import pytest
from scripts.recall_models import COMMANDS, ship_recall

from rebased.config import load_config
from rebased.models.weights import WEIGHTS, load_model
from rebased.runs.load import RecallModel, open_model
from rebased.runs.record import read_record
from rebased.runs.shipped import ABOUT, MODELS, find_config, find_model, shipped_models
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.train import train
from scripts import recall_models
from tiny_run import tiny

RECALL = MODELS / "mqar"
MAX_BYTES = 60_000


@pytest.mark.parametrize("name", COMMANDS)
def test_a_shipped_model_is_small_and_whole(name: str) -> None:
    folder = RECALL / name
    about, card = json.loads((folder / ABOUT).read_text()), (folder / "README.md").read_text()
    assert (folder / WEIGHTS).stat().st_size <= MAX_BYTES
    opened = open_model(folder)
    assert isinstance(opened, RecallModel)
    assert opened.model.num_parameters() == about["parameters"]
    assert opened.model.config.length_limit is None
    assert about["command"] in card
    assert f"{about['accuracy_by_pairs']['32']:.3f} of 32 pairs" in card
    words = shlex.split(about["command"])
    assert words[:3] == ["rebased", "train", "--config"]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    changes = {key.removeprefix("--"): value for key, value in options.items() if "." in key}
    path = find_config(options["--config"], "run")
    assert load_config(SyntheticRunConfig, path, changes).digest() == about["digest"]


def test_based_and_rebased_have_states_of_one_size() -> None:
    sizes = {name: load_model(RECALL / name).state_size(100) for name in COMMANDS}
    assert sizes["rebased"] == sizes["based"] < sizes["attention"]


def test_names() -> None:
    assert list(shipped_models()) == ["mqar/rebased", "mqar/based", "mqar/attention", "lm/stdlib-bytes"]
    assert find_model("mqar/based") == RECALL / "based"
    assert find_model(RECALL) == RECALL  # a path that exists
    with pytest.raises(ValueError, match="did you mean 'mqar/attention'"):
        find_model("mqar/atention")


def test_a_run_is_shipped_with_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, folder = tmp_path / "run", tmp_path / "shipped" / "rebased"
    train(tiny({"train": {"epochs": 1}}), run)
    with pytest.raises(ValueError, match=r"which no command here makes: \w+ is rebased train --config mqar/explorer"):
        ship_recall(run, folder)
    assert not folder.exists()
    monkeypatch.setattr(recall_models, "_config", lambda name: tiny({"train": {"epochs": 1 if name == "based" else 2}}))
    about = ship_recall(run, folder)
    epoch = next(line for line in read_record(run) if line["type"] == "epoch")
    assert about["accuracy_by_pairs"] == epoch["test"]["by_pairs"]
    assert about["name"] == "based"
    assert isinstance(open_model(folder), RecallModel)
    record = run / "record.jsonl"
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="is not done; finish it with --resume"):
        ship_recall(run, folder)
