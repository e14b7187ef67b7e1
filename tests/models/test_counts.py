"""The paper's parameter counts, to the digit, and as formulas."""

import pytest

from rebased.models import preset
from rebased.models.paper import TABLE_4, TABLE_9, Cell, count_parameters

WIDTHS = [64, 128, 256, 512]


@pytest.mark.parametrize("cell", [*TABLE_4, *TABLE_9], ids=lambda cell: f"{cell.table}-{cell.model}-{cell.d_model}")
def test_every_cell_is_exact(cell: Cell) -> None:
    assert count_parameters(cell.config()) == cell.parameters


def test_the_tables_are_complete() -> None:
    models = ["Attention", "ConvAttention", "Based", "ReBased"]
    assert [(c.model, c.d_model) for c in TABLE_4] == [(model, width) for model in models for width in WIDTHS]
    assert [c.parameters for c in TABLE_9] == [126_807_552, 156_955_392, 156_992_256]


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize(
    ("name", "mixers"),
    [
        ("attention", lambda d: 2 * (4 * d * d + 4 * d)),
        ("conv_attention", lambda d: (d * d + 5 * d) + (4 * d * d + 4 * d)),
        ("based", lambda d: (d * d + 5 * d) + 2 * 192 * d + 2 * d * 12 * (d // 12)),
        ("rebased", lambda d: (d * d + 5 * d) + 2 * 192 * d + 2 * d * 12 * (d // 12) + 768),
    ],
)
def test_body_and_positions(name: str, mixers: object, d: int) -> None:
    assert callable(mixers)
    for positions in (128, 2048):
        expected = 8192 * d + 10 * d + mixers(d) + positions * d
        assert count_parameters(preset(name, d_model=d, max_len=positions)) == expected


def test_the_shape_of_the_papers_text() -> None:
    based, rebased = (count_parameters(preset(f"lm-paper-text-{name}")) for name in ("based", "rebased"))
    assert based == 145_453_824
    assert rebased - based == 6_912
