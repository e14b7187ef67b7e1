"""The paper's values on attention matrices (arXiv 2402.10644, Table 3), and when a probe may be compared with them."""

from typing import Any, NamedTuple

from rebased.report.synthetic.paper import Reading

SOURCE = "arXiv 2402.10644, Table 3, as printed"
SEQ_LEN, PAIRS, EXAMPLES = 128, 32, 10_000
FIRST_LAYER = "previous_token"  # Section 5.5: a short convolution with fixed weights that attends to the previous token


class Row(NamedTuple):
    """A row of the paper's Table 3."""

    iou: Reading
    accuracy: Reading


TABLE_3 = {
    "Attention": Row(Reading(0.999, error=0.0005), Reading(1.0, error=0.0005)),
    "Based": Row(Reading(0.157, error=0.0005), Reading(0.956, error=0.0005)),
    "ReBased": Row(Reading(0.173, error=0.0005), Reading(0.957, error=0.0005)),
}

OPEN = (
    "The paper states neither width, heads nor learning rate of Table 3, nor how IoU is computed from weights that are "
    "no yes or no. Here it is the soft IoU, sum min(A, G) / sum max(A, G) over queries and keys, G being 1 where the "
    "answer stands and 0 elsewhere. With several heads it can mean three things: the mean over heads, the best head, "
    "or the IoU of the heads' mean matrix. The verdict is on the mean over heads."
)


def paper_row(record: dict[str, Any]) -> Row | None:
    """The paper's row for a probe's model; None if task or first layer are not those of Table 3."""
    config = record["config"]
    segments = config["task"].get(record["split"]) or [{}]
    same_task = (segments[0].get("seq_len"), segments[0].get("kv_pairs")) == (SEQ_LEN, PAIRS)
    named = config["task"].get("name", "mqar") == "mqar"
    first = config["model"]["mixers"][0]["name"] == FIRST_LAYER
    return TABLE_3.get(record["model"]) if same_task and named and first else None
