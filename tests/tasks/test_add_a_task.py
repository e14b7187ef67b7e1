"""The worked example of docs/add_a_task.md keeps the contract and trains, by the commands that the page gives."""

import re
from pathlib import Path

import pytest

from forked_python import run_pytest
from rebased.cli import main
from rebased.evaluate.task_contract import CHECKS
from rebased.runs.record import read_record

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add_a_task.md").read_text()


def block(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    return text


def test_the_page_keeps_the_contract(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text(block("python"))
    suite = str(ROOT / "tests" / "tasks" / "test_task_contract.py")
    done = run_pytest("--task", f"{tmp_path / 'my_task.py'}:first_token", suite)
    assert done.returncode == 0, done.output
    assert f"{len(CHECKS) - 2} passed, 2 skipped" in done.output  # it has no slices and no answer_positions


def test_the_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_task.py").write_text(block("python"))
    Path("my_task.yaml").write_text(block("yaml"))
    words = ["train", "--import", "my_task.py", "--config", "my_task.yaml"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--out", "run", "--train.epochs", "1", "--task.train.0.examples", "200"])
    assert not left.value.code
    run, epoch, _ = read_record(Path("run"))
    assert run["config"]["task"]["name"] == "first_token"
    assert epoch["test"].keys() == {"accuracy", "by_length"}
    assert epoch["test"]["by_length"].keys() == {"8", "12"}
    with pytest.raises(SystemExit):
        main([*words, "--task.name", "first_tokn"])
    assert "--task.name: unknown task 'first_tokn'; did you mean 'first_token'?" in capsys.readouterr().err
