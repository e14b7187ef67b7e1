"""The mixers' benchmark at a size for CI: it runs whole, and what grows with T grows as it should."""

import json
from pathlib import Path

import pytest

from benchmark_command import succeed
from rebased.mixers import mixer_class, mixer_names

OURS = [name for name in mixer_names() if mixer_class(name).__module__.startswith("rebased.")]


@pytest.mark.release
def test_small(tmp_path: Path) -> None:
    lengths = ["--lengths", "256", "512", "--repeats", "1"]
    said = succeed("mixers", "--small", "--device", "cpu", *lengths, "--mixers", *OURS, "--out", str(tmp_path))
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert [(row["mixer"], row["T"]) for row in result["mixers"]] == [(name, T) for name in OURS for T in (256, 512)]
    assert all(row["seconds"] > 0 for row in result["mixers"])
    assert str(tmp_path) not in path.read_text()
    assert path.with_suffix(".svg").stat().st_size > 10_000
    assert "attention        T    512" in said
    # Bytes, not seconds: a busy machine changes only the latter. Attention's dropout keeps T x T, the rest keep T.
    exponents = result["growth"]["bytes"]
    assert exponents.pop("attention") > 1.5
    assert all(0.8 < exponent < 1.1 for exponent in exponents.values()), exponents
