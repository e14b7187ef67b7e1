"""The file that an exported folder carries: it loads without this package and computes what the package computes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="needs rebased[hf]")

from rebased.data.tokenizer import ByteTokenizer  # noqa: E402
from rebased.models import LanguageModel, LMConfig, modeling_rebased  # noqa: E402
from rebased.models.presets import MODERN_ATTENTION, MODERN_MODEL  # noqa: E402
from rebased.runs.export import FLAT, FLAT_MIXERS, export_model, model_card  # noqa: E402
from tolerances import assert_near  # noqa: E402

HEADS = {"n_heads": 2, "key_width": 4}
REBASED = {"name": "rebased", **HEADS}
MODELS: dict[str, dict[str, Any]] = {
    "hybrid": {"mixers": ["short_conv", REBASED], "mlp_ratio": 2},
    "based": {"mixers": [{"name": "based", **HEADS, "value_width": 3}, {"name": "short_conv", "width": 1}]},
    "attention": {"mixers": ["short_conv", {"name": "attention", "n_heads": 4, "qkv_bias": False}], "mlp_ratio": 1},
    "modern": MODERN_MODEL | {"mixers": [{"name": "attention", "n_heads": 4, **MODERN_ATTENTION}], "mlp_ratio": 2},
    "mamba's block": {"mixers": [REBASED, "short_conv"], "block": "mamba"},
    "no positions": {"mixers": [{"name": "short_conv", "width": 4}, REBASED], "positions": "none"},
    "per head": {"mixers": [REBASED | {"norm_axis": "per_head"}, "short_conv"]},
    "each head, rms": {"mixers": [REBASED | {"norm_axis": "each_head", "norm": "rms"}]},
    "l2": {"mixers": [REBASED | {"norm": "l2"}]},
    "affine": {"mixers": [REBASED | {"qk_transform": "affine"}]},
    "scale": {"mixers": [REBASED | {"qk_transform": "scale"}]},
    "norm": {"mixers": [REBASED | {"qk_transform": "norm", "eps": 0.1}]},
    "none": {"mixers": [REBASED | {"qk_transform": "none", "eps": 0.1}]},
    "fourth": {"mixers": [REBASED | {"kernel": "fourth"}]},
    "learned": {"mixers": [REBASED | {"kernel": "learned"}]},
}
GREEDY = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
T = 90  # more than one chunk
SUMS = (16, 16, 10, T, 16, 32) * 4

WITHOUT_US = """
import json, sys
from importlib.abc import MetaPathFinder
class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("rebased", "pydantic", "triton"):
            raise ModuleNotFoundError(f"{name} is not here", name=name)
sys.meta_path.insert(0, Refuse())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, asked = sys.argv[1], json.load(open(sys.argv[2]))
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float64).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
tokens = torch.tensor(asked["tokens"])
with torch.no_grad():
    logits = model(tokens).logits.tolist()
made = model.generate(tokens, max_new_tokens=asked["new"], do_sample=False, pad_token_id=0).tolist()
found = {"logits": logits, "made": made, "modules": sorted(sys.modules), "text": tokenizer("d\u00e9f").input_ids}
json.dump(found, open(sys.argv[3], "w"))
"""


def build(changes: dict[str, Any], dtype: torch.dtype = torch.float64) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "d_model": 16, "n_layers": len(changes["mixers"]) * 2, "max_len": 256}
    model = LanguageModel(LMConfig.model_validate(sizes | changes)).to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    return model


def flat_of(model: LanguageModel) -> modeling_rebased.RebasedForCausalLM:
    shell = modeling_rebased.RebasedForCausalLM(modeling_rebased.RebasedConfig(model.config.model_dump(mode="json")))
    shell.to(model.embedding.weight.dtype).eval()
    missing, unexpected = shell.model.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    assert all(".ln_k." in name for name in unexpected)  # norm_axis "per_head": a second name of ln_q
    return shell


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return build(MODELS[request.param])


def rows(count: int = 3) -> Tensor:
    return torch.randint(1, 40, (count, T), generator=torch.Generator().manual_seed(1))


def near(got: Tensor, want: Tensor) -> None:
    """Up to four layers, each with sums over the width, pairs, the past, the width and the MLP."""
    assert_near(got, want, *SUMS, condition=8.0)


def test_the_list_of_mixers_is_that_of_the_file() -> None:
    assert set(FLAT_MIXERS) == set(modeling_rebased.MIXERS)
    source = Path(modeling_rebased.__file__).read_text()
    assert not [line for line in source.splitlines() if line.startswith(("import rebased", "from rebased"))]


def test_it_computes_what_the_package_computes(model: LanguageModel) -> None:
    tokens, flat = rows(), flat_of(model)
    with torch.no_grad():
        want = model(tokens)
        near(flat(tokens).logits, want)
        cache, parts = None, []
        for part in tokens.split([70, 19, 1], dim=1):
            output = flat(part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(output.logits)
        near(torch.cat(parts, dim=1), want)
        assert cache.get_seq_length() == T


def test_greedy_generation_has_the_same_tokens(model: LanguageModel) -> None:
    flat, tokens = flat_of(model), rows(2)[:, :8]
    made = flat.generate(tokens, **GREEDY)
    assert torch.equal(made, flat.generate(tokens, use_cache=False, **GREEDY))
    for row, prompt in zip(made.tolist(), tokens.tolist(), strict=True):
        expected = prompt
        for _ in range(GREEDY["max_new_tokens"]):
            with torch.no_grad():
                expected = [*expected, int(model(torch.tensor([expected]))[0, -1].argmax())]
        assert row == expected


def test_padding_changes_nothing(model: LanguageModel) -> None:
    flat, tokens = flat_of(model), rows()
    mask = torch.ones_like(tokens)
    mask[1, :30] = mask[2, :77] = 0
    with torch.no_grad():
        for use_cache in (False, True):
            logits = flat(tokens, attention_mask=mask, use_cache=use_cache).logits
            for row, begin in enumerate((0, 30, 77)):
                near(logits[row : row + 1, begin:], model(tokens[row : row + 1, begin:]))
        ends = flat(tokens, attention_mask=mask.flip(1)).logits
        near(ends[1:2, :60], model(tokens[1:2, :60]))
    made = flat.generate(tokens, attention_mask=mask, **GREEDY)
    alone = flat.generate(tokens[2:, 77:], **GREEDY)
    assert torch.equal(made[2, 77:], alone[0])
    with pytest.raises(ValueError, match="padding on the left"):
        flat(tokens, attention_mask=mask.flip(1), use_cache=True)


@pytest.mark.parametrize("how", [{"num_beams": 3, "num_return_sequences": 2}, {"do_sample": True, "top_p": 0.9}])
def test_beams_and_sampling_need_no_cache_to_be_right(how: dict[str, Any]) -> None:
    flat, found = flat_of(build(MODELS["attention"])), []
    for use_cache in (True, False):
        torch.manual_seed(2)
        found.append(flat.generate(rows(2)[:, :8], **(GREEDY | {"max_new_tokens": 20} | how), use_cache=use_cache))
    assert torch.equal(*found)


def test_the_state_has_a_constant_size() -> None:
    model = build(MODELS["no positions"])
    flat, sizes = flat_of(model), set()
    with torch.no_grad():
        cache = flat(rows(1), use_cache=True).past_key_values
        for _ in range(100):
            flat(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
            sizes.add(cache.nbytes)
    assert sizes == {8 * model.state_size(1000)}


def test_the_loss_and_its_gradients_are_the_models() -> None:
    model, tokens = build(MODELS["hybrid"]), rows()
    flat = flat_of(model)
    flat(tokens, labels=tokens).loss.backward()
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    wanted = dict(model.named_parameters())
    for name, weight in flat.model.named_parameters():
        assert_near(weight.grad, wanted[name].grad, *SUMS, *SUMS, 3 * T, condition=8.0)


def test_more_tokens_than_learned_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="257 tokens are more than the 256 learned positions"):
        flat_of(build(MODELS["hybrid"])).generate(rows(1), **(GREEDY | {"max_new_tokens": 200}))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "modern", "per head"])
def test_an_exported_folder_loads_without_this_package(name: str, tmp_path: Path) -> None:
    model, folder = build(MODELS[name], torch.float32), tmp_path / "exported"
    export_model(model, ByteTokenizer(), folder)
    assert (folder / FLAT).read_bytes() == Path(modeling_rebased.__file__).read_bytes()
    tokens = rows(2)
    (tmp_path / "asked.json").write_text(json.dumps({"tokens": tokens.tolist(), "new": 20}))
    paths = [each for each in sys.path if each and not (Path(each) / "rebased").exists()]
    environment = os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": os.pathsep.join(paths)}
    words = [sys.executable, "-c", WITHOUT_US, folder, tmp_path / "asked.json", tmp_path / "found.json"]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert not [each for each in found["modules"] if each.split(".")[0] == "rebased"]
    assert found["text"] == ByteTokenizer().encode("déf")
    assert "Do you wish to run" not in done.stdout  # transformers asks, unless it is told
    wide = model.double()
    with torch.no_grad():
        near(torch.tensor(found["logits"], dtype=torch.float64), wide(tokens))
    ours = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)  # with the package: its own
    assert type(ours).__module__ == "rebased.models.hf"
    assert found["made"] == ours.generate(tokens, **(GREEDY | {"max_new_tokens": 20})).tolist()


def test_a_folder_of_another_mixer_says_what_to_install(tmp_path: Path) -> None:
    model = build({"mixers": ["rwkv", "sliding_window"]})
    export_model(model, None, tmp_path / "exported")
    assert not (tmp_path / "exported" / FLAT).exists()
    assert "auto_map" not in json.loads((tmp_path / "exported" / "config.json").read_text())
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "pip install '.[hf]'` in a clone of its repository; it computes rwkv, sliding_window" in card
    assert "trust_remote_code" not in card
    assert "trust_remote_code=True" in model_card(build(MODELS["hybrid"]), None, [])
