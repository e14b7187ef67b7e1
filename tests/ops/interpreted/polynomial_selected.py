"""Kernels of some queries only, against attention of all of them in fp64: odd shapes, gradients, memory that starts as
NaN; and a layer of a model that takes this way."""

import pytest
import torch

from ops.polynomial_cases import NAMES, at, attend_at, some_positions, tensors
from polynomial_inputs import Shape
from rebased.mixers import ReBased, mixer_class
from rebased.models import LanguageModel, LMConfig
from rebased.ops import BASED, REBASED, Coefficients, poly_attention_at
from tolerances import assert_near, assert_small_error

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.recorded("polynomial")]


@pytest.mark.parametrize(
    ("shape", "n", "coefficients", "dtype"),
    [
        (Shape(B=2, T=70, H=2, K=16, V=2), 5, REBASED, torch.float32),
        (Shape(B=1, T=64, H=1, K=16, V=5), 64, BASED, torch.float32),
        (Shape(B=1, T=130, H=1, K=17, V=16), 33, REBASED, torch.float32),  # no column is left for the sum
        (Shape(B=1, T=3, H=1, K=1, V=1), 1, BASED, torch.float32),
        (Shape(B=2, T=5, H=1, K=5, V=3), 70, (0.3, -0.2, 0.7), torch.float32),  # more queries than tokens
        (Shape(B=1, T=100, H=1, K=16, V=10), 40, REBASED, torch.float16),
    ],
    ids=str,
)
def test_values_and_gradients(shape: Shape, n: int, coefficients: Coefficients, dtype: torch.dtype) -> None:
    given, exact = tensors(shape, coefficients, dtype)
    positions = some_positions(shape.B, n, shape.T)
    results = [attend_at(x, positions, coefficients, "triton") for x in (given, exact)]
    assert_small_error(*results, NAMES, dtype)


def test_wide_values_and_any_strides() -> None:
    """Values of more than 128 columns are computed in two calls; rows may be views."""
    shape = Shape(B=1, T=20, H=2, K=3, V=130)
    given, exact = tensors(shape, REBASED, torch.float32)
    given = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(x.requires_grad) for x in given]
    positions = some_positions(1, 7, 20)
    assert_small_error(*(attend_at(x, positions, REBASED, "triton") for x in (given, exact)), NAMES, torch.float32)


def test_keys_after_a_query_do_not_count() -> None:
    (q, k, v, _), _ = tensors(Shape(B=1, T=80, H=1, K=16, V=4), REBASED, torch.float32)
    positions = torch.tensor([[0, 40, 79]])
    outputs = []
    for change in (0.0, 1.0):
        with torch.no_grad():
            k[:, 41:] += change
            v[:, 41:] += change
            outputs.append(poly_attention_at(at(q, positions), k, v, positions, coefficients=REBASED, backend="triton"))
    assert torch.equal(outputs[0][:, :2], outputs[1][:, :2])
    assert not torch.equal(outputs[0][:, 2], outputs[1][:, 2])


@pytest.mark.parametrize("mixer", ["rebased", "based"])
def test_a_mixer_at_some_positions(mixer: str) -> None:
    torch.manual_seed(0)
    layer = mixer_class(mixer)(d_model=8, n_heads=2, key_width=4, backend="triton")
    x, positions = torch.randn(2, 40, 8, requires_grad=True), some_positions(2, 6, 40)
    assert layer.attends_at(x, 6)
    assert not layer.attends_at(x, 40)
    weights = [x, *layer.parameters()]
    some = layer.forward_at(x, positions)
    every = layer(x).gather(1, positions[:, :, None].expand(-1, -1, 8))
    assert_near(some, every, 8, 40, 8, condition=4)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), weights) for y in (some, every)), strict=True):
        assert_near(a, b, 8, 40, 8, 80, condition=16)


def test_a_model_leaves_out_what_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    spec = {"name": "rebased", "n_heads": 2, "key_width": 4, "backend": "triton"}
    config = LMConfig(vocab_size=16, d_model=8, n_layers=1, max_len=40, mlp_ratio=0, embed_dropout=0, mixers=[spec])
    model = LanguageModel(config)
    tokens, positions = torch.randint(16, (2, 40)), some_positions(2, 6, 40)
    called = []
    way = ReBased.forward_at
    monkeypatch.setattr(ReBased, "forward_at", lambda *given: called.append(1) or way(*given))
    some = model.hidden_at(tokens, positions)
    assert called
    every = model.hidden(tokens).gather(1, positions[:, :, None].expand(-1, -1, 8)).flatten(0, 1)
    assert_near(some, every, 8, 40, 8, condition=16)
    model.blocks[-1].mixer.register_forward_hook(lambda *_: None)  # whoever listens to a mixer hears all of it
    assert not model.blocks[-1].mixer.attends_at(torch.zeros(2, 40, 8), 6)
