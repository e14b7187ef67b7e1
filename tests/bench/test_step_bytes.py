"""benchmarks/step_bytes.py against counts made by hand."""

import json
from typing import Any

from benchmark_command import succeed


def counts(rows: int, T: int, labels: int, D: int = 64) -> dict[str, dict[str, Any]]:
    words = ("--rows", str(rows), "--T", str(T), "--D", str(D), "--labels", str(labels), "--json")
    return json.loads(succeed("step_bytes", *words))


def test_the_head_by_hand() -> None:
    labels = 512 * 512
    moved, multiplied = counts(512, 2048, labels=512, D=256)["bf16"]["head"]
    logits = labels * 8192 * 2  # bytes
    # Written, read and overwritten by the loss, read by two products; and the features, read and written twice.
    assert moved == 5 * logits + 4 * labels * 256 * 4
    assert multiplied == 3 * 2 * labels * 8192 * 256
    moved, multiplied = counts(512, 2048, labels=512)["bf16"]["head"]
    assert moved == 5 * labels * 64 * 4  # a narrow head writes no logits, and computes them twice
    assert multiplied == 4 * 2 * labels * 8192 * 64


def test_what_is_not_the_stream_is_half_as_much_in_half_precision() -> None:
    found = counts(8, 256, labels=64, D=256)
    full, mixed, half = (found[name] for name in ("fp32", "tf32", "bf16"))
    for name in ("projections", "norms of q and k", "short convolution and its gate"):
        assert full[name][0] == 2 * half[name][0]
    assert {name: counted for name, counted in mixed.items() if name != "head"} | {"head": full["head"]} == full
    assert mixed["head"] == half["head"]
    assert full["embedding, positions, dropout"] == half["embedding, positions, dropout"]


def test_a_projection_and_its_norm_move_less_together() -> None:
    found = counts(8, 256, labels=64)
    names = ("projections", "norms of q and k")
    apart, joined = (sum(found[precision][name][0] for name in names) for precision in ("fp32", "tf32"))
    assert joined < apart
    assert sum(found["fp32"][name][1] for name in names) == sum(found["tf32"][name][1] for name in names)
    assert "all" in succeed("step_bytes")
