"""Mamba against its equations and against the one of `transformers`: values, gradients, steps; and how it starts."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.mixers import RWKV, Mamba
from rebased.models import LanguageModel, LMConfig, preset
from rebased.models.block import Block
from tolerances import assert_near, limit

B, T, D = 2, 19, 24
SUMS = (D, 4, 16, T, 2 * D) * 2
"""Of two layers: the first projection, the short convolution, states, tokens, the last projection."""


@pytest.fixture(scope="module")
def theirs() -> Any:
    """Return two layers whose weights are large enough to matter and keep softplus away from its linear ends."""
    transformers = pytest.importorskip("transformers")  # there after `make test-all`
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=8, hidden_size=D, num_hidden_layers=2, time_step_rank=math.ceil(D / 16)
    )
    model = transformers.MambaModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.2 * torch.randn_like(parameter) if "norm" not in name else 0.1)
    return model


@pytest.fixture(scope="module")
def ours(theirs: Any) -> list[Block]:
    """Return our blocks with the weights of theirs. Names in the mixers are the same; their `norm` is our `norm1`."""
    config = LMConfig(d_model=D, mixers=("mamba",), block="mamba")
    blocks = [Block(config, layer) for layer in range(2)]
    for block, layer in zip(blocks, theirs.layers, strict=True):
        block.mixer.load_state_dict(layer.mixer.state_dict())
        block.norm1.load_state_dict(layer.norm.state_dict())
    return blocks


def run(blocks: list[Block], x: Tensor, norm: nn.Module) -> Tensor:
    for block in blocks:
        x = block(x)
    return norm(x)


def equations(mixer: Mamba, x: Tensor) -> Tensor:
    """Mamba as its paper writes it, one token at a time: [B,T,D] -> [B,T,D]."""
    u, gate = mixer.in_proj(x).chunk(2, dim=-1)  # [B,T,E]
    taps = mixer.conv1d.weight.shape[2]
    window = functional.pad(u, (0, 0, taps - 1, 0)).unfold(1, taps, 1)  # [B,T,E,taps]
    u = functional.silu((window * mixer.conv1d.weight.squeeze(1)).sum(-1) + mixer.conv1d.bias)
    h, outputs = x.new_zeros(x.shape[0], u.shape[2], mixer.d_state), []  # [B,E,N]
    for t in range(x.shape[1]):
        low_rank, b, c = mixer.x_proj(u[:, t]).split([mixer.dt_rank, mixer.d_state, mixer.d_state], dim=-1)
        dt = functional.softplus(mixer.dt_proj(low_rank)).unsqueeze(-1)  # [B,E,1]
        h = torch.exp(-dt * mixer.A_log.exp()) * h + dt * u[:, t].unsqueeze(-1) * b.unsqueeze(1)
        outputs.append((h * c.unsqueeze(1)).sum(-1) + mixer.D * u[:, t])
    return mixer.out_proj(torch.stack(outputs, dim=1) * functional.silu(gate))


@pytest.mark.parametrize("arguments", [{}, {"d_state": 5, "d_conv": 3, "expand": 1}], ids=str)
def test_values_and_gradients_are_those_of_the_equations(arguments: dict[str, int]) -> None:
    torch.manual_seed(3)
    mixer = Mamba(D, **arguments).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    x = torch.randn(B, T, D, dtype=torch.float64, requires_grad=True)
    actual, expected = mixer(x), equations(mixer, x)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    weights, inputs = torch.randn_like(actual), (x, *mixer.parameters())
    got, wanted = (torch.autograd.grad((y * weights).sum(), inputs) for y in (actual, expected))
    for name, a, b in zip(("x", *(name for name, _ in mixer.named_parameters())), got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=name)


def assert_kernels_match(device: str, B: int = B) -> None:
    """Mamba with kernels against plain torch in fp64: forward, one token after others, documents; all gradients."""
    torch.manual_seed(4)
    mixer, x = Mamba(D, backend="triton").to(device), torch.randn(B, T, D, device=device)
    law = copy.deepcopy(mixer).double()
    law.backend = "chunked"
    documents = torch.tensor([0, 7, 8, B * T], device=device)
    for run in (lambda m, x: m(x), two_parts, lambda m, x: m.forward_documents(x, documents)):
        results = []
        for each, tokens in ((mixer, x), (law, x.double())):
            leaves = [tokens.requires_grad_(), *each.parameters()]
            y = run(each, tokens)
            results.append([y.detach(), *torch.autograd.grad((y * y.detach().cos()).sum(), leaves)])
        names = ("y", "x", *(name for name, _ in mixer.named_parameters()))
        for name, actual, expected in zip(names, *results, strict=True):
            assert_near(actual, expected, *SUMS[:5], B * T, condition=2, name=name)


def two_parts(mixer: Mamba, x: Tensor) -> Tensor:
    """All tokens but the last, then the last by itself."""
    first, state = mixer.extend(x[:, :-1], mixer.init_state(len(x)))
    return torch.cat([first, mixer.extend(x[:, -1:], state)[0]], dim=1)


@pytest.mark.gpu
def test_kernels_on_a_gpu() -> None:
    assert_kernels_match("cuda")


def test_values_and_gradients_are_those_of_transformers(theirs: Any, ours: list[Block]) -> None:
    torch.manual_seed(1)
    x, weights = torch.randn(B, T, D, requires_grad=True), torch.randn(B, T, D)
    expected, actual = theirs(inputs_embeds=x).last_hidden_state, run(ours, x, theirs.norm_f)
    assert_near(actual, expected, *SUMS)
    (dx,) = torch.autograd.grad((expected * weights).sum(), x, retain_graph=True)
    assert_near(torch.autograd.grad((actual * weights).sum(), x, retain_graph=True)[0], dx, *SUMS)
    for block, layer in zip(ours, theirs.layers, strict=True):
        names = [name for name, _ in layer.mixer.named_parameters()]
        mine = torch.autograd.grad((actual * weights).sum(), list(block.mixer.parameters()), retain_graph=True)
        named = dict(zip([name for name, _ in block.mixer.named_parameters()], mine, strict=True))
        other = torch.autograd.grad((expected * weights).sum(), list(layer.mixer.parameters()), retain_graph=True)
        for name, gradient in zip(names, other, strict=True):
            assert_near(named[name], gradient, *SUMS, B * T, name=name)


@torch.no_grad()
def test_steps_are_those_of_transformers(theirs: Any, ours: list[Block]) -> None:
    torch.manual_seed(2)
    x, cache = torch.randn(B, T, D), None
    states = [block.mixer.init_state(B) for block in ours]
    for piece in x.split([6] + [1] * (T - 6), dim=1):  # prefill, then one token per call
        out = theirs(inputs_embeds=piece, cache_params=cache, use_cache=True)
        cache, h = out.cache_params, piece
        for i, block in enumerate(ours):
            h, states[i] = block.extend(h, states[i])
        assert_near(theirs.norm_f(h), out.last_hidden_state, *SUMS)


def test_dt_starts_as_mambas_own_or_as_the_papers() -> None:
    """The config says which one a run used: `dt_init`."""
    torch.manual_seed(0)
    own = LanguageModel(preset("mamba", d_model=128)).blocks[1].mixer
    dt = functional.softplus(own.dt_proj.bias).detach()
    slack = limit(dt.dtype, 3, condition=7)  # softplus of its inverse, which is -7 to -2
    assert 1e-3 * (1 - slack) <= float(dt.min()) < 2e-3
    assert 5e-2 < float(dt.max()) <= 1e-1 * (1 + slack)
    logs = dt.log() - math.log(1e-3)  # uniform between 0 and log 100
    assert float(logs.mean()) == pytest.approx(math.log(100) / 2, rel=0.1)
    assert float(own.dt_proj.weight.detach().abs().max()) <= 8**-0.5
    config = LMConfig(d_model=128, mixers=({"name": "mamba", "dt_init": "paper"},), block="mamba")
    paper = LanguageModel(config).blocks[1].mixer
    assert not paper.dt_proj.bias.any()
    assert float(paper.dt_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert preset("mamba").mixers[0].arguments()["dt_init"] == "mamba"


def test_the_rest_of_the_start() -> None:
    torch.manual_seed(0)
    model = LanguageModel(preset("mamba", d_model=128))
    mixer = model.blocks[0].mixer
    assert torch.equal(mixer.A_log, torch.log(torch.arange(1.0, 17.0)).expand(256, 16))
    assert torch.equal(mixer.D, torch.ones(256))
    assert float(mixer.out_proj.weight.detach().std()) == pytest.approx(0.02 / 2, rel=0.05)  # sqrt(2 n_layers) = 2
    assert float(mixer.in_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert 0.4 < float(mixer.conv1d.weight.detach().abs().max()) <= 0.5  # torch's own: 1/sqrt(4)
    assert model.dropout.p == 0


def test_block_is_one_rms_norm_and_a_residual() -> None:
    torch.manual_seed(0)
    block = Block(LMConfig(d_model=D, mixers=("mamba",), block="mamba"), 0)
    x = torch.randn(B, T, D)
    normed = block.norm1.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    assert_near(block(x), x + block.mixer(normed), D, *SUMS[:5])
    assert {name for name, _ in block.named_parameters() if "norm" in name} == {"norm1.weight"}
    with pytest.raises(ValueError, match="Mamba's block has no MLP; set mlp_ratio to 0"):
        LMConfig(block="mamba", mlp_ratio=4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"d_state": 0}, "d_state 0 is out of range; choose 1 to 256"),
        ({"d_state": 257}, "d_state 257"),
        ({"d_conv": 0}, "d_conv 0 is out of range; choose 1 to 64"),
        ({"expand": 0}, "expand 0"),
        ({"dt_init": "zero"}, "dt_init 'zero' is unknown; choose 'mamba' or 'paper'"),
    ],
)
def test_bad_arguments_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mamba(D, **values)


def test_foreign_states_are_refused() -> None:
    mixer, x = Mamba(D), torch.randn(B, T, D)
    with pytest.raises(ValueError, match=r"must be a MambaState .* got RWKVState"):
        mixer.extend(x, RWKV(D, 0, 2).init_state(B))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"state \[2, 3, 48\]; got .* \[3, 3, 48\]"):
        mixer.extend(x, mixer.init_state(B + 1))
    with pytest.raises(ValueError, match=r"state is \[2, 48, 8\]; .* needs \[2, 48, 16\]"):
        mixer.extend(x, Mamba(D, d_state=8).init_state(B))
