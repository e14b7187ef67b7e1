"""Shipped configs and models by name: a path wins, near misses are named, and `rebased list` lists them."""

from pathlib import Path

import pytest

from rebased.cli import main
from rebased.runs.shipped import CONFIGS, MODELS, find_config, find_model, kind_of, shipped_configs, shipped_models

QUICK = CONFIGS / "mqar" / "quick.yaml"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_yaml_file_has_a_name() -> None:
    shipped = shipped_configs()
    assert set(shipped.values()) == set(CONFIGS.rglob("*.yaml"))
    assert {"sweeps/demo", "mqar/quick", "lm/quick", "sweeps/table1-cpu"} <= set(shipped)
    assert [kind_of(name) for name in ("mqar/quick", "lm/quick", "sweeps/heads")] == [
        "run",
        "lm",
        "sweep",
    ]


def test_names_lead_to_files() -> None:
    assert find_config("mqar/quick", "run") == QUICK
    assert find_config("lm/quick", "lm") == find_config("quick", "lm") == CONFIGS / "lm" / "quick.yaml"
    assert find_config(Path("table1-cpu"), "sweep") == find_config("sweeps/table1-cpu", "sweep")
    assert find_config("lm/quick", "run").is_file()  # `rebased train` then says which command it is for


def test_a_file_wins_and_a_folder_does_not() -> None:
    Path("mqar").mkdir()
    Path("demo").mkdir()
    Path("mqar/quick").write_text("task: {}")
    assert find_config("mqar/quick", "run") == Path("mqar/quick")
    assert find_config("demo", "sweep") == CONFIGS / "sweeps" / "demo.yaml"
    assert find_config("mqar", "run") == Path("mqar")  # no shipped config: whoever reads it says that it is a folder


@pytest.mark.parametrize(
    ("name", "kind", "hint"),
    [
        ("mqar/qiuck", "run", "did you mean 'mqar/quick'? "),
        ("quick", "run", "did you mean 'mqar/quick'? "),
        ("configs/mqar/quick.yaml", "run", "did you mean 'mqar/quick'? "),
        ("tabel1-cpu", "sweep", "did you mean 'sweeps/table1-cpu'? "),
        ("lm/qick.yaml", "lm", "did you mean 'lm/quick'? "),
        ("nowhere.yaml", "run", ""),
    ],
)
def test_an_unknown_name_is_told_with_the_nearest(name: str, kind: str, hint: str) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        find_config(name, kind)  # type: ignore[arg-type]
    unknown = f"{name}: No such file or directory, and no shipped config has this name;"
    expected = f"{unknown} {hint}`rebased list configs` lists"
    assert str(raised.value).startswith(expected)


def run(*words: str, verb: tuple[str, ...] = ("list", "configs")) -> int:
    with pytest.raises(SystemExit) as left:
        main([*verb, *words])
    return int(left.value.code or 0)


def test_the_list_has_every_name_with_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert run() == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == list(shipped_configs())
    assert all(sentence.strip().endswith((".", "?")) for _, sentence in lines)


def test_one_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mqar/quick") == 0
    assert capsys.readouterr().out == QUICK.read_text()
    assert run("mqar/qiuck") == 2
    assert capsys.readouterr().err == "error: no shipped config is named 'mqar/qiuck'; did you mean 'mqar/quick'?\n"


def test_a_model_of_this_path_wins_over_a_shipped_one() -> None:
    assert find_model() == find_model("lm/stdlib-bytes") == MODELS
    Path("lm/stdlib-bytes").mkdir(parents=True)
    assert find_model() == MODELS
    assert find_model("lm/stdlib-bytes") == Path("lm/stdlib-bytes")


def test_models_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert run(verb=("list", "models")) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == list(shipped_models())
    assert all("parameters, trained on" in sentence for _, sentence in lines)


NEEDED = {
    "export": ("-o", "out"),
    "recall": ("--facts", "facts.jsonl"),
    "generate": ("--prompt", "x"),
    "serve": ("--port", "0"),
}


@pytest.mark.parametrize("verb", ["eval", "export", "generate", "recall", "serve"])
def test_every_command_finds_models_by_name(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    if verb == "serve":
        pytest.importorskip("rebased.serve.api", reason="needs rebased[serve]")
    Path("facts.jsonl").write_text('{"context": "Norway has", "continuation": "Oslo"}\n')
    assert run("lm/stdlib-byte", *NEEDED.get(verb, ()), verb=("lm", verb)) == 2
    said = capsys.readouterr().err
    assert "lm/stdlib-byte does not exist, and no shipped model has this name; did you mean 'lm/stdlib-bytes'? " in said
    assert run("mqar/based", *NEEDED.get(verb, ()), verb=("lm", verb)) == 2
    assert "mqar/based was not trained on text" in capsys.readouterr().err
