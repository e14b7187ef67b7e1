"""Paired tests, compared with scipy, with enumeration and by hand; and the sentences made from them."""

from itertools import product
from math import inf, isnan, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rebased.analysis.paired import (
    compare,
    compare_all,
    holm,
    in_words,
    rank_biserial,
    signed_rank,
    smallest_wilcoxon_p,
    wilcoxon_limit,
)

LOW = {42: 0.40, 43: 0.50, 44: 0.45, 45: 0.52, 46: 0.47}
HIGH = {42: 0.55, 43: 0.61, 44: 0.58, 45: 0.60, 46: 0.62}


def test_against_scipy() -> None:
    found = compare(HIGH, LOW)
    assert found.seeds == (42, 43, 44, 45, 46)
    assert found.difference.mean == pytest.approx(0.124)
    assert found.t_p == pytest.approx(stats.ttest_rel(list(HIGH.values()), list(LOW.values())).pvalue)
    assert found.wilcoxon_p == 0.0625 == smallest_wilcoxon_p(5)
    assert found.d == pytest.approx(found.difference.mean / found.difference.sd)
    assert found.rank_biserial == 1
    mirrored = compare(LOW, HIGH)
    assert (mirrored.t_p, mirrored.d, mirrored.rank_biserial) == pytest.approx((found.t_p, -found.d, -1))


@given(differences=st.lists(st.integers(-4, 4), min_size=2, max_size=7))
@settings(max_examples=60, deadline=None)
def test_signed_rank_is_the_share_of_all_signs(differences: list[int]) -> None:
    """p by enumeration: the share of all assignments of signs that are as extreme or more.

    Zeros are left out, and ties share their rank.
    """
    decided = [value for value in differences if value]
    if not decided:
        assert signed_rank(differences) == 1
        return
    ranks = stats.rankdata([abs(value) for value in decided])
    sums = [
        sum(rank for rank, sign in zip(ranks, signs, strict=True) if sign)
        for signs in product((0, 1), repeat=len(ranks))
    ]
    seen = sum(rank for rank, value in zip(ranks, decided, strict=True) if value > 0)
    tails = (sum(one >= seen for one in sums), sum(one <= seen for one in sums))
    assert signed_rank(differences) == pytest.approx(min(1, 2 * min(tails) / len(sums)))


def test_rank_biserial_by_hand() -> None:
    assert rank_biserial([3, -1, 2]) == pytest.approx((3 + 2 - 1) / 6)
    assert rank_biserial([0, 0]) == 0


def test_holm_by_hand() -> None:
    assert holm([0.04, 0.01, nan, 0.03]) == pytest.approx([0.06, 0.03, nan, 0.06], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_family_is_corrected_together() -> None:
    alone, twice = compare_all([(HIGH, LOW)]), compare_all([(HIGH, LOW), (HIGH, LOW)])
    assert alone[0].t_holm == alone[0].t_p
    assert twice[0].t_holm == pytest.approx(2 * alone[0].t_p)
    assert twice[1].wilcoxon_holm == pytest.approx(0.125)


def test_one_comparison_alone_needs_no_correction() -> None:
    found = compare(HIGH, LOW)
    assert (found.t_holm, found.wilcoxon_holm) == (found.t_p, found.wilcoxon_p)
    assert in_words("A", "B", found).startswith("A recalls more than B by 0.124 ")


def test_no_difference_at_all() -> None:
    found = compare_all([(HIGH, HIGH)])[0]
    assert (found.t_p, found.wilcoxon_p, found.d, found.rank_biserial) == (1, 1, 0, 0)
    assert in_words("A", "B", found) == "A and B recall equally much on each of 5 paired seeds."


def test_the_same_difference_on_every_seed() -> None:
    found = compare_all([({1: 0.3, 2: 0.2, 3: 0.1}, {1: 0.2, 2: 0.1, 3: 0.0})])[0]
    assert isnan(found.t_p)
    assert found.d == inf
    assert "without spread the t test says nothing" in in_words("A", "B", found)


def test_one_pair() -> None:
    found = compare({42: 0.5, 43: 0.9}, {42: 0.4, 44: 0.1})
    assert (found.seeds, found.unpaired) == ((42,), 2)
    assert isnan(found.t_p)
    assert isnan(found.wilcoxon_p)
    assert in_words("A", "B", found) == "A and B differ by +0.100 on one paired seed: one pair can be put to no test."


def test_no_pair() -> None:
    with pytest.raises(ValueError, match="no seed is in both"):
        compare({42: 0.5}, {43: 0.5})


def test_sentences() -> None:
    clear, unclear = compare_all([(LOW, HIGH), ({1: 0.5, 2: 0.6}, {1: 0.4, 2: 0.61})])
    assert in_words("Based", "ReBased", clear) == (
        "Based recalls less than ReBased by 0.124 ± 0.030 on 5 paired seeds (Holm p = 0.0015, d = -4.2)."
    )
    assert in_words("A", "B", unclear).startswith("Undecided: A recalls more than B by 0.045 ± ")


def test_too_few_pairs_for_wilcoxon_are_said() -> None:
    assert "its smallest two-sided p is 0.0625" in (wilcoxon_limit(5) or "")
    assert wilcoxon_limit(6) is None
    assert wilcoxon_limit(1) is None
