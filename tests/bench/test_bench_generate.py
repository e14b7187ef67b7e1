"""The benchmark of decoding at a size for CI: it runs whole, and its record says what was measured."""

import json
import re
from pathlib import Path

import pytest

from benchmark_command import succeed

BROKEN = """
import torch
from rebased.models import decoder
reserve = decoder.Decoder.__init__
def init(self, model, slots, **options):
    if slots == 2:
        raise torch.OutOfMemoryError("no room")
    reserve(self, model, slots, **options)
decoder.Decoder.__init__ = init
"""


@pytest.mark.release
def test_steps_and_first_tokens(tmp_path: Path) -> None:
    """One case finds no memory: the others are measured all the same."""
    size = ["--batches", "3", "2", "--contexts", "32", "48", "--first", "24", "--device", "cpu"]
    options = ["--sampling", "filter", "--variants", "fused", "eager", "--profile", "--out", str(tmp_path)]
    said = succeed("generate", *size, *options, patch=BROKEN)
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    rows = {(row["variant"], row["model"], row["batch"], row["context"]): row for row in record["steps"]}
    wanted = {("attention-full", B, T) for B in (3, 2) for T in (32, 48)}
    both = {("paper-text", B, 32) for B in (3, 2)} | {("attention", B, T) for B in (3, 2) for T in (32, 48)}
    assert {*rows} == {("fused", *each) for each in wanted | both} | {("eager", *each) for each in both}
    for (_, _, batch, _), row in rows.items():
        assert row["sampling"] == "filter"
        if batch == 2:
            assert row["failed"] == "out of memory"
        else:
            assert row["tokens_per_second"] == pytest.approx(1e3 * batch / row["ms"])
            assert row["profile"]
    cache = 2 * 2 * 48 * 48 * 4  # k and v, layers, width, context, bytes
    assert rows["fused", "attention", 3, 48]["state_bytes_per_sequence"] == cache
    first = [(row["model"], row["chunk"]) for row in record["first"]]
    assert first == [("paper-text", 4096), ("paper-text", 24), ("attention", 24)]
    assert all(row["seconds"] > 0 for row in record["first"])
    assert all(row["one_by_one"] > 0 and row["together"] > 0 for row in record["prompts"])
    assert str(tmp_path) not in path.read_text()
    assert "paper-text" in said
    assert "<svg" in path.with_suffix(".svg").read_text()


def test_a_record_is_drawn_and_held_against_what_is_wanted(tmp_path: Path) -> None:
    step = {"variant": "fused", "sampling": "greedy", "state_bytes": 2**30, "peak_bytes": None}
    steps = [
        step | {"model": "paper-text", "batch": 64, "context": 4096, "ms": 0.5, "tokens_per_second": 128_000},
        step | {"model": "attention", "batch": 64, "context": 4096, "ms": 3.2, "tokens_per_second": 20_000},
        step | {"model": "attention-full", "batch": 64, "context": 4096, "ms": 2.0, "tokens_per_second": 32_000},
        {"model": "attention", "variant": "graph", "batch": 9, "context": 16, "sampling": "greedy", "failed": "no"},
    ]
    record = {"machine": {"device": "a GPU"}, "steps": steps, "first": [], "left_out": [{"model": "based"}]}
    (tmp_path / "record.json").write_text(json.dumps(record))
    said = succeed("generate", "--plot", str(tmp_path / "record.json"))
    assert "batch 64: ms per step" in said
    assert re.search(r"4\.0 +at least 4", said)  # against the faster of both ways to read the cache
    assert "1 cases" in said
    assert "<svg" in (tmp_path / "record.svg").read_text()


@pytest.mark.release
def test_it_ends_in_time(tmp_path: Path) -> None:
    """A case that hangs is left out, and what was measured before is saved and shown."""
    patch = "import time\nfrom rebased.models import Decoder\nDecoder.prefill_chunks = lambda *_, **__: time.sleep(600)"
    size = ["--batches", "1", "--contexts", "32", "--device", "cpu", "--variants", "fused", "--minutes", "0.5"]
    said = succeed("generate", *size, "--models", "paper-text", "--out", str(tmp_path), patch=patch)
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    assert [row["model"] for row in record["steps"]] == ["paper-text"]
    assert (record["left_out"][0]["prompt"], record["left_out"][0]["reason"]) == (32_768, "the time was over")
    assert "paper-text" in said
