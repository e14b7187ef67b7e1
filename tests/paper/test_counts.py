"""The paper's parameter counts, to the digit, and as formulas."""

import math

import pytest

from rebased.models import preset
from rebased.models.presets import mqar_preset_names
from rebased.paper.counts import TABLE_4, TABLE_9, Cell, count_parameters, sizes_at_one_length

WIDTHS = [64, 128, 256, 512]


@pytest.mark.parametrize("cell", [*TABLE_4, *TABLE_9], ids=lambda cell: f"{cell.table}-{cell.model}-{cell.d_model}")
def test_every_cell_is_exact(cell: Cell) -> None:
    assert count_parameters(cell.config()) == cell.parameters


def test_the_tables_are_complete() -> None:
    models = ["Attention", "ConvAttention", "RWKV", "ConvRWKV", "Mamba", "Based", "ReBased"]
    assert [(c.model, c.d_model) for c in TABLE_4] == [(model, width) for model in models for width in WIDTHS]
    assert [c.parameters for c in TABLE_9] == [126_807_552, 156_955_392, 156_992_256]


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize(
    ("name", "mixers"),
    [
        ("attention", lambda d: 2 * (4 * d * d + 4 * d)),
        ("conv_attention", lambda d: (d * d + 5 * d) + (4 * d * d + 4 * d)),
        ("rwkv", lambda d: 2 * (4 * d * d + 5 * d)),
        ("conv_rwkv", lambda d: (d * d + 5 * d) + (4 * d * d + 5 * d)),
        ("hyena", lambda d: 2 * (4 * d * d + 17 * d + 64 * d + 3 * 64 + 2 * 64 * 64 + 4 * 64)),
        ("based", lambda d: (d * d + 5 * d) + 2 * 192 * d + 2 * d * 12 * (d // 12)),
        ("rebased", lambda d: (d * d + 5 * d) + 2 * 192 * d + 2 * d * 12 * (d // 12) + 768),
    ],
)
def test_body_and_positions(name: str, mixers: object, d: int) -> None:
    assert callable(mixers)
    for positions in (128, 2048):
        expected = 8192 * d + 10 * d + mixers(d) + positions * d
        assert count_parameters(preset(name, d_model=d, max_len=positions)) == expected


@pytest.mark.parametrize("d", WIDTHS)
def test_mamba_has_one_norm_without_a_bias(d: int) -> None:
    r = math.ceil(d / 16)
    mixer = 6 * d * d + 10 * d + 2 * d * (r + 32) + 2 * d * r + 2 * d + 32 * d + 2 * d
    assert count_parameters(preset("mamba", d_model=d, max_len=128)) == (8192 + 2 + 128) * d + 2 * (mixer + d)


def test_sizes_at_one_length() -> None:
    sizes = {(size.preset, size.d_model): size for size in sizes_at_one_length()}
    assert len(sizes) == len(mqar_preset_names()) * len(WIDTHS)
    linear, window = sizes["mamba", 64].state_bytes, sizes["conv_sliding", 64].state_bytes
    assert set(linear.values()) == {4 * 2 * 128 * (3 + 16)}  # two layers, 2D channels, 3 taps and 16 states
    assert set(window.values()) == {4 * (2 * 64 + 2 * 63 * 64)}  # a window of 64 is full at 128 tokens
    degree_1 = sizes["linear_attention", 64].state_bytes
    assert set(degree_1.values()) == {4 * (2 * 64 + 12 * 16 * (5 + 1))}  # 12 heads with keys of 16 and values of 5
    attention = sizes["attention", 64].state_bytes
    assert attention[2048] == 16 * attention[128] == 4 * 2 * 2 * 64 * 2048


def test_the_shape_of_the_papers_text() -> None:
    based, rebased = (count_parameters(preset(f"lm-paper-text-{name}")) for name in ("based", "rebased"))
    assert based == 145_453_824
    assert rebased - based == 6_912
