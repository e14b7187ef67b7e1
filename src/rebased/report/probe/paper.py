"""The paper's values on attention matrices (arXiv 2402.10644, Table 3), and when a probe may be compared with them."""

from typing import Any

from rebased.report.paper.values import TABLE_3, Row

SOURCE = "arXiv 2402.10644, Table 3, as printed"
SEQ_LEN, PAIRS, EXAMPLES = 128, 32, 10_000
FIRST_LAYER = "previous_token"  # Section 5.5: a short convolution with fixed weights that attends to the previous token


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
