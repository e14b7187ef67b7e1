"""What every shipped mixer has as a torch layer: device and dtype, print, errors about x, empty batches, torch.func."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rebased.mixers import CONTEXT, FACTORY, contract, mixer_class, mixer_names
from rebased.models import LMConfig
from rebased.models.block import build_mixer
from rebased.models.config import mixer_schema

NAMES = [name for name in mixer_names() if mixer_class(name).__module__.startswith("rebased.")]
B, T, D = 2, 5, 48


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build(name: str, **arguments: Any) -> Any:
    context = dict(zip(CONTEXT, (D, 1, 2, 64), strict=True))
    wanted = inspect.signature(mixer_class(name)).parameters
    return mixer_class(name)(**{key: value for key, value in context.items() if key in wanted}, **arguments)


def shapes(state: Any) -> list[tuple[int, ...]]:
    return [tuple(state.shape)] if isinstance(state, Tensor) else [shape for each in state for shape in shapes(each)]


def weights(mixer: nn.Module) -> list[Tensor]:
    """The parameters; of previous_token, which has none, its fixed gate."""
    return list(mixer.parameters()) or list(mixer.buffers())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_are_made_in_the_given_dtype(name: str, dtype: torch.dtype) -> None:
    mixer = build(name, dtype=dtype)
    assert {weight.dtype for weight in weights(mixer)} == {dtype}
    assert all(parameter.isfinite().all() for parameter in mixer.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_made_on_the_given_device(name: str) -> None:
    assert {weight.device.type for weight in weights(build(name, device="meta"))} == {"meta"}
    with torch.device("meta"):
        assert {weight.device.type for weight in weights(build(name))} == {"meta"}
        assert {weight.device.type for weight in weights(build(name, device="cpu"))} == {"cpu"}


@pytest.mark.parametrize("name", NAMES)
def test_an_explicit_default_changes_no_weight(name: str) -> None:
    torch.manual_seed(0)
    plain = build(name).state_dict()
    torch.manual_seed(0)
    explicit = build(name, device="cpu", dtype=torch.float32).state_dict()
    assert all(torch.equal(plain[key], explicit[key]) for key in plain)


@pytest.mark.parametrize("name", NAMES)
def test_device_and_dtype_are_no_config_keys(name: str) -> None:
    assert set(FACTORY) <= inspect.signature(mixer_class(name)).parameters.keys()
    assert not set(FACTORY) & mixer_schema(name, mixer_class(name)).model_fields.keys()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown key 'device'"):
        LMConfig(mixers=({"name": name, "device": "cpu"},))


@pytest.mark.parametrize("name", NAMES)
def test_help_is_a_reference(name: str) -> None:
    """Every argument of the constructor is listed, and so are the shapes of every public method."""
    cls = mixer_class(name)
    text = inspect.getdoc(cls) or ""
    assert "Args:" in text
    assert "Example:" in text
    listed = text.split("Args:")[1]
    for argument in inspect.signature(cls).parameters:
        assert f"{argument}:" in listed or f"{argument}, " in listed, argument
    for method in ("forward", "extend", "init_state", "state_size"):
        documented = getattr(cls, method).__doc__ or ""
        assert documented.startswith("Return "), method
        assert method == "state_size" or "[B" in documented, method


@pytest.mark.parametrize("name", NAMES)
def test_print_shows_the_arguments(name: str) -> None:
    first = "".join(repr(build(name)).splitlines()[:2])  # the class; its arguments, on one line if it has no layers
    for argument, parameter in inspect.signature(mixer_class(name)).parameters.items():
        if argument in ("d_model", "max_len", "layer", "n_layers"):
            assert f"{argument}=" in first
        elif argument not in FACTORY and parameter.default is not None:
            assert f"{argument}={parameter.default!r}" in first


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(B, T, D + 1), r"expects x of shape \[B, T, 48\]; its shape is \[2, 5, 49\]"),
        (torch.zeros(T, D), r"expects x of shape \[B, T, 48\]; its shape is \[5, 48\]"),
        (torch.zeros(1, B, T, D), r"its shape is \[1, 2, 5, 48\]"),
        (torch.zeros(B, T, D, dtype=torch.float64), r"x is torch.float64 and the weights of \w+ are torch.float32"),
        (torch.zeros(B, T, D, dtype=torch.long), r"x is torch.int64 .*for example x.to\(torch.float32\)"),
        (torch.zeros(B, T, D, device="meta"), r"x is on meta and the weights of \w+ are on cpu"),
        ([[[0.0] * D]], r"expects a tensor x \[B, T, 48\]; got list"),
    ],
    ids=["width", "two axes", "four axes", "dtype", "whole numbers", "device", "list"],
)
def test_a_wrong_x_is_named(name: str, x: Any, message: str) -> None:
    mixer = build(name)
    with pytest.raises(ValueError, match=message):
        mixer(x)
    with pytest.raises(ValueError, match=message):
        mixer.extend(x, mixer.init_state(B))


@pytest.mark.parametrize("shape", [(0, T, D), (B, 0, D), (0, 0, D)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_empty_batches_pass_through(name: str, shape: tuple[int, ...]) -> None:
    mixer, x = build(name), torch.randn(shape, requires_grad=True)
    y = mixer(x)
    assert (y.shape, y.dtype) == (shape, torch.float32)
    y.sum().backward()
    for key, parameter in (*mixer.named_parameters(), ("x", x)):
        assert parameter.grad is not None, key
        assert not parameter.grad.any(), key
    state = mixer.init_state(shape[0])
    y, after = mixer.extend(x, state)
    assert y.shape == shape
    whole = mixer.extend(torch.randn(1, shape[1], D), mixer.init_state(1))[1] if shape[1] else mixer.init_state(1)
    assert shapes(after) == [(shape[0], *each[1:]) for each in shapes(whole)]


@pytest.mark.parametrize(
    ("name", "arguments"), [*((name, {}) for name in NAMES), ("sliding_window", {"rotary": True, "window": 3})], ids=str
)
def test_an_empty_piece_changes_nothing(name: str, arguments: dict[str, Any]) -> None:
    mixer, x = build(name, **arguments).eval(), torch.randn(B, T, D)
    _, state = mixer.extend(x[:, :3], mixer.init_state(B))
    _, same = mixer.extend(x[:, :0], state)
    assert torch.equal(mixer.extend(x[:, 3:], same)[0], mixer.extend(x[:, 3:], state)[0])


PLAIN = ("attention", "sliding_window", "previous_token", "based", "rebased", "linear_attention")
TORCH_FUNC: dict[str, dict[str, str]] = {name: {} for name in PLAIN} | {"rwkv": {"backend": "reference"}}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for its attention
@pytest.mark.parametrize("name", TORCH_FUNC)
def test_torch_func_works(name: str) -> None:
    mixer, x = build(name, **TORCH_FUNC[name]).eval(), torch.randn(3, B, T, D)
    parameters = dict(mixer.named_parameters())

    def loss(values: dict[str, Tensor], one: Tensor) -> Tensor:
        return torch.func.functional_call(mixer, values, (one,)).square().sum()

    expected = torch.stack([mixer(one) for one in x])
    torch.testing.assert_close(torch.func.vmap(mixer)(x), expected, rtol=1e-4, atol=1e-5)
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    for row, one in enumerate(x if parameters else x[:0]):
        wanted = torch.autograd.grad(loss(parameters, one), list(parameters.values()))
        for (key, got), want in zip(gradients.items(), wanted, strict=True):
            torch.testing.assert_close(got[row], want, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", sorted({*NAMES} - {*PLAIN}))
def test_where_torch_func_does_not_work_the_error_says_why(name: str) -> None:
    mixer, x = build(name).eval(), torch.randn(3, B, T, D)
    for transform in (torch.func.vmap(mixer), torch.func.grad(lambda all_x: mixer(all_x[0]).sum())):
        with pytest.raises(RuntimeError, match=r"cannot go through transforms of torch\.func .* is written by hand"):
            transform(x)


def test_a_mixer_without_device_and_dtype_is_moved() -> None:
    @contract.register_mixer("plain")
    class Plain(nn.Module):
        def __init__(self, d_model: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(d_model))

    config = LMConfig(d_model=D, mixers=("plain",))
    assert build_mixer(config, 0, dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    assert build_mixer(config, 0, device="meta").weight.device.type == "meta"
    assert build_mixer(config, 0).weight.dtype == torch.float32
