"""Every class of kernel that a call can launch was computed on a GPU and compiled for all GPUs."""

import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import time
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from kernels import classes, compile_classes, compute_classes, operator_calls, records, same_code
from kernels.classes import ARITHMETICS, KINDS, LAYOUTS, Call, classes_of, launches, source_hashes
from kernels.compute_classes import (
    Computed,
    compute_all,
    described,
    error_over_limit,
    make_record,
    still_valid,
    write_record,
)
from rebased.kernels.machine_code import compile_launch
from rebased.ops import PolyState
from tolerances import KERNEL_ERRORS, changed

ROOT = Path(__file__).parents[2]
SAMPLE = 2  # kernels that a run of the tests compiles: some 10 s


def random_call(draw: random.Random) -> Call:
    """Any call: all widths and lengths, not those of the sweep."""
    kind = draw.choice(KINDS)
    T = 1 if kind == "decode" else int(2 ** draw.uniform(0, 10 if kind == "at" else 16.5))
    batch = 1 if "packed" in kind else draw.randint(1, 3)
    widths = draw.randint(1, 128), draw.randint(1, 128)
    call = Call(
        draw.choice(ARITHMETICS), *widths, T, draw.random() < 0.5, kind, draw.choice(LAYOUTS), batch, draw.randint(1, 4)
    )
    return call._replace(gated=kind != "at" and draw.random() < 0.5)


def not_in(record: dict[str, Any], wanted: set[str]) -> list[str]:
    """The classes that a record does not hold."""
    return sorted(wanted - set(record["classes"]))


def read(path: Path, command: str) -> dict[str, Any]:
    if not path.exists():
        pytest.skip(f"{path.name} is not there yet: {command} writes it")
    return dict(json.loads(path.read_text()))


@pytest.mark.slow
def test_every_class_was_computed() -> None:
    record = read(compute_classes.RECORD, "make test-gpu on a GPU")
    if not record["complete"]:
        pytest.skip(f"{len(record['classes']):,} classes are computed, others still wait: make test-gpu goes on")
    missing = not_in(record, classes.reachable() | operator_calls.reachable())
    assert not missing, f"{len(missing)} classes were never computed (run make test-gpu on a GPU): {missing[:5]}"
    assert record["failed"] == []
    assert max(record["classes"].values()) <= 1


def test_the_record_of_what_was_computed_is_of_these_kernels() -> None:
    record = read(compute_classes.RECORD, "make test-gpu on a GPU")
    assert record["hashes"] == source_hashes(), "kernels or plans have changed: run make test-gpu on a GPU"


def test_the_record_of_what_was_compiled_is_of_these_kernels() -> None:
    record = read(compile_classes.RECORD, "make test-all on 8 cores or more")
    assert record["hashes"] == source_hashes(), "kernels or plans have changed: run make test-all on 8 cores or more"
    for name, about in record["architectures"].items():
        assert about["largest"] <= compile_classes.SHARED_MEMORY[int(name)]
        assert (about["too_large"], about["wrong_descriptors"], about["problems"]) == ({}, [], []), name
    if not record["complete"]:
        pytest.skip(f"{len(record['done']):,} kernels are compiled, others still wait: make kernels goes on")
    assert set(record["architectures"]) == {str(each) for each in compile_classes.RECORDED}


def test_no_call_launches_another_class() -> None:
    """Calls with any widths and lengths have only classes that were computed: the sweep over some found all."""
    record, draw = read(compute_classes.RECORD, "make test-gpu on a GPU"), random.Random(0)
    known = set(record["classes"]) if record["complete"] else classes.reachable()
    for _ in range(100):
        call = random_call(draw)
        unknown = {name for each in launches(call) for name in classes_of(each)} - known
        assert not unknown, f"{call} has {unknown}"


def test_dtypes_layouts_kinds_and_lengths_meet_pairwise() -> None:
    chosen = classes.calls()
    lengths = [1, 63, 64, 65, 255, 256, 257, 512, 513, 2048]
    wanted = {
        ("arithmetic", "layout"): product(ARITHMETICS, LAYOUTS),
        ("arithmetic", "kind"): product(ARITHMETICS, (kind for kind in KINDS if kind not in ("extend o", "decode"))),
        ("layout", "kind"): product(LAYOUTS, (kind for kind in KINDS if kind != "extend o")),
        ("arithmetic", "T"): [*product(("bf16", "fp32"), lengths), ("bf16", 8193)],  # the others have no limit there
    }
    for fields, pairs in wanted.items():
        met = {tuple(getattr(call, field) for field in fields) for call in chosen}
        missing = set(pairs) - met
        assert not missing, f"{fields}: {sorted(missing)}"


def test_a_class_that_was_not_computed_is_named(tmp_path: Path) -> None:
    call = Call("bf16", 24, 5, 300, False)
    names = [name for each in launches(call) for name in classes_of(each)]
    record = make_record([(call, Computed(tuple(names), 0.5))], 1.0, "a test")
    write_record(record, tmp_path / "record.json")
    held = json.loads((tmp_path / "record.json").read_text())
    assert held == record
    assert not_in(held, set(names)) == []
    del held["classes"][names[0]]
    assert not_in(held, set(names)) == [names[0]]
    assert "K<32 V<16" in names[0]  # the class that shipped without being computed


def test_a_constant_changes_the_hash_and_a_comment_does_not(tmp_path: Path) -> None:
    ops = tmp_path / "ops"
    shutil.copytree(ROOT / "src" / "rebased" / "ops", ops, ignore=shutil.ignore_patterns("__pycache__"))
    before, plan = source_hashes(ops), ops / "polynomial" / "gpu" / "plan.py"
    assert before == source_hashes()
    text = plan.read_text()
    plan.write_text("# a comment\n" + text.replace('"""The number of slices', '"""How many slices') + "import math\n")
    assert source_hashes(ops) == before
    plan.write_text(text.replace("CHUNK = 256", "CHUNK = 128"))
    after = source_hashes(ops)
    assert {folder for folder in before if after[folder] != before[folder]} == {"polynomial"}


@pytest.mark.parametrize("record", [compute_classes.RECORD, compile_classes.RECORD], ids=lambda path: path.name)
def test_a_record_is_carried_over_only_with_a_proof(record: Path) -> None:
    """From the hashes that the GPU computed to the present ones, without a gap, and each step with what it compared."""
    held = read(record, "make test-gpu on a GPU")
    for folder, now in held["hashes"].items():
        steps = [note["folders"][folder] for note in held.get("carried", []) if folder in note["folders"]]
        assert all(before[1] == after[0] for before, after in pairwise(steps)), folder
        assert not steps or steps[-1][1] == now, folder
    for note in held.get("carried", []):
        assert note["because"].startswith("the code is identical")
        assert note["kernels"] > 0
        assert note["launches"] >= note["calls"] > 0
        assert re.fullmatch(r"[0-9a-f]{40}", note["from"])


def test_a_change_of_a_kernel_is_seen() -> None:
    """Another constant gives another representation; the same gives the same; a note keeps the hashes of both."""
    one, other = (launches(Call("bf16", 16, V, 64, False))[0] for V in (16, 24))
    first, again, second = (same_code.representation(compile_classes.job_of(x, 90)) for x in (one, one, other))
    assert first == again != second
    assert same_code.describe(*one) != same_code.describe(*other)
    assert same_code.compare({"a": [("x", first)]}, {"a": [("x", second)]}) == ["a"]
    carried = same_code.carried_over(
        {"hashes": {"norm": "1", "scan": "2"}, "complete": True}, {"norm": "1", "scan": "3"}, {"kernels": 9}
    )
    assert carried == {
        "hashes": {"norm": "1", "scan": "3"},
        "complete": True,
        "whole": ["norm", "scan"],
        "carried": [{"kernels": 9, "folders": {"scan": ["2", "3"]}}],
    }


def test_only_operators_that_changed_are_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jobs = [compile_classes.Job(f"rebased.ops.{name}.gpu", f"{name}_kernel", (), (), 80) for name in ("norm", "scan")]
    monkeypatch.setattr(compile_classes, "jobs", lambda *_: dict.fromkeys(jobs, ""))
    monkeypatch.setattr(compile_classes, "source_hashes", lambda: {"norm": "1", "scan": "3"})
    record = {"hashes": {"norm": "1", "scan": "2"}, "complete": False, "done": [job.name for job in jobs]}
    record |= {"whole": ["norm", "scan"], "architectures": {"80": {"largest": 5}}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    kept = {"hashes": {"norm": "1", "scan": "3"}, "complete": False, "done": [jobs[0].name], "whole": ["norm"]}
    assert compile_classes.read_record(tmp_path / "record.json") == record | kept


def failing_work(pipe: Any) -> None:
    """As a process of the runner: one call ends it, one is wrong."""
    while (call := pipe.recv()) is not None:
        if call.T == 2:
            os._exit(7)
        if call.T == 4:
            pipe.send(Computed(("some class",), 0.1, last=True))
            time.sleep(1)  # another call sent meanwhile would be lost
            return
        pipe.send(Computed(("some class",), 3.0, "o 3") if call.T == 3 else Computed(("some class",), 0.1))


@pytest.mark.release
def test_a_wrong_result_and_a_dead_process_are_recorded() -> None:
    calls = [Call("bf16", 16, 16, T, False) for T in (1, 2, 3, 4, 5)]
    results = list(compute_all(calls, 1, failing_work))
    assert [call.T for call, _ in results] == [1, 2, 3, 4, 5]
    record = make_record(results, 1.0, "a test")
    ended, wrong = record["failed"]
    assert "T=2" in ended
    assert "ended with 7" in ended
    assert "T=3" in wrong
    assert record["classes"] == {"some class": 0.1}


@pytest.mark.parametrize(("message", "last"), [("CUDA error: misaligned address", True), ("no such width", False)])
def test_a_process_says_that_it_ends(monkeypatch: pytest.MonkeyPatch, message: str, last: bool) -> None:
    def fail(_: Any) -> Computed:
        raise RuntimeError(message)

    monkeypatch.setattr(compute_classes, "compute", fail)
    ours, theirs = multiprocessing.Pipe()
    ours.send(Call("bf16", 16, 16, 1, False))
    ours.send(None)
    compute_classes._work(theirs)
    assert ours.recv().last == last


def test_a_record_is_continued() -> None:
    """What failed and is right now counts; what was computed before stays."""
    one, two = (Call("bf16", 16, 16, T, False) for T in (1, 2))
    first = make_record([(one, Computed(("a",), 0.2)), (two, Computed(("b",), 9.0, "o 9"))], 1.0, "a test")
    assert (first["classes"], len(first["failed"])) == ({"a": 0.2}, 1)
    second = make_record([(two, Computed(("a", "b"), 0.3))], 2.0, "a test", first)
    assert (second["classes"], second["failed"]) == ({"a": 0.3, "b": 0.3}, [])
    assert (second["calls"], second["seconds"]) == (3, 3)
    assert described(first["failed"][0].partition(": ")[0]) == two


def test_a_record_loses_the_classes_of_kernels_that_changed() -> None:
    names = ("poly.forward a", "norm.norm b")
    record = make_record([(Call("bf16", 16, 16, 1, False), Computed(names, 0.2))], 1.0, "a test")
    assert still_valid(record) == record
    record["hashes"]["norm"] = "another"
    assert set(still_valid(record)["classes"]) == {"poly.forward a"}
    record["hashes"] = {}
    assert still_valid(record) == {}


@pytest.mark.parametrize("dtype", KERNEL_ERRORS)
def test_garbage_in_some_rows_of_one_head_is_found(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    want = torch.randn(2, 2048, 4, 64, dtype=torch.float64)
    limit = KERNEL_ERRORS[dtype]
    assert error_over_limit(want * (1 + limit / 4 * torch.randn_like(want).clamp(-2, 2)), want, limit) < 1
    wrong = want.clone()
    wrong[1, 70, 2] = torch.randn(64)
    assert error_over_limit(wrong, want, limit) > 1
    wrong[1, 70, 2] = torch.nan
    assert error_over_limit(wrong, want, limit) > 1


GATED = Call("bf16", 8, 16, 300, False, "packed extend", B=1, H=2, gated=True)


def decay_gradient(inputs: dict[str, Any]) -> torch.Tensor:
    return compute_classes.run(GATED, inputs, law=True)["dg"]


def test_the_expected_size_of_the_gradient_of_a_gate() -> None:
    """Each draw is of another size, because its largest terms have one sign together; the decays are left out."""
    squares, expected = [], []
    for seed in range(8):
        torch.manual_seed(seed)
        inputs, _, floors = compute_classes.make_inputs(GATED, "cpu")
        squares.append(float(decay_gradient(compute_classes.exact(inputs)).square().sum(-1).mean()))
        expected.append(float(floors["dg"].square()))
    assert sum(expected) / 4 < sum(squares) < sum(expected)


def test_the_gradient_of_a_gate_is_compared_with_its_terms() -> None:
    """Rounded inputs change it by less, though terms cancel; what is missing or in another row is found."""
    torch.manual_seed(1)
    inputs, _, floors = compute_classes.make_inputs(GATED, "cpu")
    given, limit = compute_classes.exact(inputs), KERNEL_ERRORS[torch.bfloat16]

    def error(got: torch.Tensor, want: torch.Tensor) -> float:
        return error_over_limit(got, want, limit, floors["dg"])

    want = decay_gradient(given)
    wrong = {"a row": want.clone(), "a tile": want.clone(), "a shift": want.roll(1, 1)}
    wrong["a row"][:, 250], wrong["a tile"][:, 64:128] = 0, 0
    for name in ("state", "d_state"):
        wrong[f"no {name}"] = decay_gradient(given | {name: PolyState(*map(torch.zeros_like, given[name]))})
    assert {name: error(got, want) > 1 for name, got in wrong.items()} == dict.fromkeys(wrong, True)

    (_, z), (kv, dz) = given["state"], given["d_state"]
    dz = dz - z * ((z * dz).sum(-1) / z.square().sum(-1))[..., None]
    given["d_state"] = PolyState(torch.zeros_like(kv), dz)
    rounded = {name: x if isinstance(x, PolyState) else changed(x, torch.bfloat16) for name, x in given.items()}
    rounded["d_state"] = PolyState(torch.zeros_like(kv), changed(dz, torch.bfloat16))
    want, got = decay_gradient(given), decay_gradient(rounded)
    assert 10 * error(got, want) < 1
    assert error_over_limit(got, want, limit) > 5 * error(got, want)


def test_a_gate_of_single_tokens_has_no_gradient() -> None:
    call = GATED._replace(T=2, kind="packed")
    zero, floors = torch.zeros(1, 2, 2), compute_classes.make_inputs(call, "cpu")[2]
    for size, wrong in ((1e-14, False), (0.5, True)):
        assert (error_over_limit(zero + size, zero, KERNEL_ERRORS[torch.bfloat16], floors["dg"]) > 1) == wrong


def test_three_architectures_have_the_same_ptx() -> None:
    """So kernels for sm_80 are compiled once, and ptxas alone is asked for the two others."""
    job = compile_classes.job_of(launches(Call("bf16", 16, 16, 64, False))[0], 80)
    made = [compile_launch(compile_classes.launch_of(job), capability) for capability in (80, 86, 89)]
    assert len({each.metadata.shared for each in made}) == 1
    assert len({re.sub(r"\.target sm_\d+", "", each.asm["ptx"]) for each in made}) == 1
    assert compile_classes.assemble(made[0].asm["ptx"], 86) == ""
    assert compile_classes.assemble("nothing", 86) != ""


@pytest.mark.slow
def test_some_classes_compile() -> None:
    """A few kernels of any calls for one architecture; others in the next commit."""
    said = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    draw = random.Random(said.strip() or str(source_hashes()))
    capability = draw.choice(list(compile_classes.SHARED_MEMORY))
    first = next((each for each, same in compile_classes.SAME_PTX.items() if capability in same), capability)
    for _ in range(SAMPLE):
        call = random_call(draw)
        call = call._replace(tiles="small" if capability in compile_classes.SMALL else "large")
        job = compile_classes.job_of(draw.choice(launches(call)), first)
        built = compile_classes.compile_job(job._replace(alike=() if first == capability else (capability,)))
        assert capability in built, f"sm_{first}: {built}"
        for each, found in built.items():
            assert (found.wrong, found.problem) == (0, ""), f"sm_{each}: {call}"
            assert found.shared <= compile_classes.SHARED_MEMORY[each], f"sm_{each}: {call}"


def test_tests_are_left_out_only_while_kernels_are_those_of_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = {"hashes": source_hashes(), "complete": True}
    for name in ("COMPUTED", "COMPILED"):
        (tmp_path / name).write_text(json.dumps(current))
        monkeypatch.setattr(records, name, tmp_path / name)
    assert records.unchanged_operators() == set(source_hashes())
    (tmp_path / "COMPILED").write_text(json.dumps(current | {"hashes": source_hashes() | {"scan": "of older kernels"}}))
    assert records.unchanged_operators() == set(source_hashes()) - {"scan"}
    (tmp_path / "COMPUTED").write_text(json.dumps(current | {"complete": False, "whole": ["norm", "scan"]}))
    assert records.unchanged_operators() == {"norm"}
    (tmp_path / "COMPUTED").write_text(json.dumps(current | {"complete": False}))
    assert records.unchanged_operators() == set()
