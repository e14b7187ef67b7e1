"""A user's own mixer in a model: what it returns, whether it looks ahead, and what it declares."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rebased.mixers import MixerFailed, ShortConv, register_mixer
from rebased.models import LanguageModel, LMConfig, check_causality, preset, preset_names

VOCAB, B, T, D = 50, 2, 13, 24


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def model_with(forward: Callable[[Any, Tensor], Any], **methods: Any) -> LanguageModel:
    """A model whose second layer is a mixer called "own" with this forward."""

    class Own(nn.Module):
        def __init__(self, d_model: int) -> None:
            super().__init__()
            self.proj = nn.Linear(d_model, d_model)
            self.register_buffer("calls", torch.zeros(()))

    Own.forward = forward
    for name, method in methods.items():
        setattr(Own, name, method)
    register_mixer("own")(Own)
    return LanguageModel(LMConfig(vocab_size=VOCAB, d_model=D, max_len=16, mixers=("short_conv", "own"), mlp_ratio=2))


def tokens() -> Tensor:
    return torch.randint(VOCAB, (B, T))


WRONG: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "tuple": (lambda self, x: (x, None), r"returned a tuple; forward must return one tensor of x's shape \[B, T, D\]"),
    "none": (lambda self, x: None, "returned a NoneType; forward must return one tensor"),
    "length": (lambda self, x: x[:, 1:], r"returned the shape \[\d, \d+, 24\]; forward must return x's shape"),
    "broadcast": (lambda self, x: x[:1, :1], r"returned the shape \[1, 1, 24\]"),
    "dtype": (lambda self, x: x.double(), "returned torch.float64; forward must return x's dtype, torch.float32"),
    "device": (lambda self, x: x.to("meta"), "returned a tensor on meta; x is on cpu"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_output_is_named_as_the_mixers(fault: str) -> None:
    forward, message = WRONG[fault]
    model = model_with(forward)
    named = rf"mixer 'own' \(class \S*Own of \S*test_user_mixers\.py\) {message}"
    with pytest.raises(ValueError, match=named):
        model(tokens())
    with pytest.raises(ValueError, match=named):
        model.loss(tokens(), tokens())
    with pytest.raises(ValueError, match=named):
        check_causality(model)


def test_packed_documents_and_extend_are_checked_too() -> None:
    state = {
        "init_state": lambda self, batch, **_: torch.zeros(batch),
        "state_size": lambda self, seq_len: 1,
        "extend": lambda self, x, state: x,
    }
    model = model_with(lambda self, x: (x,), **state)
    with pytest.raises(ValueError, match=r"mixer 'own' .* returned a tuple; forward must return"):
        model.hidden(tokens(), torch.tensor([0, 4, T, B * T]))
    with pytest.raises(ValueError, match=r"mixer 'own' .* returned a Tensor; extend must return \(y, state\)"):
        model.extend(tokens(), model.init_state(B))
    model = model_with(lambda self, x: x, forward_documents=lambda self, x, cu_seqlens: x.flatten(0, 1))
    with pytest.raises(ValueError, match=r"returned the shape \[26, 24\]; forward_documents must return x's shape"):
        model.hidden(tokens(), torch.tensor([0, 4, T, B * T]))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_under_autocast_a_mixer_may_return_another_float() -> None:
    model = model_with(lambda self, x: x.cumsum(1, dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.hidden(tokens()).shape == (B, T, D)


def shifted(self: Any, x: Tensor) -> Tensor:
    return self.proj(torch.cat([x[:, 1:], x[:, :1]], dim=1))


def odd_positions(self: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1:-1:2] += x[:, 2::2][:, : y[:, 1:-1:2].shape[1]]
    return y


LOOKS_AHEAD: dict[str, Callable[[Any, Tensor], Any]] = {
    "mean": lambda self, x: x - x.mean(1, keepdim=True),
    "next": shifted,
    "odd positions": odd_positions,
    "softmax": lambda self, x: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "a little": lambda self, x: x + 1e-2 * x.flip(1),
    "last": lambda self, x: self.proj(x[:, -1:]) + x,
    "nan": lambda self, x: torch.where(x[:, -1:] > 0, torch.nan, x),
}


@pytest.mark.parametrize("leak", LOOKS_AHEAD)
def test_a_mixer_that_looks_ahead_is_named(leak: str) -> None:
    model = model_with(LOOKS_AHEAD[leak])
    with pytest.raises(ValueError, match=r"mixer 'own' \(class .* looks ahead: its output at position \d+ changes by"):
        check_causality(model)


def test_a_mixer_that_changes_its_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"mixer 'own' \(class .* changes its input x in place"):
        check_causality(model_with(lambda self, x: x.add_(1)))


CAUSAL: dict[str, Callable[[Any, Tensor], Any]] = {
    "sum": lambda self, x: self.proj(x.cumsum(1)),
    "nan": lambda self, x: torch.full_like(x, torch.nan),
    "nan at first": lambda self, x: torch.cat([torch.full_like(x[:, :1], torch.nan), x[:, 1:]], dim=1),
    "infinite": lambda self, x: torch.full_like(x, torch.inf),
    "zero": lambda self, x: 0 * x,
    "noise": lambda self, x: x + torch.randn_like(x),
}


@pytest.mark.parametrize("kind", CAUSAL)
def test_a_causal_mixer_passes(kind: str) -> None:
    check_causality(model_with(CAUSAL[kind]))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_passes(name: str) -> None:
    check_causality(LanguageModel(preset(name, d_model=96, vocab_size=VOCAB, max_len=40)))


def test_one_token_has_nothing_to_look_at() -> None:
    check_causality(LanguageModel(LMConfig(vocab_size=VOCAB, d_model=D, max_len=1, mixers=("attention",))))


def test_the_check_leaves_everything_as_it_is() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        return self.proj(x) + torch.rand_like(x)

    model = model_with(forward)
    model.blocks[0].eval()  # a model that is partly in eval mode
    modes = [module.training for module in model.modules()]
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    check_causality(model)
    assert torch.equal(torch.get_rng_state(), stream)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_error_inside_a_users_mixer_is_named() -> None:
    model = model_with(lambda self, x: self.proj(x.flatten(1)))
    with pytest.raises(
        ValueError, match=r"mixer 'own' .* failed at x \[1, 16, 24\] in torch.float32 \(line \d+\): RuntimeError: mat1"
    ):
        check_causality(model)


def fail(*_: Any) -> int:
    raise KeyError("width")


FAILED = r"mixer 'own' \(class \S*Own of \S*test_user_mixers\.py\) failed in {} \(line \d+\): KeyError: 'width'"


def test_an_error_while_a_users_mixer_is_built_is_named() -> None:
    @register_mixer("own")
    class Own(nn.Module):
        def __init__(self, d_model: int) -> None:
            super().__init__()
            if d_model == 96:
                raise AssertionError
            fail()

    with pytest.raises(MixerFailed, match=FAILED.format("its constructor")) as caught:
        LanguageModel(LMConfig(d_model=D, mixers=("own",), n_layers=1))
    assert f"(line {fail.__code__.co_firstlineno + 1})" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(MixerFailed, match=r"failed in its constructor \(line \d+\): AssertionError$"):
        LanguageModel(LMConfig(d_model=96, mixers=("own",), n_layers=1))


def test_errors_of_our_own_mixers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShortConv, "init_weights", fail, raising=False)
    with pytest.raises(KeyError):
        LanguageModel(LMConfig(d_model=D, mixers=("short_conv",), n_layers=1))
    monkeypatch.setattr(ShortConv, "__init__", fail)
    with pytest.raises(TypeError, match="fail"):
        LanguageModel(LMConfig(d_model=D, mixers=("short_conv",), n_layers=1))


@pytest.mark.parametrize("size", [-1, 2.5, 3.0, math.nan, None, "12"])
def test_a_state_size_that_counts_nothing_is_named(size: Any) -> None:
    model = model_with(lambda self, x: x, state_size=lambda self, seq_len: size)
    with pytest.raises(ValueError, match=rf"mixer 'own' .* returned {size!r} from state_size\(7\); it must return how"):
        model.state_size(7)


@pytest.mark.parametrize("method", ["init_weights", "state_size"])
def test_an_error_in_a_method_of_a_users_mixer_is_named(method: str) -> None:
    with pytest.raises(MixerFailed, match=FAILED.format(method)):
        model_with(lambda self, x: x, **{method: fail}).state_size(7)


def test_an_error_during_generation_is_named() -> None:
    sound = {
        "state_size": lambda self, seq_len: 1,
        "init_state": lambda self, batch: torch.zeros(batch, 1),
        "extend": lambda self, x, state: (x, state),
    }

    def generate(**methods: Any) -> None:
        model_with(lambda self, x: x, **(sound | methods)).eval().generate(torch.tensor([[1, 2]]), max_tokens=3)

    generate()
    with pytest.raises(MixerFailed, match=FAILED.format("init_state")):
        generate(init_state=fail)
    with pytest.raises(MixerFailed, match=FAILED.format(r"extend at x \[1, \d, 24\] in torch.float32")):
        generate(extend=fail)
    shapes = r"\[\[1, 7\]\], and init_state makes \[\[1, 1\]\]; by state_size it does not grow"
    with pytest.raises(
        ValueError, match=rf"mixer 'own' .*: extend returned a state with tensors of the shapes {shapes}"
    ):
        generate(extend=lambda self, x, state: (x, torch.ones(1, 7) if x.shape[1] == 1 else state))


@pytest.mark.parametrize(
    ("declared", "scaled"),
    [
        (None, {"out_proj", "inner.fc2"}),
        ((), set()),
        (("proj",), {"proj"}),
        (("inner.fc2", "proj"), {"inner.fc2", "proj"}),
        ("proj", {"proj"}),
    ],
)
def test_residual_projections_are_declared(declared: Any, scaled: set[str]) -> None:
    @register_mixer("own")
    class Own(nn.Module):
        def __init__(self, d_model: int) -> None:
            super().__init__()
            self.proj, self.out_proj = (nn.Linear(d_model, d_model) for _ in range(2))
            self.inner = nn.ModuleDict({"fc2": nn.Linear(d_model, d_model)})

    if declared is not None:
        Own.residual_projections = declared
    n_layers = 8
    model = LanguageModel(LMConfig(vocab_size=VOCAB, d_model=96, n_layers=n_layers, mixers=("own",), mlp_ratio=1))
    small = 0.02 / math.sqrt(2 * n_layers)
    for name in ("proj", "out_proj", "inner.fc2"):
        std = float(model.blocks[3].mixer.get_submodule(name).weight.detach().std())
        assert std == pytest.approx(small if name in scaled else 0.02, rel=0.1), name
    assert float(model.blocks[3].mlp.fc2.weight.detach().std()) == pytest.approx(small, rel=0.1)


def test_a_projection_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"mixer 'own' .* 'output' is no nn.Linear of it; .* \['proj'\]"):
        model_with(lambda self, x: x, residual_projections=("output",))
