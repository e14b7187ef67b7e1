"""A run's folder holds one run and is used by one process at a time."""

from pathlib import Path

import pytest

from rebased.config import load_config
from rebased.runs.folder import run_folder
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.train import train
from tiny_run import tiny


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "done"
    train(tiny({"train": {"epochs": 1}}), folder)
    return folder


def test_the_config_in_the_folder_is_the_finished_one(done: Path) -> None:
    config = tiny({"train": {"epochs": 1}})
    assert load_config(SyntheticRunConfig, done / "config.yaml") == config
    assert load_config(SyntheticRunConfig, done / "config.yaml").digest() == config.digest()


@pytest.mark.parametrize("resume", [False, True])
def test_another_run_is_refused_and_the_keys_are_named(done: Path, resume: bool) -> None:
    before = contents(done)
    other = tiny({"train": {"epochs": 1, "lr": 0.02}, "model": {"mixers": {1: {"key_width": 5}}}})
    with pytest.raises(ValueError, match="another run") as caught:
        train(other, done, resume=resume)
    assert "train.lr is 0.01 there and 0.02 here" in str(caught.value)
    assert "model.mixers.1.key_width is 4 there and 5 here" in str(caught.value)
    assert "batch_size" not in str(caught.value)
    assert contents(done) == before


def test_the_same_run_without_resume_is_refused(done: Path) -> None:
    before = contents(done)
    with pytest.raises(ValueError, match="holds this run; add --resume"):
        train(tiny({"train": {"epochs": 1}}), done)
    assert contents(done) == before


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="not empty and not a run's"):
        train(tiny(), tmp_path, resume=True)
    assert contents(tmp_path) == {"thesis.tex": b"years of work"}
    with pytest.raises(ValueError, match="is a file"):
        train(tiny(), tmp_path / "thesis.tex")


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("train: [")
    with pytest.raises(ValueError, match=r"config\.yaml is not valid YAML"):
        train(tiny(), tmp_path, resume=True)


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    folder, config = tmp_path / "run", tiny()
    with run_folder(folder, config, resume=False):
        before = contents(folder)
        with pytest.raises(ValueError, match="in use by another process"):
            train(config, folder, resume=True)
        assert contents(folder) == before
    train(config, folder, resume=True)  # the lock went with its holder
