"""Polynomial attention's kernels on real hardware: real sizes, every dtype, compiled, captured, and never NaN."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ops.polynomial_cases import check_packed_extend
from polynomial_inputs import Shape
from rebased.kernels.verify_cases import REGIMES, Regime, forced
from rebased.mixers import mixer_class
from rebased.ops import (
    BASED,
    REBASED,
    Coefficients,
    PolyState,
    init_poly_state,
    poly_attention,
    poly_attention_extend,
)
from tolerances import KERNEL_ERRORS, assert_small_error, relative_error

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAMES = ("o", "dq", "dk", "dv")


def made(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> list[Tensor]:
    """q, k, v, do [B,T,H,*] on the GPU; the first three want gradients."""
    B, T, H, K, V = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    tensors = [scale * torch.randn(B, T, H, w, generator=generator, device="cuda") for w in (K, K, V, V)]
    return [x.to(dtype).requires_grad_(i < 3) for i, x in enumerate(tensors)]


def exact(tensors: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]


def attend(tensors: list[Tensor], coefficients: Coefficients = REBASED, backend: str = "triton") -> list[Tensor]:
    """o, dq, dk, dv."""
    q, k, v, do = tensors
    o = poly_attention(q, k, v, coefficients=coefficients, backend=backend)  # type: ignore[arg-type]
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def law(tensors: list[Tensor], coefficients: Coefficients = REBASED) -> list[Tensor]:
    return attend(exact(tensors), coefficients, "chunked" if tensors[0].shape[1] > 2048 else "reference")


@pytest.fixture(params=REGIMES)
def regime(request: pytest.FixtureRequest) -> Iterator[Regime]:
    with forced(request.param):
        yield request.param


CASES = [  # every dtype, every length, width and coefficient once: each line is a dozen kernels to compile
    (torch.bfloat16, REBASED, (2, 256, 3, 16, 64)),
    (torch.bfloat16, REBASED, (1, 4096, 2, 16, 64)),
    (torch.bfloat16, BASED, (1, 1000, 2, 16, 42)),
    (torch.bfloat16, REBASED, (2, 256, 12, 16, 2)),  # MQAR's: 12 heads share a narrow model
    (torch.bfloat16, BASED, (2, 2048, 12, 16, 5)),
    (torch.bfloat16, REBASED, (2, 1000, 2, 64, 5)),
    (torch.bfloat16, REBASED, (1, 1024, 2, 40, 64)),  # an odd number of feature blocks, in groups of two
    (torch.bfloat16, BASED, (1, 256, 2, 128, 96)),
    (torch.bfloat16, REBASED, (2, 512, 3, 16, 10)),
    (torch.bfloat16, REBASED, (1, 2048, 3, 16, 21)),
    (torch.bfloat16, REBASED, (1, 1000, 2, 64, 21)),
    (torch.bfloat16, REBASED, (1, 2000, 2, 32, 64)),
    (torch.bfloat16, REBASED, (1, 2048, 2, 16, 128)),
    (torch.bfloat16, BASED, (1, 9000, 2, 16, 42)),  # so long that features are summed as two numbers
    (torch.float16, BASED, (2, 1000, 3, 16, 64)),
    (torch.float16, REBASED, (1, 256, 2, 64, 42)),
    (torch.float32, REBASED, (1, 4096, 2, 16, 64)),
    (torch.float32, BASED, (2, 1000, 3, 16, 5)),
    (torch.float32, REBASED, (1, 256, 2, 128, 96)),
]


@pytest.mark.parametrize(("dtype", "coefficients", "shape"), CASES, ids=str)
def test_values_and_gradients(
    dtype: torch.dtype, coefficients: Coefficients, shape: tuple[int, ...], regime: Regime
) -> None:
    tensors = made(*shape, dtype=dtype)
    got = attend(tensors, coefficients)
    assert all(x.dtype == dtype for x in got)
    assert_small_error(got, law(tensors, coefficients), NAMES, dtype)


def test_long_sequences() -> None:
    """65,536 tokens of one row: many chunks, offsets that grow."""
    tensors = made(1, 65_536, 2, 16, 64, dtype=torch.bfloat16)
    assert_small_error(attend(tensors), law(tensors), NAMES, torch.bfloat16)


@pytest.mark.parametrize("lengths", [[300], [1] * 4, [299, 1], [100, 1, 700, 199]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "widths"), [(torch.bfloat16, (16, 64)), (torch.float16, (16, 42)), (torch.float32, (64, 5))], ids=str
)
def test_prefill_and_decode(dtype: torch.dtype, widths: tuple[int, int], lengths: list[int]) -> None:
    """extend at any split, with a state in and out, and gradients through both."""
    B, H, (K, V) = 2, 3, widths
    tensors = made(B, sum(lengths), H, K, V, dtype=dtype)
    past = made(B, 9, H, K, V, dtype=torch.float32, seed=1)
    results = []
    for inputs, backend in ((tensors, "triton"), (exact(tensors), "reference")):
        q, k, v, do = inputs
        empty = init_poly_state(B, H, K, V, BASED, device="cuda", dtype=torch.float64)
        _, start = poly_attention_extend(*exact(past)[:3], empty, coefficients=BASED, backend="reference")
        wide = torch.float64 if backend == "reference" else torch.float32
        before = state = PolyState(*(x.detach().to(wide).requires_grad_() for x in start))
        outputs = []
        for piece in zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True):
            o, state = poly_attention_extend(*piece, state, coefficients=BASED, backend=backend)  # type: ignore[arg-type]
            outputs.append(o)
        o = torch.cat(outputs, dim=1)
        generator = torch.Generator("cuda").manual_seed(2)
        d_state = [torch.randn(x.shape, generator=generator, device="cuda").to(x.dtype) for x in state]
        gradients = torch.autograd.grad((o, *state), (q, k, v, *before), (do, *d_state))
        results.append([o.detach(), *(x.detach() for x in state), *gradients])
    assert results[0][1].dtype == torch.float32
    assert_small_error(*results, ("o", "kv", "z", "dq", "dk", "dv", "d kv", "d z"), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_documents(dtype: torch.dtype, regime: Regime) -> None:
    bounds = [0, 1, 1, 300, 301, 1500, 2000]
    tensors = made(1, 2000, 3, 16, 64, dtype=dtype)
    cu_seqlens = torch.tensor(bounds, device="cuda", dtype=torch.int32)
    results = []
    for inputs, backend in ((tensors, "triton"), (exact(tensors), "reference")):
        q, k, v, do = inputs
        o = poly_attention(q, k, v, coefficients=BASED, cu_seqlens=cu_seqlens, backend=backend)  # type: ignore[arg-type]
        results.append([o.detach(), *torch.autograd.grad(o, (q, k, v), do)])
    assert_small_error(*results, NAMES, dtype)


def test_packing_never_waits_for_the_gpu() -> None:
    q, k, v, do = made(1, 500, 2, 16, 64, dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 200, 500], device="cuda")
    poly_attention(q, k, v, coefficients=REBASED, cu_seqlens=cu_seqlens).backward(do)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        poly_attention(q, k, v, coefficients=REBASED, cu_seqlens=cu_seqlens).backward(do)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_strided_inputs() -> None:
    """Slices of one fused projection."""
    fused = torch.randn(2, 300, 3, 16 + 16 + 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    views = fused.split([16, 16, 64], dim=-1)
    contiguous = [x.detach().contiguous().requires_grad_() for x in views]
    o = poly_attention(*views, coefficients=REBASED)
    want = poly_attention(*contiguous, coefficients=REBASED)
    assert torch.equal(o, want)
    (got,) = torch.autograd.grad(o.sum(), fused)
    assert torch.equal(got, torch.cat(torch.autograd.grad(want.sum(), contiguous), dim=-1))


@pytest.mark.parametrize("T", [300, 3000])
def test_compiles_as_one_graph(T: int) -> None:
    q, k, v, do = made(2, T, 2, 16, 64, dtype=torch.bfloat16)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return poly_attention(q, k, v, coefficients=REBASED)

    results = []
    for run in (attention, torch.compile(attention, fullgraph=True)):
        o = run(q, k, v)
        results.append([o.detach(), *torch.autograd.grad(o, (q, k, v), do)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_mixer_compiles_as_one_graph() -> None:
    torch.manual_seed(0)
    mixer = mixer_class("rebased")(d_model=768).cuda()
    x = torch.randn(2, 1500, 768, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        want, got = (run(x).float() for run in (mixer, torch.compile(mixer, fullgraph=True)))
    assert relative_error(got, want) < KERNEL_ERRORS[torch.bfloat16]


def test_decoding_compiles_as_one_graph() -> None:
    q, k, v, _ = (x.detach() for x in made(2, 1, 2, 16, 64, dtype=torch.bfloat16))
    state = PolyState(*(x.normal_() for x in init_poly_state(2, 2, 16, 64, REBASED, device="cuda")))

    def step(q: Tensor, k: Tensor, v: Tensor, state: PolyState) -> tuple[Tensor, PolyState]:
        return poly_attention_extend(q, k, v, state, coefficients=REBASED)

    (o, after), (want, want_after) = torch.compile(step, fullgraph=True)(q, k, v, state), step(q, k, v, state)
    assert_small_error((o, *after), (want, *want_after), ("o", "kv", "z"), torch.bfloat16)


@pytest.mark.parametrize("T", [300, 3000])
def test_captured_in_a_cuda_graph(T: int) -> None:
    """Replayed over new numbers, forward and backward."""
    tensors = made(2, T, 2, 16, 64, dtype=torch.bfloat16)
    attend(tensors)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(tensors)
    other = made(2, T, 2, 16, 64, dtype=torch.bfloat16, seed=5)
    with torch.no_grad():
        for mine, new in zip(tensors, other, strict=True):
            mine.copy_(new)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, attend(other), strict=True))


def test_decoding_captured_in_a_cuda_graph() -> None:
    q, k, v, _ = (x.detach() for x in made(2, 1, 2, 16, 64, dtype=torch.bfloat16))
    state = PolyState(*(x.normal_() for x in init_poly_state(2, 2, 16, 64, REBASED, device="cuda")))
    want = poly_attention_extend(q, k, v, state, coefficients=REBASED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = poly_attention_extend(q, k, v, state, coefficients=REBASED)
    graph.replay()
    for a, b in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
        assert torch.equal(a, b)


def softmax(tensors: list[Tensor]) -> list[Tensor]:
    """As attend, of torch's own attention."""
    q, k, v, do = tensors
    o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    return [o.detach(), *torch.autograd.grad(o, (q, k, v), do)]


def gradient_errors(got: list[list[Tensor]], want: list[list[Tensor]]) -> list[float]:
    """Of dq, dk and dv, over several draws."""
    stacked = (map(torch.stack, zip(*draws, strict=True)) for draws in (got, want))
    return [relative_error(a, b) for a, b in zip(*stacked, strict=True)][1:]


def softmax_law(tensors: list[Tensor], rows: int = 512) -> list[Tensor]:
    """The same in fp64, some queries at a time: all at once would not fit."""
    q, k, v, do = (x.detach().double().transpose(1, 2) for x in tensors)
    scale = q.shape[-1] ** -0.5
    o, dq, dk, dv = (torch.zeros_like(x) for x in (v, q, k, v))
    for i in range(0, q.shape[2], rows):
        here, seen = slice(i, i + rows), slice(0, i + rows)
        scores = scale * q[:, :, here] @ k[:, :, seen].mT
        ahead = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(i + 1)
        weights = scores.masked_fill_(ahead, -torch.inf).softmax(-1)
        o[:, :, here] = weights @ v[:, :, seen]
        slopes = do[:, :, here] @ v[:, :, seen].mT
        slopes = weights * (slopes - (do[:, :, here] * o[:, :, here]).sum(-1, keepdim=True))
        dq[:, :, here] = scale * slopes @ k[:, :, seen]
        dk[:, :, seen] += scale * slopes.mT @ q[:, :, here]
        dv[:, :, seen] += weights.mT @ do[:, :, here]
    return [x.transpose(1, 2) for x in (o, dq, dk, dv)]


@pytest.mark.parametrize(
    ("T", "K"),
    [(256, 16), (1024, 16), (4096, 16), (32_768, 16), (1024, 32), (8192, 32), (1024, 64), (16_384, 64)],
)
def test_gradient_errors_in_bf16_are_no_larger_than_those_of_softmax_attention(T: int, K: int) -> None:
    """On inputs of the same scale, in the regime that the cost model chooses; 36 heads, since a few decide."""
    draws = [made(1, T, 12, K, 64, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    ours = gradient_errors([attend(x) for x in draws], [law(x) for x in draws])
    draws = [made(1, T, 12, 64, 64, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    theirs = gradient_errors([softmax(x) for x in draws], [softmax_law(x) for x in draws])
    for name, mine, other in zip(NAMES[1:], ours, theirs, strict=True):
        assert mine <= other, f"{name}: {mine:.3e}, SDPA's {other:.3e}"


@pytest.mark.parametrize("K", [16, 64])
@pytest.mark.parametrize("scale", [1.0, 10.0])
def test_gradient_errors_in_either_regime(scale: float, K: int, regime: Regime) -> None:
    """At scale 1, whatever the cost model would choose, at most 1.3 times those of softmax attention; at 10, where it
    saturates, no larger in dq and dk. A softmax that picks one value has no error in dv to speak of."""
    q, k, v, do = made(2, 1000, 4, K, 64, dtype=torch.bfloat16)
    tensors = [*((scale * x).detach().requires_grad_() for x in (q, k)), v, do]
    ours = gradient_errors([attend(tensors)], [law(tensors)])
    theirs = gradient_errors([softmax(tensors)], [softmax(exact(tensors))])
    names, more = (NAMES[1:], 1.3) if scale == 1 else (("dq", "dk"), 1.0)
    for name, mine, other in zip(names, ours, theirs, strict=False):
        assert mine <= more * other, f"{name}: {mine:.2e}, SDPA's {other:.2e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("coefficients", [REBASED, BASED], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 100.0])
def test_no_nan_at_any_scale(scale: float, coefficients: Coefficients, dtype: torch.dtype, regime: Regime) -> None:
    for x in attend(made(1, 1000, 2, 16, 64, dtype=dtype, scale=scale), coefficients):
        assert not x.isnan().any()


def test_zeros_give_zeros(regime: Regime) -> None:
    tensors = [
        torch.zeros_like(x).requires_grad_(x.requires_grad) for x in made(1, 600, 2, 16, 64, dtype=torch.bfloat16)
    ]
    assert all(torch.equal(x, torch.zeros_like(x)) for x in attend(tensors))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_inputs_same_bits(dtype: torch.dtype, regime: Regime) -> None:
    tensors = made(2, 1000, 3, 16, 64, dtype=dtype)
    first = attend(tensors, BASED)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, attend(tensors, BASED), strict=True))


@pytest.mark.parametrize(("K", "V"), [(16, 5), (16, 64), (128, 64)])
def test_fp32_is_exact_until_torch_allows_tf32(K: int, V: int, regime: Regime) -> None:
    tensors = made(1, 1000, 2, K, V, dtype=torch.float32)
    want = law(tensors)
    assert torch.get_float32_matmul_precision() == "highest"
    assert_small_error(attend(tensors), want, NAMES, torch.float32)
    torch.set_float32_matmul_precision("high")
    try:
        errors = [relative_error(a, b) for a, b in zip(attend(tensors), want, strict=True)]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert all(error < KERNEL_ERRORS[torch.float16] for error in errors), errors  # which has as many digits
    assert max(errors) > KERNEL_ERRORS[torch.float32], "TF32 was allowed and not used"


def test_auto_is_triton_and_leaves_fp64_to_the_chunked_path() -> None:
    q, k, v, _ = made(1, 64, 2, 16, 64, dtype=torch.float32)
    results = [poly_attention(q, k, v, coefficients=REBASED, backend=name) for name in ("auto", "triton")]
    assert torch.equal(*results)
    q, k, v, _ = exact(made(1, 64, 2, 16, 64, dtype=torch.float32))
    assert torch.equal(*(poly_attention(q, k, v, coefficients=REBASED, backend=name) for name in ("auto", "chunked")))
    with pytest.raises(ValueError, match="float64"):
        poly_attention(q, k, v, coefficients=REBASED, backend="triton")


def test_a_state_on_another_device() -> None:
    q, k, v, _ = made(1, 3, 2, 16, 64, dtype=torch.float32)
    with pytest.raises(ValueError, match="state is on cpu and the inputs are on cuda"):
        poly_attention_extend(q, k, v, init_poly_state(1, 2, 16, 64, REBASED), coefficients=REBASED)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_nan_stays_in_its_row_head_and_document(which: int, dtype: torch.dtype, regime: Regime) -> None:
    """Of earlier tokens it reaches those of its own tile of 64 alone, counted from the document's first token."""
    q, k, v, _ = (x.detach() for x in made(2, 300, 2, 16, 32, dtype=dtype))
    (q, k, v)[which][0, 200, 1, 3] = torch.nan
    o = poly_attention(q, k, v, coefficients=REBASED, backend="triton")
    assert o[1].isfinite().all()
    assert o[0, :, 0].isfinite().all()
    assert o[0, :192].isfinite().all()
    assert not o[0, 200, 1].isfinite().all()
    cu_seqlens = torch.tensor([0, 150, 198, 230, 300], device="cuda")
    packed = poly_attention(q[:1], k[:1], v[:1], coefficients=REBASED, cu_seqlens=cu_seqlens, backend="triton")
    assert packed[0, :198].isfinite().all()
    assert packed[0, 230:].isfinite().all()
    assert packed[0, :, 0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bounds", [[0, 1, 3, 70, 400], [0, 2000, 4096], [*range(0, 1025, 16)]], ids=str)
def test_packed_documents_follow_states(bounds: list[int], dtype: torch.dtype) -> None:
    shape = Shape(B=1, T=bounds[-1], H=3, K=16, V=64)
    check_packed_extend(shape, bounds, REBASED, dtype, "triton", device="cuda")
