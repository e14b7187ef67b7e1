"""The server's benchmark at a size for CI: it runs whole, and what it leaves says what was measured."""

import json
from pathlib import Path

import pytest

from benchmark_command import succeed

pytest.importorskip("fastapi", reason="serving needs it: pip install 'rebased[serve]'")


@pytest.mark.release
def test_requests_and_latencies(tmp_path: Path) -> None:
    load = ["--cases", "1x20x5", "3x20x5", "--requests", "2", "--shared", "10", "--device", "cpu", "--slots", "2"]
    size = ["--models", "canned", "nothing", "paper-text", "attention"]
    said = succeed("serve", *load, *size, "--out", str(tmp_path))
    (path,) = tmp_path.glob("serve-*-cpu.json")
    record = json.loads(path.read_text())
    cases = record["cases"]
    models = ("canned", "nothing", "paper-text", "attention")
    assert [(case["model"], case["clients"]) for case in cases] == [(model, n) for model in models for n in (1, 3)]
    for case in cases:
        assert (case["answered"], case["failed"]) == (2 * case["clients"], 0)
        assert case["tokens_per_second"] == pytest.approx(5 * case["requests_per_second"])
        assert 0 < case["first_token"]["p50"] <= case["latency"]["p50"] <= case["latency"]["p99"]
        assert case["cut_off"] == 0
    assert str(tmp_path) not in path.read_text()
    assert "<svg" in path.with_suffix(".svg").read_text()
    assert "paper-text" in said


@pytest.mark.release
def test_it_ends_in_time_and_measures_both_models(tmp_path: Path) -> None:
    """More requests than there is time for: those under way are cut off, and the other model has its turn."""
    load = ["--cases", "2x20x5", "--requests", "10000", "--minutes", "1.5", "--models", "paper-text", "attention"]
    succeed("serve", *load, "--device", "cpu", "--slots", "2", "--out", str(tmp_path))
    (path,) = tmp_path.glob("serve-*-cpu.json")
    cases = json.loads(path.read_text())["cases"]
    assert [(case["model"], case["cut_off"]) for case in cases] == [("paper-text", 2), ("attention", 2)]
    assert all(case["answered"] > 0 for case in cases)
