"""The page on probes as a function of records: the paper's Table 3 beside ours, comparisons, and maps as SVG."""

import copy

import pytest

from fake_records import fake_run
from page_reader import assert_self_contained
from paper_records import probe_record as record
from rebased.analysis.paired import compare, holm
from rebased.paper.reference import PAPER
from rebased.paper.values import TABLE_3
from rebased.report.heatmap import LEVELS, heatmap, level_of
from rebased.report.probe.cells import run_of
from rebased.report.probe.page import ProbeReport, contests
from rebased.report.probe.tables import iou_table


def test_the_papers_values_stand_beside_ours_with_a_verdict() -> None:
    seeds = (42, 43, 44)
    records = [record("rebased", 0.17 + 0.002 * (seed - 43), seed=seed) for seed in seeds]
    records += [record("based", 0.10 + 0.003 * (seed - 43), seed=seed) for seed in seeds]
    report = ProbeReport(records, PAPER)
    table = iou_table(report.cells)
    rows = {row[0]: dict(zip(table.head, row, strict=True)) for row in table.rows}
    assert rows["ReBased"]["IoU"] == "0.170 ± 0.002"
    assert (rows["ReBased"]["paper: IoU"], rows["ReBased"]["IoU agrees"]) == ("0.173", "agrees")
    assert (rows["Based"]["paper: IoU"], rows["Based"]["IoU agrees"]) == ("0.157", "differs")
    assert any(sentence.startswith("ReBased has a higher IoU than Based by 0.070") for sentence in report.summary)
    assert any(
        "has an IoU for 2 of these cells: 1 agree with it within 0.016, 1 differ" in sentence
        for sentence in report.summary
    )
    html = report.page("rebased probe runs").to_html()
    reader = assert_self_contained(html)
    assert "arXiv 2402.10644, Table 3, as printed" in html
    assert any("Made with rebased 0.1.0" in text for text in reader.texts["footer"])


def test_models_are_compared_that_differ_in_nothing_else() -> None:
    """ReBased with Based of as many heads; and p is corrected over all such pairs of the page."""
    records = []
    for n_heads in (1, 2):
        for name, iou, step in (("rebased", 0.17, 0.02), ("based", 0.10, 0.01)):
            for seed in (42, 43, 44):
                one = record(name, iou + n_heads * step * (seed - 43), seed=seed)
                config = copy.deepcopy(one["config"])
                config["model"]["mixers"][1]["n_heads"] = n_heads
                records.append(one | {"config": config})
    pairs = contests(ProbeReport(records).cells)
    names = [(str(one.model), str(other.model)) for one, other in pairs]
    assert names == [(f"ReBased (n_heads {n})", f"Based (n_heads {n})") for n in (1, 2)]
    sentences = [sentence for sentence in ProbeReport(records).summary if "Holm" in sentence]
    alone = [compare(one.values("iou"), other.values("iou")).t_p for one, other in pairs]
    for sentence, p in zip(sentences, holm(alone), strict=True):
        assert f"Holm p = {p:.2g}" in sentence
    assert holm(alone) != alone


def test_other_tasks_and_layers_have_no_paper_value() -> None:
    assert TABLE_3["Attention"].iou.mean == 0.999
    assert PAPER.of(run_of(record("rebased", 0.1))).values["iou"] == TABLE_3["ReBased"].iou
    assert "iou" not in PAPER.of(run_of(record("rebased", 0.1, pairs=16))).values
    other = record("rebased", 0.1)
    other["config"] = fake_run("rebased", seq_len=128, pairs=(32,), d_model=48).settings
    assert "iou" not in PAPER.of(run_of(other)).values  # the first layer is trained
    assert "paper: IoU" not in iou_table(ProbeReport([other], PAPER).cells).head


def test_what_a_reader_should_know_is_a_warning() -> None:
    poor = record("based", 0.01, accuracy=0.2) | {"not_drawn": "512 questions x 1,024 positions are too many to draw"}
    warnings = ProbeReport([poor]).warnings
    assert warnings[0] == "No attention maps: 512 questions x 1,024 positions are too many to draw."
    assert warnings[1].endswith("their attention says little: Based, D = 48.")
    assert "one seed" in warnings[2]
    with pytest.raises(ValueError, match="there is no probe to show"):
        ProbeReport([])


def test_a_heatmap_has_a_rectangle_per_run_of_equal_shades() -> None:
    svg = heatmap([[0.0, 0.95, 0.95, 0.02], [0.02, 0.0, 0.0, 0.0]], "a < b", [(1, 2)])
    assert 'aria-label="a &lt; b"' in svg
    assert "M1 0h2v1h-2z" in svg  # two neighbours of one shade
    assert "M3 0h1v1h-1zM0 1h1v1h-1z" in svg  # both cells of another shade in one path
    assert "M2 1h1v1h-1z" in svg  # the mark
    assert svg.count("fill-opacity") == 2
    assert [level_of(value) for value in (0.0, 0.0099, 0.01, 1.0)] == [0, 0, 1, len(LEVELS)]
