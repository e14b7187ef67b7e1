"""rebased lm generate: what it prints and writes, and its error messages."""

import io
import json
import os
import pty
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from command_line import rebased
from data.small_tokenizer import write_small_tokenizer
from forked_python import COMMAND, Started
from rebased.cli.text_output import visible
from rebased.data.tokenizer import ByteTokenizer
from rebased.models import LanguageModel, LMConfig
from rebased.models.weights import load_model, save_model

run = partial(rebased, "lm", "generate")

TEXT = "Grüße, 漢字!\n"
BYTES = ("--tokenizer", "bytes")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models: random/, and spoken/, which knows one text by heart."""
    home = tmp_path_factory.mktemp("home")
    torch.manual_seed(0)
    random = LanguageModel(
        LMConfig(
            vocab_size=257,
            d_model=24,
            max_len=64,
            mixers=("short_conv", {"name": "rebased", "n_heads": 3}),
            positions="none",
        )
    )
    for parameter in random.parameters():
        nn.init.normal_(parameter, std=0.3)
    spoken = LanguageModel(LMConfig(vocab_size=257, d_model=257, max_len=64, mixers=("short_conv",), n_layers=1))
    for parameter in spoken.parameters():
        nn.init.zeros_(parameter)
    spoken.norm.weight.data.fill_(1.0)
    spoken.embedding.weight.data.copy_(torch.eye(257))
    assert spoken.positions is not None
    for place, token in enumerate([*TEXT.encode(), 256]):
        spoken.positions.weight.data[place, token] = 9.0
    for name, model in (("random", random), ("spoken", spoken)):
        (home / name).mkdir()
        save_model(model, home / name)
    return home


@pytest.fixture(autouse=True)
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    monkeypatch.delenv("REBASED_TRACEBACK", raising=False)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(*words) == 0
    return capsys.readouterr().out


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["sequences"]


def test_text_is_plain_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "spoken", *BYTES, "--prompt", "x", "--temperature", "0") == TEXT
    assert said(capsys, "spoken", *BYTES, "--prompt", "x", "--stop", ", ", "--temperature", "0") == "Grüße\n"
    cut = said(capsys, "spoken", *BYTES, "--prompt", "x", "--max-tokens", "3", "--temperature", "0")
    assert cut == "Gr\ufffd\n"


def test_stdin_is_the_prompt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for given, prompt in ((b"ab\n", "ab"), (b"ab\n\n", "ab\n"), (b"ab", "ab"), (b"", "")):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        found = json.loads(said(capsys, "random", *BYTES, "--max-tokens", "3", "--json", "-"))
        assert found["sequences"][0]["prompt"] == prompt
        assert found["sequences"][0]["prompt_tokens"] == list(prompt.encode()) or [256]


def test_prompts_may_look_like_options(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--prompt", "-x", "--prompt", "", "--prompt", "--seed", "--stop", "-y", "--max-tokens", "2", "--json", "-")
    found = json.loads(said(capsys, "random", *BYTES, *words))
    assert [each["prompt"] for each in found["sequences"]] == ["-x", "", "--seed"]
    assert found["ending"]["stop"] == ["-y"]


def test_files_of_prompts_of_any_lengths(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines, objects = tmp_path / "p.txt", tmp_path / "p.jsonl"
    lines.write_text("a\n\nlonger prompt\r\nbc")
    texts = ["a", "longer prompt", "bc", "", "x\ny"]
    objects.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    out = said(capsys, "random", *BYTES, "--file", str(lines), "--n", "2", "--json", str(tmp_path / "out.json"))
    assert [line for line in out.splitlines() if line.startswith("== ")][2] == "== 3 of 6: 'longer prompt'"
    found = read(tmp_path / "out.json")
    assert [each["prompt"] for each in found] == ["a", "a", "longer prompt", "longer prompt", "bc", "bc"]
    assert all(len(each["tokens"]) == len(each["logprobs"]) for each in found)
    assert found[0]["tokens"] != found[1]["tokens"]
    out = json.loads(said(capsys, "random", *BYTES, "--file", str(objects), "--json", "-", "--max-tokens", "2"))
    assert [each["prompt"] for each in out["sequences"]] == texts


def test_options_are_those_of_generate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.3, "seed": 11}
    words = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    out = json.loads(said(capsys, "random", *BYTES, "--prompt", "ab", *words, "--max-tokens", "40", "--json", "-"))
    model = load_model("random")
    made = model.generate("ab", tokenizer=ByteTokenizer(), max_tokens=40, **options)  # type: ignore[arg-type]
    assert out["sequences"][0]["tokens"] == made.tokens[0]
    assert out["sequences"][0]["logprobs"] == made.logprobs[0]
    assert out["sequences"][0]["text"] == made.texts[0]
    assert out["sampling"] == options


def test_a_sequence_does_not_depend_on_the_others(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("random", *BYTES, "--batch-invariant", "--max-tokens", "9", "--device", "cpu", "--prompt", "ab")
    alone, among = tmp_path / "alone.json", tmp_path / "among.json"
    said(capsys, *words, "--json", str(alone))
    said(capsys, *words, "--prompt", "", "--prompt", "a longer one", "--json", str(among))
    assert read(alone)[0] == read(among)[0]
    assert json.loads(among.read_text())["batch_invariant"]


def test_in_a_terminal_the_prompt_stands_before_the_text(home: Path) -> None:
    """A real terminal, with characters of several bytes, in pieces as they come."""
    leader, follower = pty.openpty()
    environment = {"TERM": "dumb", "COLUMNS": "100"}
    words = ("lm", "generate", "spoken", *BYTES, "--temperature", "0", "--prompt", "x")
    child = Started(COMMAND, *words, cwd=home, environment=environment, streams=dict.fromkeys(range(3), follower))
    os.close(follower)
    content = b""
    while True:
        try:
            piece = os.read(leader, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        content += piece
    assert child.wait(60) == 0
    os.close(leader)
    text = content.decode()
    assert "x" + TEXT.replace("\n", "\r\n") in text
    assert "tokens/s; a sequence's state takes" in text


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert visible("a\x1b[2J\r\x07b\n\tc\x9b") == "a\ufffd[2J\ufffd\ufffdb\n\tc\ufffd"


ERRORS: list[tuple[list[str], str]] = [
    (["nowhere"], "nowhere does not exist, and no shipped model has this name; give a run's folder"),
    (["empty"], "empty is not a run's folder (no config.yaml); give one, or a model.safetensors"),
    (["half"], "half/model.safetensors is not there: it is written when a run ends; finish it with --resume"),
    (["cut"], "cut/model.safetensors is damaged or not a safetensors file"),
    (["random"], "random: it does not say which tokenizer it was trained with; give its tokenizer with --tokenizer"),
    (
        ["random", "--tokenizer", "small.json"],
        "the tokenizer small.json has 358 tokens, and the model has a vocabulary",
    ),
    (
        ["random", "--device", "gpu"],
        'Invalid value "gpu" for --device. Choose from: "auto", "cpu", "cuda". Did you mean "cuda"?',
    ),
    (["random", *BYTES, "--prompt", "a", "--file", "bad.txt"], "give --prompt or --file, not both"),
    (["random", *BYTES, "--file", "bad.txt"], "bad.txt, line 2 is not UTF-8: invalid start byte at byte 3"),
    (["random", *BYTES, "--file", "blank.txt"], "blank.txt has no prompts; write one per line"),
    (["random", *BYTES, "--file", "none.txt"], "none.txt: No such file or directory"),
    (["random", *BYTES, "--file", "bad.jsonl"], "bad.jsonl, line 1 should be an object with a text"),
    (["random", *BYTES, "--prompt", "a", "--max-tokens", "0"], "--max-tokens 0 is not a number of tokens"),
    (["random", *BYTES, "--prompt", "a", "--temperature", "-1"], "--temperature -1.0 is out of range"),
    (["random", *BYTES, "--prompt", "a", "--top-p", "7"], "--top-p 7.0 is out of range"),
    (["random", *BYTES, "--prompt", "a", "--stop", ""], "a stop string is empty"),
    (["random", *BYTES, "--prompt", "a", "--n", "0"], "--n 0 is not a number of sequences per prompt"),
    (["random", *BYTES, "--prompt", "a", "--batch-size", "0"], "--batch-size 0 is not a number of sequences at a time"),
    (["random", *BYTES, "--prompt", "a", "--n", "100001"], "100,001 sequences (prompts times n) are more than the"),
    (["random", *BYTES, "--prompt", "a", "--json", "bad.jsonl"], "bad.jsonl is there already; choose another file"),
    (
        ["spoken", *BYTES, "--prompt", "a" * 65],
        "the prompt has 65 tokens, more than the model's 64 positions; shorten it",
    ),
    (
        ["spoken", *BYTES, "--prompt", "a", "--prompt", "a" * 65],
        "prompt 2 of 2 has 65 tokens, more than the model's 64 positions; shorten it",
    ),
]


@pytest.mark.parametrize(("words", "message"), ERRORS, ids=lambda each: str(each)[:60])
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], home: Path, words: list[str], message: str) -> None:
    for name in ("empty", "half", "cut"):
        (home / name).mkdir(exist_ok=True)
    (home / "half" / "config.yaml").write_text("data: {}\n")
    (home / "cut" / "model.safetensors").write_bytes((home / "random" / "model.safetensors").read_bytes()[:-9])
    (home / "bad.txt").write_bytes(b"ok\n\xff\xfe\n")
    (home / "blank.txt").write_text("\n \n")
    (home / "bad.jsonl").write_text('{"text": "x"}\n')
    write_small_tokenizer(home / "small.json")
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.err.replace("\n", " ").startswith(f"error: {message}")
    assert captured.out == ""


def test_learned_positions_end_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("spoken", *BYTES, "--prompt", "a" * 60, "--ignore-end", "--max-tokens", "999", "--json", "-")
    (found,) = json.loads(said(capsys, *words))["sequences"]
    assert (len(found["tokens"]), found["finish_reason"]) == (5, "length")
