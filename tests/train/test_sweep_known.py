"""Results from elsewhere: which known runs count, what a bundle of the union holds, and unfinished runs that travel."""

import json
import shutil
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fake_records import fake_run
from rebased.cli import sweep_files
from rebased.runs.collect import collect, distinct, gather, write_bundle
from rebased.runs.finished import Run
from rebased.runs.provenance import describe_code
from rebased.runs.run_config import RunConfig
from rebased.train import train
from rebased.train.checkpoint import Pointer, read_pointer
from rebased.train.sweep import unfinished
from rebased.train.sweep.grid import Point
from rebased.train.sweep.known import describe_known, read_known, write_union
from rebased.train.sweep.plan import Plan, make_plan
from rebased.train.sweep.unfinished import archives, pack, unpack
from tiny_run import AtStep, everything, tiny


def bundled(tmp_path: Path, *runs: Run, name: str = "a.jsonl.gz") -> Path:
    write_bundle(distinct(runs), tmp_path / name)
    return tmp_path / name


def points_of(*configs: RunConfig) -> list[Point]:
    return [Point({}, config) for config in configs]


def on_gpu(run: Run) -> Run:
    first = run.lines[0]
    return Run(run.folder, [first | {"machine": first["machine"] | {"gpu": "A GPU"}}, *run.lines[1:]])


def test_what_has_ended_counts_and_the_rest_does_not(tmp_path: Path) -> None:
    done, diverged = fake_run(seed=1), fake_run(seed=2, status="diverged")
    begun, elsewhere = fake_run(seed=3, status=None), fake_run(seed=9)
    lying = fake_run(seed=4)
    lying.lines[0]["config"]["train"]["lr"] = 0.5  # but the digest of another rate
    empty = fake_run(seed=5)
    empty.lines[1:-1] = []  # it says that it is done
    path = bundled(tmp_path, done, diverged, begun, elsewhere, lying, empty)
    wanted = points_of(*(fake_run(seed=seed).config for seed in (1, 2, 3, 4, 5)))
    known = read_known([path], wanted, on_gpu=False)
    assert known.runs.keys() == {done.digest, diverged.digest}
    assert known.rejected == Counter(
        {
            "not finished": 1,
            "the settings in the record are not those that its digest names": 1,
            "lines of epochs are missing in the record, or damaged": 1,
        }
    )
    assert next(describe_known(known, 5)) == "known: 2 of 5 runs; 1 of other sweeps"


def test_known_runs_of_other_code_than_this_are_named(tmp_path: Path) -> None:
    run = fake_run(commit="feedfacefeedface")
    known = read_known([bundled(tmp_path, run)], points_of(run.config), on_gpu=False)
    (said,) = (line for line in describe_known(known, 1) if "other versions of the code" in line)
    assert f"({run.code}: 1); all of them count" in said
    run.lines[0]["code"] = describe_code()
    known = read_known([bundled(tmp_path, run)], points_of(run.config), on_gpu=False)
    assert list(describe_known(known, 1)) == ["known: 1 of 1 run"]


def without_epoch(run: Run, number: int) -> Run:
    return Run(run.folder, [line for line in run.lines if line.get("epoch") != number])


@pytest.mark.parametrize("lost", [1, 2])
def test_a_run_that_lost_an_epoch_is_trained_again_and_then_forgotten(tmp_path: Path, lost: int) -> None:
    """Such a record would otherwise stay in all later bundles, without a trace of the damage."""
    run = fake_run(accuracies=(0.1, 0.5))
    run.lines[2]["step"] = run.lines[3]["step"] = 20
    path = bundled(tmp_path, without_epoch(run, lost), name="damaged.jsonl.gz")
    known = read_known([path], points_of(run.config), on_gpu=False)
    assert known.runs == {}
    assert known.rejected == Counter({"lines of epochs are missing in the record, or damaged": 1})
    folder = tmp_path / "runs" / run.digest
    folder.mkdir(parents=True)
    assert write_union(tmp_path / "a.jsonl.gz", known, folder.parent) == 1  # nothing is lost before there is better
    (folder / "record.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in run.lines))
    assert write_union(tmp_path / "b.jsonl.gz", known, folder.parent) == 1
    found = gather([tmp_path / "b.jsonl.gz"])
    assert [one.lines for one in (*found.runs, *found.others)] == [run.lines]


def test_a_cpus_result_does_not_count_on_a_gpu(tmp_path: Path) -> None:
    run = fake_run()
    path = bundled(tmp_path, run)
    assert read_known([path], points_of(run.config), on_gpu=True).rejected.total() == 1
    better = bundled(tmp_path, run, on_gpu(run), name="b.jsonl.gz")  # both are kept, and one of them counts
    known = read_known([better], points_of(run.config), on_gpu=True)
    assert known.runs[run.digest].device == "A GPU"
    assert len(known.all) == 2


def test_the_same_runs_give_the_same_bytes_and_copies_vanish(tmp_path: Path) -> None:
    runs = [fake_run(seed=seed) for seed in (1, 2, 3)]
    one = bundled(tmp_path, *runs)
    two = bundled(tmp_path, runs[2], runs[0], runs[1], runs[0], name="b.jsonl.gz")
    assert one.read_bytes() == two.read_bytes()
    assert {run.digest for run in collect([two]).runs} == {run.digest for run in runs}


def test_a_union_loses_no_result_and_drops_what_is_superseded(tmp_path: Path) -> None:
    begun, other = fake_run(seed=1, accuracies=(0.1,), status=None), fake_run(seed=2, accuracies=(0.3, 0.4))
    known = read_known([bundled(tmp_path, begun, other)], [], on_gpu=False)
    here = tmp_path / "runs"
    for run in (fake_run(seed=1), fake_run(seed=2, accuracies=(0.3, 0.5)), fake_run(seed=3, status=None)):
        (here / run.digest).mkdir(parents=True)
        text = "".join(json.dumps(line) + "\n" for line in run.lines)
        (here / run.digest / "record.jsonl").write_text(text)
    assert write_union(tmp_path / "all.jsonl.xz", known, here) == 2
    found = gather([tmp_path / "all.jsonl.xz"])
    assert sorted(run.seed for run in found.runs) == [1, 2]
    assert {run.status for run in found.runs} == {"done"}
    (different,) = found.others  # two trainings of seed 2 with different results
    assert different.seed == 2


def test_which_record_counts_does_not_depend_on_the_order_of_files(tmp_path: Path) -> None:
    a = bundled(tmp_path, fake_run(accuracies=(0.1, 0.2)))
    b = bundled(tmp_path, fake_run(accuracies=(0.1, 0.3)), name="b.jsonl.gz")
    assert collect([a, b]).runs == collect([b, a]).runs


LONG: dict[str, Any] = {"train": {"epochs": 6, "stop_above": 1}}


@pytest.fixture
def half(tmp_path: Path) -> Plan:
    """A plan with one run that was stopped half-way, and one that has not begun."""
    configs = [tiny(LONG), tiny({"train": LONG["train"] | {"seed": 1}})]
    folder = tmp_path / "here"
    stopped = AtStep(20, lambda: signal_self())
    train(configs[0], folder / configs[0].digest(), sinks=[stopped])
    return make_plan(points_of(*configs), folder, {})


def signal_self() -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGTERM)


def elsewhere(plan: Plan, folder: Path) -> Plan:
    return make_plan(points_of(*(run.config for run in plan.runs)), folder, {})


def test_an_unfinished_run_goes_on_elsewhere_as_if_nothing_had_happened(tmp_path: Path, half: Plan) -> None:
    assert [run.status for run in half.runs] == ["begun", "new"]
    carried = pack(half.runs, tmp_path / "a.tar", 2**24)
    assert (carried.runs, carried.left) == (1, 0)
    assert pack(half.runs, tmp_path / "b.tar", 2**24) == carried
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    there = tmp_path / "there"
    assert unpack(tmp_path / "a.tar", elsewhere(half, there).runs, there).runs == 1
    run = elsewhere(half, there).runs[0]
    assert run.status == "begun"
    train(run.config, run.folder, resume=True)
    whole = tmp_path / "whole" / run.digest
    train(run.config, whole)
    assert everything(run.folder) == everything(whole)


def test_of_two_checkpoints_of_a_run_the_further_one_is_taken(tmp_path: Path, half: Plan) -> None:
    pack(half.runs, tmp_path / "old.tar", 2**24)
    run = half.runs[0]
    train(run.config, run.folder, sinks=[AtStep(40, lambda: signal_self())], resume=True)
    pack(half.runs, tmp_path / "new.tar", 2**24)
    for order in (("old", "new"), ("new", "old")):
        there, taken = tmp_path / f"{order[0]}-first", dict[str, Path]()
        plan = elsewhere(half, there)
        for name in order:
            unpack(tmp_path / f"{name}.tar", plan.runs, there, taken)
        assert taken == {run.digest: tmp_path / "new.tar"}
        newest, found = (read_pointer(each / run.digest) for each in (half.folder, there))
        assert newest == found
        assert newest is not None
        assert newest.step >= 40


@pytest.mark.parametrize("here", [20, None])
def test_a_further_checkpoint_replaces_the_one_in_the_folder(tmp_path: Path, half: Plan, here: int | None) -> None:
    """A folder that was left behind hid what had been trained elsewhere since, and then replaced it in the file."""
    run, there = half.runs[0], tmp_path / "there"
    shutil.copytree(half.folder, there)
    if here is None:
        (there / run.digest / "checkpoint.json").unlink()  # as after kill -9 in the first epoch
    train(run.config, run.folder, sinks=[AtStep(40, lambda: signal_self())], resume=True)
    pack(half.runs, tmp_path / "new.tar", 2**24)
    newest = read_pointer(run.folder)
    assert unpack(tmp_path / "new.tar", elsewhere(half, there).runs, there).runs == 1
    assert read_pointer(there / run.digest) == newest
    assert unpack(tmp_path / "new.tar", elsewhere(half, there).runs, there)[:2] == (0, 1)  # not further


def test_a_run_that_saves_while_it_is_packed_is_packed_whole(
    tmp_path: Path, half: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that the pointer no longer names is deleted: it must not be packed beside the new pointer."""
    run, read, calls = half.runs[0], unfinished.read_pointer, 0

    def read_and_go_on(folder: Path) -> Pointer | None:
        nonlocal calls
        calls += 1
        pointer = read(folder)
        if calls == 1:
            train(run.config, run.folder, sinks=[AtStep(40, lambda: signal_self())], resume=True)
        return pointer

    monkeypatch.setattr(unfinished, "read_pointer", read_and_go_on)
    assert pack([run], tmp_path / "a.tar", 2**24).runs == 1
    there = tmp_path / "there"
    assert unpack(tmp_path / "a.tar", elsewhere(half, there).runs, there).runs == 1
    assert (found := read_pointer(there / run.digest))
    assert found.step >= 40


def test_unfinished_runs_are_written_while_a_sweep_goes_on(
    tmp_path: Path, half: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_files, "CARRY_EVERY", 0.0)
    sweep_files.SweepFiles(sweep_files.SweepOptions(carry_unfinished=tmp_path / "rest")).keep(half)()
    there = tmp_path / "there"
    assert unpack(tmp_path / "rest" / "unfinished-1.tar", elsewhere(half, there).runs, there).runs == 1


def test_what_does_not_fit_is_left_and_counted(tmp_path: Path, half: Plan) -> None:
    carried = pack(half.runs, tmp_path / "a.tar", 40_000)
    assert (carried.runs, carried.left) == (0, 1)
    assert (tmp_path / "a.tar").stat().st_size <= 40_000


def test_a_folder_holds_several_files_and_only_the_newest(tmp_path: Path, half: Plan) -> None:
    begun, new = half.runs
    shutil.copytree(begun.folder, new.folder)
    pointer = json.loads((new.folder / "checkpoint.json").read_text())
    one = pack([begun], tmp_path / "a.tar", 2**24).bytes
    carried = pack([begun, new], tmp_path / "rest", one + 20_000)  # the pointer is not of that run, but it has a size
    assert (carried.runs, carried.left) == (2, 0)
    assert [path.name for path in archives(tmp_path / "rest")] == ["unfinished-1.tar", "unfinished-2.tar"]
    assert pointer["digest"] == begun.digest
    there = tmp_path / "there"
    plan = elsewhere(half, there)
    found = [unpack(path, plan.runs, there) for path in archives(tmp_path / "rest")]
    assert sorted(one[:2] for one in found) == [(0, 1), (1, 0)]  # the copy is no checkpoint of its run
    pack([begun], tmp_path / "rest", one + 20_000)
    assert [path.name for path in archives(tmp_path / "rest")] == ["unfinished-1.tar"]


def test_a_bad_file_is_refused_and_a_damaged_run_is_trained_anew(tmp_path: Path, half: Plan) -> None:
    there = tmp_path / "there"
    plan = elsewhere(half, there)
    (tmp_path / "text.tar").write_text("no tar")
    with pytest.raises(ValueError, match=r"text.tar is not a file of unfinished runs, or is damaged"):
        unpack(tmp_path / "text.tar", plan.runs, there)
    (tmp_path / "evil").write_text("evil")
    digest = half.runs[0].digest
    long, nul = f"{digest}/checkpoint-{'x' * 300}", f"{digest}/checkpoint-\0"
    for name in ("../evil", f"{digest}/model.py", "/evil", f"{digest}/checkpoint-1/part", long, nul):
        with tarfile.open(tmp_path / "evil.tar", "w") as archive:
            member = tarfile.TarInfo(name)
            member.pax_headers = {"path": name}
            archive.addfile(member)
        with pytest.raises(ValueError, match="which is no file of a run"):
            unpack(tmp_path / "evil.tar", plan.runs, there)
    with tarfile.open(tmp_path / "dot.tar", "w") as archive:
        archive.add(half.folder, ".")  # as `tar cf dot.tar .` makes it
    assert unfinished.digests_in(tmp_path / "dot.tar") == {half.runs[0].digest}
    for name in ("record.jsonl", "config.yaml", "checkpoint-*.pt"):
        (path,) = half.runs[0].folder.glob(name)
        whole = path.read_bytes()
        path.write_bytes(whole.replace(b"0", b"1", 1))
        pack(half.runs, tmp_path / "a.tar", 2**24)
        path.write_bytes(whole)
        assert unpack(tmp_path / "a.tar", plan.runs, there)[:2] == (0, 1), name
        assert not there.exists() or list(there.iterdir()) == []
    shutil.rmtree(there, ignore_errors=True)
