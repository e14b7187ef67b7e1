"""The paper's tables and figures: what each shows, by the experiment that it is from, and how to do it again."""

from typing import NamedTuple


class Experiment(NamedTuple):
    """Runs that one or several tables and figures are computed from. What they show is one result, not several."""

    title: str
    items: dict[str, str]  # by the name of a table or figure: what the paper says it shows
    redo: tuple[str, ...]  # commands: the whole first, then what takes less
    left_open: str = ""  # what the paper does not state, and what stands here for it

    @property
    def key(self) -> str:
        """'narrow-models', for links."""
        return self.title.lower().replace(" ", "-")


EXPERIMENTS = (
    Experiment(
        "Kernels of narrow models",
        {
            "Table 1": "ReBased recalls more than five other kernels, in short and in long sequences.",
            "Figure 3": "ReBased is best at every width, most at T = 2,048.",
            "Figure 4": "ReBased is best for every number of rates tried.",
        },
        (
            "rebased sweep table1             # all: 960 runs",
            "rebased sweep results/table1-t256/sweep.yaml  # T = 256: 180 runs",
        ),
        "The number of heads. The authors' code has 12, with values D // 12 wide; so have the runs here.",
    ),
    Experiment(
        "Language models",
        {
            "Table 2": "ReBased has a lower perplexity than Based, and than attention on non-AR tokens and overall.",
        },
        (
            "rebased lm train --config lm/paper-checkpoint    # and lm/based, lm/attention: the paper's models",
            "rebased sweep results/enwik8-six-passes/sweep.yaml  # the stand-in: nine runs",
        ),
        "The number of seeds, and the heads: Tables 6 and 8 say 12 of 16, the released checkpoint has 8 of 128.",
    ),
    Experiment(
        "Recall by length and width",
        {
            "Figure 1": "ReBased recalls more than Based, RWKV and Mamba.",
            "Figure 7": "A short convolution helps attention; RWKV is better without.",
            "Figure 10": "Gamma tends to about 0.13, beta to 0.",
        },
        (
            "rebased sweep figure1            # all: 2,000 runs; figure7 has 1,600 more",
            "rebased sweep results/figure1-t256/sweep.yaml  # T = 128 and 256, D = 64 and 128, three seeds: 120 runs",
            "rebased sweep results/figure7-t256/sweep.yaml  # both pairs of Figure 7: 40 runs",
            "rebased sweep results/figure10-weight-decay/sweep.yaml  # no weight decay: 5 runs",
        ),
    ),
    Experiment(
        "Attention probes",
        {
            "Table 3": "IoU on the answers: Attention 0.999, ReBased 0.173, Based 0.157.",
            "Figure 2": "ReBased can ignore a token, Based cannot.",
            "Figure 5": "Softmax looks at the answers, the others also elsewhere.",
            "Figure 8": "Softmax has more attention on the answers.",
            "Figure 9": "ReBased has fewer noisy tokens than Based.",
        },
        (
            "rebased probe runs/table3 --sweep table3 --json table3.json  # 112 of 280 are trained",
            "rebased probe runs/table3 --sweep results/table3-16-epochs/sweep.yaml --json table3.json  # 98 of 210",
        ),
        "Width, heads, learning rate, and how IoU is computed from weights. Here: D = 64 and 128, 12 heads (attention: "
        "1), soft IoU, sum min(A, G) / sum max(A, G). The mean over heads was planned; live heads and the best head "
        "were looked at after the fact.",
    ),
    Experiment(
        "Fitted parameter counts",
        {
            "Table 4": "Parameters of seven models, four widths.",
            "Table 9": "Parameters of the models of Table 2.",
        },
        ("rebased paper --params",),
        "Which length each cell of Table 4 has was found by solving for it.",
    ),
)
SAYS = {name: says for experiment in EXPERIMENTS for name, says in experiment.items.items()}
