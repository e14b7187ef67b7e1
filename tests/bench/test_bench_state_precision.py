"""benchmarks/state_precision.py: its roundings, its steps without them, and the whole command at a small size."""

import json
from pathlib import Path

import pytest

from benchmark_command import succeed
from forked_python import ROOT, run_code

NEAREST = """
from benchmarks.state_precision import nearest_bf16, nearest_fp16
import torch

def rounded(round_, *numbers):
    x = torch.tensor(numbers)
    round_(x, torch.Generator())
    return x.tolist()

assert rounded(nearest_bf16, 256.0, 257.0, 259.0, -257.5) == [256.0, 256.0, 260.0, -258.0]  # ties go to even
assert rounded(nearest_fp16, 2048.0, 2049.0, -2051.0, 65_520.0) == [2048.0, 2048.0, -2052.0, float("inf")]
"""
STOCHASTIC = """
from benchmarks.state_precision import stochastic_bf16
import torch

x, generator = torch.tensor([256.0, 256.5, -256.5]).repeat(10_000, 1), torch.Generator().manual_seed(0)
stochastic_bf16(x, generator)
assert [set(column.tolist()) for column in x.T] == [{256.0}, {256.0, 258.0}, {-256.0, -258.0}]
error = 2 * (1 / 4 * 3 / 4 / len(x)) ** 0.5  # of a mean of numbers that are 2 apart, a quarter of them the farther one
assert (x.mean(0) - torch.tensor([256.0, 256.5, -256.5])).abs().max() < 5 * error
"""
PLAIN = """
from benchmarks.state_precision import FORMATS, Reader
from rebased.runs.load import open_text_model
import torch

model, _ = open_text_model(None)
for block in model.blocks:
    block.mixer.backend = "recurrent"  # the plain path, one token after the other
tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))
state, wanted = model.init_state(2), []
with torch.no_grad():
    for t in range(40):
        features, state = model.extend(tokens[:, t : t + 1], state)
        wanted.append(features[:, 0])
wanted = torch.stack(wanted)
found = {label: torch.stack(list(Reader(model, FORMATS[label]).read(tokens))) for label in FORMATS}
plain = found["fp32"]
assert (plain - wanted).norm() < 2**-18 * wanted.norm()  # a step is in fp32, `extend` in fp64 inside: 64 roundings
for label in FORMATS:
    assert torch.equal(found[label][0], plain[0])  # the output of a token is computed before its state is rounded
    assert label == "fp32" or not torch.equal(found[label], plain)
"""


@pytest.mark.parametrize("code", [NEAREST, STOCHASTIC, PLAIN], ids=["nearest", "stochastic", "plain"])
def test_arithmetic(code: str) -> None:
    answer = run_code(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}", ROOT)
    assert answer.returncode == 0, answer.stderr


def test_the_command_writes_a_record(tmp_path: Path) -> None:
    said = succeed("state_precision", "--size", "tiny", "--device", "cpu", "--out", str(tmp_path))
    (path,) = tmp_path.iterdir()
    record = json.loads(path.read_text())
    assert record["command"] == "python benchmarks/state_precision.py --size tiny"
    errors = {(row["kernel"], row["T"], row["format"]): row["error"] for row in record["operator"]}
    for kernel, T, _ in errors:
        assert errors[kernel, T, "fp32"] < 1e-5 < errors[kernel, T, "fp16"] < errors[kernel, T, "bf16"] < 0.1
    for section in ("recall", "text"):
        plain = [row["change"] for row in record[section]["rows"] if row["format"] == "fp32"]
        assert plain
        assert set(plain) == {0.0}
    assert not record["verdicts"]["fp32"]["harmless"]  # one epoch of training recalls nothing, so nothing was shown
    for first, last in zip(*(row["z"] for row in record["range"]["rows"]), strict=True):
        assert 0 < first < last
    assert "rise of perplexity" in said
