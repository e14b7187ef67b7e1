"""The five sentences, and which planned tests take the place of an earlier claim."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from rebased.analysis.paired import holm
from rebased.analysis.unpaired import Effect
from rebased.paper.answered import PLANS, answer_again, same_claims
from rebased.paper.answers import caveats, sentences
from rebased.paper.evidence import PLANNED, shipped_evidence
from rebased.paper.finding import Finding
from rebased.paper.page import PaperPage
from rebased.paper.plan_file import PlannedTest, plans_in, read_plan
from rebased.paper.planned import JudgedPlan, Outcome
from rebased.paper.verdict import Answer, Claim, Difference

BASED = ("ReBased", "Based")


@cache
def shipped() -> PaperPage:
    """The page of the package's own records, computed once."""
    return PaperPage(shipped_evidence())


def with_answer(table: str, of: str, answer: Answer, **changes: Any) -> dict[str, Finding]:
    """The findings of the package, with another answer to the claims of a table that have these words."""

    def changed(claim: Claim) -> Claim:
        return claim._replace(answer=answer, **changes) if of in claim.what else claim

    finding = shipped().by_name[table]
    return shipped().by_name | {table: replace(finding, claims=list(map(changed, finding.claims)))}


def earlier_claims(table: str) -> list[Claim]:
    """The claims of a table before plans."""
    claims = shipped().by_name[table].claims
    return [claim._replace(replaced=False, mark="") for claim in claims if claim.planned is None]


def test_sentences_are_short_and_have_one_interval() -> None:
    answers = shipped().answers
    assert len(answers) == 5
    for sentence in answers:
        assert len(sentence.split()) <= 25, sentence
        assert sentence.count(" to ") <= 1, sentence


def test_sentences_follow_the_outcomes() -> None:
    recall, text, attention, heads, left = shipped().answers
    assert "In narrow models yes (T = 256: +0.154, +0.070 to +0.238), untested (T = 2,048); wider: equal." in recall
    assert "On small texts undecided (one pass: +0.002, -0.013 to +0.017; mini-pile; 5.9 passes)." in text
    assert "Not comparable" in attention
    assert attention.endswith("All and AR tokens: yes (one pass; mini-pile), no (5.9 passes).")
    assert "Depends on the heads: yes (live: +0.023 fragile, +0.072), undecided or no (all)." in heads
    assert "2 contradicted, 4 opposite here" in left

    assert "In narrow models no (T = 256: " in sentences(with_answer("Table 1", "T = 256", "contradicted"))[0]
    assert sentences(with_answer("Figure 1", "Based", "contradicted"))[0].endswith("wider: equal or no.")
    assert (
        "undecided (one pass: +0.002, -0.013 to +0.017; mini-pile), yes (5.9 passes)"
        in (sentences(with_answer("Table 2", "all tokens, 5.9 passes", "holds here"))[1])
    )
    ahead = sentences(with_answer("Table 2", "AR tokens, one pass: attention", "holds here"))[2]
    assert ahead.endswith("yes or no (one pass), yes (mini-pile), no (5.9 passes).")  # AR tokens: attention is ahead
    assert "Depends" not in sentences(with_answer("Table 3", "ReBased", "undecided"))[3]
    assert (
        "3 contradicted"
        in sentences(with_answer("Table 1", "T = 256: ReBased recalls more than x²", "contradicted"))[4]
    )
    found = Difference(-0.1, -0.2, -0.05, 0.01)
    long = with_answer("Table 1", "T = 2,048: ReBased recalls more than Based", "contradicted", planned=found)
    assert (
        "In narrow models yes (T = 256: +0.154, +0.070 to +0.238), no (T = 2,048); wider: equal." in sentences(long)[0]
    )


def test_caveats_follow_the_records() -> None:
    said = list(caveats(shipped().by_name, shipped().planned))
    assert "T = 2,048, where the paper's lead is largest (0.83 against 0.66), has no run." in said
    assert "Sentences 2, 3, 4 rest on runs with changes." in said
    assert "Sentences 2, 3, 4 rest on plans not shown to be older than their runs." in said
    shown = {name: plan._replace(came_first=True) for name, plan in shipped().planned.items()}
    assert not any("older" in words for words in caveats(shipped().by_name, shown))


def test_without_runs_every_answer_is_untested() -> None:
    nothing = {name: Finding(name, "none") for name in shipped().by_name}
    assert [sentence.lower().count("untested") > 0 for sentence in sentences(nothing)[:4]] == [True] * 4
    assert list(caveats(nothing, {})) == [
        "T = 2,048, where the paper's lead is largest (0.83 against 0.66), has no run."
    ]


def test_a_plan_replaces_a_claim_only_if_it_says_so() -> None:
    for name in shipped().planned.keys() & PLANS.keys():
        text = plans_in(PLANNED)[name].read_text()
        assert PLANS[name].replaces == ("The result replaces" in text), name
    for table, count in (("Table 1", 1), ("Table 2", 0), ("Table 3", 0)):
        claims = shipped().by_name[table].claims
        assert sum(claim.replaced and claim.difference is not None for claim in claims) == count, table
    planned, earlier, *_ = shipped().by_name["Table 1"].claims
    assert (planned.answer, planned.mark, planned.replaced) == ("holds", "planned", False)
    assert (earlier.answer, earlier.mark, earlier.replaced) == ("undecided", "earlier", True)
    assert planned.contest.pair == earlier.contest.pair == BASED
    assert planned.contest.paper
    assert planned.contest.paper.difference == pytest.approx((0.59 - 0.45 + 0.86 - 0.82) / 2)
    answers = [claim.answer for claim in shipped().by_name["Table 3"].claims if claim.contest.pair == BASED]
    assert answers == ["holds", "holds", "undecided", "contradicted"]  # live heads, and the mean over heads


def test_a_plan_replaces_a_claim_only_if_it_compares_the_same_quantity() -> None:
    for name, replaced in (("table3-fair", False), ("enwik8-one-pass", True)):  # live heads are not the mean over heads
        about = PLANS[name]._replace(replaces=True)
        claims = answer_again(earlier_claims(about.table), about, shipped().planned[name])
        assert any(claim.planned for claim in claims)
        assert any(claim.replaced for claim in claims) is replaced


def test_claims_of_one_seed_are_answered_too() -> None:
    alone = [claim._replace(answer="one seed") for claim in earlier_claims("Table 3")]
    claims = answer_again(alone, PLANS["table3-fair"], shipped().planned["table3-fair"])
    assert [claim.answer for claim in claims[:2]] == ["holds", "holds"]


def test_the_claims_that_plans_without_runs_will_answer_are_known() -> None:
    """The paper has no modern Transformer, and makes no claim about dropout or about one level alone."""
    known = {
        "Table 2": (" has a lower loss than ", "Transformer"),
        "Figure 1": (" than Based", "level"),
        "Figure 7": ("", "no"),
    }
    for name in ("mini-pile", "mini-pile/pass", "mini-pile/long", "enwik8-dropout", "figure1-t512", "figure7-t256"):
        about = PLANS[name]
        claims, (words, other) = shipped().by_name[about.table].claims, known[about.table]
        for test in read_plan(plans_in(PLANNED)[name]).tests:
            is_claim = words in test.name and other not in test.name
            found = [claims[n].what for n in same_claims(claims, about, test)]
            assert bool(found) == is_claim, test.name
            if about.table == "Table 2":
                statement, _, tokens = test.name.partition(", ")
                assert all(what.startswith(tokens) and what.lower().endswith(statement.lower()) for what in found)
            outcome = Outcome(test, (3, 3), None, Effect(0.1, 0.01, 4, 3, 3), (0.08, 0.12), 0.01, "holds")
            answered = answer_again(claims, about, JudgedPlan([outcome]))
            assert len(answered) - len(claims) == is_claim
            for claim in (claim for claim in answered if claim.planned and claim not in claims):
                assert len(claim.what.split(": ")) == 2


def test_an_answer_is_fragile_by_a_p_that_is_corrected_as_its_own() -> None:
    test = PlannedTest.model_validate(
        {
            "name": "",
            "value": "held_out",
            "a": {"model": "ReBased"},
            "b": {"model": "Based"},
            "runs": 5,
            "test": "permutation",
            "margin": 0.1,
        }
    )
    outcome = Outcome(test, (5, 5), None, Effect(0.1, 0.04, 8, 5, 5), (0.01, 0.2), 0.04, "holds", welch_p=0.03)
    assert outcome.fragile == ""
    assert outcome._replace(welch_p=0.06).fragile == "fragile: Welch's test has p = 0.06"
    corrected = [found for found in shipped().planned["table3-fair"].outcomes if not found.is_shown]
    assert [found.welch_p for found in corrected] == holm([found.effect.p for found in corrected if found.effect])
