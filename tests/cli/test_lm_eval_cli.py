"""The commands rebased lm eval and lm recall on a small model and text, and their error messages."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rebased.cli import main
from rebased.cli.output import digits
from rebased.data import Corpus, write_corpus
from rebased.evaluate.ar import ARRule
from rebased.evaluate.text import evaluate_text
from rebased.models import LanguageModel, LMConfig
from rebased.models.weights import load_model, save_model
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.record import RECORD, read_record
from rebased.train import train
from tolerances import TRAINED

LENGTH = 96
WORDS = ["the", "port", "of", "a", "town", "by", "sea", "and", "hill", "has", "one", "old", "gate", "but", "no", "wall"]


def write_text(seed: int, documents: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=40)) for _ in range(documents)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model (run/) and a text (text/) beside it."""
    home = tmp_path_factory.mktemp("home")
    texts = {"train": write_text(1, 20), "valid": write_text(2, 3), "test": write_text(3, 6)}
    write_corpus(home / "text", texts)
    torch.manual_seed(0)
    mixers = ["short_conv", {"name": "rebased", "n_heads": 2, "key_width": 4}]
    config = {"vocab_size": 260, "d_model": 8, "max_len": LENGTH, "mixers": mixers}
    (home / "run").mkdir()
    save_model(LanguageModel(LMConfig.model_validate(config)), home / "run")
    facts = [{"context": f"Town {i:02} has", "continuation": random.Random(i).choice(WORDS)} for i in range(30)]
    (home / "facts.jsonl").write_text("\n".join(map(json.dumps, facts)))
    return home


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("REBASED_TRACEBACK", raising=False)


def run(*words: str) -> None:
    with pytest.raises(SystemExit) as left:
        main(["lm", *words])
    assert left.value.code == 0


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as left:
        main(["lm", *words])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def measure(tmp_path: Path, *words: str) -> dict[str, Any]:
    path = tmp_path / f"numbers-{len(list(tmp_path.iterdir()))}.json"
    run("eval", "run", "--data", "text", *words, "--json", str(path))
    return dict(json.loads(path.read_text()))


def test_numbers_and_table(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = measure(tmp_path)
    shown = capsys.readouterr().out
    corpus = Corpus("text")
    split = corpus.splits["test"]
    scores = evaluate_text(load_model(home / "run"), corpus.windows("test", LENGTH))
    assert numbers["all"]["nats"] == pytest.approx(scores.mean(), rel=1e-12)
    assert numbers["all"]["tokens"] == split.tokens - 1
    f = numbers["ar_share"]
    parts = f * math.log(numbers["ar"]["perplexity"]) + (1 - f) * math.log(numbers["non_ar"]["perplexity"])
    assert parts == pytest.approx(math.log(numbers["all"]["perplexity"]), rel=1e-13)
    assert sum(entry["tokens"] for entry in numbers["by_distance"]) == numbers["ar"]["tokens"]
    low, high = numbers["ar"]["perplexity_interval"]
    assert low < numbers["ar"]["perplexity"] < high
    assert split.text_bytes is not None
    bits = scores.mean() / math.log(2) * split.tokens / split.text_bytes
    assert numbers["bits_per_byte"] == pytest.approx(bits, rel=1e-12)
    for text in ("non-AR", "2 to 3 ago", f"{f:.4f}", f"bits per byte: {bits:.4f}", "of 96"):
        assert text in shown


def test_one_window_has_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = measure(tmp_path, "--windows", "1")
    assert numbers["all"]["perplexity_interval"] == [None, None]
    shown = capsys.readouterr().out
    assert "test, 1 window of 96" in shown
    assert "no interval where all tokens are of one window" in shown


def test_options_reach_the_rule(tmp_path: Path) -> None:
    corpus = Corpus("text")
    batch = corpus.windows("test", LENGTH).batch([0, 5])
    stream = torch.cat([batch.tokens, batch.labels[:, -1:].clamp(min=0)], dim=1)
    want = (ARRule(3, 256).distances(stream) > 0)[:, 1:] & (batch.labels >= 0)
    numbers = measure(tmp_path, "--windows", "2", "--order", "3", "--reset-token", "end")
    assert numbers["windows"] == 2
    assert 0 < numbers["ar"]["tokens"] == int(want.sum())
    assert numbers["rule"] == {"order": 3, "reset_token": 256, "max_count": None}


def test_bigrams_of_the_training_split_are_capped(tmp_path: Path) -> None:
    free, capped, none = (
        measure(tmp_path, *words)["ar"]["tokens"] for words in ((), ("--max-count", "100"), ("--max-count", "0"))
    )
    assert free > capped > none == 0


def test_a_run_knows_its_text_and_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {
        "type": "run",
        "config": {"data": {"folder": "text", "seq_len": 48, "isolate_documents": False}},
        "corpus": {"tokenizer": "bytes", "vocab_size": 257},
    }
    (tmp_path / "model.safetensors").write_bytes(Path("run/model.safetensors").read_bytes())
    (tmp_path / RECORD).write_text(json.dumps(line) + "\n")
    run("eval", str(tmp_path), "--windows", "2")
    assert "2 windows of 48" in capsys.readouterr().out
    line["corpus"] = {"tokenizer": "other.json", "vocab_size": 259}
    (tmp_path / RECORD).write_text(json.dumps(line) + "\n")
    said = refusal(capsys, "eval", str(tmp_path))
    assert (
        "the tokenizer bytes of 257 tokens, and the model was trained with other.json of 259; prepare the text" in said
    )
    line["corpus"] = {"tokenizer": "other.json", "vocab_size": 257, "vocabulary": "another"}
    (tmp_path / RECORD).write_text(json.dumps(line) + "\n")
    assert "was trained with other.json, which has other tokens; prepare" in refusal(capsys, "eval", str(tmp_path))
    line["config"] = {"data": {"folder": "elsewhere", "seq_len": 48}}
    (tmp_path / RECORD).write_text(json.dumps(line) + "\n")
    said = refusal(capsys, "eval", str(tmp_path))
    assert "was trained on elsewhere, which does not exist here; give its present place with --data" in said
    said = refusal(capsys, "eval")
    assert "lm/stdlib-bytes was trained on data/stdlib" in said
    assert "or make it with: rebased data prepare -o data/stdlib" in said


def test_recall(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recall.json"
    run("recall", "run", "--data", "text", "--facts", "facts.jsonl", "--questions", "12", "--json", str(path))
    numbers = json.loads(path.read_text())
    shown = capsys.readouterr().out
    for text in ("fact in context", "context without it", "question alone", "64 to 127 ago", "12 questions"):
        assert text in shown
    assert [numbers[name]["asked"] for name in ("present", "absent", "alone")] == [12, 12, 12]
    assert sum(entry["asked"] for entry in numbers["by_distance"]) == 12
    assert len(numbers["answers"]["present"]) == 12
    assert [entry["fact"] for entry in numbers["answers"]["present"]] == [
        entry["fact"] for entry in numbers["answers"]["alone"]
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "run"], "does not say which text it was trained on; name a prepared folder with --data"),
        (
            ["eval", "nowhere", "--data", "text"],
            "nowhere does not exist, and no shipped model has this name; give a run's folder",
        ),
        (["eval", "text", "--data", "text"], "text is not a run's folder (no config.yaml)"),
        (["eval", "facts.jsonl", "--data", "text"], "not a safetensors file"),
        (["eval", "run", "--data", "run"], "run has no manifest.json"),
        (["eval", "run", "--data", "text", "--split", "tset"], "no split 'tset'; did you mean 'test'"),
        (["eval", "run", "--data", "text", "--seq-len", "97"], "--seq-len 97: the model has 96 positions"),
        (["eval", "run", "--data", "text", "--windows", "0"], "--windows 0: give 1 or more"),
        (["eval", "run", "--data", "text", "--reset-token", "257"], "give a number below 257, or `end`"),
        (["eval", "run", "--data", "text", "--split", "train", "--max-count", "1"], "counts the training split"),
        (["eval", "run", "--data", "text", "--json", "facts.jsonl"], "facts.jsonl is there already"),
        (["eval", "run", "--data", "text", "--json", "no/x.json"], "there is no folder no"),
        (["compare", "runs", "-o", "x.html"], "-o. rebased lm compare prints its result: append > FILE to keep it"),
        (["recall", "run", "--data", "text"], "--facts FILE or --squad FILE"),
        (["recall", "run", "--data", "text", "--facts", "text/manifest.json"], "line 1: not a fact"),
        (["recall", "run", "--data", "text", "--facts", "facts.jsonl", "--length", "500"], "--length 500"),
        (["recall", "run", "--data", "text", "--facts", "facts.jsonl", "--length", "9"], "no fact fits into 9"),
    ],
)
def test_one_clear_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(capsys, *words)


@pytest.mark.parametrize("rows", [64, 50304])
def test_a_tokenizer_that_is_not_the_models(rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"vocab_size": rows, "d_model": 4, "max_len": LENGTH, "n_layers": 1, "mixers": ["short_conv"]}
    save_model(LanguageModel(LMConfig.model_validate(config)), tmp_path)
    said = refusal(capsys, "eval", str(tmp_path), "--data", "text")
    assert f"tokenizer bytes of 257 tokens, and the model has a vocabulary of {rows:,}; prepare the text with" in said


def test_a_run_of_another_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.safetensors").write_bytes(Path("run/model.safetensors").read_bytes())
    (tmp_path / RECORD).write_text(json.dumps({"type": "run", "config": {"task": {}}}) + "\n")
    assert "was not trained on text" in refusal(capsys, "eval", str(tmp_path), "--data", "text")


def test_an_empty_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "small", {"train": ["some text"], "test": []})
    assert "small has no split 'test'" in refusal(capsys, "eval", "run", "--data", str(tmp_path / "small"))


def test_a_damaged_split_is_told(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(home / "text", tmp_path / "text")
    shard = tmp_path / "text" / "test-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    words = ("eval", "run", "--data", str(tmp_path / "text"))
    assert "test-00000.bin is damaged: its sha256" in refusal(capsys, *words)
    run(*words, "--split", "valid")  # which is whole


def test_a_model_that_diverged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = load_model("run")
    with torch.no_grad():
        model.norm.weight.fill_(math.nan)
    save_model(model, tmp_path)
    said = refusal(capsys, "eval", str(tmp_path), "--data", "text", "--windows", "1")
    assert "its losses are not finite; the model has diverged" in said


def test_a_trained_run_measures_as_its_own_record_says(tmp_path: Path) -> None:
    """`lm eval` with only the run's folder gives the numbers that `lm train` recorded at its end."""
    mixers = ["short_conv", {"name": "rebased", "n_heads": 2, "key_width": 4}]
    tree = {
        "data": {"folder": str(Path("text").resolve()), "seq_len": 32, "isolate_documents": True},
        "model": {"vocab_size": 257, "d_model": 8, "n_layers": 2, "mixers": mixers},
        "train": {"steps": 3, "batch_size": 4, "warmup_steps": 1, "device": "cpu"},
    }
    train(LMRunConfig.model_validate(tree), tmp_path / "trained")
    run("eval", str(tmp_path / "trained"), "--split", "valid", "--json", str(tmp_path / "numbers.json"))
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    (told,) = (line for line in read_record(tmp_path / "trained") if line["type"] == "end")
    for name in ("all", "ar", "non_ar"):
        assert numbers[name]["nats"] == pytest.approx(told["valid"][name]["loss"], rel=TRAINED)
    measured = [
        {"loss": at["nats"], **{key: at[key] for key in ("nearest", "farthest", "tokens", "perplexity")}}
        for at in numbers["by_distance"]
    ]
    assert told["valid"]["by_distance"] == [pytest.approx(at, rel=TRAINED) for at in measured]
    assert len(measured) > 2


@pytest.mark.parametrize(
    ("number", "text"),
    [(55822339168.7, "5.5822e+10"), (22.4, "22.400"), (12345.6, "12,346"), (-0.5, "-0.5000"), (math.nan, "-")],
)
def test_numbers_can_be_read(number: float, text: str) -> None:
    assert digits(number) == text
