"""The selective scan: the fast path against the loop, long sequences, extreme decays, wrong inputs."""

import math

import pytest
import torch

from ops.scan_cases import NAMES, OPTIONS, assert_gradients_match, scan, scan_inputs
from rebased.ops import Backend, selective_scan, selective_scan_extend
from rebased.ops.scan import chunked
from tolerances import assert_near


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("T", [1, 2, 3, 16, 37])
@pytest.mark.parametrize("options", [(), OPTIONS], ids=str)
def test_chunked_is_the_loop(
    T: int, dtype: torch.dtype, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "CHUNK_TOKENS", (8, 8))  # several chunks, the last of them short
    assert_gradients_match(scan_inputs(2, T, 3, 5, options=options, dtype=dtype), "chunked")


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_step_size_and_gate_are_what_torch_computes_around_the_scan(backend: Backend) -> None:
    inputs = scan_inputs(2, 7, 3, 4, options=OPTIONS)
    actual, after = scan(inputs, backend)
    plain = {name: inputs[name] for name in NAMES}
    plain["dt"] = torch.nn.functional.softplus(inputs["dt"] + inputs["dt_bias"])
    y, state = scan(plain, backend)
    assert_near(actual, y * torch.nn.functional.silu(inputs["gate"]), 1)
    assert torch.equal(after, state)
    x, dt, A, B, C, skip, _ = plain.values()
    whole = selective_scan(x, inputs["dt"], A, B, C, skip, dt_bias=inputs["dt_bias"], gate=inputs["gate"])
    parts = selective_scan(x, dt, A, B, C, skip) * torch.nn.functional.silu(inputs["gate"])
    assert_near(whole, parts, 1)


def test_half_precision_keeps_its_state_in_fp32() -> None:
    inputs = scan_inputs(2, 12, 3, 4, options=OPTIONS, dtype=torch.bfloat16)
    assert_gradients_match(inputs, "chunked")
    y, state = scan(inputs)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_does_not_reach_inside() -> None:
    inputs = scan_inputs(2, 9, 3, 4, options=OPTIONS)
    expected, _ = scan(inputs, "chunked")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(scan(inputs, "chunked")[0], expected)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_one_channel_written_out(backend: Backend) -> None:
    """A constant input with B = C = 1: the geometric series that the recurrence is."""
    step, rate, T = 0.25, -2.0, 9
    ones = torch.ones(1, T, 1, dtype=torch.float64)
    y = selective_scan(ones, step * ones, torch.tensor([[rate]], dtype=torch.float64), ones, ones, backend=backend)
    q = math.exp(step * rate)
    expected = [step * (1 - q ** (t + 1)) / (1 - q) for t in range(T)]
    assert_near(y.flatten(), torch.tensor(expected, dtype=torch.float64), T)


def test_any_split_gives_the_same() -> None:
    x, dt, A, B, C, skip, state = scan_inputs(2, 23, 3, 4, dtype=torch.float64).values()
    whole, after = selective_scan_extend(x, dt, A, B, C, skip, state)
    outputs, lengths = [], [1, 10, 7, 5]
    for part in zip(*(each.split(lengths, dim=1) for each in (x, dt, B, C)), strict=True):
        y, state = selective_scan_extend(part[0], part[1], A, part[2], part[3], skip, state)
        outputs.append(y)
    assert_near(torch.cat(outputs, dim=1), whole, 4, 23)
    assert_near(state, after, 23)


def test_65536_tokens_in_fp32() -> None:
    """Slow channels that remember for 10,000 tokens beside fast ones that forget at once. fp32 rounds the slow ones'
    decay, exp(-1e-4), by 3e-8, which must not be taken to the power of 10,000."""
    inputs = scan_inputs(1, 65_536, 2, 4)
    inputs["dt"] = torch.tensor([1e-3, 1.0]).expand(1, 65_536, 2)
    inputs["A"] = -torch.tensor([[0.1, 1.0, 10.0, 100.0]]).expand(2, 4)
    assert_gradients_match(inputs, "chunked", law="chunked")


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_extreme_decays(backend: Backend) -> None:
    """exp(-1e9) is zero and exp(-1e-9) is one: neither may turn into inf or NaN on the way."""
    inputs = scan_inputs(1, 40, 2, 3)
    inputs["dt"] = torch.tensor([1e5, 1e-9]).repeat(20).reshape(1, 40, 1).expand(1, 40, 2)
    inputs["A"] = torch.tensor([[-1e4, -1.0, -1e-4]]).expand(2, 3)
    assert_gradients_match(inputs, backend)


def test_the_backward_holds_one_chunk_of_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between forward and backward nothing of the size [B,T,D,N] is kept."""
    monkeypatch.setattr(chunked, "CHUNK_TOKENS", (16, 16))
    inputs = scan_inputs(2, 128, 32, 16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        selective_scan(inputs["x"].requires_grad_(), *list(inputs.values())[1:6])
    assert sum(each.numel() for each in kept) < 2 * 128 * 32 * 16 / 2


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.zeros(2, 5), "x must be"),
        ("dt", torch.zeros(2, 6, 3), r"dt is \[2, 6, 3\]; .* needs \[2, 5, 3\]"),
        ("B", torch.zeros(2, 5, 3), r"B is \[2, 5, 3\]; .* needs \[2, 5, 4\]"),
        ("skip", torch.zeros(4), r"skip is \[4\]; .* needs \[3\]"),
        ("dt_bias", torch.zeros(4), r"dt_bias is \[4\]; .* needs \[3\]"),
        ("gate", torch.zeros(2, 5, 4), r"gate is \[2, 5, 4\]; .* needs \[2, 5, 3\]"),
        ("state", torch.zeros(1, 3, 4), r"state is \[1, 3, 4\]; .* needs \[2, 3, 4\]"),
        ("state", torch.zeros(2, 3, 4, dtype=torch.float64), "a state for torch.float32 inputs is torch.float32"),
    ],
)
def test_wrong_inputs_are_named(name: str, value: torch.Tensor, message: str) -> None:
    options = scan_inputs(2, 5, 3, 4) | {name: value}
    inputs = [options.pop(each) for each in NAMES]
    with pytest.raises(ValueError, match=message):
        selective_scan_extend(*inputs, **options)


def test_kernels_say_what_they_cannot_do() -> None:
    with pytest.raises(ValueError, match="need CUDA tensors; these are on cpu: use backend='chunked'"):
        selective_scan_extend(*scan_inputs(1, 3, 2, 2).values(), backend="triton")
    with pytest.raises(ValueError, match="compute in fp32; for float64 inputs use"):
        selective_scan_extend(*scan_inputs(1, 3, 2, 2, dtype=torch.float64).values(), backend="triton")
