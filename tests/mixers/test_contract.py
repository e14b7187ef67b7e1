"""The contract of every mixer: one suite over all that the package registers, or one with `pytest --mixer NAME`."""

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tolerances
from mixer_option import MIXER
from rebased.mixers import (
    can_divide,
    can_extend,
    count_numbers,
    forward_documents,
    mixer_class,
    mixer_name,
    mixer_names,
    register_mixer,
)
from rebased.models import LMConfig
from rebased.models.block import build_mixer

B, T, D = 3, 21, 48  # 48 is a multiple of 1, 2, 3, 4, 6, 8, 12, 16 and 24 heads
SUMS = (D, D, T, 153, D)
"""Of any mixer: projections in, a norm or a convolution, tokens, features or states, a projection out."""
CONDITION = 8.0
"""Norms, gates and denominators of a few random tokens make numbers some times larger, and some cancel again."""
ROUNDINGS = 8
"""One after the other, of a mixer that computes in bf16: x, weights, projections, gates, what is mixed, the result."""
SPLITS = [[21], [1] * 21, [20, 1], [1, 20], [8, 5, 1, 7], [3, 16, 2]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        ours = [name for name in mixer_names() if mixer_class(name).__module__.startswith("rebased.")]
        chosen = metafunc.config.stash.get(MIXER, None)
        metafunc.parametrize("name", [chosen] if chosen else ours)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """The mixer as a model builds it, in eval mode: dropout would hide what these tests look for."""
    return build_mixer(LMConfig(d_model=D, max_len=64, mixers=(name,)), layer=1).to(dtype).eval()


def build_extendable(name: str, dtype: torch.dtype = torch.float64) -> Any:
    mixer = build(name, dtype)
    if not can_extend(mixer):
        pytest.skip(f"mixer {name!r} has no init_state, extend and state_size")
    return mixer


def inputs(batch: int = B, length: int = T, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, D, dtype=torch.float64).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    options: dict[str, Any] = {"condition": CONDITION, "roundings": ROUNDINGS, "size": 1.0, "dtype": dtype}
    tolerances.assert_near(actual, expected, *SUMS, **options)


def tensors(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors(part)]


@pytest.mark.parametrize("length", [1, 2, 7, 21, 64])
def test_keeps_the_shape(name: str, length: int) -> None:
    for batch in (1, B):
        y = build(name)(inputs(batch, length))
        assert y.shape == (batch, length, D)
        assert y.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keeps_the_dtype(name: str, dtype: torch.dtype) -> None:
    mixer, x = build(name), inputs()
    y = build(name, dtype)
    y.load_state_dict(mixer.state_dict())
    assert y(x.to(dtype)).dtype == dtype
    assert_near(y(x.to(dtype)), mixer(x))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 says so at length, then computes
def test_bfloat16(name: str) -> None:
    mixer = build(name, torch.bfloat16)
    exact = copy.deepcopy(mixer).double()
    x = inputs(dtype=torch.bfloat16)
    try:
        y = mixer(x)
    except RuntimeError as error:
        if "not implemented for 'BFloat16'" not in str(error):
            raise
        pytest.skip(f"mixer {name!r} does not compute in bfloat16")
    assert y.dtype == torch.bfloat16
    assert_near(y, exact(x.double()))


@pytest.mark.parametrize("at", [1, 10, 20])
def test_never_looks_ahead(name: str, at: int) -> None:
    mixer, x = build(name), inputs()
    changed = x.clone()
    changed[:, at:] += 10 * torch.randn_like(changed[:, at:])
    before, after = mixer(x), mixer(changed)
    assert_near(after[:, :at], before[:, :at])
    assert not torch.allclose(after[:, at:], before[:, at:])  # or the first assertion says nothing


def test_gradients_never_look_ahead(name: str) -> None:
    x = inputs().requires_grad_()
    (gradient,) = torch.autograd.grad(build(name)(x)[:, :10].square().sum(), x)
    assert (gradient[:, :10] != 0).any()
    assert_near(gradient[:, 10:], torch.zeros_like(gradient[:, 10:]))


def test_every_parameter_has_a_gradient(name: str) -> None:
    mixer = build(name, torch.float32).train()
    x = inputs(dtype=torch.float32).requires_grad_()
    (mixer(x) * torch.randn(B, T, D)).sum().backward()
    for key, parameter in (*mixer.named_parameters(), ("x", x)):
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert (parameter.grad != 0).any(), key


def test_gradients_are_those_of_forward(name: str) -> None:
    """Along one random direction through all parameters and inputs, against central differences."""
    mixer = build(name)
    point = {**{f"mixer.{key}": value.detach() for key, value in mixer.named_parameters()}, "x": inputs()}
    along = {key: torch.randn_like(value) for key, value in point.items()}
    weights = torch.randn(B, T, D, dtype=torch.float64)

    def loss(at: dict[str, Tensor]) -> Tensor:
        values = {key.removeprefix("mixer."): value for key, value in at.items() if key != "x"}
        return (torch.func.functional_call(mixer, values, at["x"]) * weights).sum()

    h = 1e-6  # differences lose u / h, 1e-10, of their digits, and are off by h^2
    up, down = ({key: value + s * h * along[key] for key, value in point.items()} for s in (1, -1))
    numeric = (loss(up) - loss(down)) / (2 * h)
    leaves = {key: value.clone().requires_grad_() for key, value in point.items()}
    gradients = torch.autograd.grad(loss(leaves), list(leaves.values()))
    analytic = sum((g * along[key]).sum() for key, g in zip(leaves, gradients, strict=True))
    assert float(analytic) == pytest.approx(float(numeric), rel=1e-5)


@pytest.mark.parametrize("pieces", SPLITS, ids=lambda pieces: "+".join(map(str, pieces)) if len(pieces) < 9 else "1s")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extend_is_forward_in_pieces(name: str, pieces: list[int], dtype: torch.dtype) -> None:
    mixer, x = build_extendable(name, dtype), inputs(dtype=dtype)
    state, outputs = mixer.init_state(B), []
    for piece in x.split(pieces, dim=1):
        y, state = mixer.extend(piece, state)
        outputs.append(y)
    assert_near(torch.cat(outputs, dim=1), mixer(x))


@pytest.mark.parametrize("length", [1, 5, 21])
def test_state_has_the_declared_size(name: str, length: int) -> None:
    mixer = build_extendable(name)
    _, state = mixer.extend(inputs(length=length), mixer.init_state(B))
    assert count_numbers(state) == B * mixer.state_size(length)


def test_state_handed_in_is_left_alone(name: str) -> None:
    mixer, x = build_extendable(name), inputs()
    _, state = mixer.extend(x[:, :9], mixer.init_state(B))
    kept = [tensor.clone() for tensor in tensors(state)]
    first, _ = mixer.extend(x[:, 9:], state)
    assert all(torch.equal(a, b) for a, b in zip(tensors(state), kept, strict=True))
    again, _ = mixer.extend(x[:, 9:], state)
    assert torch.equal(first, again)


def in_parts(mixer: Any, parts: list[Tensor]) -> Tensor:
    """forward_part one after another, each part told what the earlier ones handed on."""
    handed_on: list[list[Tensor]] = []  # of each part, in the order of its calls
    outputs = []
    for number, part in enumerate(parts):
        mine: list[Tensor] = []
        handed_on.append(mine)

        def earlier(own: Tensor, mine: list[Tensor] = mine, number: int = number) -> Tensor:
            mine.append(own)
            before = [calls[len(mine) - 1] for calls in handed_on[:number]]
            return torch.stack(before) if before else own.new_empty(0, *own.shape)

        outputs.append(mixer.forward_part(part, earlier))
    assert len({len(calls) for calls in handed_on}) == 1  # or processes would wait for each other forever
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize("count", [1, 3, 7, 21])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_parts_side_by_side_are_the_whole(name: str, count: int, dtype: torch.dtype) -> None:
    mixer, x = build(name, dtype), inputs(dtype=dtype).requires_grad_()
    if not can_divide(mixer):
        pytest.skip(f"mixer {name!r} has no forward_part")
    weights = torch.randn(B, T, D, dtype=dtype)
    leaves = [x, *mixer.parameters()]
    results = []
    for y in (in_parts(mixer, list(x.chunk(count, dim=1))), mixer(x)):
        results.append((y, *torch.autograd.grad((y * weights).sum(), leaves)))
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_documents_are_strangers(name: str, dtype: torch.dtype) -> None:
    """Packed into rows they are what each would be alone, with one of a single token, an empty one and a whole row."""
    bounds = [0, 1, 12, 12, 21, 42, 44, 63]
    mixer, x = build(name, dtype), inputs(dtype=dtype).requires_grad_()
    tokens, weights = x.reshape(1, B * T, D), torch.randn(B, T, D, dtype=dtype)
    alone = torch.cat([mixer(tokens[:, i:j]) for i, j in pairwise(bounds) if i < j], dim=1).view(B, T, D)
    packed = forward_documents(mixer, x, torch.tensor(bounds, dtype=torch.int32))
    assert packed.dtype == dtype
    results = []
    for y in (packed, alone):
        results.append((y, *torch.autograd.grad((y * weights).sum(), [x, *mixer.parameters()])))
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected)


def test_rows_of_a_batch_are_strangers(name: str) -> None:
    mixer, x = build(name), inputs()
    together = mixer(x)
    for row in range(B):
        assert_near(together[row : row + 1], mixer(x[row : row + 1]))


def test_eval_is_deterministic_and_weights_are_all_there_is(name: str) -> None:
    mixer, x = build(name), inputs()
    first = mixer(x)
    mixer(inputs())  # a mixer that kept something of its last call would answer otherwise now
    assert torch.equal(first, mixer(x))
    other = build(name)
    other.load_state_dict(mixer.state_dict())
    assert torch.equal(first, other(x))


def test_config_says_what_the_constructor_takes(name: str) -> None:
    config = LMConfig(d_model=D, mixers=(name,))
    assert LMConfig.model_validate_json(config.model_dump_json()) == config
    assert mixer_name(build(name)) == name
    with pytest.raises(ValueError, match="unknown key 'no_such_argument'"):
        LMConfig(d_model=D, mixers=({"name": name, "no_such_argument": 1},))


def test_a_name_stands_for_one_class(name: str) -> None:
    cls = mixer_class(name)
    assert register_mixer(name)(cls) is cls  # a notebook's cell that is run again
    with pytest.raises(ValueError, match=f"mixer '{name}' is taken by"):
        register_mixer(name)(type("Other", (nn.Module,), {}))
    assert mixer_class(name) is cls
