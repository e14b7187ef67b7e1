"""Paired comparisons of two models, as the reports of both kinds of runs show them: table, sentences and JSON."""

import re
from collections.abc import Iterator, Sequence
from math import isnan
from textwrap import fill
from typing import Any, NamedTuple

from rebased.analysis.paired import SIGNIFICANT, Comparison, wilcoxon_limit
from rebased.config import plural
from rebased.report.drawing import Draw, Interval, draw_intervals
from rebased.report.page import finite
from rebased.report.tables import number, p_text

# Columns of a table of comparisons. p* is p after Holm's correction.
TESTS = (
    *("difference", "sd", "t test p*", "Cohen's d", "95% from", "to"),
    *("t test p", "Wilcoxon p", "Wilcoxon p*", "rank-biserial"),
)
PAIRS = ("pairs", "unpaired runs", "code")
HOW_TO_READ = "How to read this table"
BRIEF = (*TESTS[:4], PAIRS[0])
MOST, LETTERS = 8, 30  # rows of a panel, and letters in a line of its labels


class Contrast(NamedTuple):
    """A comparison of two models on one synthetic task, at one width or over several."""

    task: str
    widths: tuple[int, ...]
    reference: str
    other: str
    split: str  # of the accuracies: "test" or "held out"
    same_code: bool  # otherwise the code may cause the difference
    found: Comparison  # of reference - other
    selected_p: float  # Holm p if rates are chosen on the tested seeds themselves
    learned: bool = True  # False if no run of one of the two models learned: it has no p then

    @property
    def at(self) -> str:
        """The widths in words, such as "D = 24, 32"."""
        return f"D = {', '.join(map(str, self.widths))}"

    @property
    def favours(self) -> int:
        """1 if the reference is decidedly better, -1 if the other one is, otherwise 0."""
        sign = 1 if self.found.difference.mean > 0 else -1
        return sign if self.found.t_holm < SIGNIFICANT else 0


class Difference(NamedTuple):
    """The difference in perplexity between two models on one part of the tokens."""

    reference: str
    other: str
    part: str  # a key of PARTS in lm/models.py
    same_code: bool  # otherwise the code may cause the difference
    found: Comparison  # of reference - other: a negative mean favours the reference


AnyContrast = Contrast | Difference


def result_cells(contrast: AnyContrast, form: str = ".3f") -> tuple[str, ...]:
    """The cells of the columns TESTS; `form` is the format of differences."""
    found, spread = contrast.found, contrast.found.difference
    return (
        number(spread.mean, form),
        number(spread.sd),
        p_text(found.t_holm),
        number(found.d, ".2f"),
        *(number(value, form) for value in (spread.low, spread.high)),
        *(p_text(p) for p in (found.t_p, found.wilcoxon_p, found.wilcoxon_holm)),
        number(found.rank_biserial, ".2f"),
    )


def pair_cells(contrast: AnyContrast) -> tuple[str, ...]:
    """The cells of the columns PAIRS."""
    counts = (contrast.found.difference.n, contrast.found.unpaired)
    return (*(number(count, "d") for count in counts), "same" if contrast.same_code else "differs")


def effects_panel(contrasts: Sequence[AnyContrast], xlabel: str) -> Draw | None:
    """The first MOST differences that have an interval, without those to a model that never learned; None if no
    difference is left."""
    rows, several = [], len({getattr(one, "widths", ()) for one in contrasts}) > 1
    for one in contrasts:
        spread, where = one.found.difference, f", {one.at}" if isinstance(one, Contrast) and several else ""
        if not isnan(spread.low) and (isinstance(one, Difference) or one.learned):
            name = difference_of(one.reference, one.other)
            text = f"{name}{where}: {spread.mean:+.3f} ({spread.low:+.3f} to {spread.high:+.3f}), {spread.n} pairs"
            rows.append(Interval(fill(f"{name}{where}", LETTERS), spread.mean, spread.low, spread.high, text))
    return draw_intervals(rows[:MOST], xlabel=xlabel) if rows else None


def difference_of(one: str, other: str) -> str:
    """Settings that both names state are written once: 'ReBased − Based (n_heads 2)'."""
    apart = re.search(r" \([^()]*\)$", one)
    return f"{one.removesuffix(apart[0]) if apart and other.endswith(apart[0]) else one} − {other}"


def notes_on_tests(contrasts: Sequence[AnyContrast]) -> Iterator[str]:
    """How to read the table of comparisons, and what Wilcoxon's test cannot show with as few pairs as some have."""
    dead = [one for one in contrasts if isinstance(one, Contrast) and not one.learned]
    tested = len(dead) + sum(not isnan(one.found.t_p) for one in contrasts)
    yield (
        "Differences are paired by seed; ± and sd are their standard deviation. p* is p after Holm's correction over "
        f"the {'' if tested == len(contrasts) else f'{tested} tested ones of '}{plural(len(contrasts), 'comparison')} "
        "of this table, for each test separately. Intervals are Student's, of one mean each, and not corrected. "
        "Cohen's d is the mean difference divided by its standard deviation; it is biased upwards for few seeds. "
        "rank-biserial is 1 if the first model has the greater value with every seed, and -1 if the smaller."
    )
    if dead:
        yield "A comparison with a model of which no run learned has no p. It counts in the correction."
    limits = (wilcoxon_limit(pairs) for pairs in sorted({one.found.difference.n for one in contrasts}))
    yield from filter(None, limits)


def as_record(contrast: AnyContrast) -> dict[str, Any]:
    """A comparison as JSON data."""
    record = {**contrast._asdict(), **contrast.found._asdict(), **contrast.found.difference._asdict()}
    return finite({key: value for key, value in record.items() if key not in ("found", "difference")})
