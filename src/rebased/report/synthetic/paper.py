"""The paper's value for a run on MQAR, whether ours agrees with it, and in which settings the run differs."""

from math import isnan, sqrt
from typing import Any

from rebased.analysis import Spread
from rebased.report.paper.values import EPOCHS, EXAMPLES, READINGS, SEEDS, TABLE_1, Place, Reading
from rebased.runs.finished import Run

# The paper's settings of both: (name, path in a config, value).
_SETTINGS: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("epochs", ("train", "epochs"), EPOCHS),
    ("sequences per step", ("train", "batch_size"), 512),
    ("vocabulary", ("task", "vocab_size"), 8192),
    ("weight decay", ("train", "weight_decay"), 0.1),
    ("precision", ("train", "precision"), "fp32"),
)
PAPER_TASK = "mqar"
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
    """Whether the means differ by at most two standard errors plus the error of reading the paper's. If one of the two
    has no spread, that of the other is taken for both."""
    if paper.at_least:
        return ours.mean >= paper.mean - paper.error
    sd = (paper.sd or 0.0) if isnan(ours.sd) else ours.sd
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
    if examples != EXAMPLES:
        found.append(f"{examples:,} examples instead of {EXAMPLES:,}")
    if has_other_heads(run):
        found.append(f"heads {', '.join(map(str, sorted(numbers_of_heads(run))))} instead of {HEADS}")
    return found


def numbers_of_heads(run: Run) -> set[int]:
    """The numbers of heads of its ReBased and Based mixers."""
    mixers = [mixer for mixer in run.settings["model"]["mixers"] if mixer["name"] in ("rebased", "based")]
    return {mixer["n_heads"] for mixer in mixers if mixer.get("n_heads")}


def has_other_heads(run: Run) -> bool:
    """True if a mixer has another number of heads than in the authors' code."""
    return bool(numbers_of_heads(run) - {HEADS})
