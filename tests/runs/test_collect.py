"""Records wherever they lie; what is damaged is left out, counted and said."""

import gzip
import json
import lzma
from pathlib import Path

import pytest

from fake_records import fake_run, write_record
from rebased.report.report import Report
from rebased.runs.collect import collect, write_bundle
from rebased.runs.record import Record, read_record
from rebased.train import train

RUNS = [fake_run(seed=seed, lr=lr) for seed in (42, 43) for lr in (1e-3, 1e-2)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, run in enumerate(RUNS):
        write_record(run, tmp_path / "sweep" / f"part{i % 2}")
    return tmp_path / "sweep"


def lines_of(folder: Path) -> dict[str, list[dict]]:
    return {run.digest: run.lines for run in collect([folder]).runs}


def test_folders_are_searched_at_any_depth(folder: Path) -> None:
    found = collect([folder])
    assert lines_of(folder) == {run.digest: run.lines for run in RUNS}
    assert (found.files, found.damaged_lines, found.nameless, found.other, found.repeated) == (4, 0, 0, 0, 0)
    assert {run.folder for run in found.runs} == {run.digest for run in RUNS}


@pytest.mark.parametrize("suffix", ["xz", "gz"])
def test_a_bundle_is_the_same_runs(folder: Path, tmp_path: Path, suffix: str) -> None:
    bundle = tmp_path / "results" / f"records.jsonl.{suffix}"
    write_bundle(collect([folder]).runs, bundle)
    assert {run.folder: run.lines for run in collect([bundle.parent]).runs} == lines_of(folder)
    assert bundle.read_bytes()[:2] == (b"\xfd7" if suffix == "xz" else b"\x1f\x8b")
    again = collect([folder, bundle])
    assert len(again.runs) == 4
    assert again.repeated == 4


def test_damaged_lines_are_skipped_and_counted(folder: Path) -> None:
    first, second, third, fourth = sorted(folder.rglob("record.jsonl"))
    first.write_text(first.read_text().replace('"epoch": 1', '"epoch" 1', 1))
    second.write_text(second.read_text() + '{"type": "epoch", "epoch": 3}\n[1]\n\x00\n')
    third.write_text(third.read_text().split("\n", 1)[1])  # its first line is lost
    fourth.write_bytes(fourth.read_bytes()[:-3])  # being written
    found = collect([folder])
    assert (found.damaged_lines, found.nameless, len(found.runs)) == (4, 1, 3)
    assert found.damaged_files == [f"{path.parent.name}/record.jsonl" for path in (first, second, third)]
    epochs = {run.folder: [line["epoch"] for line in run.epochs] for run in found.runs}
    assert epochs[first.parent.name] == [2]
    warnings = " ".join(Report(found).warnings)
    assert f"1 run with epochs missing in the record, perhaps the best: {first.parent.name}." in warnings
    statuses = {run.folder: run.status for run in found.runs}
    assert statuses[fourth.parent.name] == "unfinished"


@pytest.mark.parametrize("suffix", ["xz", "gz"])
def test_a_torn_bundle_gives_what_is_whole(tmp_path: Path, suffix: str) -> None:
    bundle = tmp_path / f"records.jsonl.{suffix}"
    write_bundle([fake_run(seed=seed, accuracies=[seed / 1e3] * 50) for seed in range(200)], bundle)
    bundle.write_bytes(bundle.read_bytes()[: bundle.stat().st_size // 2])
    found = collect([bundle])
    assert 10 < len(found.runs) < 200
    assert found.damaged_lines == 1
    bundle.write_bytes(b"not an archive")
    said = r"there is no record of a run on a synthetic task.*; 1 file read: no record at all; damaged: .*records.jsonl"
    with pytest.raises(ValueError, match=said):
        collect([bundle])


def test_an_empty_bundle_has_no_record(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(ValueError, match=r"records.jsonl.gz; 1 file read: no record at all$"):
        collect([tmp_path / "records.jsonl.gz"])


def test_in_a_bundle_a_lost_first_line_costs_its_run_alone(tmp_path: Path) -> None:
    bundle = tmp_path / "records.jsonl.xz"
    write_bundle(RUNS, bundle)
    lines = lzma.decompress(bundle.read_bytes()).splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines) if json.loads(line)["type"] == "run"]
    lines[starts[1]] = b"{broken\n"
    (tmp_path / "broken.jsonl.gz").write_bytes(gzip.compress(b"".join(lines)))
    found = collect([tmp_path / "broken.jsonl.gz"])
    assert [run.lines for run in found.runs] == [RUNS[0].lines, RUNS[2].lines, RUNS[3].lines]
    assert (found.damaged_lines, found.nameless) == (1, 1)


def test_of_one_run_the_most_complete_record_counts(tmp_path: Path) -> None:
    for name, run in (("a", fake_run(status=None)), ("b", fake_run()), ("c", fake_run(accuracies=[0.1], status=None))):
        write_record(run, tmp_path / name)
    found = collect([tmp_path])
    assert [run.status for run in found.runs] == ["done"]
    assert found.repeated == 2


@pytest.mark.parametrize("commits", ["abc", "bca", "cab"])
def test_of_several_trainings_the_result_does_not_decide_which_counts(tmp_path: Path, commits: str) -> None:
    solved, slow = {"accuracies": (0.5, 0.995)}, {"accuracies": (0.1, 0.2, 0.3, 0.4)}
    diverged = {"accuracies": (0.1,), "status": "diverged"}
    for commit, about in zip(commits, (solved, slow, diverged), strict=True):
        write_record(fake_run(commit=commit, **about), tmp_path / commit)
    assert [run.lines[0]["code"]["commit"] for run in collect([tmp_path]).runs] == ["c"]
    assert [run.lines[0]["code"]["commit"] for run in collect([tmp_path / name for name in "cab"]).runs] == ["c"]


def test_a_whole_record_counts_before_one_that_lacks_epochs(tmp_path: Path) -> None:
    gap = fake_run(accuracies=(0.1, 0.2, 0.3), commit="f")
    del gap.lines[2]
    for run in (gap, fake_run(accuracies=(0.1, 0.2, 0.3), commit="0")):
        write_record(run, tmp_path / run.lines[0]["code"]["commit"])
    assert [len(run.epochs) for run in collect([tmp_path]).runs] == [3]


def test_records_of_other_kinds_are_left_out(tmp_path: Path) -> None:
    write_record(fake_run(), tmp_path)
    other = fake_run(seed=43)
    other.lines[0]["config"] = {"task": "text", "model": {}}
    write_record(other, tmp_path)
    lacking = fake_run(seed=44)
    del lacking.lines[0]["config"]["train"]["lr"]
    write_record(lacking, tmp_path)
    found = collect([tmp_path])
    assert (found.other, len(found.runs)) == (2, 1)


def test_what_a_sweep_wrote_down(folder: Path) -> None:
    lines = [
        {"type": "sweep", "file": "a.yaml", "runs": [RUNS[0].digest, "absent", "tried"]},
        {"type": "failed", "digest": "gone", "error": "no room"},
        {"type": "failed", "digest": "tried", "error": "no room"},
        {"type": "retry", "digest": "tried"},
        {"type": "failed", "digest": "lacks its error"},
        {"type": "sweep", "runs": 5},
    ]
    (folder / "sweep.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + "damaged\n")
    found = collect([folder])
    assert found.failures == {"gone": "no room"}
    assert found.asked == {RUNS[0].digest, "absent", "tried"}
    assert found.damaged_lines == 3
    assert Report(found).warnings == [
        "3 damaged lines skipped, in sweep/sweep.jsonl.",
        "1 run failed: in no result. The first error: no room",
        "2 runs of a sweep without a record here: not begun yet, left out by its stages, or known from a bundle that "
        "is not among the files given.",
    ]


def test_a_real_run_is_collected(tmp_path: Path) -> None:
    config = fake_run(changes={"train": {"epochs": 2, "device": "cpu"}}).config
    result = train(config, tmp_path / "run")
    (run,) = collect([tmp_path]).runs
    assert (run.folder, run.digest, run.status) == ("run", config.digest(), "done")
    assert run.best.accuracy == result.accuracy


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A record as a run writes it, with a checksum in its last line."""
    record = Record(tmp_path / "run" / "record.jsonl")
    record.path.parent.mkdir()
    for line in RUNS[0].lines:
        record.append(line)
    return record.path


def test_a_changed_digit_is_noticed(written: Path, tmp_path: Path) -> None:
    """Each line is intact, so that only the checksum tells."""
    write_record(RUNS[1], tmp_path)
    assert collect([tmp_path]).other == 0
    data = written.read_bytes()
    changed = data.replace(b'"accuracy": 0.5', b'"accuracy": 0.9')
    first, _, *rest = data.splitlines(keepends=True)
    for content in (changed, data.replace(b'"done"', b'"diverged"'), b"".join([first, *rest])):
        assert content != data
        written.write_bytes(content)
        found = collect([tmp_path])
        assert [run.digest for run in found.runs] == [RUNS[1].digest]
        assert found.other_names == ["run (its checksum is not that of its lines)"]
        with pytest.raises(
            ValueError, match=r"record\.jsonl is damaged: its checksum is not that of its lines; restore"
        ):
            read_record(written)


def test_a_checksum_is_for_files_alone(written: Path, tmp_path: Path) -> None:
    """Whoever reads a record does not see it, and a bundle has that of its archive."""
    assert b'"sha256"' in written.read_bytes().splitlines()[-1]
    assert read_record(written) == RUNS[0].lines
    found = collect([written.parent])
    assert found.runs[0].lines == RUNS[0].lines
    write_bundle(found.runs, tmp_path / "records.jsonl.gz")
    assert collect([tmp_path / "records.jsonl.gz"]).runs[0].lines == RUNS[0].lines
    joined = b'{"type": "folder", "folder": "%s"}\n' + written.read_bytes()
    (tmp_path / "joined.jsonl").write_bytes(joined % b"a" + joined % b"b")  # records that a user has put together
    assert (collect([tmp_path / "joined.jsonl"]).other, len(collect([tmp_path / "joined.jsonl"]).runs)) == (0, 1)


def test_a_damaged_line_costs_itself_alone_though_there_is_a_checksum(written: Path) -> None:
    written.write_bytes(written.read_bytes().replace(b'"epoch": 1', b'"epoch" 1'))
    found = collect([written])
    assert (found.damaged_lines, found.other, [run.status for run in found.runs]) == (1, 0, ["done"])


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no record\.jsonl and no bundle .* or below; train something first"):
        collect([tmp_path])
    with pytest.raises(ValueError, match="there is no such file or folder"):
        collect([tmp_path / "nowhere"])
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"notes\.txt is not a record; give folders"):
        collect([tmp_path / "notes.txt"])
    with pytest.raises(ValueError, match=r"the name of a bundle must end in \.jsonl\.xz or \.jsonl\.gz"):
        write_bundle(RUNS, tmp_path / "records.zip")


def test_runs_of_both_kinds_are_collected_in_one_pass(tmp_path: Path) -> None:
    bundle = Path(__file__).parents[2] / "results" / "enwik8"
    write_record(RUNS[0], tmp_path)
    found = collect([tmp_path, bundle])
    assert [run.digest for run in found.runs] == [RUNS[0].digest]
    assert [run.folder for run in found.lm_runs][:4] == ["attention-42", "attention-43", "attention-44", "based-42"]
    assert (len(found.lm_runs), found.other, found.damaged_lines) == (9, 0, 0)
