"""What runs say about a plan: one outcome per test."""

from collections.abc import Iterator, Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from rebased.analysis.paired import equals, holm
from rebased.analysis.unpaired import ALPHA, Effect, effect, fisher_p, permutation_interval, permutation_p
from rebased.files import read_json
from rebased.paper.evidence import Evidence, read_evidence
from rebased.paper.plan_file import Plan, PlannedTest, plans_in, read_plan
from rebased.report.lm.models import curve, is_finished
from rebased.report.probe.cells import live_mean, run_of
from rebased.report.probe.files import Probe
from rebased.report.synthetic.cells import COUNTED, has_learned
from rebased.report.tables import NONE, Table
from rebased.runs.finished import Run

NO_INTERVAL = (nan, nan)
CAME_FIRST = "came-first.json"  # in a folder of plans: by name, whether each commit that a run names holds the plan
GAP_STEPS = 50  # steps before an evaluation: the gap is its loss minus the mean training loss of these
Answer = Literal["holds", "contradicted", "equal", "too wide to tell", "not shown", "incomplete"]


class Outcome(NamedTuple):
    """What the runs say about one test."""

    test: PlannedTest
    n: tuple[int, int]  # runs of a and b with a value
    yes: tuple[int, int] | None  # those that began, for Fisher's test
    effect: Effect | None
    interval: tuple[float, float]  # 95 %, of the same test as p before its correction; nan without a difference
    p: float  # corrected, if the plan corrects; nan if runs are missing
    answer: Answer
    never_began: tuple[int, int] = (0, 0)  # runs of a and b that count with an accuracy and did not learn
    is_shown: bool = False  # beside the tests of the plan: it decides nothing
    welch_p: float = nan  # of Welch's test, corrected as p is

    @property
    def counts(self) -> tuple[str, str]:
        """Runs of a and b, as words: '20'; '2 of 20', those that began; '17 of 20 runs', if some are missing."""
        if self.answer == "incomplete":
            return f"{self.n[0]} of {self.test.wanted[0]} runs", f"{self.n[1]} of {self.test.wanted[1]} runs"
        if self.yes:
            return f"{self.yes[0]} of {self.n[0]}", f"{self.yes[1]} of {self.n[1]}"
        return str(self.n[0]), str(self.n[1]) if self.test.level is None else f"{self.test.level:g} as reported"

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

    @property
    def remarks(self) -> str:
        """What stands beside the answer: whether it is fragile, how many runs never began, and the plan's note."""
        began = f"runs that never began: {self.never_began[0]} of {self.n[0]} and {self.never_began[1]} of {self.n[1]}"
        fragile = "" if self.test.claims_no_loss else self.fragile  # such an answer does not rest on p
        return "; ".join(filter(None, (fragile, began if any(self.never_began) else "", self.test.note)))

    def to_record(self) -> dict[str, Any]:
        """The outcome as JSON data; p is None if runs are missing."""
        about = {"test": self.test.name, "shown_only": self.is_shown, "found": self.words, "margin": self.test.margin}
        return about | {"p": None if isnan(self.p) else self.p, "answer": self.answer, "remarks": self.remarks}


class JudgedPlan(NamedTuple):
    """A plan's outcomes, and whether its runs can be shown to have come after it."""

    outcomes: list[Outcome]  # none if there are no runs
    runs: Sequence[Run] = ()
    came_first: bool = False  # each commit that a run names holds the plan, word by word
    probes: Sequence[Probe] = ()

    @property
    def mark(self) -> str:
        """The word for its tests."""
        return "planned" if self.came_first else "planned, order not shown"


def judge_folders(folder: Path) -> dict[str, JudgedPlan]:
    """{plan: its outcomes, computed from the records beside it}."""
    found: dict[str, JudgedPlan] = {}
    first = read_json(folder / CAME_FIRST)
    for name, path in plans_in(folder).items():
        others = [file for file in path.parent.iterdir() if file.suffix in (".gz", ".xz")]
        if not others:
            found[name] = JudgedPlan([])
            continue
        evidence, plan = read_evidence(others), read_plan(path)
        runs = [run for run in (*evidence.runs, *evidence.lm_runs) if is_asked_for(plan, run)]
        probes = [probe for _, probe in evidence.probes if is_asked_for(plan, run_of(probe))]
        found[name] = JudgedPlan(judge_plan(plan, evidence), runs, bool(first.get(name)), probes)
    return found


def is_asked_for(plan: Plan, run: Run) -> bool:
    """Whether a test describes the run. Beside a plan there may be runs that chose its rates, and other plans' runs."""
    asked = (which for test in (*plan.tests, *plan.shown) for which in (test.a, test.b, test.less) if which)
    return any(describes(which, run) for which in asked)


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
    answer = "; ".join(filter(None, (found.answer, found.remarks)))
    return (name, " and ".join(found.counts), found.words, f"{found.p:.3g}", f"{found.test.margin or NONE}", answer)


def examine(test: PlannedTest, evidence: Evidence) -> Outcome:
    """The numbers of one test, with p as yet uncorrected."""
    runs_a, runs_b = (members(test, which, evidence) for which in (test.a, test.b))
    n = len(runs_a), len(runs_b)
    a, b = by_stratum(test, runs_a), by_stratum(test, runs_b)
    if test.level is not None:
        b = {key: [test.level, test.level] for key in a}  # twice: it has no spread
    if n != test.wanted or a.keys() != b.keys() or not all((*a.values(), *b.values())):
        return Outcome(test, n, None, None, NO_INTERVAL, nan, "incomplete")
    if test.test == "fisher":
        yes_a, yes_b = (int(sum(map(sum, group.values()))) for group in (a, b))
        ahead: Answer = "holds" if yes_a * n[1] > yes_b * n[0] else "contradicted"
        p = fisher_p(yes_a, n[0], yes_b, n[1])
        return Outcome(test, n, (yes_a, yes_b), None, NO_INTERVAL, p, ahead)
    found = effect(a, b)
    shuffled = test.test == "permutation"
    interval, p = (permutation_interval(a, b), permutation_p(a, b)) if shuffled else (found.interval(), found.p)
    answer: Answer = "holds" if found.difference > 0 else "contradicted"
    never = [sum(test.value == "held_out" and not has_learned(run) for run, _ in runs) for runs in (runs_a, runs_b)]
    counted = found.n_a, found.n_b if test.level is None else 0
    return Outcome(test, counted, None, found, interval, p, answer, (never[0], never[1]), welch_p=found.p)


def decide(outcome: Outcome) -> Outcome:
    """The answer: the sign if p is small enough, else equal within the margin, else too wide to tell. Of a level, equal
    comes first. That a loses nothing holds if the 90 % interval is above minus the margin, unless p is small enough and
    a is behind."""
    test, found, is_small = outcome.test, outcome.effect, outcome.p < ALPHA
    if outcome.answer == "incomplete":
        return outcome
    if found is not None and test.margin is not None and test.claims_no_loss:
        if is_small and outcome.answer == "contradicted":
            return outcome
        low, _ = found.interval(1 - 2 * ALPHA)
        return outcome._replace(answer="holds" if low > -test.margin else "too wide to tell")
    is_equal = found is not None and test.margin is not None and found.is_within(test.margin)
    if is_small and not (is_equal and test.level is not None):
        return outcome
    if found is None or test.margin is None:
        return outcome._replace(answer="not shown")
    return outcome._replace(answer="equal" if is_equal else "too wide to tell")


Valued = tuple[Run, float | None]  # a run and its number; None if it has none, such as one without a live head


def members(test: PlannedTest, which: Mapping[str, Any], evidence: Evidence) -> list[Valued]:
    """The runs that `which` describes, each with its number; none if it is empty, because b is a level."""
    if not which:
        return []
    numbers = list(values_of(test.value, evidence))
    found = [(run, value) for run, value in numbers if describes(which, run)]
    if test.less is None:
        return found
    other = {(run.model, run.seed): value for run, value in numbers if describes(test.less, run)}
    pairs = [(run, value, other.get((run.model, run.seed))) for run, value in found]
    return [(run, None if value is None or less is None else value - less) for run, value, less in pairs]


def by_stratum(test: PlannedTest, runs: Sequence[Valued]) -> dict[Any, list[float]]:
    """The numbers of runs by stratum, without runs that have none."""
    found: dict[Any, list[float]] = {}
    for run, value in runs:
        values = found.setdefault(setting(run.settings, test.strata) if test.strata else None, [])
        values += [value] if value is not None else []
    return found


def describes(which: Mapping[str, Any], run: Run) -> bool:
    """Whether a run has the model and all settings that `which` names."""
    return all(fits(run, key, wanted) for key, wanted in which.items())


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


def values_of(value: str, evidence: Evidence) -> Iterator[Valued]:
    """(run, number) of every run that has ended; None if it has no such number."""
    kind, _, part = value.partition(".")
    if kind == "iou":
        for _, probe in evidence.probes:
            iou = probe["layers"][-1]["iou"]
            yield run_of(probe), live_mean(iou["by_head"]) if part == "live" else iou[part]
    elif kind in ("loss", "loss_change", "gap_growth"):
        for run in evidence.lm_runs:
            if is_finished(run) and "test" in run.lines[-1]:
                yield run, gap_growth(run) if kind == "gap_growth" else run.lines[-1]["test"][part or "all"]["loss"]
    else:
        for run in evidence.runs:
            if run.status in COUNTED:
                yield run, float(has_learned(run)) if kind == "began" else run.held_out


def gap_growth(run: Run) -> float | None:
    """The gap at the last evaluation minus that at the last one before any token was read twice. A gap is the loss on
    valid windows minus the training loss of the steps before. None if nothing was read twice, or lines are missing."""
    steps, losses = curve(run, "step", "loss")
    at, valid = curve(run, "eval", "loss")
    train, tokens = run.settings["train"], run.lines[0]["corpus"].get("tokens", {}).get("train", 0)
    per_step = train["batch_size"] * run.settings["data"]["seq_len"]
    first = sum(step * per_step <= tokens for step in at)  # evaluations in the first pass
    if not 0 < first < len(at):
        return None
    gaps = []
    for n in (first - 1, -1):
        before = [loss for step, loss in zip(steps, losses, strict=True) if at[n] - GAP_STEPS < step <= at[n]]
        if len(before) * train["log_every"] < GAP_STEPS:
            return None
        gaps.append(valid[n] - fmean(before))
    return gaps[1] - gaps[0]
