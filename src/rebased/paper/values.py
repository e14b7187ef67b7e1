"""The paper's numbers (arXiv 2402.10644), in one place. Tables 4 and 9 are in counts.py, with their models.

Tables are as printed. Figures 1 and 10 were read: off the picture to about 0.02, and off its caption.
"""

from typing import NamedTuple

from rebased.report.reference_values import MARGIN, Measure, ReferenceValue

# The protocol of all MQAR experiments: Appendix A and the authors' code.
EPOCHS, SEEDS, RATES = 64, 5, (5e-4, 1e-3, 3e-3, 1e-2)


def read_off(mean: float, sd: float | None = None, at_least: bool = False) -> ReferenceValue:
    """A value that was read off a figure, which may show no spread, or only that the mean is `at_least` so high."""
    return ReferenceValue(mean, sd, at_least, error=0.02, seeds=SEEDS)


def printed(mean: float, sd: float | None = None, error: float = 0.005) -> ReferenceValue:
    """A value that is printed in a table; `error` is half a unit of its last digit."""
    return ReferenceValue(mean, sd, error=error, seeds=SEEDS)


PRESETS = {"Attention": "attention", "ConvAttention": "conv_attention", "RWKV": "rwkv", "ConvRWKV": "conv_rwkv"}
PRESETS |= {"Mamba": "mamba", "Based": "based"}
"""Presets by the paper's names. All others, the kernels of Table 1, are ReBased's."""


class Place(NamedTuple):
    """A place in the paper's grids: the model by its name here, the task, the width."""

    model: str
    seq_len: int
    pairs: int
    d_model: int


# Table 1, printed: 32 pairs, mean ± sd of accuracy at D = 16, 24, 32, 48.
_TABLE_1 = {
    256: {
        "Based": ((0.06, 0.02), (0.45, 0.15), (0.82, 0.06), (0.99, 0.00)),
        "x²": ((0.05, 0.05), (0.47, 0.08), (0.64, 0.42), (0.99, 0.00)),
        "norm(x)²": ((0.09, 0.04), (0.39, 0.24), (0.84, 0.09), (0.97, 0.02)),
        "(γx)²": ((0.02, 0.02), (0.35, 0.22), (0.71, 0.09), (0.98, 0.03)),
        "(γx + β)²": ((0.06, 0.01), (0.51, 0.08), (0.89, 0.03), (0.99, 0.00)),
        "ReBased": ((0.09, 0.05), (0.59, 0.06), (0.86, 0.08), (0.99, 0.00)),
    },
    2048: {
        "Based": ((0.02, 0.02), (0.40, 0.18), (0.66, 0.08), (0.99, 0.01)),
        "x²": ((0.03, 0.03), (0.33, 0.21), (0.46, 0.42), (0.93, 0.09)),
        "norm(x)²": ((0.05, 0.05), (0.56, 0.10), (0.72, 0.17), (0.99, 0.00)),
        "(γx)²": ((0.02, 0.03), (0.26, 0.45), (0.65, 0.37), (0.99, 0.01)),
        "(γx + β)²": ((0.06, 0.03), (0.50, 0.08), (0.85, 0.04), (0.99, 0.01)),
        "ReBased": ((0.04, 0.03), (0.58, 0.01), (0.83, 0.04), (0.99, 0.00)),
    },
}
TABLE_1_PAIRS, TABLE_1_WIDTHS = 32, (16, 24, 32, 48)
KERNEL_ORDER = tuple(_TABLE_1[256])

# Figure 1, read off the picture to about ±0.02: by model and T, one value per width. None: it was not read.
FIGURE_1_PAIRS = {128: 16, 256: 64, 512: 128, 1024: 256, 2048: 512}
FIGURE_1_WIDTHS = (64, 128, 256, 512)
_SOLVED = read_off(0.97, at_least=True)
_FIGURE_1: dict[str, dict[int, tuple[ReferenceValue | None, ...]]] = {
    "ConvAttention": {seq_len: (read_off(1.0),) * 4 for seq_len in FIGURE_1_PAIRS},
    "ReBased": {
        128: (_SOLVED,) * 4,
        256: (_SOLVED,) * 4,
        512: (read_off(0.89), None, None, None),
        1024: (read_off(0.55, 0.18), _SOLVED, _SOLVED, _SOLVED),
        2048: (read_off(0.07, 0.05), read_off(0.66, 0.06), read_off(0.98), read_off(0.99)),
    },
    "Based": {
        512: (read_off(0.90, 0.06), None, None, None),
        1024: (read_off(0.33, 0.26), None, None, None),
        2048: (read_off(0.14, 0.06), read_off(0.49, 0.16), read_off(0.99), read_off(0.99)),
    },
    "RWKV": {
        128: (read_off(0.10), read_off(0.25), read_off(0.54), read_off(0.82)),
        **{seq_len: (read_off(0.0),) * 4 for seq_len in (256, 512, 1024, 2048)},
    },
    "Mamba": {
        128: (read_off(0.73, 0.43), read_off(0.77, 0.43), read_off(0.99), read_off(0.98)),
        256: (read_off(0.09), read_off(0.12), read_off(0.19), read_off(0.33)),
        512: (read_off(0.0), read_off(0.02), read_off(0.38), read_off(0.20)),
        **{seq_len: (read_off(0.0),) * 4 for seq_len in (1024, 2048)},
    },
}

TABLE_1 = {
    Place(model, seq_len, TABLE_1_PAIRS, d_model): printed(*value)
    for seq_len, rows in _TABLE_1.items()
    for model, values in rows.items()
    for d_model, value in zip(TABLE_1_WIDTHS, values, strict=True)
}
FIGURE_1 = {
    Place(model, seq_len, FIGURE_1_PAIRS[seq_len], d_model): reading
    for model, rows in _FIGURE_1.items()
    for seq_len, readings in rows.items()
    for d_model, reading in zip(FIGURE_1_WIDTHS, readings, strict=True)
    if reading is not None
}
READINGS = TABLE_1 | FIGURE_1


TABLE_2_TOKENS = 20_000 * 1024 * 4096  # the paper's Table 6: steps, sequences, tokens per sequence
# Table 2, printed: perplexity of all, AR and non-AR tokens of the Pile.
TABLE_2 = {"Attention": (16.62, 3.57, 58.57), "Based": (16.69, 3.72, 57.21), "ReBased": (16.45, 3.67, 56.31)}


IOU_MARGIN = 0.016  # the difference between ReBased and Based in Table 3
MARGINS = (IOU_MARGIN, MARGIN)


class Row(NamedTuple):
    """A row of the paper's Table 3."""

    iou: ReferenceValue
    accuracy: ReferenceValue


TABLE_3 = {
    model: Row(
        *(printed(value, error=0.0005)._replace(margin=margin) for value, margin in zip(row, MARGINS, strict=True))
    )
    for model, row in {"Attention": (0.999, 1.0), "Based": (0.157, 0.956), "ReBased": (0.173, 0.957)}.items()
}

# Figure 10, its caption: the means of gamma and beta after training, "about", at every length.
FIGURE_10: dict[Measure, ReferenceValue] = {"gamma": read_off(0.13), "beta": read_off(0.0)}
