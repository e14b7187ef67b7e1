"""The model in Hugging Face transformers: saved, loaded, padded, generated with and trained as other models are."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="needs rebased[hf]")

from rebased.mixers import mixer_class, mixer_names  # noqa: E402
from rebased.models import LanguageModel, LMConfig  # noqa: E402
from rebased.models.hf import RebasedConfig, RebasedForCausalLM, find_spans  # noqa: E402
from rebased.models.modeling_rebased import find_tokens  # noqa: E402
from tolerances import TRAINED, assert_near  # noqa: E402

HEADS = {"n_heads": 2, "key_width": 4}
PATTERNS: dict[str, tuple[Any, ...]] = {
    "hybrid": ("short_conv", {"name": "rebased", **HEADS}),
    "shared weights": ({"name": "rebased", **HEADS, "norm_axis": "per_head"}, "attention"),
    **{name: (name,) for name in ("mamba", "rwkv", "hyena", "sliding_window", "previous_token")},
    "gates": tuple(
        {"name": name, **HEADS}
        for name in ("gated_based", "gated_rebased", "gated_linear_attention", "delta_rebased", "linear_attention")
    ),
    "sums": (
        {"name": "delta_rebased", **HEADS, "delta": False, "centred": True},
        {"name": "gated_delta_net", "n_heads": 2, "delta": False},
    ),
    "others' gates": (
        *({"name": name, "n_heads": 2} for name in ("gated_delta_net", "gla", "kda")),
        {"name": "mamba2", "head_width": 8, "d_state": 8},
    ),
}
GREEDY = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}


def build(mixers: tuple[Any, ...], **changes: Any) -> RebasedForCausalLM:
    torch.manual_seed(0)
    block = {"block": "mamba"} if mixers == ("mamba",) else {"mlp_ratio": 2}
    config = LMConfig.model_validate(
        {"vocab_size": 40, "d_model": 16, "n_layers": max(2, len(mixers)), "max_len": 64, "mixers": mixers, **block}
        | changes
    )
    model = LanguageModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    return RebasedForCausalLM.from_language_model(model)


@pytest.fixture(params=PATTERNS)
def shell(request: pytest.FixtureRequest) -> RebasedForCausalLM:
    return build(PATTERNS[request.param])


@pytest.fixture
def hybrid() -> RebasedForCausalLM:
    return build(PATTERNS["hybrid"])


def test_a_flipped_bit_in_the_weights_is_an_error(hybrid: RebasedForCausalLM, tmp_path: Path) -> None:
    hybrid.save_pretrained(tmp_path)
    weights, auto = tmp_path / "model.safetensors", transformers.AutoModelForCausalLM
    content = bytearray(weights.read_bytes())
    content[-5] ^= 16
    weights.write_bytes(content)
    for load in (auto.from_pretrained, RebasedForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=r"model\.safetensors is not what was saved"):
            load(tmp_path)
    content[-5] ^= 16
    weights.write_bytes(content)
    auto.from_pretrained(tmp_path)
    (tmp_path / "checksums.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"checksums\.json cannot be read"):
        auto.from_pretrained(tmp_path)


def test_a_folder_without_checksums_is_loaded_with_a_warning(
    hybrid: RebasedForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hybrid.save_pretrained(tmp_path)
    (tmp_path / "checksums.json").unlink()
    transformers.logging.set_verbosity_warning()
    monkeypatch.setattr(transformers.logging.get_logger("transformers"), "propagate", True)
    RebasedForCausalLM.from_pretrained(tmp_path)
    assert "has no checksums.json" in caplog.text
    assert "pip install 'rebased[hf]'" in (tmp_path / "config.json").read_text()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)


def padded() -> tuple[Tensor, Tensor]:
    """Three rows of 7, 4 and 2 tokens, padded on the left."""
    tokens = torch.randint(1, 40, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :3] = mask[2, :5] = 0
    return tokens * mask, mask


def test_patterns_name_every_kind_of_state() -> None:
    named = {mixer if isinstance(mixer, str) else mixer["name"] for mixers in PATTERNS.values() for mixer in mixers}
    ours = {name for name in mixer_names() if mixer_class(name).__module__.startswith("rebased.")}
    assert ours <= named | {"based"}


def test_saved_and_loaded_by_the_auto_class(shell: RebasedForCausalLM, tmp_path: Path) -> None:
    shell.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens, _ = padded()
    assert type(loaded) is RebasedForCausalLM
    assert loaded.config.language_model == shell.config.language_model
    assert loaded.config.vocab_size == 40
    assert loaded.config.hidden_size == 16
    assert torch.equal(loaded(tokens).logits, shell.model(tokens))
    assert {file.suffix for file in tmp_path.iterdir()} <= {".json", ".safetensors"}


@pytest.mark.parametrize("use_cache", [False, True])
def test_padding_changes_nothing(shell: RebasedForCausalLM, use_cache: bool) -> None:
    tokens, mask = padded()
    with torch.no_grad():
        logits = shell(tokens, attention_mask=mask, use_cache=use_cache).logits
        for row, begin in enumerate((0, 3, 5)):
            alone = shell.model(tokens[row : row + 1, begin:])
            assert_near(logits[row : row + 1, begin:], alone, 16, 16, 16, 32, 16, condition=8.0)


def test_generation_has_the_tokens_of_each_row_alone(shell: RebasedForCausalLM) -> None:
    tokens, mask = padded()
    together = shell.generate(tokens, attention_mask=mask, **GREEDY)
    assert torch.equal(together, shell.generate(tokens, attention_mask=mask, use_cache=False, **GREEDY))
    for row, begin in enumerate((0, 3, 5)):
        alone = shell.generate(tokens[row : row + 1, begin:], **GREEDY)
        assert torch.equal(together[row, begin:], alone[0])
        left = shell.generate(tokens[row : row + 1], attention_mask=mask[row : row + 1], **GREEDY)  # a batch of 1
        assert torch.equal(left[0, 7:], together[row, 7:])


@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"do_sample": True, "num_return_sequences": 2, "top_p": 0.9},
        {"do_sample": False, "repetition_penalty": 1.3},
    ],
    ids=["beams", "sampling", "penalty"],
)
def test_ways_to_generate_need_no_cache_to_be_right(shell: RebasedForCausalLM, how: dict[str, Any]) -> None:
    tokens, mask = padded()
    found = []
    for use_cache in (True, False):
        torch.manual_seed(2)
        found.append(shell.generate(tokens, attention_mask=mask, **(GREEDY | how), use_cache=use_cache))
    assert torch.equal(*found)


def test_more_tokens_than_learned_positions_are_refused(hybrid: RebasedForCausalLM) -> None:
    tokens, _ = padded()
    with pytest.raises(ValueError, match="65 tokens are more than the 64 learned positions"):
        hybrid.generate(tokens[:1], **GREEDY | {"max_new_tokens": 80})


def test_a_cache_is_continued_with_several_tokens(shell: RebasedForCausalLM) -> None:
    tokens, mask = padded()
    with torch.no_grad():
        cache = shell(tokens, attention_mask=mask, use_cache=True).past_key_values
        more = torch.randint(1, 40, (3, 5))
        logits = shell(more, past_key_values=cache).logits
        assert cache.get_seq_length() == 12
        assert cache.lengths == [12, 9, 7]
        for row, begin in enumerate((0, 3, 5)):
            alone = shell.model(torch.cat([tokens[row : row + 1, begin:], more[row : row + 1]], dim=1))[:, -5:]
            assert_near(logits[row : row + 1], alone, 16, 16, 16, 32, 16, condition=8.0)


def test_memory_of_a_linear_model_is_flat() -> None:
    shell = build(PATTERNS["hybrid"], positions="none")
    sizes = []
    with torch.no_grad():
        cache = shell(torch.ones(2, 4, dtype=torch.long), use_cache=True).past_key_values
        for _ in range(300):
            shell(torch.ones(2, 1, dtype=torch.long), past_key_values=cache)
            sizes.append(cache.nbytes)
    assert len(set(sizes)) == 1


def test_tokens_are_streamed(hybrid: RebasedForCausalLM) -> None:
    class Words(transformers.generation.BaseStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.seen.append(-1)

    streamer = Words()
    tokens = padded()[0][:1]
    made = hybrid.generate(tokens, streamer=streamer, **GREEDY)
    assert streamer.seen == [*made[0].tolist(), -1]


def test_the_loss_is_the_models(hybrid: RebasedForCausalLM) -> None:
    tokens, mask = padded()
    labels = tokens.masked_fill(mask == 0, -100)
    loss = hybrid(tokens, attention_mask=mask, labels=labels).loss
    rows = (tokens[:1], tokens[1:2, 3:], tokens[2:, 5:])
    losses = [hybrid.model.loss(row[:, :-1], row[:, 1:]) * (row.shape[1] - 1) for row in rows]
    torch.testing.assert_close(loss, sum(losses) / 10, rtol=TRAINED, atol=0)
    assert hybrid(tokens, labels=tokens, num_items_in_batch=2).loss == hybrid(tokens, labels=tokens).loss * 18 / 2


def test_trainer_trains(hybrid: RebasedForCausalLM, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    rows = torch.randint(1, 40, (1, 16), generator=torch.Generator().manual_seed(3)).repeat(16, 1)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    before = hybrid(rows[:1], labels=rows[:1]).loss.item()
    transformers.Trainer(model=hybrid, args=arguments, train_dataset=data).train()
    assert hybrid.eval()(rows[:1], labels=rows[:1]).loss.item() < before / 2


def test_gradient_checkpointing_gives_the_same_gradients(hybrid: RebasedForCausalLM) -> None:
    tokens = padded()[0]
    hybrid.train()
    hybrid.model.dropout.p = 0.0
    found = []
    for on in (False, True):
        hybrid.gradient_checkpointing_enable() if on else hybrid.gradient_checkpointing_disable()
        assert hybrid.model.recompute == on
        hybrid.zero_grad()
        hybrid(tokens, labels=tokens).loss.backward()
        found.append([weight.grad.clone() for weight in hybrid.parameters()])
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(plain, again, rtol=TRAINED, atol=1e-7)


def test_masks_that_are_no_padding(hybrid: RebasedForCausalLM) -> None:
    mask = torch.tensor([[0, 1, 1], [1, 1, 0], [1, 1, 1]])
    assert find_spans(find_tokens(mask, 3, 3), 3, 3) == [(1, 3), (0, 2), (0, 3)]
    with pytest.raises(ValueError, match="gaps"):
        hybrid(torch.ones(1, 3, dtype=torch.long), attention_mask=torch.tensor([[1, 0, 1]]))
    with pytest.raises(ValueError, match="row 1 of attention_mask has no tokens"):
        hybrid(torch.ones(2, 2, dtype=torch.long), attention_mask=torch.tensor([[1, 1], [0, 0]]))
    with pytest.raises(ValueError, match=r"attention_mask is \[3\]"):
        hybrid(torch.ones(1, 3, dtype=torch.long), attention_mask=torch.ones(3))


def test_other_caches_and_cropping_are_refused(hybrid: RebasedForCausalLM) -> None:
    tokens = torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="DynamicCache"):
        hybrid(tokens, past_key_values=transformers.DynamicCache())
    with pytest.raises(NotImplementedError, match="cannot be cropped"):
        hybrid(tokens, use_cache=True).past_key_values.crop(1)
    with pytest.raises(ValueError, match="the cache has 1 rows"):
        hybrid(torch.ones(2, 1, dtype=torch.long), past_key_values=hybrid(tokens, use_cache=True).past_key_values)


def test_a_wrong_config_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="d_modell"):
        RebasedConfig({"d_modell": 3})


def test_what_other_models_offer_is_refused_and_not_left_out(hybrid: RebasedForCausalLM) -> None:
    tokens = torch.tensor([[1, 2, 3]])
    for given in ({"output_hidden_states": True}, {"output_attentions": True}, {"inputs_embeds": torch.ones(1, 3, 16)}):
        with pytest.raises(ValueError, match=f"returns logits, a loss and a cache; got {next(iter(given))}"):
            hybrid(tokens, **given)
    with pytest.raises(ValueError, match="this model takes input_ids"):
        hybrid()
    plain = hybrid(tokens, output_hidden_states=False, token_type_ids=torch.zeros_like(tokens))
    assert torch.equal(plain.logits, hybrid(tokens).logits)
