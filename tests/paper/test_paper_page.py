"""The page about the paper, as a function of records: which are used, what is said, and what is not."""

import copy
import json
from html import escape
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from benchmarks.sweep_hours import read_speeds

from fake_records import fake_lm_run, fake_run
from page_reader import assert_self_contained
from paper_records import KERNELS, paper_run, probe_record
from rebased.paper import mqar
from rebased.paper.contents import ITEMS
from rebased.paper.evidence import PRECISION, RECORDS, SPEEDS, Evidence, read_evidence, shipped_evidence
from rebased.paper.finding import Finding
from rebased.paper.gamma import decay_table, decays_of, describe_decays
from rebased.paper.page import PaperPage
from rebased.paper.values import RATES, TABLE_1, TABLE_3, Place
from rebased.report.probe.files import check_probe
from rebased.runs.collect import write_bundle
from rebased.runs.finished import Run
from rebased.runs.shipped import find_config
from rebased.train.sweep import read_sweep
from scripts import ship_paper

ROOT = Path(__file__).parents[2]
SEEDS = range(42, 47)
PAPERS = {  # settings of Table 3
    "task": {"train": [{"seq_len": 128, "kv_pairs": 32, "examples": 100_000}]},
    "train": {"epochs": 64},
}


def jitter(name: str, seed: int) -> float:
    """A small number that differs from model to model and from seed to seed."""
    return 0.002 * (crc32(f"{name}{seed}".encode()) % 7 - 3)


def found_in(folder: Path, **bundles: list[Run]) -> dict[str, Finding]:
    for name, runs in bundles.items():
        write_bundle(runs, folder / f"{name}.jsonl.gz")
    return findings(read_evidence([folder]))


def findings(evidence: Evidence) -> dict[str, Finding]:
    return {finding.item.name: finding for finding in PaperPage(evidence).findings}


def table_1(epochs: int, rates: tuple[float, ...], *, off: float = 0.0, d_models: tuple[int, ...] = (24,)) -> list[Run]:
    """Short runs of all six kernels, `off` the paper's means."""
    return [
        paper_run(
            preset,
            TABLE_1[Place(kernel, 256, 32, d_model)].mean + off + jitter(kernel, seed) - 5 * (max(rates) - lr),
            pairs=32,
            d_model=d_model,
            lr=lr,
            seed=seed,
            epochs=epochs,
            transform=transform,
        )
        for kernel, (preset, transform) in KERNELS.items()
        for d_model in d_models
        for lr in rates
        for seed in SEEDS
    ]


def test_the_papers_protocol_is_preferred_and_the_weaker_named(tmp_path: Path) -> None:
    weak = table_1(12, (1e-2,), off=-0.3)
    found = found_in(tmp_path, table1=weak)["Table 1"]
    assert (found.protocol, found.verdict) == ("departs", "partly")  # ReBased is ahead, but far from the paper's values
    assert found.departures == ["epochs 12 instead of 64", "1 of the paper's 4 learning rates"]
    assert [number.outcome for number in found.numbers if number.outcome != "not run"] == ["differs"] * 6
    assert found.sources == ["table1.jsonl.gz"]

    both = found_in(tmp_path, campaign=table_1(64, RATES))
    found = both["Table 1"]
    assert (found.protocol, found.departures, found.sources) == ("paper", [], ["campaign.jsonl.gz"])
    assert found.verdict == "partly"  # 42 cells are missing
    assert sum(number.outcome == "agrees" for number in found.numbers) == 6
    assert "6 of 48 cells measured, 6 of them agree" in found.sentence
    (unused,) = found.others
    assert unused.sources == ["table1.jsonl.gz"]
    assert "Departures from the paper's protocol: epochs 12 instead of 64" in unused.sentence
    assert found.cost is not None
    assert found.cost.what == "The 42 cells not run by the paper's protocol: 840 runs"
    assert [claim.outcome for claim in found.claims[:5]] == ["agrees"] * 5
    budgets = both["Figure 4"]
    assert budgets.protocol == "paper"
    assert sum(claim.outcome == "agrees" for claim in budgets.claims) == 5
    assert both["Figure 3"].verdict == "partly"


def test_a_rate_drawn_at_random_is_tested_on_the_held_out_split(tmp_path: Path) -> None:
    """As the page says of all claims: the epoch was chosen on the test split."""
    runs = table_1(64, RATES[:2])
    for line in (line for run in runs for line in run.lines if line["type"] == "epoch"):
        line["held_out"]["accuracy"] = 0.25
    claims = [claim for claim in found_in(tmp_path, all=runs)["Figure 4"].claims if claim.found]
    assert [claim.outcome for claim in claims] == ["undecided"] * 5
    assert {claim.found.difference.mean for claim in claims if claim.found} == {0.0}


def test_all_of_a_table_by_the_papers_protocol_is_reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid is cut down to one width and length here; 960 runs would take long to invent."""
    from rebased.paper import kernels

    small = {place: reading for place, reading in TABLE_1.items() if place[1:] == (256, 32, 24)}
    monkeypatch.setattr(kernels, "TABLE_1", small)
    monkeypatch.setattr(kernels, "LENGTHS", (256, 2048))
    found = found_in(tmp_path, all=table_1(64, RATES))["Table 1"]
    assert found.cost is None
    assert [claim.outcome for claim in found.claims] == ["agrees"] * 5 + ["not run"] * 5
    only = Finding(found.item, found.protocol, found.numbers, found.claims[:5])
    assert only.verdict == "reproduced"
    assert (
        only.sentence
        == "6 of 6 cells measured, 6 of them agree; 5 claims: 5 hold. By the paper's protocol.".replace(
            "cells", "numbers"
        )
    )


def test_other_heads_and_kernels_are_not_the_papers_models(tmp_path: Path) -> None:
    runs = table_1(12, (1e-2,))
    other = {"model": {"mixers": {1: {"n_heads": 2}}}}
    heads = [with_changes("rebased", other, seed) for seed in SEEDS]
    power = {"model": {"mixers": {1: {"kernel": "fourth", "key_width": 5}}}}
    fourth = [with_changes("rebased", power, seed) for seed in SEEDS]
    found = found_in(tmp_path, all=[*runs, *heads, *fourth])["Table 1"]
    assert {number.seeds for number in found.numbers} == {0, 5}
    assert sum(number.outcome != "not run" for number in found.numbers) == 6
    page = PaperPage(read_evidence([tmp_path])).page("rebased paper")
    headings = [section.heading for section in page.sections]
    assert "Not in the paper: how many heads?" in headings
    assert "Not in the paper: other norms and kernels" in headings
    html = page.to_html()
    assert "ReBased, fourth power" in html


def test_other_kernels_are_compared_with_the_runs_of_their_own_sweep(tmp_path: Path) -> None:
    """ReBased was trained twice, with different results; the one beside the other kernel counts in their comparison."""
    power = {"model": {"mixers": {1: {"kernel": "fourth", "key_width": 5}}}}
    fourth = [with_changes("rebased", power, seed) for seed in SEEDS]
    before, again = (
        [paper_run("rebased", at + 0.001 * (seed - 42), pairs=32, seed=seed, epochs=12) for seed in SEEDS]
        for at in (0.61, 0.73)
    )
    for first, last in ((before, again), (again, before)):
        found_in(tmp_path, all=first, kernels=[*last, *fourth])
        (body,) = (
            section.body
            for section in PaperPage(read_evidence([tmp_path])).page("rebased paper").sections
            if section.heading == "Not in the paper: other norms and kernels"
        )
        assert "Records: kernels.jsonl" in body
        assert ("0.732 ± 0" in body, "0.612 ± 0" in body) == (last is again, last is before)


def with_changes(preset: str, changes: dict[str, Any], seed: int) -> Run:
    segment = {"seq_len": 256, "kv_pairs": 32}
    task = {"train": [segment | {"examples": 100_000}], "test": [segment | {"examples": 3000}], "held_out": []}
    train = {"epochs": 12}
    return fake_run(
        preset, seed=seed, seq_len=256, pairs=(32,), lr=1e-2, changes={"task": task, "train": train, **changes}
    )


def test_another_precision_departs_least_and_another_task_is_not_the_papers() -> None:
    widths = (24, 32)
    tf32 = [
        paper_run("rebased", 0.5, pairs=32, d_model=d, seed=seed, precision="tf32") for d in widths for seed in SEEDS
    ]
    stray, short = paper_run("based", 0.4, pairs=32), paper_run("based", 0.3, pairs=32, epochs=16)
    groups = mqar.groups_of([stray, short, *tf32], TABLE_1.__contains__)
    assert [(len(group.runs), group.settings) for group in groups] == [
        (10, ("precision tf32 instead of fp32",)),
        (1, ()),
        (1, ("epochs 16 instead of 64",)),
    ]
    one_seed = [paper_run("rebased", 0.5, pairs=32)]
    five_seeds = [paper_run("rebased", 0.4, pairs=32, seed=seed, epochs=12) for seed in SEEDS]
    groups = mqar.groups_of([*one_seed, *five_seeds], TABLE_1.__contains__)
    assert [len(group.runs) for group in groups] == [5, 1]  # one seed can be put to no test
    for part, key, value in (("task", "random_non_queries", True), ("model", "embed_dropout", 0.0)):
        other = copy.deepcopy(stray)
        other.settings[part][key] = value
        assert mqar.is_papers_model(stray)
        assert not mqar.is_papers_model(other)
    alone = copy.deepcopy(stray)
    alone.settings["train"]["give_up"] = {"below": 0.1, "after_epoch": 16}
    alone.settings["task"]["seeds"] = "per_run"
    assert mqar.departures_of(alone) == ["runs that learned nothing early were ended", "data drawn anew for every seed"]


def test_tf32_is_stated_and_lowers_no_verdict_but_bf16_does(tmp_path: Path) -> None:
    """Everything else is the paper's protocol."""
    runs = {
        name: [
            paper_run("rebased", 0.5, pairs=32, d_model=24, lr=lr, seed=seed, precision=name)
            for lr in RATES
            for seed in SEEDS
        ]
        for name in ("tf32", "bf16")
    }
    (tf32,), (bf16,) = (mqar.groups_of(some, TABLE_1.__contains__) for some in runs.values())
    assert (tf32.protocol, tf32.departures, tf32.stated) == ("paper", [], ["precision tf32 instead of fp32"])
    assert (bf16.protocol, bf16.departures, bf16.stated) == ("departs", ["precision bf16 instead of fp32"], [])
    found = found_in(tmp_path, tf32=runs["tf32"])["Table 1"]
    assert found.sentence.endswith("By the paper's protocol. Stated, and no departure: precision tf32 instead of fp32.")
    assert found.to_record()["stated"] == ["precision tf32 instead of fp32"]
    mixed = mqar.groups_of([*runs["tf32"], *runs["bf16"]], TABLE_1.__contains__)
    assert len(mixed) == 2  # they are never mixed in one table


def test_the_test_of_tf32_excludes_no_equality_and_is_on_the_page() -> None:
    """What the page says of TF32 rests on this record; if it ever shows a loss, TF32 is a departure again."""
    evidence = shipped_evidence()
    assert len(evidence.precision.differences) >= 5
    assert evidence.precision.interval.low < 0 < evidence.precision.interval.high
    assert str(evidence.precision).startswith("TF32 products instead of fp32 are stated and are no departure")
    assert evidence.precision.record in (ROOT / "results" / "paper.html").read_text()


def test_figures_1_7_and_10(tmp_path: Path) -> None:
    levels = {"rebased": 0.98, "based": 0.9, "mamba": 0.7, "rwkv": 0.1, "conv_attention": 0.99, "attention": 0.8}
    runs = [
        paper_run(
            preset, level + jitter(preset, seed) / 10, seq_len=128, d_model=d_model, lr=1e-3, seed=seed, gamma=gamma
        )
        for preset, level in levels.items()
        for d_model in (64, 128)
        for seed in (42, 43, 44)
        for gamma in [0.125 if preset == "rebased" else None]
    ]
    found = found_in(tmp_path, campaign=runs)
    one = found["Figure 1"]
    assert one.departures == ["1 of the paper's 4 learning rates", "3 seeds instead of 5"]
    by_name = {claim.what.partition(" (")[0]: claim.outcome for claim in one.claims}
    assert by_name["T = 128: ReBased recalls more than Based"] == "agrees"
    assert by_name["T = 2,048: ReBased recalls more than Based"] == "not run"
    assert any("Mamba has its own initialization" in remark for remark in one.remarks)
    seven = {claim.what.partition(" (")[0]: claim.outcome for claim in found["Figure 7"].claims}
    assert seven["T = 128: ConvAttention recalls more than Attention"] == "agrees"
    assert seven["T = 128: RWKV recalls more than ConvRWKV"] == "not run"
    ten = found["Figure 10"]
    assert [number.outcome for number in ten.numbers if number.ours] == ["agrees"] * 8
    assert len([number for number in ten.numbers if number.outcome == "not run"]) == 16  # four lengths
    (remark,) = ten.remarks
    assert "it alone leaves 0.15 of it after 64 epochs at a learning rate of 3e-3" in remark
    html = PaperPage(read_evidence([tmp_path])).page("rebased paper").to_html()
    assert_self_contained(html)
    row = '<th scope="row">T = 128, D = 64, rate 0.001</th><td>2</td><td>3</td><td>0.125</td><td>0.962</td>'
    assert row in html


def test_mamba_as_the_paper_begins_it_is_held_against_the_paper(tmp_path: Path) -> None:
    start = {"mixers": {n: {"dt_init": "paper"} for n in (0, 1)}}
    place: dict[str, Any] = {"seq_len": 256, "d_model": 128, "lr": 3e-3}
    own, papers = (
        [paper_run("mamba", accuracy(seed), seed=seed, model=model, **place) for seed in (42, 43)]
        for accuracy, model in ((lambda seed: 0.95 + (seed - 42) / 1e3, None), (lambda seed: 0.12, start))
    )
    for runs in ([*own, *papers], [*papers, *own]):
        one = found_in(tmp_path, campaign=runs)["Figure 1"]
        (number,) = (number for number in one.numbers if number.ours)
        assert (number.what, number.ours) == ("Mamba, T = 256, D = 128", "0.120 ± 0.000")
        (remark,) = one.remarks
        assert remark.startswith("Mamba has the paper's initialization here. In the authors' code")
        assert remark.endswith(
            "At T = 256, D = 128 Mamba recalls 0.120 with the paper's initialization (best of 1 rate) and 0.950 with "
            "its own (best of 1 rate); paired t test over 2 seeds, Holm p < 0.001."
        )
    (remark,) = found_in(tmp_path, campaign=own)["Figure 1"].remarks
    assert remark.startswith("Mamba has its own initialization at T = 256 here.")


def test_no_mean_over_widths_mixes_initializations_of_mamba(tmp_path: Path) -> None:
    start = {"mixers": {n: {"dt_init": "paper"} for n in (0, 1)}}
    own = [
        paper_run("mamba", 0.9, seq_len=seq_len, d_model=d_model, seed=42)
        for seq_len, d_model in ((128, 64), (256, 64), (256, 128))
    ]
    papers = [
        paper_run("mamba", 0.1, seq_len=seq_len, d_model=d_model, seed=42, model=start)
        for seq_len, d_model in ((128, 64), (256, 128))
    ]
    one = found_in(tmp_path, campaign=[*papers, *own])["Figure 1"]
    measured = {number.what.removeprefix("Mamba, "): number.ours for number in one.numbers if number.ours}
    assert measured == {"T = 128, D = 64": "0.100", "T = 256, D = 64": "0.900", "T = 256, D = 128": "0.900"}
    (remark,) = one.remarks
    assert remark.startswith("Mamba has its own initialization at T = 256 here.")
    assert remark.count("untested: fewer than two seeds are in both") == 2


def test_runs_without_weight_decay_are_apart(tmp_path: Path) -> None:
    run, other = (paper_run("rebased", 0.9, seq_len=128, d_model=64, seed=seed, gamma=0.2) for seed in (42, 43))
    other.settings["train"]["weight_decay"] = 0.0
    write_bundle([run, other], tmp_path / "runs.jsonl.gz")
    plain, without = decays_of(read_evidence([tmp_path]))[::-1]
    assert (plain.weight_decay, without.weight_decay) == (0.1, 0.0)
    assert without.alone == [1.0]
    rows = [row[0] for row in decay_table([plain, without]).rows]
    assert rows == ["T = 128, D = 64, rate 0.01", "T = 128, D = 64, rate 0.01, weight decay 0"]
    assert describe_decays([plain, without]) == describe_decays([plain])  # no seed in common
    sweep = "rebased sweep results/figure10-weight-decay/sweep.yaml"
    assert describe_decays([plain]).endswith(f"Training without weight decay tests it ({sweep}).")


def test_gamma_without_weight_decay_is_compared_with_gamma_with_it(tmp_path: Path) -> None:
    usual, without = (
        [paper_run("rebased", 0.9, seq_len=128, d_model=64, seed=seed, gamma=at(seed)) for seed in (42, 43, 44)]
        for at in (lambda seed: 0.2 + seed / 1e4, lambda seed: 0.9)
    )
    for number, run in enumerate(without):
        run.settings["train"]["weight_decay"], run.lines[0]["digest"] = 0.0, f"{number:012x}"
    write_bundle([*usual, *without], tmp_path / "runs.jsonl.gz")
    assert describe_decays(decays_of(read_evidence([tmp_path]))).endswith(
        "That was seen after the fact. Without weight decay gamma ends at 0.90 instead of 0.20 (T = 128, D = 64, "
        "rate 0.01; paired t test over 3 seeds, p < 0.001). So weight decay makes up 87 % of its fall from 1."
    )


def test_half_of_a_figure_is_said_to_be_half(tmp_path: Path) -> None:
    runs = [paper_run(preset, 0.9, seq_len=128, d_model=64) for preset in ("conv_attention", "rwkv")]
    sentence = found_in(tmp_path, campaign=runs)["Figure 7"].sentence
    why = "ConvAttention and RWKV were run, and Attention and ConvRWKV, which they are compared with, were not"
    assert sentence.startswith(why)


def test_language_models_of_another_size_are_a_stand_in(tmp_path: Path) -> None:
    runs = [
        fake_lm_run(
            model,
            (level + jitter(model, seed), level / 4, 3 * level),
            seed=seed,
            settings={"train.steps": steps},
        )
        for steps, shift in (("600", 50.0), ("4500", 0.0))
        for model, level in (("rebased", 30 + shift), ("based", 32 + shift), ("attention", 34 + shift))
        for seed in (42, 43, 44)
    ]
    for run in runs:
        run.lines[-1]["step"] = run.settings["train"]["steps"]
    found = found_in(tmp_path, enwik8=runs)["Table 2"]
    assert (found.protocol, found.verdict) == ("stand-in", "not run")
    assert found.sentence.startswith("Only a stand-in was run: enwik8 instead of the Pile; models of 34 million")
    assert "147 million training tokens instead of 84 billion" in found.sentence  # the longer ones
    assert {number.outcome for number in found.numbers} == {"not run"}
    outcomes = {claim.what: claim.outcome for claim in found.claims}
    assert outcomes["all tokens: ReBased has a lower perplexity than Based"] == "agrees"
    assert outcomes["AR tokens: Attention has a lower perplexity than ReBased"] == "undecided"  # no spread
    longer = [run for run in runs if run.settings["train"]["steps"] == 4500]
    alone = [run for run in longer if run.settings["train"]["seed"] == 42]
    shorter = [run for run in runs if run not in longer]
    (tmp_path / "alone").mkdir()
    found = found_in(tmp_path / "alone", enwik8=[*alone, *shorter])["Table 2"]
    assert "20 million training tokens instead of 84 billion" in found.sentence  # one seed can be put to no test
    assert found.draw is not None
    assert "Show 1 other group of runs" in found.draw()


def test_each_shape_of_heads_is_compared_with_its_own_kind(tmp_path: Path) -> None:
    wide = {name: f"[short_conv, {{name: {name}, n_heads: 4, key_width: 128}}]" for name in ("rebased", "based")}
    runs = [
        fake_lm_run(model, (level + jitter(model, seed), 4.0, 60.0), seed=seed)
        for model, level in (("rebased", 30.0), ("based", 31.0), ("attention", 22.0))
        for seed in (42, 43, 44)
    ]
    runs += [fake_lm_run(name, (20.0, 3.0, 50.0), settings={"model.mixers": mixers}) for name, mixers in wide.items()]
    shorter = [fake_lm_run(run.model.lower(), seed=run.seed, settings={"train.steps": "600"}) for run in runs[:9]]
    for run in (*runs, *shorter):
        run.lines[-1]["step"] = run.settings["train"]["steps"]
    found = found_in(tmp_path, enwik8=[*runs, *shorter])["Table 2"]
    assert "79 million training tokens" in found.sentence  # one seed of another shape does not put the others last
    outcomes = {claim.what: claim.outcome for claim in found.claims}
    assert len(outcomes) == 12
    better = "ReBased has a lower perplexity than Attention"
    assert outcomes[f"all tokens with key_width 16, n_heads 12: {better}"] == "differs"
    assert outcomes[f"all tokens with key_width 128, n_heads 4: {better}"] == "untested"


def test_probes_of_table_3(tmp_path: Path) -> None:
    records = [
        probe_record(
            model,
            TABLE_3[name].iou.mean + jitter(name, seed) / 10,
            seed=seed,
            accuracy=TABLE_3[name].accuracy.mean,
            changes=PAPERS,
        )
        for model, name in (("conv_attention", "Attention"), ("based", "Based"), ("rebased", "ReBased"))
        for seed in SEEDS
    ]
    for record in records:
        record["examples"] = 10_000
        iou = record["layers"][0]["iou"]
        record["layers"][0]["noisy"] = iou | {"mean": 30 * (1 - iou["mean"])}
    (tmp_path / "table3.json").write_bytes(ship_paper.as_json({"type": "probes", "records": records}))
    found = findings(read_evidence([tmp_path / "table3.json"]))
    three = found["Table 3"]
    assert three.departures == ["how many learning rates were tried is in no record here"]
    assert [number.outcome for number in three.numbers] == ["agrees"] * 6
    assert [claim.outcome for claim in three.claims] == ["agrees"] * 3
    assert three.verdict == found["Figure 5"].verdict == found["Figure 9"].verdict == "partly"
    assert "<svg" in found["Figure 5"].draw()
    short = [copy.deepcopy(record) for record in records]
    ablation = [copy.deepcopy(record) for record in records if record["model"] == "ReBased"]
    for record in short:
        record["config"]["train"]["epochs"] = 16
    for record in ablation:
        record["model"], record["config"]["model"]["mixers"][1]["qk_transform"] = "x²", "none"
    several = [*short, *records, *ablation]
    (tmp_path / "table3.json").write_bytes(ship_paper.as_json({"type": "probes", "records": several}))
    three = findings(read_evidence([tmp_path / "table3.json"]))["Table 3"]
    assert three.remarks == [
        "Not used: 15 probes that depart more (epochs 16 instead of 64). Their IoU: Attention, D = 48: 0.999 ± 0.000; "
        "Based, D = 48: 0.157 ± 0.001; ReBased, D = 48: 0.173 ± 0.000."
    ]
    assert [number.outcome for number in three.numbers] == ["agrees"] * 6
    assert "x²" in three.draw()
    other = [copy.deepcopy(record) for record in records]
    for record in other:
        record["config"]["task"]["test"][0]["kv_pairs"] = 16
    (tmp_path / "table3.json").write_bytes(ship_paper.as_json({"type": "probes", "records": other}))
    three = findings(read_evidence([tmp_path / "table3.json"]))["Table 3"]
    assert (three.protocol, three.verdict) == ("stand-in", "not run")


def test_a_probe_that_lacks_something_is_named(tmp_path: Path) -> None:
    record = probe_record("rebased", 0.2)
    check_probe(record)
    for part, words in (("layers", "layers"), ("config", "config")):
        other = {key: value for key, value in record.items() if key != part}
        with pytest.raises(ValueError, match=words):
            check_probe(other)
    for value in (10**30, "0.5", None, [0.5]):
        record["layers"][0]["matrix_iou"] = value
        with pytest.raises(ValueError, match="matrix_iou"):
            check_probe(record)
    record["layers"][0]["matrix_iou"] = 1
    check_probe(record)
    record["layers"][0]["iou"]["mean"] = "much"
    (tmp_path / "one.json").write_bytes(ship_paper.as_json(record))
    with pytest.raises(ValueError, match=r"one.json is damaged, or of other code: probe 1: layers.0.iou.mean"):
        read_evidence([tmp_path / "one.json"])


def test_the_package_has_the_committed_records(tmp_path: Path) -> None:
    """If this fails: python -m scripts.ship_paper"""
    made = {path.name: path for path in ship_paper.ship(ROOT, tmp_path)}
    assert made.keys() == {path.name for path in RECORDS.iterdir()}
    for name in (SPEEDS.name, PRECISION.name):
        assert (RECORDS / name).read_bytes() == made[name].read_bytes()
    fresh, shipped = read_evidence([tmp_path]), shipped_evidence()
    for name in ("runs", "lm_runs"):
        lines = [{run.digest: run.lines for run in getattr(evidence, name)} for evidence in (fresh, shipped)]
        assert lines[0] == lines[1]
    assert list(fresh.probes) == list(shipped.probes)


def test_the_committed_page_is_the_packages() -> None:
    """If this fails: rebased paper -o results/paper.html"""
    page = (ROOT / "results" / "paper.html").read_text()
    evidence = shipped_evidence()
    found = PaperPage(evidence)
    assert f"{found.counts}." in page
    for finding in found.findings:
        assert f'<section id="{finding.item.key}">' in page
        assert escape(finding.sentence) in page
    assert_self_contained(page)
    assert len(page) < 2_000_000


def test_compact_runs_have_the_same_results() -> None:
    run = paper_run("rebased", 0.5, gamma=0.2)
    epochs = [
        dict(run.lines[1], epoch=n, test=dict(run.lines[1]["test"], accuracy=a))
        for n, a in enumerate((0.1, 0.7, 0.3, 0.2), 1)
    ]
    long = Run(run.folder, [run.lines[0], *epochs, run.lines[-1]])
    compact = ship_paper.compact_run(long)
    assert [line["epoch"] for line in compact.epochs] == [2, 4]
    assert compact.best == long.best
    assert compact.held_out == long.held_out
    assert "counts" in compact.epochs[-1]["norms"]["1"]["q.gamma"]
    assert compact.epochs[0]["norms"]["1"]["q.gamma"] == {"mean": 0.2, "sd": 0.3}


def test_every_command_names_a_sweep_or_config_that_is_shipped() -> None:
    for line in dict.fromkeys(line for item in ITEMS for line in item.redo):
        words, _, comment = line.partition("#")
        parts = words.split()
        if "--config" in parts:
            find_config(Path(parts[parts.index("--config") + 1]), "lm")
        name = parts[parts.index("--sweep") + 1] if "--sweep" in parts else parts[2] if parts[1] == "sweep" else None
        said = int(comment.split()[-2].replace(",", "")) if name and ": " in comment and "nine" not in comment else 0
        if name:
            find_config(Path(name), "sweep")
        if name and 0 < said < 300:  # to read a larger one takes a second or more
            assert len(read_sweep(find_config(Path(name), "sweep"), {})) == said, line


def test_speeds_come_from_the_newest_record_with_all_models(tmp_path: Path) -> None:
    """A record of one model alone, such as of a peer, is no basis for costs."""
    steps = [
        {"section": "targets", "preset": "rebased", "precision": "tf32", "T": 256, "D": 64, "ms": 4.0},
        {"section": "targets", "preset": "rebased", "precision": "tf32", "T": 256, "D": 128, "ms": 8.0},
        {"section": "presets", "preset": "rebased", "precision": "bf16", "mode": "captured", "T": 2048, "ms": 9.0},
    ]
    (tmp_path / "train-1-cuda.json").write_text(json.dumps({"rows": steps}))
    for name, models in (("lm-1-h200.json", ("attention", "paper-text")), ("lm-2-h200.json", ("attention",))):
        rows = [{"model": model, "T": 4096, "tokens_per_second": 4e5} for model in models]
        (tmp_path / name).write_text(json.dumps({"steps": rows}))
    assert read_speeds(tmp_path).records == ["train-1-cuda.json", "lm-1-h200.json"]
