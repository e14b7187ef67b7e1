"""The paper's values on MQAR (arXiv 2402.10644), and the settings in which runs differ from the paper's."""

from math import isnan, sqrt
from typing import Any, NamedTuple

from rebased.analysis import Spread
from rebased.runs.finished import Run


class Reading(NamedTuple):
    """An accuracy in the paper."""

    mean: float
    sd: float | None = None  # sample standard deviation over five seeds; None where the figure does not show it
    at_least: bool = False  # the mean is a lower bound: the figure shows no more
    error: float = 0.02  # of reading the value off the figure; half a unit of the last digit where it is printed

    def __str__(self) -> str:
        return f"{'≥ ' if self.at_least else ''}{self.mean:.2f}" + (f" ± {self.sd:.2f}" if self.sd is not None else "")


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
_SOLVED = Reading(0.97, at_least=True)
_FIGURE_1: dict[str, dict[int, tuple[Reading | None, ...]]] = {
    "ConvAttention": {seq_len: (Reading(1.0),) * 4 for seq_len in FIGURE_1_PAIRS},
    "ReBased": {
        128: (_SOLVED,) * 4,
        256: (_SOLVED,) * 4,
        512: (Reading(0.89), None, None, None),
        1024: (Reading(0.55, 0.18), _SOLVED, _SOLVED, _SOLVED),
        2048: (Reading(0.07, 0.05), Reading(0.66, 0.06), Reading(0.98), Reading(0.99)),
    },
    "Based": {
        512: (Reading(0.90, 0.06), None, None, None),
        1024: (Reading(0.33, 0.26), None, None, None),
        2048: (Reading(0.14, 0.06), Reading(0.49, 0.16), Reading(0.99), Reading(0.99)),
    },
    "RWKV": {
        128: (Reading(0.10), Reading(0.25), Reading(0.54), Reading(0.82)),
        **{seq_len: (Reading(0.0),) * 4 for seq_len in (256, 512, 1024, 2048)},
    },
    "Mamba": {
        128: (Reading(0.73, 0.43), Reading(0.77, 0.43), Reading(0.99), Reading(0.98)),
        256: (Reading(0.09), Reading(0.12), Reading(0.19), Reading(0.33)),
        512: (Reading(0.0), Reading(0.02), Reading(0.38), Reading(0.20)),
        **{seq_len: (Reading(0.0),) * 4 for seq_len in (1024, 2048)},
    },
}

TABLE_1 = {
    Place(model, seq_len, TABLE_1_PAIRS, d_model): Reading(*value, error=0.005)
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

# The paper's settings of both: (name, path in a config, value).
_SETTINGS: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("epochs", ("train", "epochs"), 64),
    ("sequences per step", ("train", "batch_size"), 512),
    ("vocabulary", ("task", "vocab_size"), 8192),
    ("weight decay", ("train", "weight_decay"), 0.1),
    ("precision", ("train", "precision"), "fp32"),
)
PAPER_TASK = "mqar"
_EXAMPLES = 100_000
SEEDS = 5
HEADS = 12  # in the authors' code; the paper does not give them for Table 1


def place_of(run: Run) -> Place | None:
    """The run's place in the paper's grids; None if its task is not of the paper's kind."""
    if run.task != PAPER_TASK:
        return None
    tested, trained = (
        [(s["seq_len"], s.get("kv_pairs")) for s in run.settings["task"][part]] for part in ("test", "train")
    )
    return Place(run.model, *tested[0], run.d_model) if len(tested) == 1 and trained == tested else None


def paper_reading(run: Run) -> Reading | None:
    """The paper's value for this model, task and width; None if it has none, or it was not read."""
    place = place_of(run)
    return READINGS.get(place) if place else None


def source(run: Run) -> str:
    """The table or figure that the paper's value for a run is from."""
    return "Table 1, as printed" if place_of(run) in TABLE_1 else "Figure 1, as read off the picture (±0.02)"


def agrees(ours: Spread, paper: Reading) -> bool:
    """Whether the means differ by at most two standard errors plus the error of reading the paper's. If the paper shows
    no spread, ours is taken for both."""
    if paper.at_least:
        return ours.mean >= paper.mean - paper.error
    sd = 0.0 if isnan(ours.sd) else ours.sd
    error = sqrt(sd**2 / ours.n + (sd if paper.sd is None else paper.sd) ** 2 / SEEDS)
    return abs(ours.mean - paper.mean) <= 2 * error + paper.error


def deviations(run: Run) -> list[str]:
    """The settings in which a run differs from the paper's, in words."""
    found = []
    for name, path, papers in _SETTINGS:
        ours: Any = run.settings
        for key in path:
            ours = ours.get(key)
        if ours not in (papers, None):  # other versions of the code may not have had that setting
            found.append(
                f"{name} {ours:,} instead of {papers:,}"
                if isinstance(ours, int) and not isinstance(papers, str)
                else f"{name} {ours} instead of {papers}"
            )
    examples = sum(segment["examples"] for segment in run.settings["task"]["train"])
    if examples != _EXAMPLES:
        found.append(f"{examples:,} examples instead of {_EXAMPLES:,}")
    mixers = [mixer for mixer in run.settings["model"]["mixers"] if mixer["name"] in ("rebased", "based")]
    heads = {mixer["n_heads"] for mixer in mixers if mixer.get("n_heads")}
    if heads - {HEADS}:
        found.append(f"heads {', '.join(map(str, sorted(heads)))} instead of {HEADS}")
    return found
