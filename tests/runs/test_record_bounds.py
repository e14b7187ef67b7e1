"""One bad record never ends a report: it is left out, counted and named, and reading it takes bounded memory."""

import gzip
import json
import lzma
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fake_records import fake_lm_run, fake_run, write_record
from rebased.report.report import Report
from rebased.runs import record
from rebased.runs.collect import collect, write_bundle
from rebased.runs.finished import Run
from rebased.runs.record import parse_line, read_record

HUGE = 10**400

Change = Callable[[dict[str, Any]], object]


def mixer(**settings: Any) -> Change:
    return lambda line: line["config"]["model"]["mixers"][-1].update(settings)


def section(name: str, **settings: Any) -> Change:
    return lambda line: line["config"][name].update(settings)


FIRST_LINES: dict[str, tuple[Change, str]] = {
    "a list as transform": (mixer(qk_transform=[1]), "config.model.mixers.1.qk_transform: Input should be a valid str"),
    "no heads": (mixer(n_heads=0), "config.model.mixers.1.n_heads: Input should be greater than or equal to 1, not 0"),
    "a mixer without a name": (mixer(name=7), "config.model.mixers.1.name: Input should be a valid string, not 7"),
    "two billion layers": (section("model", n_layers=2_000_000_000), "config.model.n_layers: .* to 1024, not 20000000"),
    "no mixers": (section("model", mixers=[]), "config.model.mixers: List should have at least 1 item"),
    "a width of text": (section("model", d_model="24"), "config.model.d_model: Input should be a valid integer"),
    "a rate of nothing": (section("train", lr=0), "config.train.lr: Input should be greater than 0, not 0"),
    "a seed of text": (section("train", seed="42"), "config.train.seed: Input should be a valid integer, not '42'"),
    "an infinite setting": (section("train", eps=float("1e999")), "a setting is inf"),
    "an endless setting": (section("train", device="x" * 10**5), "a setting has 100,000 characters: 'xxx"),
    "a format as a key": (section("task", train=[{"seq_len": 8, "examples": 1, "{0}": 1}]), "should match pattern"),
    "a list of pairs": (section("task", test=[{"seq_len": 8, "examples": 1, "kv_pairs": [4]}]), "config.task.test.0"),
    "no parameters": (lambda line: line.pop("parameters"), "parameters: Field required"),
}


def report_of(folder: Path) -> tuple[Report, list[str]]:
    """A whole report over a folder, tables included, and the names of the runs in it."""
    report = Report(collect([folder]))
    report.tables()
    return report, sorted(run.folder for run in [*report.found.runs, *report.found.lm_runs])


def add_bad(folder: Path, change: Change, bad: Run) -> None:
    change(bad.lines[0])
    path = folder / "bad" / "record.jsonl"
    path.parent.mkdir()
    text = "".join(f"{json.dumps(line)}\n" for line in bad.lines)
    path.write_text(text.replace("Infinity", "1e999"))


@pytest.mark.parametrize("name", FIRST_LINES)
def test_a_record_that_no_run_can_have_is_left_out_and_named(tmp_path: Path, name: str) -> None:
    change, reason = FIRST_LINES[name]
    good = fake_run()
    write_record(good, tmp_path)
    add_bad(tmp_path, change, fake_run(seed=43))
    report, names = report_of(tmp_path)
    assert names == [good.digest]
    assert report.found.other == 1
    (warning,) = [warning for warning in report.warnings if "left out" in warning]
    assert warning.startswith(
        "1 record left out because no run on a synthetic task or of a language model has such settings: bad ("
    )
    assert re.search(reason, warning)


@pytest.mark.parametrize(
    "change",
    [mixer(n_heads=0), section("model", n_layers=10**9), section("data", seq_len=-1), section("data", folder=3)],
)
def test_the_same_holds_for_a_language_model(tmp_path: Path, change: Change) -> None:
    good = fake_lm_run("rebased")
    write_record(good, tmp_path)
    add_bad(tmp_path, change, fake_lm_run("rebased", seed=43))
    report, names = report_of(tmp_path)
    assert names == [good.digest]
    assert report.found.other == 1


LINES = {
    "400 digits": b'{"type": "epoch", "epoch": %d}\n' % HUGE,
    "400 digits in a config": json.dumps(fake_run(seed=43).lines[0]).replace('"lr": 0.001', f'"lr": {HUGE}').encode()
    + b"\n",
    "nested": b"[" * 100_000 + b"\n",
    "nested and closed": b'{"type": ' + b"[" * 100 + b"]" * 100 + b"}\n",
    "half a pair": b'{"type": "x", "y": "\\ud800"}\n',
    "not a number": b'{"type": "x", "y": NaN}\n',
    "no text": b'{"type": "x", "y": "\xed\xa0\x80"}\n',
    "a slice without a number": json.dumps(
        fake_run().lines[1] | {"test": {"accuracy": 0.5, "by_length": {"many": 0.5}}}
    ).encode()
    + b"\n",
    "an epoch without end": json.dumps(fake_run().lines[1] | {"epoch": 2**53}).encode() + b"\n",  # loops count to it
}


@pytest.mark.parametrize("name", LINES)
def test_a_bad_line_is_left_out_and_counted(tmp_path: Path, name: str) -> None:
    path = write_record(fake_run(), tmp_path)
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(first + b"\n" + LINES[name] + rest)
    report, names = report_of(tmp_path)
    assert names == [path.parent.name]
    assert report.found.damaged_lines == 1
    assert report.warnings[0].startswith(f"1 damaged line skipped, in {path.parent.name}/record.jsonl.")
    if name not in ("a slice without a number", "an epoch without end"):
        with pytest.raises(ValueError, match=r"record\.jsonl is damaged in line 2"):  # who resumes a run is told
            read_record(path)


def test_missing_slices_of_one_seed_do_not_end_a_report(tmp_path: Path) -> None:
    whole, lacking = fake_run(seed=42, pairs=(4, 8)), fake_run(seed=43, pairs=(4, 8))
    del lacking.lines[2]["test"]["by_pairs"]["8"]
    for run in (whole, lacking):
        write_record(run, tmp_path)
    report, names = report_of(tmp_path)
    assert len(names) == 2
    (cell,) = report.parts[0].results.cells  # type: ignore[union-attr]
    assert cell.slices("by_pairs") == {4: 0.5, 8: 0.25}


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_LINE_BYTES", 2**16)
    monkeypatch.setattr(record, "MIN_UNPACKED", 2**21)
    monkeypatch.setattr(record, "MAX_RATIO", 100)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("suffix", ["xz", "gz"])
def test_a_bundle_that_grows_without_end_takes_little_memory(tmp_path: Path, suffix: str) -> None:
    """A bundle of 458 kB without a line break once took 6.3 GB."""
    content = b"".join(json.dumps(line).encode() + b"\n" for line in fake_run().lines) + bytes(2**25)
    packed = lzma.compress(content, preset=0) if suffix == "xz" else gzip.compress(content, 1)
    (tmp_path / f"bomb.jsonl.{suffix}").write_bytes(packed)
    tracemalloc.start()
    try:
        found = collect([tmp_path])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [run.status for run in found.runs] == ["done"]  # what came before is read
    assert found.damaged_lines == 1
    assert found.damaged_files == [f"{tmp_path.name}/bomb.jsonl.{suffix}"]
    assert peak < 2**23


def test_a_bundle_of_countless_lines_is_read_no_further_than_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle of 229 kB with 76 million lines kept every command busy for minutes."""
    monkeypatch.setattr(record, "MIN_LINES", 1000)
    content = b"".join(json.dumps(line).encode() + b"\n" for line in fake_run().lines) + b"{}\n" * 10**5
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(content))
    found = collect([tmp_path])
    assert [run.status for run in found.runs] == ["done"]
    assert found.damaged_lines < 2000
    assert found.damaged_files == [f"{tmp_path.name}/bomb.jsonl.gz"]


@pytest.mark.usefixtures("small_limits")
def test_a_long_line_costs_itself_alone(tmp_path: Path) -> None:
    path = write_record(fake_run(), tmp_path)
    first, second, rest = path.read_bytes().split(b"\n", 2)
    path.write_bytes(b"\n".join([first, b"x" * 2**18, second, rest]))
    found = collect([tmp_path])
    assert found.damaged_lines == 1
    assert found.runs[0].lines == fake_run().lines


def test_a_record_of_too_many_lines_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rebased.runs.collect.MAX_LINES", 3)
    write_record(fake_run(accuracies=[0.1] * 5), tmp_path)
    found = collect([tmp_path])
    assert (len(found.runs[0].lines), found.damaged_lines) == (3, 4)


def test_a_large_honest_bundle_is_far_below_the_limits(tmp_path: Path) -> None:
    """Equal runs compress best, so their bundle is the nearest to the limit."""
    bundle = tmp_path / "records.jsonl.xz"
    lines = fake_run().lines
    runs = [Run(f"run{n}", [{**line, "digest": f"{n:012x}"} for line in lines]) for n in range(1000)]
    write_bundle(runs, bundle)
    unpacked = len(lzma.decompress(bundle.read_bytes()))
    assert unpacked / bundle.stat().st_size < record.MAX_RATIO / 4
    assert max(map(len, record.read_lines(bundle))) < record.MAX_LINE_BYTES / 1000
    found = collect([bundle])
    assert (len(found.runs), found.damaged_lines, found.other) == (1000, 0, 0)


def test_numbers_of_64_bits_are_numbers() -> None:
    assert parse_line(b'{"type": "x", "seed": %d}' % (2**64 - 1))["seed"] == 2**64 - 1
    with pytest.raises(ValueError, match="a number has 21 digits"):
        parse_line(b'{"type": "x", "seed": %d}' % 10**20)
