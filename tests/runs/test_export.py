"""A trained model as a folder for others, and a card that says what its record says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rebased.cli import main
from rebased.data.tokenizer import ByteTokenizer
from rebased.models import LanguageModel, LMConfig
from rebased.models.authors_checkpoint import read_authors_checkpoint
from rebased.models.weights import load_model
from rebased.runs.export import export_model, is_flat, model_card
from rebased.runs.load import record_beside
from rebased.runs.record import read_record
from rebased.runs.shipped import ABOUT, find_model
from rebased.train import train
from tiny_lm_run import tiny, write_text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("export")
    train(tiny(write_text(home / "text")), home / "run")
    return home / "run"


def call(*words: str | Path) -> int:
    with pytest.raises(SystemExit) as left:
        main(["lm", *map(str, words)])
    assert isinstance(left.value.code, int)
    return left.value.code


def test_the_authors_layout_and_back(run: Path, tmp_path: Path) -> None:
    assert call("export", run, "-o", tmp_path / "out", "--layout", "authors") == 0
    model, back = load_model(run), read_authors_checkpoint(tmp_path / "out", n_heads=2)
    tokens = torch.arange(12).unsqueeze(0)
    assert torch.equal(model(tokens), back(tokens))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_transformers_reads_what_was_exported(run: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs rebased[hf]")
    assert call("export", run, "-o", tmp_path / "out") == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "alpha beta é \x00\n"
    tokens = tokenizer(text, return_tensors="pt").input_ids
    assert tokens[0].tolist() == ByteTokenizer().encode(text)
    assert tokenizer.decode(tokens[0]) == text
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == model.generation_config.eos_token_id == 256
    tokens = tokens[:, :12]
    assert torch.equal(model(tokens).logits, load_model(run)(tokens))
    writer = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert writer("al", max_new_tokens=4, do_sample=False)[0]["generated_text"].startswith("al")


def test_quiet_is_quiet(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="needs rebased[hf]")
    assert call("export", run, "-o", tmp_path / "out", "--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_the_card_says_what_the_record_says(run: Path) -> None:
    model, record = load_model(run), read_record(run)
    card = model_card(model, ByteTokenizer(), record)
    assert f"{model.num_parameters():,} parameters" in card
    assert record[0]["corpus"]["sha256"] in card
    assert f"{record[-1]['valid']['all']['perplexity']:.2f}" in card
    steps, train = record[-1]["step"], record[0]["config"]["train"]
    seen = steps * train["batch_size"] * record[0]["config"]["data"]["seq_len"]
    assert f"{seen:,} tokens ({steps:,} steps of " in card
    assert "is not known" in model_card(model, None, [])
    record[-1]["valid"]["ar"] = {"tokens": 0, "loss": None, "perplexity": None}  # a text without AR tokens
    assert f"{record[-1]['valid']['all']['perplexity']:.2f} |  | " in model_card(model, None, record)


def test_nothing_is_overwritten_and_nothing_half_is_left(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    assert call("export", run, "-o", tmp_path / "mine", "--layout", "authors") == 2
    assert "is there already" in capsys.readouterr().err

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rebased.runs.export.save_file", full)
    with pytest.raises(OSError, match="No space"):
        export_model(load_model(run), None, tmp_path / "out", layout="authors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("export", tmp_path, "-o", tmp_path / "out") == 2
    assert "is not a run's folder" in capsys.readouterr().err


def test_the_shipped_model_is_exported_and_its_card_knows_its_text(tmp_path: Path) -> None:
    assert call("export", "-o", tmp_path / "out", "--layout", "authors") == 0
    path = find_model()
    card = model_card(load_model(path), ByteTokenizer(), record_beside(path))
    about = json.loads((path / ABOUT).read_text())
    assert about["text"] in card
    assert f"{about['tokens']:,} tokens ({about['steps']:,} steps of " in card
    assert f"| test | {about['measured_tokens']['test']:,} | {2 ** about['bits_per_byte']['test']:.2f} |" in card
    assert "import rebased.models.hf" in card
    assert "pip install '.[hf]'` in a clone" in card


OWN = """
from torch import nn
from rebased import register_mixer

@register_mixer("fading")
class Fading(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.proj = nn.Linear(d_model, d_model)

    def init_state(self, batch): return ()
    def extend(self, x, state): return self(x), state
    def state_size(self, seq_len): return 0
    def forward(self, x): return self.proj(x)
"""
EXPORT = """
import json, sys
from pathlib import Path
from rebased.cli.imports import import_all
from rebased.data.tokenizer import ByteTokenizer
from rebased.models import LanguageModel, LMConfig
from rebased.runs.export import export_model
from rebased.runs.record import read_record

import_all(("my.py",))
sizes = {"vocab_size": 257, "d_model": 16, "max_len": 64, "n_layers": 2}
model = LanguageModel(LMConfig.model_validate(sizes | {"mixers": json.loads(sys.argv[1])}))
export_model(model, ByteTokenizer(), Path("out"), record=read_record(sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("mixers", "said"),
    [
        (["short_conv", "fading"], "Not part of rebased: fading. Below, `my` stands for"),
        (["short_conv", {"name": "rebased", "n_heads": 2, "conv_width": 4}], "it computes rebased with conv_width 4."),
    ],
    ids=["own mixer", "conv_width"],
)
def test_the_code_of_the_card_runs(mixers: list[Any], said: str, run: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs rebased[hf]")

    def python(*words: str | Path) -> str:
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "my.py").write_text(OWN)
    python("-c", EXPORT, json.dumps(mixers), run)
    card = (tmp_path / "out" / "README.md").read_text()
    assert said in card
    has_own = "fading" in mixers
    assert ("`rebased lm train --config config.yaml --import my`" in card) is has_own
    assert ("import my, rebased.models.hf" in (tmp_path / "out" / "config.json").read_text()) is has_own
    code = card.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "card.py").write_text(code.replace("this folder", "out"))
    assert python("card.py").startswith("Once")


@pytest.mark.parametrize(
    ("mixer", "flat"),
    [
        ({"name": "rebased", "n_heads": 2}, True),
        ({"name": "rebased", "n_heads": 2, "output_gate": "silu"}, False),
        ({"name": "rebased", "n_heads": 2, "conv_width": 4}, False),
        ({"name": "gla", "n_heads": 2}, False),
    ],
    ids=str,
)
def test_code_is_exported_where_it_computes_the_model(mixer: dict[str, object], flat: bool) -> None:
    config = LMConfig.model_validate({"vocab_size": 257, "d_model": 16, "max_len": 32, "mixers": [mixer]})
    assert is_flat(LanguageModel(config)) is flat
