"""Every mixer, three layers to one of attention or a window: states counted, served, exported and explored alike."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rebased.config import load_config, parse_yaml
from rebased.data.tokenizer import ByteTokenizer
from rebased.mixers import count_numbers, has_attention_map, mixer_class, mixer_names
from rebased.models import GenerateOptions, LanguageModel, LMConfig
from rebased.models.block import build_mixer
from rebased.models.config import mixer_schema
from rebased.models.job import Job
from rebased.runs.load import TextModel
from rebased.runs.run_names import kind_of
from rebased.runs.shipped import CONFIGS
from rebased.runs.synthetic_config import SyntheticRunConfig
from served_model import Listener, is_greedy, make_engine, run, small_model

OURS = [name for name in mixer_names() if mixer_class(name).__module__.startswith("rebased.")]
COMPANIONS: dict[str, Any] = {"attention": "attention", "window": {"name": "sliding_window", "window": 5, "n_heads": 2}}


def config_of(name: str, companion: str) -> LMConfig:
    """The mixer with all options that it does not bring itself."""
    schema = mixer_schema(name, mixer_class(name))
    options = {key: value for key, value in (("conv_width", 3), ("output_gate", "silu")) if key in schema.around}
    heads = {"n_heads": 2} if "n_heads" in schema.model_fields else {}
    mixers = ({"name": name, **heads, **options}, COMPANIONS[companion])
    shape = {"vocab_size": 257, "d_model": 16, "n_layers": 5, "max_len": 128, "mlp_ratio": 2, "positions": "none"}
    return LMConfig.model_validate({**shape, "mixers": mixers, "pattern": "3:1"})


def pairs() -> list[Any]:
    """Each mixer with each companion. One of the two is run always and both before a release: layers do not know each
    other, and either companion meets states of every kind."""
    return [
        pytest.param(
            (name, companion), marks=[] if row % 2 == column else pytest.mark.release, id=f"{name}-{companion}"
        )
        for row, name in enumerate(OURS)
        for column, companion in enumerate(COMPANIONS)
    ]


@pytest.fixture(params=pairs())
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return small_model(config_of(*request.param))


def test_states_are_counted(model: LanguageModel) -> None:
    kinds = [mixer.name for mixer in model.config.mixers]
    assert kinds[0] == kinds[1] == kinds[2] != kinds[3] or len(set(kinds)) == 1  # attention with itself
    parts = [build_mixer(model.config, layer).state_size(20) for layer in range(4)]
    assert model.state_size(20) == 4 * parts[0] + parts[3]  # the fifth layer begins the pattern again
    with torch.no_grad():
        _, state = model.extend(torch.zeros(1, 20, dtype=torch.int64), model.init_state(1))
    assert count_numbers(state.layers) == model.state_size(20)


def test_served_together_each_gets_what_it_gets_alone(model: LanguageModel) -> None:
    options = GenerateOptions(temperature=0.0, max_tokens=6, end_of_text=256)
    jobs = [(Job([list(b"ab" * n + b"c")], options), Listener()) for n in (1, 9, 4)]
    run(make_engine(model, slots=2, context=100, prefill_chunk=16), *jobs)
    for job, heard in jobs:
        assert heard.reasons() == ["length"], heard.failure
        assert is_greedy(model, job.prompts[0], heard.tokens())


def test_explored(model: LanguageModel) -> None:
    workbench = pytest.importorskip("rebased.serve.explorer.workbench", reason="serving needs rebased[serve]")
    schema = pytest.importorskip("rebased.serve.explorer.schema")
    bench = workbench.Workbench({"hybrid": TextModel(model, ByteTokenizer())}, "hybrid", None)
    about, text = bench.about()["models"][0], bench.text(schema.TextBody(model="hybrid", text="abcabc"))
    assert about["mixers"] == list(dict.fromkeys(mixer.name for mixer in model.config.mixers))
    assert text["state"]["bytes"] == 4 * model.state_size(len(text["tokens"]))
    shown = [layer for layer, block in enumerate(model.blocks) if has_attention_map(block.mixer)]
    assert [layer["layer"] for layer in about["layers"]] == shown
    assert 3 in shown  # attention, or a window
    for layer in shown:
        rows = bench.attention(schema.AttentionBody(model="hybrid", tokens=text["tokens"], layer=layer))["rows"]
        assert len(rows[-1]) == len(text["tokens"])


def test_exported(model: LanguageModel, tmp_path: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    pytest.importorskip("transformers", reason="needs rebased[hf]")
    from rebased.models.hf import RebasedForCausalLM

    RebasedForCausalLM.from_language_model(model).save_pretrained(tmp_path)
    loaded = RebasedForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([[0, 0, 97, 98], [97, 98, 99, 97]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    made = loaded.generate(tokens, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    for row, begin in ((0, 2), (1, 0)):
        assert is_greedy(model, tokens[row, begin:].tolist(), made[row, 4:].tolist())


def test_one_line_of_a_config() -> None:
    line = "{mixers: [gated_delta_net, {name: sliding_window, window: 9}], pattern: 3:1, n_layers: 8}"
    config = LMConfig.model_validate(parse_yaml(line, "a test"))
    written = LMConfig(mixers=(*["gated_delta_net"] * 3, {"name": "sliding_window", "window": 9}), n_layers=8)  # type: ignore[arg-type,list-item]
    assert config == written
    assert config.digest() == written.digest()
    assert kind_of(config.model_dump()) == "3 gated_delta_net + sliding_window"


def test_a_run_takes_a_pattern() -> None:
    changes = {"model.preset": "conv_attention", "model.pattern": "2:1", "model.n_layers": "6"}
    run_of = load_config(
        SyntheticRunConfig, CONFIGS / "tasks" / "copying.yaml", changes | {"model.mixers.1.n_heads": "2"}
    )
    mixers = run_of.model.mixers
    assert [mixer.name for mixer in mixers] == ["short_conv", "short_conv", "attention"]
    assert mixers[2].arguments()["n_heads"] == 2


@pytest.mark.parametrize("pattern", ["3", "3:1:1", "3:0", "3:-1", "a:b", "3:1.5", "99999999999:1"])
def test_bad_patterns(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not one number per mixer, such as 3:1"):
        LMConfig.model_validate({"mixers": ["gla", "attention"], "pattern": pattern, "n_layers": 8})
