"""The server's benchmark at a size for CI: it runs whole, and what it leaves says what was measured."""

import json
from pathlib import Path

import pytest

from benchmark_command import succeed

pytest.importorskip("fastapi", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("httpx", reason="the clients need it: pip install httpx")


@pytest.mark.release
def test_requests_and_latencies(tmp_path: Path) -> None:
    load = ["--clients", "1", "3", "--requests", "2", "--prompt-tokens", "20", "--shared", "10", "--max-tokens", "5"]
    size = ["--device", "cpu", "--precision", "fp32", "--slots", "2", "--models", "paper-text", "attention"]
    said = succeed("serve", *load, *size, "--out", str(tmp_path))
    (path,) = tmp_path.glob("serve-*-cpu.json")
    record = json.loads(path.read_text())
    cases = record["cases"]
    assert [(case["model"], case["clients"]) for case in cases] == [
        ("paper-text", 1),
        ("paper-text", 3),
        ("attention", 1),
        ("attention", 3),
    ]
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
    load = ["--clients", "2", "--requests", "100000", "--prompt-tokens", "20", "--max-tokens", "5", "--minutes", "0.9"]
    succeed("serve", *load, "--device", "cpu", "--precision", "fp32", "--slots", "2", "--out", str(tmp_path))
    (path,) = tmp_path.glob("serve-*-cpu.json")
    cases = json.loads(path.read_text())["cases"]
    assert [(case["model"], case["cut_off"]) for case in cases] == [("paper-text", 2), ("attention", 2)]
    assert all(case["answered"] > 0 for case in cases)
