"""Plans: a question, its test and its margin, committed before the runs; and what the runs then say.

A plan is a Markdown file with one block of YAML, beside the sweep that makes its runs (results/NAME/plan.md).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from rebased.analysis.paired import equals, holm
from rebased.analysis.unpaired import ALPHA, Effect, effect, fisher_p, permutation_interval, permutation_p
from rebased.config import Config
from rebased.files import read_json
from rebased.paper.evidence import Evidence, read_evidence
from rebased.report.lm.models import is_finished, training_loss
from rebased.report.probe.cells import live_mean, run_of
from rebased.report.probe.files import Probe
from rebased.report.synthetic.cells import COUNTED, has_learned
from rebased.report.tables import NONE, Table
from rebased.runs.finished import Run

NO_INTERVAL = (nan, nan)
CAME_FIRST = "came-first.json"  # in a folder of plans: by name, whether each commit that a run names holds the plan
Answer = Literal["holds", "contradicted", "equal", "too wide to tell", "not shown", "incomplete"]


class PlannedTest(Config):
    """One comparison: the runs of two groups, the number that each run counts with, the test, and the margin."""

    name: str
    value: Literal["held_out", "began", "loss.all", "loss.ar", "loss.non_ar", "gap", "iou.live", "iou.mean", "iou.best"]
    a: dict[str, Any]  # `model` is the name of a model, or a list of names; other keys are paths of settings
    b: dict[str, Any]
    runs: int | tuple[int, int]  # of a and of b
    test: Literal["welch", "permutation", "fisher"] = "welch"
    strata: str | None = None  # the path of a setting: labels are permuted, and differences taken, within its values
    margin: float | None = None  # a difference below it does not matter; Fisher's test has none

    @property
    def wanted(self) -> tuple[int, int]:
        """How many runs a and b need."""
        return (self.runs, self.runs) if isinstance(self.runs, int) else self.runs


class Plan(Config):
    """What a sweep is to decide."""

    correct: Literal["none", "holm"]  # over `tests`
    tests: tuple[PlannedTest, ...]
    shown: tuple[PlannedTest, ...] = ()  # computed in the same way, and decides nothing


class Outcome(NamedTuple):
    """What the runs say about one test."""

    test: PlannedTest
    n: tuple[int, int]  # runs of a and b with a value
    yes: tuple[int, int] | None  # those that began, for Fisher's test
    effect: Effect | None
    interval: tuple[float, float]  # 95 %, of the same test as p before its correction; nan without a difference
    p: float  # corrected, if the plan corrects; nan if runs are missing
    answer: Answer
    is_shown: bool = False  # beside the tests of the plan: it decides nothing
    welch_p: float = nan  # of Welch's test, corrected as p is

    @property
    def counts(self) -> tuple[str, str]:
        """Runs of a and b, as words: '20'; '2 of 20', those that began; '17 of 20 runs', if some are missing."""
        if self.answer == "incomplete":
            return f"{self.n[0]} of {self.test.wanted[0]} runs", f"{self.n[1]} of {self.test.wanted[1]} runs"
        if self.yes:
            return f"{self.yes[0]} of {self.n[0]}", f"{self.yes[1]} of {self.n[1]}"
        return str(self.n[0]), str(self.n[1])

    @property
    def words(self) -> str:
        """The difference with its 95 % interval, or the two counts."""
        if self.effect is None:
            return f"{self.counts[0]} against {self.counts[1]}"
        low, high = self.interval
        return f"{self.effect.difference:+.3f} ({low:+.3f} to {high:+.3f})"

    @property
    def fragile(self) -> str:
        """A warning if permutations decide and Welch's test does not, which allows groups of unequal spread."""
        if self.test.test != "permutation" or not self.p < ALPHA <= self.welch_p:
            return ""
        return f"fragile: Welch's test has p {equals(self.welch_p)}"

    def to_record(self) -> dict[str, Any]:
        """The outcome as JSON data; p is None if runs are missing."""
        about = {"test": self.test.name, "shown_only": self.is_shown, "found": self.words, "margin": self.test.margin}
        return about | {"p": None if isnan(self.p) else self.p, "answer": self.answer, "fragile": self.fragile}


class JudgedPlan(NamedTuple):
    """A plan's outcomes, and whether its runs can be shown to have come after it."""

    outcomes: list[Outcome]  # none if there are no runs
    runs: Sequence[Run] = ()
    came_first: bool = False  # each commit that a run names holds the plan, with the same tests
    probes: Sequence[Probe] = ()

    @property
    def mark(self) -> str:
        """The word for its tests."""
        return "planned" if self.came_first else "planned, order not shown"


def read_plan(path: Path) -> Plan:
    """The plan in a Markdown file. ValueError if it has no block of YAML, or one that is no plan."""
    tests = tests_in(path.read_text(encoding="utf-8"))
    if tests is None:
        raise ValueError(f"{path} has no block of YAML; a plan states its tests in one")
    return Plan.model_validate(tests)


def tests_in(text: str) -> Any:
    """The block of YAML in a plan's text; None if there is none."""
    block = re.search(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return yaml.safe_load(block[1]) if block else None


def judge_folders(folder: Path) -> dict[str, JudgedPlan]:
    """By the name of a plan, what the records beside it say."""
    found: dict[str, JudgedPlan] = {}
    first = read_json(folder / CAME_FIRST)
    for path in sorted(folder.glob("*/plan.md")):
        name, others = path.parent.name, [file for file in path.parent.iterdir() if file.suffix in (".gz", ".xz")]
        if not others:
            found[name] = JudgedPlan([])
            continue
        evidence = read_evidence(others)
        runs = [*evidence.runs, *evidence.lm_runs]
        probes = [probe for _, probe in evidence.probes]
        found[name] = JudgedPlan(judge_plan(read_plan(path), evidence), runs, bool(first.get(name)), probes)
    return found


def judge_plan(plan: Plan, evidence: Evidence) -> list[Outcome]:
    """One outcome per planned test, then one per test that is only shown."""
    found = [examine(test, evidence) for test in plan.tests]
    if plan.correct == "holm":
        corrected = [holm([outcome.p for outcome in found]), holm([outcome.welch_p for outcome in found])]
        found = [outcome._replace(p=p, welch_p=welch_p) for outcome, p, welch_p in zip(found, *corrected, strict=True)]
    shown = [examine(test, evidence)._replace(is_shown=True) for test in plan.shown]
    return [decide(outcome) for outcome in (*found, *shown)]


OUTCOME_HEAD = ("test", "runs", "difference (95 % interval)", "p", "margin", "answer")


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per test."""
    return Table(OUTCOME_HEAD, [outcome_row(found) for found in outcomes])


def outcome_row(found: Outcome, source: str = "") -> tuple[str, ...]:
    """The cells of a test, after its `source`."""
    name = f"{source}{found.test.name}{' (shown only)' if found.is_shown else ''}"
    answer = "; ".join(filter(None, (found.answer, found.fragile)))
    return (name, " and ".join(found.counts), found.words, f"{found.p:.3g}", f"{found.test.margin or NONE}", answer)


def examine(test: PlannedTest, evidence: Evidence) -> Outcome:
    """The numbers of one test, with p as yet uncorrected."""
    (a, n_a), (b, n_b) = (groups(test, which, evidence) for which in (test.a, test.b))
    if (n_a, n_b) != test.wanted or a.keys() != b.keys() or not all((*a.values(), *b.values())):
        return Outcome(test, (n_a, n_b), None, None, NO_INTERVAL, nan, "incomplete")
    if test.test == "fisher":
        yes_a, yes_b = (int(sum(map(sum, group.values()))) for group in (a, b))
        ahead: Answer = "holds" if yes_a * n_b > yes_b * n_a else "contradicted"
        p = fisher_p(yes_a, n_a, yes_b, n_b)
        return Outcome(test, (n_a, n_b), (yes_a, yes_b), None, NO_INTERVAL, p, ahead)
    found = effect(a, b)
    shuffled = test.test == "permutation"
    interval, p = (permutation_interval(a, b), permutation_p(a, b)) if shuffled else (found.interval(), found.p)
    answer: Answer = "holds" if found.difference > 0 else "contradicted"
    return Outcome(test, (found.n_a, found.n_b), None, found, interval, p, answer, welch_p=found.p)


def decide(outcome: Outcome) -> Outcome:
    """The answer: the sign if p is small enough, else equal within the margin, else too wide to tell."""
    if outcome.answer == "incomplete" or outcome.p < ALPHA:
        return outcome
    if outcome.effect is None or outcome.test.margin is None:
        return outcome._replace(answer="not shown")
    return outcome._replace(answer="equal" if outcome.effect.is_within(outcome.test.margin) else "too wide to tell")


def groups(test: PlannedTest, which: Mapping[str, Any], evidence: Evidence) -> tuple[dict[Any, list[float]], int]:
    """(the values of the runs that `which` describes, by stratum; how many runs there are). A run without a live head
    has no value."""
    found: dict[Any, list[float]] = {}
    runs = 0
    for run, value in values_of(test.value, evidence):
        if all(fits(run, key, wanted) for key, wanted in which.items()):
            runs += 1
            values = found.setdefault(setting(run.settings, test.strata) if test.strata else None, [])
            values += [value] if value is not None else []
    return found, runs


def fits(run: Run, key: str, wanted: Any) -> bool:
    """Whether a run has a model, or a setting, of one of the wanted values."""
    found = run.model if key == "model" else setting(run.settings, key)
    return found in wanted if isinstance(wanted, list) else found == wanted


def setting(settings: Any, path: str) -> Any:
    """The setting at a path such as model.mixers.1.n_heads; None if there is none."""
    for name in path.split("."):
        try:
            settings = settings[int(name) if isinstance(settings, list) else name]
        except (KeyError, IndexError, TypeError, ValueError):
            return None
    return settings


def values_of(value: str, evidence: Evidence) -> Iterator[tuple[Run, float | None]]:
    """(run, number) of every run that has ended; None if it has no such number."""
    kind, _, part = value.partition(".")
    if kind == "iou":
        for _, probe in evidence.probes:
            iou = probe["layers"][-1]["iou"]
            yield run_of(probe), live_mean(iou["by_head"]) if part == "live" else iou[part]
    elif kind in ("loss", "gap"):
        for run in evidence.lm_runs:
            if is_finished(run) and "test" in run.lines[-1]:
                loss: float = run.lines[-1]["test"][part or "all"]["loss"]
                trained = training_loss(run) if kind == "gap" else 0.0
                yield run, None if trained is None else loss - trained
    else:
        for run in evidence.runs:
            if run.status in COUNTED:
                yield run, float(has_learned(run)) if kind == "began" else run.held_out
