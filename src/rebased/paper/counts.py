"""Tables 4 and 9: the parameter counts that the paper prints, each with the model that has this count."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from rebased.models.config import LMConfig
from rebased.models.presets import mqar_preset_names, preset_to_change
from rebased.models.shapes import shape_of
from rebased.paper.finding import Finding
from rebased.paper.verdict import Number, Outcome


class Cell(NamedTuple):
    """One number of a table of the paper.

    Learned positions are parameters, and Table 4 mixes runs of different lengths: `positions` says which was used.
    """

    table: int
    model: str  # its name in the table
    preset: str
    d_model: int
    positions: int
    parameters: int

    def config(self) -> LMConfig:
        """Return the config of the model that has this many parameters. Widths that 12 heads do not divide are the
        paper's own: there is no warning about them."""
        return preset_to_change(self.preset, d_model=self.d_model, max_len=self.positions)


_WIDTHS = (64, 128, 256, 512)
_TABLE_4 = {  # model: (preset, positions at each width, counts at each width)
    "Attention": ("attention", (1024, 1024, 1024, 1024), (623_744, 1_313_024, 2_888_192, 6_824_960)),
    "ConvAttention": ("conv_attention", (512, 128, 128, 128), (578_752, 1_149_312, 2_462_464, 5_580_288)),
    "RWKV": ("rwkv", (1024, 1024, 1024, 1024), (623_872, 1_313_280, 2_888_704, 6_825_984)),
    "ConvRWKV": ("conv_rwkv", (2048, 2048, 512, 512), (677_120, 1_395_200, 2_561_024, 5_777_408)),
    "Mamba": ("mamba", (1024, 1024, 1024, 512), (655_360, 1_413_120, 3_235_840, 7_847_936)),
    "Based": ("based", (256, 256, 256, 256), (577_984, 1_179_520, 2_459_392, 5_307_904)),
    "ReBased": ("rebased", (256, 256, 256, 256), (578_752, 1_180_288, 2_460_160, 5_308_672)),  # "(+768)"
}

TABLE_4 = tuple(
    Cell(4, model, name, *shape)
    for model, (name, positions, counts) in _TABLE_4.items()
    for shape in zip(_WIDTHS, positions, counts, strict=True)
)

# The released checkpoint has 8 heads with keys of width 128. The 12 heads of 16 in the paper's text give other counts.
TABLE_9 = (
    Cell(9, "Attention", "lm-attention", 768, 4096, 126_807_552),
    Cell(9, "Based", "lm-paper-checkpoint-based", 768, 4096, 156_955_392),
    Cell(9, "ReBased", "lm-paper-checkpoint-rebased", 768, 4096, 156_992_256),
)


class Size(NamedTuple):
    """Parameters and state of an MQAR model at one length for all models (Table 4 mixes lengths)."""

    preset: str
    d_model: int
    parameters: int
    state_bytes: dict[int, int]  # number of tokens -> bytes of the state after them, in fp32


SAME_LENGTH = 2048
STATE_LENGTHS = (128, 256, 512, 1024, 2048)


def sizes_at_one_length() -> list[Size]:
    """Return the size of every MQAR preset at every width of Table 4, all with SAME_LENGTH positions."""
    sizes = []
    for name in mqar_preset_names():
        for d_model in _WIDTHS:
            model = shape_of(preset_to_change(name, d_model=d_model, max_len=SAME_LENGTH))
            state_bytes = {length: 4 * model.state_size(length) for length in STATE_LENGTHS}
            sizes.append(Size(name, d_model, model.num_parameters(), state_bytes))
    return sizes


@cache
def count_parameters(config: LMConfig) -> int:
    """Return how many parameters the model has. No memory is allocated for them."""
    return shape_of(config).num_parameters()


def find_counts() -> Iterator[Finding]:
    """Table 4 and Table 9. They need no records: the models are built without memory, and counted."""
    for name, cells in (("Table 4", TABLE_4), ("Table 9", TABLE_9)):
        numbers = []
        for cell in cells:
            ours = count_parameters(cell.config())
            what = f"{cell.model}, D = {cell.d_model}, {cell.positions:,} positions"
            outcome: Outcome = "agrees" if ours == cell.parameters else "differs"
            off = float(ours - cell.parameters)
            numbers.append(Number(what, f"{cell.parameters:,}", f"{ours:,}", off, outcome=outcome))
        yield Finding(name, "paper", numbers, unit="count")
