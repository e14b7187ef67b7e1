"""LMConfig and the presets: strict, frozen, named by a digest."""

import logging
from typing import Any

import pytest
from pydantic import ValidationError

from rebased.models import LanguageModel, LMConfig, preset, preset_names


def test_equal_configs_share_a_digest_however_they_are_written() -> None:
    short = LMConfig(mixers=("short_conv", "rebased"))
    long = LMConfig.model_validate(
        {"mixers": [{"width": 3, "name": "short_conv"}, {"n_heads": 12, "name": "rebased"}], "d_model": 128}
    )
    assert short == long
    assert hash(short) == hash(long)
    assert short.digest() == long.digest() == LMConfig.model_validate_json(short.model_dump_json()).digest()


@pytest.mark.parametrize(
    "change",
    [{"d_model": 96}, {"mixers": ("rebased",)}, {"mixers": ("short_conv", {"name": "rebased", "key_width": 8})}],
)
def test_a_change_changes_the_digest(change: dict[str, Any]) -> None:
    assert LMConfig(**change).digest() != LMConfig().digest()


def test_the_digest_is_stable() -> None:
    """Runs are found by their digest. If it changed, all existing runs would be lost."""
    assert LMConfig().digest() == "c3f8479511ce"


def test_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        LMConfig().d_model = 64  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"d_modle": 64}, "unknown key 'd_modle'; did you mean 'd_model'"),
        ({"mixers": ["rebasd"]}, "unknown mixer 'rebasd'; did you mean 'rebased'"),
        ({"mixers": [{"name": "rebased", "n_head": 8}]}, "unknown key 'n_head'; did you mean 'n_heads'"),
        ({"mixers": [{"name": "rebased", "qk_transform": "nrom"}]}, "'none', 'norm', 'scale', 'affine'"),
        ({"mixers": [{"n_heads": 8}]}, "a mixer is a name, or a mapping with one"),
        ({"mixers": [7]}, "a mixer is a name, or a mapping with one"),
        ({"mixers": []}, "mixers is empty"),
        ({"mixers": ["rebased", "based", "attention"]}, "3 mixers do not fit into 2 layers"),
        ({"d_model": "wide"}, "valid integer"),
        ({"d_model": 0}, "greater than or equal to 1"),
        ({"embed_dropout": 1.0}, "less than 1"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LMConfig.model_validate(values)


def test_a_truncating_preset_says_so_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rebased"):
        config = preset("rebased", d_model=64)
    assert caplog.messages == ["d_model 64 is not divisible by 12 heads: as in the paper, values are 12 x 5 = 60 wide"]
    assert LanguageModel(config).blocks[1].mixer.proj_v.weight.shape == (60, 64)


def test_a_preset_that_does_not_truncate_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    preset("rebased", d_model=48)
    preset("attention", d_model=64)
    preset("lm-paper-checkpoint-rebased")
    assert caplog.messages == []


def test_elsewhere_truncation_is_refused() -> None:
    with pytest.raises(ValueError, match="d_model 64 is not divisible by n_heads 12"):
        LanguageModel(LMConfig(d_model=64, mixers=("short_conv", "rebased")))
    with pytest.raises(ValueError, match="d_model 8 is below the 12 heads"):
        preset("rebased", d_model=8)


def test_presets_by_name() -> None:
    for name in preset_names():
        assert preset(name) == preset(name)
    assert [mixer.name for mixer in preset("conv_attention").mixers] == ["short_conv", "attention"]
    with pytest.raises(ValueError, match="unknown preset 'conv_atention'; did you mean 'conv_attention'"):
        preset("conv_atention")
