"""Models under lm-evaluation-harness: what our adapter says is what its own adapter for Hugging Face says."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
pytest.importorskip("lm_eval", reason="needs rebased[eval]")

from lm_eval.api.instance import Instance

from rebased.cli import main
from rebased.data.tokenizer import ByteTokenizer
from rebased.evaluate.harness.model import HarnessModel
from rebased.evaluate.text import token_losses
from rebased.models import LanguageModel, LMConfig
from rebased.runs.evaluations import read_evaluations
from rebased.runs.shipped import MODELS
from rebased.train import train
from tiny_lm_run import tiny, write_text

TEXTS = ["alpha beta gamma, delta.", "x", "an epsilon of some length that needs more than one window to be read" * 2]


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(0)
    mixers: tuple[Any, ...] = ("short_conv", {"name": "rebased", "n_heads": 2, "key_width": 4})
    model = LanguageModel(LMConfig(vocab_size=257, d_model=16, n_layers=2, max_len=48, mlp_ratio=2, mixers=mixers))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    return model.eval()


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=i) for i, each in enumerate(arguments)]


PAIRS = [("alpha", " beta"), ("", "gamma"), ("x" * 100, "yz"), ("a b ", "c"), ("é", "ü")]
UNTIL = [("alpha", {"until": ["\n", "e"], "max_gen_toks": 12}), ("y" * 99, {"until": [], "max_gen_toks": 5})]


def test_it_answers_as_the_harness_own_adapter_does(model: LanguageModel) -> None:
    transformers = pytest.importorskip("transformers", reason="needs rebased[hf]")
    pytest.importorskip("accelerate", reason="the harness's own adapter needs accelerate")
    from lm_eval.models.huggingface import HFLM

    from rebased.models.hf import RebasedForCausalLM, to_hf_tokenizer

    ours = HarnessModel(model, ByteTokenizer(), batch_size=2)
    transformers.logging.set_verbosity_error()
    theirs = HFLM(
        pretrained=RebasedForCausalLM.from_language_model(model),
        tokenizer=to_hf_tokenizer(ByteTokenizer(), 48),
        batch_size=1,
        max_length=48,
        device="cpu",
    )
    found, wanted = (lm.loglikelihood(requests("loglikelihood", *PAIRS)) for lm in (ours, theirs))
    for (logprob, greedy), (expected, is_greedy) in zip(found, wanted, strict=True):
        assert logprob == pytest.approx(expected, abs=1e-4)
        assert greedy == is_greedy
    texts = requests("loglikelihood_rolling", *((text,) for text in TEXTS))
    for text, a, b in zip(TEXTS, ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts), strict=True):
        assert a == pytest.approx(b, abs=1e-4 * len(text))
    asked = requests("generate_until", *UNTIL)
    assert ours.generate_until(asked) == theirs.generate_until(asked)


def test_perplexity_is_that_of_the_model_itself(model: LanguageModel) -> None:
    """The same document, the same first token, one window: to 1e-4 nats per token."""
    tokens = torch.tensor([[256, *ByteTokenizer().encode(TEXTS[0])]])
    nats = token_losses(model, tokens[:, :-1], tokens[:, 1:]).sum()
    found = HarnessModel(model, ByteTokenizer()).loglikelihood_rolling(requests("loglikelihood_rolling", (TEXTS[0],)))
    assert -found[0] / len(TEXTS[0]) == pytest.approx(float(nats.detach()) / len(TEXTS[0]), abs=1e-4)


def test_each_token_of_a_long_text_is_predicted_once(model: LanguageModel) -> None:
    lm = HarnessModel(model, ByteTokenizer(), max_length=16)
    uniform = LanguageModel(model.config)
    with torch.no_grad():
        for weight in uniform.parameters():
            weight.zero_()
    lm.model = uniform.eval()
    found = lm.loglikelihood_rolling(requests("loglikelihood_rolling", (TEXTS[2],)))
    assert found[0] == pytest.approx(-len(TEXTS[2]) * math.log(257), rel=1e-5)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    train(tiny(write_text(tmp_path / "text"), {"model": {"positions": "none"}}), tmp_path / "run")
    words = ["lm", "eval", str(tmp_path / "run"), "--tasks", "rebased_mqar_words_4,rebased_mqar_words_4_twice"]
    with pytest.raises(SystemExit) as left:
        main([*words, "--limit", "3", "--json", str(tmp_path / "out.json")])
    assert left.value.code == 0, capsys.readouterr().err
    assert "rebased_mqar_words_4_twice" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text())
    assert {score["examples"] for score in written["scores"]} == {3}
    assert [entry["scores"] for entry in read_evaluations(tmp_path / "run")] == [written["scores"]]
    with pytest.raises(SystemExit) as left:
        main([*words[:4], "no_such_task_here"])
    assert left.value.code == 2
    assert "unknown task 'no_such_task_here'" in capsys.readouterr().err


def test_scores_of_a_shipped_model_go_to_the_working_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written into the package, git says nothing, and no bar of the harness is shown."""
    monkeypatch.chdir(tmp_path)  # outside any checkout
    before = sorted(MODELS.iterdir())
    with pytest.raises(SystemExit) as left:
        main(["lm", "eval", "--tasks", "rebased_mqar_words_4", "--limit", "2"])
    assert left.value.code == 0
    assert sorted(MODELS.iterdir()) == before
    assert [entry["model"] for entry in read_evaluations(tmp_path)] == ["lm/stdlib-bytes"]
    captured = capfd.readouterr()
    assert captured.err == ""
    assert "e+" in captured.out  # the perplexity of seven digits that it has not learnt
