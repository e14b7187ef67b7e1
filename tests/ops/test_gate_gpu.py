"""The gate in polynomial attention's kernels on real hardware: real sizes, every dtype, both regimes, long memories."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.test_polynomial_gpu import made
from rebased.kernels.verify_cases import REGIMES, Regime, forced
from rebased.mixers import mixer_class
from rebased.ops import BASED, REBASED, Coefficients, PolyState, init_poly_state, poly_attention, poly_attention_extend
from tolerances import assert_small_change, assert_small_error, changed

pytestmark = pytest.mark.gpu
NAMES = ("o", "dq", "dk", "dv", "dg")
CASES = [
    (torch.bfloat16, REBASED, (2, 256, 3, 16, 64)),
    (torch.bfloat16, REBASED, (1, 4096, 2, 16, 64)),
    (torch.bfloat16, BASED, (1, 1000, 2, 16, 42)),
    (torch.bfloat16, REBASED, (2, 1000, 2, 64, 5)),
    (torch.bfloat16, BASED, (1, 512, 2, 128, 96)),
    (torch.bfloat16, REBASED, (1, 9000, 2, 16, 64)),  # so long that features are summed as two numbers
    (torch.float16, BASED, (2, 1000, 3, 16, 64)),
    (torch.float32, REBASED, (1, 2048, 2, 16, 64)),
    (torch.float32, BASED, (2, 700, 3, 24, 5)),
]


@pytest.fixture(params=REGIMES)
def regime(request: pytest.FixtureRequest) -> Iterator[Regime]:
    with forced(request.param):
        yield request.param


def decays(B: int, T: int, H: int, strength: float) -> Tensor:
    """From none to e^-strength per token; if that is strong, some of e^-1000 and some of none."""
    numbers = -strength * torch.rand(B, T, H, generator=torch.Generator("cuda").manual_seed(3), device="cuda")
    if strength > 10:
        numbers[:, ::7], numbers[:, 3::31] = 0, -1000
    return numbers.requires_grad_()


def attend(tensors: list[Tensor], g: Tensor, coefficients: Coefficients, **options: Any) -> list[Tensor]:
    q, k, v, do = tensors
    o = poly_attention(q, k, v, coefficients=coefficients, log_decay=g, **options)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v, g), do)]


def law(tensors: list[Tensor], g: Tensor, coefficients: Coefficients, **options: Any) -> list[Tensor]:
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in (*tensors, g)]
    return attend(wide[:4], wide[4], coefficients, backend="chunked", **options)


@pytest.mark.parametrize("strength", [0.0, 0.002, 0.2, 50.0])
@pytest.mark.parametrize(("dtype", "coefficients", "shape"), CASES, ids=str)
def test_values_and_gradients(
    dtype: torch.dtype, coefficients: Coefficients, shape: tuple[int, ...], strength: float, regime: Regime
) -> None:
    tensors, g = made(*shape, dtype=dtype), decays(*shape[:3], strength)
    got = attend(tensors, g, coefficients, backend="triton")
    with torch.no_grad():
        moved = [changed(x.double(), dtype).requires_grad_(x.requires_grad) for x in tensors]
    # a strong decay leaves a query one key: o is its value, and dq is what is left of terms that cancel
    assert_small_change(got, law(tensors, g, coefficients), law(moved, g, coefficients), NAMES, dtype)


def test_long_sequences() -> None:
    """65,536 tokens: no sum of decays runs over the sequence."""
    tensors, g = made(1, 65_536, 2, 16, 64, dtype=torch.bfloat16), decays(1, 65_536, 2, 1.6)
    got = attend(tensors, g, REBASED, backend="triton")
    assert_small_error(got, law(tensors, g, REBASED), NAMES, torch.bfloat16)


def test_packed_documents(regime: Regime) -> None:
    cuts = torch.tensor([0, 1, 1, 300, 301, 1500, 2000], device="cuda")
    tensors, g = made(1, 2000, 3, 16, 64, dtype=torch.bfloat16), decays(1, 2000, 3, 0.02)
    got = attend(tensors, g, REBASED, backend="triton", cu_seqlens=cuts)
    assert_small_error(got, law(tensors, g, REBASED, cu_seqlens=cuts), NAMES, torch.bfloat16)


def test_states_in_and_out_and_decoding() -> None:
    """A prompt, three tokens, and one by one without gradients, against fp64."""
    q, k, v, _ = made(2, 300, 3, 16, 64, dtype=torch.float32)
    g, results = decays(2, 300, 3, 0.05), []
    for wide in (torch.float32, torch.float64):
        state, outputs = init_poly_state(2, 3, 16, 64, BASED, device="cuda", dtype=wide), []
        with torch.no_grad():
            for piece in zip(*(x.to(wide).split([290, 7, 1, 1, 1], dim=1) for x in (q, k, v, g)), strict=True):
                backend: Any = "triton" if wide == torch.float32 else "reference"
                o, state = poly_attention_extend(
                    *piece[:3], state, coefficients=BASED, log_decay=piece[3], backend=backend
                )
                outputs.append(o)
        results.append([torch.cat(outputs, dim=1), *PolyState(*state)])
    assert_small_error(*results, ("o", "kv", "z"), torch.float32)


@pytest.mark.parametrize("K", [1, 3, 5])
@pytest.mark.parametrize("V", [20, 24, 28])
def test_gradients_of_one_token_in_tf32(K: int, V: int) -> None:
    """After a state. Its kernel has a tile of its own: with another one it ends with "misaligned address"."""
    tensors = [*made(1, 10, 2, K, V, dtype=torch.float32), decays(1, 10, 2, 0.05)]

    def run(given: list[Tensor], backend: Any) -> list[Tensor]:
        q, k, v, do, g = (x.detach().requires_grad_() for x in given)
        state = init_poly_state(1, 2, K, V, BASED, device="cuda", dtype=q.dtype)
        for at in (slice(0, 9), slice(9, 10)):
            o, state = poly_attention_extend(
                q[:, at], k[:, at], v[:, at], state, coefficients=BASED, log_decay=g[:, at], backend=backend
            )
        return [o.detach(), *torch.autograd.grad(o, (q, k, v, g), do[:, 9:])]

    wide = [x.double() for x in tensors]
    want, moved = (run(x, "reference") for x in (wide, [changed(x, torch.float16) for x in wide]))
    torch.set_float32_matmul_precision("high")
    try:
        got = run(tensors, "triton")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert_small_change(got, want, moved, NAMES, torch.float16)


@pytest.mark.parametrize("name", ["gated_rebased", "gated_based"])
def test_a_compiled_mixer_is_the_mixer(name: str) -> None:
    torch.manual_seed(0)
    mixer = mixer_class(name)(64, n_heads=4, device="cuda")
    x = torch.randn(2, 300, 64, device="cuda", requires_grad=True)
    compiled = torch.compile(mixer)
    got, want = (torch.autograd.grad(each(x).square().sum(), (x, *mixer.parameters())) for each in (compiled, mixer))
    assert_small_error(got, want, ("dx", *dict(mixer.named_parameters())), torch.float16)
