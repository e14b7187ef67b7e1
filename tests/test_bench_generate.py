"""The benchmark of decoding at a size for CI: it runs whole, and its record says what was measured."""

import json
from pathlib import Path

import pytest

from benchmark_command import succeed


def test_steps_and_first_tokens(tmp_path: Path) -> None:
    size = ["--batches", "1", "3", "--contexts", "32", "48", "--first", "24", "--device", "cpu"]
    said = succeed("generate", *size, "--sampling", "filter", "--out", str(tmp_path))
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    rows = {(row["model"], row["batch"], row["context"], row["sampling"]): row for row in record["steps"]}
    assert {row[:3] for row in rows} == {
        ("paper-text", 1, 32),
        ("paper-text", 3, 32),
        *((model, B, T) for model in ("attention", "attention-full") for B in (1, 3) for T in (32, 48)),
    }
    for (_, batch, *_), row in rows.items():
        assert row["tokens_per_second"] == pytest.approx(1e3 * batch / row["ms"])
    cache = 2 * 2 * 48 * 48 * 4  # k and v, layers, width, context, bytes
    assert rows["attention", 3, 48, "filter"]["state_bytes_per_sequence"] == cache
    assert [row["model"] for row in record["first"]] == ["paper-text", "attention"]
    assert all(row["seconds"] > 0 for row in record["first"])
    assert str(tmp_path) not in path.read_text()
    assert "paper-text" in said
