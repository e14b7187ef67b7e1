"""The paper's tables and figures: what each shows, where that is said, what is left open, and how to do it again."""

from typing import NamedTuple


class PaperItem(NamedTuple):
    """A table or figure of the paper."""

    name: str  # "Table 1"
    title: str
    says: str  # what the paper says it shows
    source: str  # where the paper says so, and how its values were read
    redo: tuple[str, ...]  # commands: the whole first, then what takes less
    left_open: str = ""  # what the paper does not state, and what stands here for it

    @property
    def key(self) -> str:
        """'table-1', for links."""
        return self.name.lower().replace(" ", "-")


PRINTED, READ = "as printed", "read off the picture, to about ±0.02"
HEADS = (
    "The number of heads of these narrow models. The authors' code has 12, with values D // 12 wide; so have the runs "
    "here."
)
INSIDE = (
    "Width, heads and learning rate of the probed models, and how IoU is computed from weights between 0 and 1. "
    "Here: D = 64 and 128, 12 heads of 16 (attention: 1), the usual choice of rate, and soft IoU, sum min(A, G) / sum "
    "max(A, G), as the mean over heads."
)
PAGE = "rebased paper runs -o paper.html"
TABLE_1_AGAIN = (
    "rebased sweep table1             # all of it: 960 runs",
    "rebased sweep results/table1-t256/sweep.yaml  # T = 256, D = 24 to 48, two to four rates: 180 runs",
    "rebased sweep table1-small       # T = 256, D = 24 and 32, 12 epochs at one rate: 60 runs",
    PAGE,
)
FIGURE_1_AGAIN = (
    "rebased sweep figure1            # all of it: 2,000 runs",
    "rebased sweep results/figure1-t256/sweep.yaml  # T = 128 and 256, D = 64 and 128, three seeds: 120 runs",
    "rebased sweep results/figure1-rwkv-rates/sweep.yaml  # RWKV at T = 128 with the other two rates: 12 runs",
    "rebased sweep results/figure1-mamba-init/sweep.yaml  # Mamba with the paper's initialization: 24 runs",
    "rebased sweep figure1-small      # T = 128 and 512, D = 64 and 128, 16 epochs, one seed: 40 runs",
    PAGE,
)
FIGURE_10_AGAIN = (
    *FIGURE_1_AGAIN[:2],
    "rebased sweep results/figure10-weight-decay/sweep.yaml  # no weight decay, T = 256, D = 32, five seeds: 5 runs",
    PAGE,
)
TABLE_3_AGAIN = (
    "rebased probe runs/table3 --sweep table3 --json table3.json  # all, 112 are trained: 280 runs",
    "rebased probe runs/table3 --sweep results/table3-16-epochs/sweep.yaml --json table3.json  # 98 of 210 are trained",
    "rebased paper table3.json -o paper.html",
)

ITEMS = (
    PaperItem(
        "Table 1",
        "kernels of narrow models",
        "ReBased recalls more than Based and than each of four simpler kernels, on average over widths, in short and "
        "in long sequences with 32 pairs.",
        f"Table 1 and Section 5.3, {PRINTED}",
        TABLE_1_AGAIN,
        HEADS,
    ),
    PaperItem(
        "Table 2",
        "perplexity on the Pile",
        "ReBased has a lower perplexity than Based on all, AR and non-AR tokens. Attention is ahead of ReBased on AR "
        "tokens and behind it on the others.",
        f"Table 2 and Section 5.4, {PRINTED}; no spread, so nobody can say how sure its differences are",
        (
            "rebased lm train --config lm/paper-checkpoint    # all of it: this, and the next two",
            "rebased lm train --config lm/based",
            "rebased lm train --config lm/attention",
            "rebased sweep results/enwik8-six-passes/sweep.yaml  # the stand-in: enwik8, 4,500 steps, nine runs",
            "rebased sweep results/enwik8-wide-keys/sweep.yaml  # the same with keys of 128, six runs",
            "rebased sweep enwik8 --train.steps 600           # shorter; docs/measurements/enwik8.md has the rest",
            PAGE,
        ),
        "Heads: Tables 6 and 8 say 12 of 16, the released checkpoint and Table 9 say 8 of 128. The number of seeds.",
    ),
    PaperItem(
        "Table 3",
        "attention on the answers (IoU)",
        "Attention looks at the answers alone, ReBased and Based mostly elsewhere, ReBased a little less than Based.",
        f"Table 3 and Section 5.5, {PRINTED}; no spread, and no number of seeds",
        TABLE_3_AGAIN,
        INSIDE,
    ),
    PaperItem(
        "Table 4",
        "parameters of the MQAR models",
        "The numbers of parameters of seven models at four widths.",
        f"Table 4 and Appendix A, {PRINTED}",
        ("rebased paper --params",),
        "Learned positions count, and the table mixes runs of different lengths. Which length each cell has was found "
        "by solving for it.",
    ),
    PaperItem(
        "Table 9",
        "parameters of the language models",
        "The numbers of parameters of the three models of Table 2.",
        f"Table 9 and Appendix B, {PRINTED}",
        ("rebased paper --params",),
        "The counts fit 8 heads of 128, as in the released checkpoint, not the 12 heads of 16 of Tables 6 and 8.",
    ),
    PaperItem(
        "Figure 1",
        "recall by length and width",
        "Attention recalls everything. ReBased recalls more than Based, RWKV and Mamba across lengths and widths.",
        f"Figure 1 and Section 5.2, {READ}",
        FIGURE_1_AGAIN,
    ),
    PaperItem(
        "Figure 2",
        "similarity of queries and keys",
        "The similarity of Based is at least 0.5, so it cannot ignore a token. That of ReBased can come to zero.",
        "Figure 2 and Section 4; a drawing without values",
        TABLE_3_AGAIN,
        "Which model and layer the drawing is of. Here: layer 2 of the models of Table 3.",
    ),
    PaperItem(
        "Figure 3",
        "Table 1 as a picture",
        "ReBased is best at every width. Its lead is small at T = 256 and evident at T = 2,048.",
        "Figure 3 and Section 5.3; the values are those of Table 1",
        TABLE_1_AGAIN,
        HEADS,
    ),
    PaperItem(
        "Figure 4",
        "accuracy by tuning budget",
        "ReBased is best for every number of learning rates tried, at every width.",
        "Figure 4 and Section 5.3; its values were not read",
        TABLE_1_AGAIN,
        "Which estimator of expected validation performance it is. Here: with replacement. For one try both are the "
        "mean over rates, and the claims are tested there.",
    ),
    PaperItem(
        "Figure 5",
        "attention matrices, one example",
        "The attention of softmax lies on the answers; that of Based and ReBased is spread over the other pairs.",
        "Figure 5 and Section 5.5; a picture without values. Its measure is the IoU of Table 3",
        TABLE_3_AGAIN,
        INSIDE,
    ),
    PaperItem(
        "Figure 7",
        "with and without a first layer of short convolution",
        "A short convolution as first layer helps attention. RWKV does better without it.",
        "Figure 7 and Appendix A; its values were not read",
        (
            "rebased sweep figure7            # all of it: 1,600 runs",
            "rebased sweep figure7-small      # T = 128 and 512, D = 64, 16 epochs, two seeds: 32 runs",
            PAGE,
        ),
    ),
    PaperItem(
        "Figure 8",
        "attention matrices, more examples",
        "Softmax attention fires more intensely at the tokens to be retrieved than Based and ReBased.",
        "Figure 8 and Appendix C; pictures without values. Held against the attention on the answers (mass)",
        TABLE_3_AGAIN,
        INSIDE,
    ),
    PaperItem(
        "Figure 9",
        "attention of the last question",
        "ReBased has fewer noisy tokens than Based, and attention has fewer than both.",
        "Figure 9 and Appendix C; a picture of one example without values",
        TABLE_3_AGAIN,
        f"What a noisy token is. Here: a wrong token with more attention than a uniform share. {INSIDE}",
    ),
    PaperItem(
        "Figure 10",
        "gamma and beta along training",
        "At every length the mean of gamma tends to about 0.13 and that of beta to 0.",
        "Figure 10, its caption, and Appendix C",
        FIGURE_10_AGAIN,
        "The width, the number of pairs, and whether queries or keys are meant. Here: both, at every width that was "
        "run.",
    ),
)
BY_NAME = {item.name: item for item in ITEMS}
NOT_HELD = (
    "Tables 5 to 8 are settings, which the configs have (rebased list configs), and Figure 6 draws the architectures; "
    "there is nothing to measure in them."
)
