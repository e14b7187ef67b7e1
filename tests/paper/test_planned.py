"""Plans and what runs say about them: decided, equal, too wide, incomplete."""

import copy
import json
from math import exp
from pathlib import Path
from typing import Any

import pytest
from scripts.ship_paper import compact_run

from fake_records import fake_lm_run, fake_run
from paper_records import probe_record
from rebased.paper.evidence import read_evidence
from rebased.paper.page import runs_made
from rebased.paper.plan_file import Plan, plans_in, read_plan
from rebased.paper.planned import (
    CAME_FIRST,
    JudgedPlan,
    describes,
    gap_growth,
    judge_folders,
    judge_plan,
    outcome_row,
)
from rebased.report.probe.cells import live_mean
from rebased.report.suite.board import Board
from rebased.runs.collect import collect, write_bundle
from rebased.runs.finished import Run
from rebased.runs.suite import load_suite
from rebased.train.sweep.grid import load_sweep

RESULTS = Path(__file__).parents[2] / "results"
RECALL_PER_BYTE = RESULTS.parent / "docs" / "measurements" / "recall_per_byte.md"
PLANS = plans_in(RESULTS) | plans_in(RESULTS / "mixers")
TEST = {"name": "", "value": "held_out", "a": {"model": "ReBased"}, "b": {"model": "Based"}}
WIDE, NARROW = [0.61, 0.39, 0.59, 0.84, 0.31], [0.41, 0.4, 0.41, 0.38, 0.39, 0.39, 0.4, 0.4, 0.39, 0.4]
HIGH, LOW = [0.70, 0.72, 0.71, 0.73, 0.69], [0.50, 0.52, 0.51, 0.53, 0.49]


def planted(tmp_path: Path, **accuracies: list[float]) -> Path:
    """A bundle of runs: by preset, one run per accuracy."""
    runs = [
        fake_run(preset, [accuracy], seed=seed, seq_len=64, held_out=[accuracy])
        for preset, values in accuracies.items()
        for seed, accuracy in enumerate(values)
    ]
    write_bundle(runs, tmp_path / "runs.jsonl.gz")
    return tmp_path / "runs.jsonl.gz"


def answer(bundle: Path, **changes: Any) -> str:
    """What the runs say about ReBased against Based."""
    plan = Plan.model_validate({"correct": "none", "tests": [TEST | {"margin": 0.1, "runs": 5} | changes]})
    return judge_plan(plan, read_evidence([bundle]))[0].answer


@pytest.mark.parametrize("test", ["welch", "permutation"])
def test_answers(tmp_path: Path, test: str) -> None:
    wide = [0.1, 0.9, 0.4, 0.7, 0.5]
    assert answer(planted(tmp_path, rebased=HIGH, based=LOW), test=test) == "holds"
    assert answer(planted(tmp_path, rebased=LOW, based=HIGH), test=test) == "contradicted"
    assert answer(planted(tmp_path, rebased=HIGH, based=HIGH), test=test) == "equal"
    assert answer(planted(tmp_path, rebased=wide, based=LOW), test=test) == "too wide to tell"
    assert answer(planted(tmp_path, rebased=HIGH[:4], based=LOW), test=test) == "incomplete"


def test_runs_that_begin(tmp_path: Path) -> None:
    none, all_ = [0.001] * 5, [0.5] * 5
    assert answer(planted(tmp_path, rebased=all_, based=none), value="began", test="fisher") == "holds"
    assert answer(planted(tmp_path, rebased=none, based=all_), value="began", test="fisher") == "contradicted"
    assert (
        answer(planted(tmp_path, rebased=[*all_[:4], 0.001], based=all_), value="began", test="fisher") == "not shown"
    )


def test_a_decision_that_welchs_test_does_not_share_is_fragile(tmp_path: Path) -> None:
    """The one group is spread 20 times as wide as the other, and half as large."""
    plan = {"correct": "none", "tests": [TEST | {"test": "permutation", "margin": 0.1, "runs": [5, 10]}]}
    (found,) = judge_plan(Plan.model_validate(plan), read_evidence([planted(tmp_path, rebased=WIDE, based=NARROW)]))
    assert (found.answer, found.fragile) == ("holds", "fragile: Welch's test has p = 0.18")
    assert found.interval[0] > 0
    assert found.counts == ("5", "10")
    (found,) = judge_plan(Plan.model_validate(plan), read_evidence([planted(tmp_path, rebased=HIGH, based=LOW * 2)]))
    assert (found.answer, found.fragile) == ("holds", "")


def test_missing_runs_are_counted(tmp_path: Path) -> None:
    plan = {"correct": "none", "tests": [TEST | {"runs": 5}]}
    (found,) = judge_plan(Plan.model_validate(plan), read_evidence([planted(tmp_path, rebased=HIGH[:3], based=LOW)]))
    assert runs_made(JudgedPlan([found])) == "8 of 10 runs made, tested when all are"
    assert runs_made(JudgedPlan([])) == "no run made"


def test_dead_heads_do_not_count() -> None:
    assert live_mean([0.17, 0.19, 0.01, 0.0]) == pytest.approx(0.18)
    assert live_mean([0.01, 0.0]) is None


PARTS = ("all", "ar", "non_ar")


def text_run(model: str, seed: int, changes: dict[str, float] | None = None, **settings: str) -> Run:
    """A language model's run; `changes` are losses of parts of the test split, 3 where nothing is said."""
    losses = [(changes or {}).get(part, 3.0) for part in PARTS]
    run = fake_lm_run(model, [exp(loss) for loss in losses], seed=seed, settings=settings)
    for part, loss in zip(PARTS, losses, strict=True):
        run.lines[-1]["test"][part] = {"loss": loss, "perplexity": exp(loss)}
    return run


def text_answer(tmp_path: Path, runs: list[Run], **changes: Any) -> str:
    """What language models' runs say: is Based's loss, or gap, the greater one?"""
    write_bundle(runs, tmp_path / "text.jsonl.gz")
    groups = {"a": {"model": "Based"}, "b": {"model": "ReBased"}, "margin": 0.01, "runs": 3}
    return answer(tmp_path / "text.jsonl.gz", **(groups | changes))


@pytest.mark.parametrize("part", PARTS)
def test_losses_of_each_part(tmp_path: Path, part: str) -> None:
    """Only the part that the test names decides."""

    def said(greater: str, what: str = part) -> str:
        level = {model: 3.1 if model == greater else 3.0 for model in ("based", "rebased")}
        runs = [text_run(model, seed, {what: level[model] + seed / 1e4}) for model in level for seed in (1, 2, 3)]
        return text_answer(tmp_path, runs, value=f"loss.{part}")

    assert said("based") == "holds"
    assert said("rebased") == "contradicted"
    assert said("based", what=next(other for other in PARTS if other != part)) == "equal"


def overfitting_run(
    model: str, seed: int, growth: float, *, offset: float = 0.0, tokens: int = 760 * 32_768, every: int = 10
) -> Run:
    """Two evaluations, at steps 750 and 4,500, whose gaps differ by `growth`; the first gap is `offset`."""
    run = text_run(model, seed, None, **{"train.steps": "4500", "train.log_every": "10"})
    run.lines[0]["corpus"]["tokens"] = {"train": tokens}
    lines = []
    for at, training, valid in ((750, 4.3, 4.3 + offset), (4500, 2.8, 2.8 + offset + growth + seed / 1e4)):
        for step in range(at - 200, at + 1, every):
            known = {"step": step, "tokens": step * 32_768, "tokens_per_second": 1.0}
            lines.append({"type": "step", "loss": training if step > at - 50 else 9.0} | known)
        lines.append({"type": "eval", "step": at, "loss": valid, "perplexity": exp(valid)})
    return Run(run.folder, [run.lines[0], *lines, run.lines[-1]])


def test_the_gap_that_grew_since_the_first_pass(tmp_path: Path) -> None:
    """Text that is harder for one model from the beginning does not count, nor does a text that is read once."""

    def said(based: float, rebased: float, **changes: Any) -> str:
        runs = [overfitting_run("rebased", seed, rebased, **changes) for seed in (1, 2, 3)]
        runs += [overfitting_run("based", seed, based, offset=0.3) for seed in (1, 2, 3)]
        return text_answer(tmp_path, runs, value="gap_growth", margin=0.05)

    assert said(0.5, 0.3) == "holds"
    assert said(0.3, 0.5) == "contradicted"
    assert said(0.3, 0.3) == "equal"
    assert said(0.3, 0.3, tokens=5000 * 32_768) == "incomplete"  # nothing was read twice
    assert said(0.3, 0.3, every=40) == "incomplete"  # lines are missing before an evaluation
    one = overfitting_run("based", 0, 0.5, offset=0.3)
    assert gap_growth(one) == gap_growth(compact_run(one)) == pytest.approx(0.5)


def test_the_value_of_the_run_of_the_same_seed_is_subtracted(tmp_path: Path) -> None:
    """Seeds differ by more than dropout changes, and dropout changes one model alone."""
    with_dropout, without = ({"model.embed_dropout": value} for value in ("0.2", "0"))

    def said(based: float, rebased: float) -> str:
        runs = []
        for seed in (1, 2, 3):
            for model, less in (("based", based), ("rebased", rebased)):
                runs.append(text_run(model, seed, {"all": 3 + seed}, **without))
                runs.append(text_run(model, seed, {"all": 3 + seed - less + seed / 1e4}, **with_dropout))
        groups = {
            which: {"model": name, "model.embed_dropout": 0.2} for which, name in (("a", "Based"), ("b", "ReBased"))
        }
        return text_answer(tmp_path, runs, value="loss_change", less={"model.embed_dropout": 0}, **groups)

    assert said(based=0.0, rebased=0.2) == "holds"
    assert said(based=0.2, rebased=0.0) == "contradicted"
    assert said(based=0.2, rebased=0.2) == "equal"
    runs = [text_run(model, seed, **with_dropout) for model in ("based", "rebased") for seed in (1, 2, 3)]
    assert text_answer(tmp_path, runs, value="loss_change", less={"model.embed_dropout": 0}) == "incomplete"


def test_ious_of_live_heads_of_all_heads_and_of_the_best(tmp_path: Path) -> None:
    """The live heads of ReBased look at the answers more, but half of its heads are dead, and its best is as good."""
    heads = {"rebased": [0.0, 0.0, 0.3, 0.3], "based": [0.2, 0.2, 0.2, 0.3]}
    records = []
    for model, by_head in heads.items():
        for seed in range(5):
            record = copy.deepcopy(probe_record(model, 0.1, seed=seed))
            each = [value + seed / 1e4 for value in by_head]
            record["layers"][0]["iou"] |= {"by_head": each, "mean": sum(each) / 4, "best": max(each)}
            records.append(record)
    (tmp_path / "probes.json").write_text(json.dumps({"type": "probes", "records": records}))
    found = {
        value: answer(tmp_path / "probes.json", value=value, margin=0.016)
        for value in ("iou.live", "iou.mean", "iou.best")
    }
    assert found == {"iou.live": "holds", "iou.mean": "contradicted", "iou.best": "equal"}


def test_losing_nothing_is_not_being_ahead(tmp_path: Path) -> None:
    """It holds if the 90 % interval is above minus the margin. That p is small decides only where a is behind."""

    def said(*rebased: float) -> str:
        return answer(planted(tmp_path, rebased=list(rebased), based=LOW), name="ReBased loses nothing", margin=0.05)

    assert said(*(value - 0.01 for value in LOW)) == "holds"
    assert said(*(value - 0.04 for value in LOW)) == "contradicted"
    assert said(*HIGH) == "holds"
    assert said(0.2, 0.9, 0.5, 0.6, 0.4) == "too wide to tell"
    fragile = planted(tmp_path, rebased=WIDE, based=NARROW)
    settings: dict[str, Any] = {"test": "permutation", "runs": [5, 10], "margin": 0.01}
    assert answer(fragile, **settings) == "holds"  # p is small, and the 90 % interval contains -0.01
    assert answer(fragile, name="ReBased loses nothing", **settings) == "too wide to tell"


def test_a_level_that_others_report(tmp_path: Path) -> None:
    runs = planted(tmp_path, rebased=HIGH)
    assert [answer(runs, b={}, level=level) for level in (0.5, 0.9, 0.75)] == ["holds", "contradicted", "equal"]
    assert answer(planted(tmp_path, rebased=HIGH[:4]), b={}, level=0.5) == "incomplete"


def test_runs_that_never_began_and_notes_stand_beside_the_answer(tmp_path: Path) -> None:
    plan = Plan.model_validate({"correct": "none", "tests": [TEST | {"runs": 5, "margin": 0.1, "note": "a note"}]})
    never = planted(tmp_path, rebased=HIGH, based=[0.001, 0.002, 0.0, 0.001, 0.5])
    (found,) = judge_plan(plan, read_evidence([never]))
    assert outcome_row(found)[-1] == "holds; runs that never began: 0 of 5 and 4 of 5; a note"


def test_all_plans_of_a_folder_are_judged(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    planted(folder, rebased=HIGH, based=LOW)
    for name, models in (
        ("plan", "a: {model: ReBased}, b: {model: Based}"),
        ("more", "a: {model: Based}, b: {model: ReBased}"),
    ):
        test = f"{{name: '', value: held_out, {models}, runs: 5, margin: 0.1}}"
        (folder / f"{name}.md").write_text(f"```yaml\ncorrect: none\ntests: [{test}]\n```\n")
    (tmp_path / CAME_FIRST).write_text('{"text": true, "text/more": false}')
    found = judge_folders(tmp_path)
    assert {name: (plan.outcomes[0].answer, plan.mark) for name, plan in found.items()} == {
        "text": ("holds", "planned"),
        "text/more": ("contradicted", "planned, order not shown"),
    }


def test_a_test_without_a_model_is_refused() -> None:
    with pytest.raises(ValueError, match="a needs `model`"):
        Plan.model_validate({"correct": "none", "tests": [TEST | {"a": {"train.lr": 1e-3}, "runs": 5}]})


@pytest.mark.parametrize("name", PLANS)
def test_committed_plans_can_be_read(name: str) -> None:
    """Each lies beside its sweep, and states how many runs it needs."""
    assert (PLANS[name].parent / "sweep.yaml").exists()
    assert read_plan(PLANS[name]).tests


@pytest.mark.parametrize("name", [name for name in PLANS if not name.startswith("mini-pile")])
def test_a_committed_sweep_makes_the_runs_that_its_plan_needs(name: str) -> None:
    """No more and no fewer. Of a sweep in stages one value of the setting is trained."""
    plan, sweep = read_plan(PLANS[name]), load_sweep(PLANS[name].parent / "sweep.yaml", {})
    runs = [Run("", [{"type": "run", "config": point.config.model_dump(mode="json")}]) for point in sweep.points]
    for test in (*plan.tests, *plan.shown):
        for which, wanted in zip((test.a, test.b), test.wanted, strict=True):
            found = [run for run in runs if which and describes(which, run)]
            rates = {run.lr for run in found} if sweep.select else {0.0}
            assert len(found) == wanted * len(rates or {0.0})
            if test.less is not None:
                others = [(run.model, run.seed) for run in runs if describes(test.less, run)]
                assert all(others.count((run.model, run.seed)) == 1 for run in found)


@pytest.mark.parametrize(
    "names", [["delta-squares"], ["sum-squares"], ["bare-squares", "delta-squares"]], ids=lambda names: names[0]
)
def test_committed_suites_make_the_runs_that_a_plan_needs(names: list[str]) -> None:
    """One of their rates is chosen per mixer and task, and seeds of the tests are those that are scored."""
    plan = read_plan(RESULTS / "suites" / names[0] / "plan.md")
    suites = [load_suite(RESULTS / "suites" / name / f"{name}.yaml") for name in names]
    configs = [
        config
        for suite in suites
        for label, mixer in suite.mixers.items()
        for config in suite.configs("", label, mixer)
    ]
    runs = [Run("", [{"type": "run", "config": config.model_dump(mode="json")}]) for config in configs]
    for test in plan.tests:
        for which, wanted in zip((test.a, test.b), test.wanted, strict=True):
            assert sum(describes(which, run) for run in runs) == wanted * len(suites[0].rates)


def test_the_page_about_suites_says_what_the_plan_of_dressed_mixers_says() -> None:
    """recall_per_byte.md has the intervals and p of the two tests of mixers, and the effects of the square."""
    folder = RESULTS / "suites" / "delta-squares"
    gated, bare = judge_plan(read_plan(folder / "plan.md"), read_evidence([folder]))
    assert (gated.answer, bare.answer) == ("too wide to tell", "contradicted")
    page = RECALL_PER_BYTE.read_text().replace("−", "-")
    for found in (gated, bare):
        low, high = found.interval
        assert f"{found.effect.difference:+.3f} ({low:+.3f} to {high:+.3f}, p = {found.p:.2g})" in page
    assert bare.fragile
    assert f"Welch's test has p = {bare.welch_p:.3f}" in page
    board = Board(load_suite(folder / "delta-squares.yaml"), collect([folder]).runs)
    for task, seen in {"MQAR": "-0.12 (-0.25 to +0.01)", "overwriting": "-0.15 (-0.28 to -0.02)"}.items():
        (square,) = (one for one in board.effects(task) if one.a == "square")
        low, high = square.interval
        assert f"{square.effect.difference:+.2f} ({low:+.2f} to {high:+.2f})" == seen
        assert f"| {seen} |" in page
        assert f"| {square.p:.2g} |" in page
        assert square.p > 0.0125


def test_the_page_about_suites_says_what_the_plan_of_sums_says() -> None:
    folder = RESULTS / "suites" / "sum-squares"
    (sums,) = judge_plan(read_plan(folder / "plan.md"), read_evidence([folder]))
    page = RECALL_PER_BYTE.read_text().replace("−", "-")
    low, high = sums.interval
    assert sums.answer == "holds"
    assert f"{sums.effect.difference:+.3f} ({low:+.3f} to {high:+.3f}, p < 0.001)" in page
    assert sums.p < 0.001
    board = Board(load_suite(folder / "sum-squares.yaml"), collect([folder]).runs)
    claimed = set()
    for task in board.suite.tasks:
        square, gate = board.effects(task)
        if square.p < 0.0125:
            claimed.add(task)
        assert gate.p > 0.05
        low, high = square.interval
        if task != "selective copying":
            assert f"| {square.effect.difference:+.2f} ({low:+.2f} to {high:+.2f})" in page
    assert claimed == {"MQAR", "noisy recall"}


def test_the_page_about_suites_says_what_the_plan_of_bare_mixers_says() -> None:
    folders = [RESULTS / "suites" / name for name in ("bare-squares", "delta-squares")]
    outcomes = judge_plan(read_plan(folders[0] / "plan.md"), read_evidence(folders))
    assert [found.answer for found in outcomes] == ["holds", "too wide to tell", "too wide to tell"]
    assert not outcomes[0].fragile
    page = RECALL_PER_BYTE.read_text().replace("−", "-")
    for found in outcomes:
        low, high = found.interval
        assert f"| {found.effect.difference:+.3f} ({low:+.3f} to {high:+.3f}) | {found.p:.2g} |" in page
    board = Board(load_suite(folders[0] / "bare-squares.yaml"), collect(folders[:1]).runs)
    effects = {task: board.effects(task)[0].effect.difference for task in board.suite.tasks}
    assert {task: f"{effect:+.2f}" for task, effect in effects.items()} == {
        "selective copying": "+0.00", "noisy recall": "+0.06", "MQAR": "+0.30", "overwriting": "+0.06",
    }  # fmt: skip


def test_the_page_about_gates_says_what_its_plan_says() -> None:
    """docs/mixers.md has the intervals of `rebased paper --plan`, and the plan's rule answers."""
    folder = RESULTS / "mixers" / "gate-and-delta"
    gate, delta = judge_plan(read_plan(folder / "plan.md"), read_evidence([folder]))
    assert (gate.answer, delta.answer) == ("too wide to tell", "holds")
    page = (RESULTS.parent / "docs" / "mixers.md").read_text().replace("−", "-")
    for found in (gate, delta):
        assert f"{found.interval[0]:+.3f} to {found.interval[1]:+.3f}" in page
