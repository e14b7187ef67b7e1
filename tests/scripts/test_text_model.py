"""The model that comes with the package: small, whole, and what its card says; and how one is made from a run."""

import json
import math
from pathlib import Path

import pytest
import torch
from scripts.text_model import MAX_BYTES, ship

from data.small_tokenizer import write_small_tokenizer
from forked_python import run_code
from rebased.data import write_corpus
from rebased.models.weights import WEIGHTS, load_model
from rebased.runs.load import open_text_model
from rebased.runs.record import read_record
from rebased.runs.shipped import ABOUT, MODELS
from rebased.train import train
from tiny_lm_run import tiny

ROOT = Path(__file__).parents[2]
CODE = "def add(self, name, value=None):\n    if value is None:\n        return self\n    self.values[name] = value\n"


def test_the_shipped_model_is_small_and_whole() -> None:
    about, card = json.loads((MODELS / ABOUT).read_text()), (MODELS / "README.md").read_text()
    assert (MODELS / WEIGHTS).stat().st_size <= MAX_BYTES
    model, tokenizer = open_text_model(None)
    assert tokenizer.name == "bytes"
    assert model.num_parameters() == about["parameters"]
    assert model.config.length_limit is None
    assert f"{about['bits_per_byte']['test']:.3f} bits per byte" in card
    assert f"{about['steps']:,} steps" in card
    assert about["command"] in card
    assert "PSF License" in card


def test_the_shipped_model_has_learnt_python() -> None:
    """Code that it has not seen costs far less than the 8 bits per byte of a model that knows nothing."""
    model, tokenizer = open_text_model(None)
    tokens = torch.tensor([[256, *tokenizer.encode(CODE)]])
    with torch.no_grad():
        bits = float(model.loss(tokens[:, :-1], tokens[:, 1:])) / math.log(2)
    assert bits < 4
    made = model.generate(["def ", ""], tokenizer=tokenizer, max_tokens=30, temperature=0.5)
    assert all(len(tokens) == 30 or reason == "stop" for tokens, reason in zip(*made[::2], strict=False))


def write_texts(folder: Path, tokenizer: str = "bytes") -> Path:
    text = CODE * 6
    write_corpus(folder, {"train": [text], "valid": [text[:150]], "test": [text[150:300]]}, tokenizer)
    return folder


def test_a_run_is_shipped_with_its_card(tmp_path: Path) -> None:
    run, folder = tmp_path / "run", tmp_path / "shipped"
    train(tiny(write_texts(tmp_path / "text"), {"train": {"steps": 6}}), run)
    about = ship(run, folder)
    end = read_record(run)[-1]
    assert about == json.loads((folder / ABOUT).read_text())
    assert about["bits_per_byte"]["test"] == pytest.approx(end["test"]["all"]["loss"] / math.log(2))
    assert (about["steps"], about["tokens"]) == (6, 6 * 4 * 16)
    assert "--data.seq_len 16 " in about["command"]
    assert "--train.steps 6" in about["command"]
    model, tokenizer = open_text_model(folder)
    whole = dict(load_model(run).named_parameters())
    assert all(torch.equal(value, whole[name].bfloat16().float()) for name, value in model.named_parameters())
    assert len(model.generate("x", tokenizer=tokenizer, max_tokens=3, ignore_end_of_text=True).tokens[0]) == 3


def test_what_is_not_shipped(tmp_path: Path) -> None:
    tokenizer = str(write_small_tokenizer(tmp_path / "tokenizer.json"))
    texts = write_texts(tmp_path / "other", tokenizer)
    changes = {"train": {"steps": 3, "warmup_steps": 1}, "model": {"vocab_size": 400}}
    train(tiny(texts, changes), tmp_path / "run")
    with pytest.raises(ValueError, match="was not trained on bytes"):
        ship(tmp_path / "run", tmp_path / "shipped")
    record = tmp_path / "run" / "record.jsonl"
    record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="is not done; finish it with --resume"):
        ship(tmp_path / "run", tmp_path / "shipped")
    assert not (tmp_path / "shipped").exists()


def test_the_guides_python_runs(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "generate.md").read_text()
    code = "\n".join(block.split("```")[0] for block in guide.split("```python\n")[1:])
    result = run_code(code, tmp_path)
    assert result.returncode == 0, result.stderr
