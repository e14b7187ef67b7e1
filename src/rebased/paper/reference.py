"""The paper's values as reference values of reports: which are of a run, and in which settings the run differs."""

from typing import Any

from rebased.paper.values import EPOCHS, FIGURE_10, READINGS, TABLE_1, TABLE_2, TABLE_3, Place, printed
from rebased.report.lm.tables import PERPLEXITIES
from rebased.report.reference_values import Measure, Reference, ReferenceValue, ReferenceValues
from rebased.runs.finished import Run
from rebased.runs.lm_config import LMRunConfig
from rebased.tasks.splits import TRAIN_EXAMPLES

# The paper's settings: (name, section and key of a config, value).
_SETTINGS: tuple[tuple[str, str, str, Any], ...] = (
    ("epochs", "train", "epochs", EPOCHS),
    ("sequences per step", "train", "batch_size", 512),
    ("vocabulary", "task", "vocab_size", 8192),
    ("weight decay", "train", "weight_decay", 0.1),
    ("precision", "train", "precision", "fp32"),
)
PAPER_TASK = "mqar"
HEADS = 12  # in the authors' code; the paper does not give them for Table 1
OTHER_HEADS = "other heads than the authors' code"
# The digest (data/tokenizer.py) of the paper's tokenizer, that of GPT-NeoX-20B.
NEOX_VOCABULARY = "a1730488dadb984eb5d266a250c058985c971c5118d043a52fc8b244b5e60b89"
PAPER_NOTE = (
    "The paper's models have 127 to 157 million parameters, its text is the Pile, and it shows no spread: "
    "signs and ratios can be compared, levels cannot."
)
OTHER_TEXT = (
    "The last column is the paper's Table 2: the Pile, GPT-NeoX's tokenizer, 84 billion training tokens, 127 to 157 "
    "million parameters, no spread. Its levels can be compared only with runs that share all of these."
)
FIRST_LAYER = "previous_token"  # of Section 5.5: a short convolution with fixed weights, one token back
SOURCE = "arXiv 2402.10644, Table 3, as printed"
SEQ_LEN, PAIRS, PROBED_EXAMPLES = 128, 32, 10_000  # of Table 3
OPEN = (
    "The paper states neither width, heads nor learning rate of Table 3, nor how IoU is computed from weights between "
    "0 and 1. Here it is the soft IoU, sum min(A, G) / sum max(A, G) over queries and keys, G being 1 where the "
    "answer stands and 0 elsewhere. With several heads it can mean three things: the mean over heads, the best head, "
    "or the IoU of the heads' mean matrix. The verdict is on the mean over heads."
)


def place_of(run: Run) -> Place | None:
    """The run's place in the paper's grids; None if its task is not of the paper's kind."""
    if run.task != PAPER_TASK:
        return None
    splits = (run.settings["task"][part] for part in ("test", "train"))
    tested, trained = ([(segment["seq_len"], segment.get("kv_pairs")) for segment in split] for split in splits)
    return Place(run.model, *tested[0], run.d_model) if len(tested) == 1 and trained == tested else None


def reference_of(run: Run) -> Reference:
    """What the paper reports for the model of a run: an accuracy on MQAR, an IoU, or perplexities."""
    if run.kind is LMRunConfig:
        perplexities = map(printed, TABLE_2.get(run.model, ()))
        known: dict[Measure, ReferenceValue] = dict(zip(PERPLEXITIES, perplexities, strict=False))
        return Reference(known, OTHER_TEXT, limit=other_tokenizer(run), remark=PAPER_NOTE)
    values: dict[Measure, ReferenceValue] = dict(FIGURE_10)
    place, source = place_of(run), ""
    if place in READINGS and not has_own_start(run):
        values["accuracy"] = READINGS[place]
        source = "Table 1, as printed" if place in TABLE_1 else "Figure 1, as read off the picture (±0.02)"
    if is_of_table_3(run) and run.model in TABLE_3:
        row = TABLE_3[run.model]
        values |= {"iou": row.iou, "probed_accuracy": row.accuracy}
        source = f"{SOURCE}. {OPEN}"
    return Reference(values, source, deviations(run), OTHER_HEADS if has_other_heads(run) else "")


def has_own_start(run: Run) -> bool:
    """Whether a run's Mamba begins as its authors have it. In the paper's code a hook zeroes the bias of its step size,
    so that it forgets within a few tokens."""
    return any(
        mixer["name"] == "mamba" and mixer.get("dt_init") == "mamba" for mixer in run.settings["model"]["mixers"]
    )


PAPER = ReferenceValues("paper", reference_of)
"""The paper's values, as reports take them."""


def is_of_table_3(run: Run) -> bool:
    """Whether task and first layer of a probed run are those of Table 3."""
    task = run.settings["task"]
    segments = task.get(run.lines[0].get("split", "test")) or [{}]
    same_task = (segments[0].get("seq_len"), segments[0].get("kv_pairs")) == (SEQ_LEN, PAIRS)
    first = run.settings["model"]["mixers"][0]["name"] == FIRST_LAYER
    return same_task and run.task == PAPER_TASK and first


def other_tokenizer(run: Run) -> str:
    """'of another tokenizer' unless the model has the paper's."""
    return "" if run.lines[0]["corpus"].get("vocabulary") == NEOX_VOCABULARY else "of another tokenizer"


def deviations(run: Run) -> list[str]:
    """The settings in which a run differs from the paper's, in words."""
    found = []
    for name, section, key, papers in _SETTINGS:
        ours = run.settings[section][key]
        if ours != papers:
            number = "," if isinstance(ours, int) and not isinstance(papers, str) else ""
            found.append(f"{name} {ours:{number}} instead of {papers:{number}}")
    examples = sum(segment["examples"] for segment in run.settings["task"]["train"])
    if examples != TRAIN_EXAMPLES:
        found.append(f"{examples:,} examples instead of {TRAIN_EXAMPLES:,}")
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
