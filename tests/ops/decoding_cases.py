"""Inputs of a decoding step's functions, and the plain torch path in fp64 as the law. One row is poisoned with NaN."""

from typing import Any

import torch
from torch import Tensor

from rebased.ops import (
    BASED,
    REBASED,
    Backend,
    Coefficients,
    Norm,
    NormKind,
    PolyState,
    advance_slots_,
    best_tokens,
    embed_step,
    feature_count,
    gated_conv_step_,
    linear_step,
    mlp_step,
    poly_state,
    poly_step_,
)
from tolerances import FIRST_TOKEN, assert_near

LINEAR = [  # rows, features, columns, norm, gelu, residual, bias
    (1, 40, 24, "layer", True, False, True),
    (1, 1100, 9, None, False, True, True),
    (3, 48, 40, "layer", True, False, True),
    (3, 300, 17, None, False, True, True),
    (16, 64, 33, "rms", False, True, False),
    (70, 24, 40, "layer", True, False, True),  # by torch
    (70, 24, 40, None, False, True, True),
]
LARGE_LINEAR = [
    (1, 768, 768, "layer", False, False, True),
    (1, 33, 4100, "rms", False, False, False),
    (1, 768, 50_304, "layer", False, False, False),
    (1, 3072, 768, None, False, True, True),
    (3, 768, 3072, "layer", True, False, True),
    (16, 3072, 768, None, False, True, True),
    (64, 768, 3072, "layer", True, False, True),
    (64, 3072, 768, None, False, True, True),
    (64, 768, 1152, "rms", False, False, False),
    (300, 768, 3072, "layer", True, False, True),
    (300, 3072, 768, None, False, True, True),
]
MLP = [(1, 24, 96, "layer"), (3, 40, 33, "rms"), (70, 24, 48, "layer"), (70, 33, 40, "rms")]
"""Rows, features, hidden features, norm."""
CONVOLUTION = [(1, 24, 3), (3, 40, 3), (3, 24, 1), (2, 33, 4), (70, 24, 3)]  # rows, features, taps
POLYNOMIAL: list[tuple[int, int, int, int, Coefficients, NormKind | None, bool, bool]] = [
    # rows, heads, K, V, coefficients, norm, joint, shared
    (1, 2, 16, 64, REBASED, "layer", True, False),
    (2, 2, 24, 40, REBASED, "layer", True, False),
    (3, 2, 5, 10, BASED, None, True, False),
    (2, 3, 16, 20, REBASED, "rms", False, False),
    (2, 3, 4, 16, BASED, "layer", False, True),
    (2, 1, 8, 16, REBASED, "none", True, False),
]
LARGE_POLYNOMIAL: list[Any] = [
    *((rows, 12, K, 64, REBASED, "layer", True, False) for rows in (1, 3, 64, 300) for K in (16, 24)),
    (3, 8, 128, 96, REBASED, "layer", True, False),
    (64, 12, 16, 64, BASED, None, True, False),
]
VOCABULARIES = [(1, 29), (3, 5000), (64, 300)]


def near(got: Tensor, want: Tensor, dtype: torch.dtype, *lengths: int, condition: float = 1.0) -> None:
    assert got.dtype == dtype
    assert_near(got.double(), want, *lengths, condition=condition, roundings=3, size=1.0, dtype=dtype)


def draw(*shape: int, dtype: torch.dtype, device: str, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, dtype=torch.float64)).to(dtype).to(device)


def double(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.double() if x.is_floating_point() else x.clone()
    return type(x)(*map(double, x)) if isinstance(x, tuple) and hasattr(x, "_fields") else x


def make_norm(kind: NormKind | None, width: int, dtype: torch.dtype, device: str) -> Norm | None:
    if kind is None:
        return None
    weight = 1 + draw(width, dtype=dtype, device=device, scale=0.3)
    return Norm(weight, None if kind == "rms" else draw(width, dtype=dtype, device=device), 1e-5, kind)


def check_linear(case: Any, dtype: torch.dtype, device: str, backend: Backend) -> None:
    rows, features, columns, kind, gelu, has_residual, has_bias = case
    torch.manual_seed(0)
    x = 1 + draw(rows, features, dtype=dtype, device=device)
    weight = draw(columns, features, dtype=dtype, device=device, scale=features**-0.5)
    bias = draw(columns, dtype=dtype, device=device) if has_bias else None
    residual = draw(rows, columns, dtype=dtype, device=device) if has_residual else None
    norm = make_norm(kind, features, dtype, device)
    if rows > 1:
        x[1] = torch.nan
    want = linear_step(*map(double, (x, weight, bias)), norm=double(norm), gelu=gelu, residual=double(residual))
    got = linear_step(x, weight, bias, norm=norm, gelu=gelu, residual=residual, backend=backend)
    kept = [row for row in range(rows) if row != 1]
    near(got[kept], want[kept], dtype, features, features, features, condition=2.0)
    assert rows == 1 or got[1].isnan().all()
    if not gelu and not has_bias and not has_residual:
        out = torch.full_like(got, torch.nan)
        assert linear_step(x, weight, norm=norm, out=out, backend=backend) is out
        assert torch.equal(out[kept], got[kept])


def check_mlp(case: Any, dtype: torch.dtype, device: str, backend: Backend) -> None:
    rows, features, hidden, kind = case
    torch.manual_seed(0)
    x = 1 + draw(rows, features, dtype=dtype, device=device)
    sizes = ((hidden, features), (features, hidden))
    weights = [draw(*size, dtype=dtype, device=device, scale=size[1] ** -0.5) for size in sizes]
    biases = [draw(size[0], dtype=dtype, device=device) for size in sizes]
    if rows > 1:
        x[1] = torch.nan
    given = (make_norm(kind, features, dtype, device), weights[0], biases[0], weights[1], biases[1])
    want = mlp_step(double(x), *map(double, given))
    got = mlp_step(x, *given, backend=backend)  # type: ignore[arg-type]
    kept = [row for row in range(rows) if row != 1]
    near(got[kept], want[kept], dtype, features, features, features, hidden, condition=2.0)
    assert rows == 1 or got[1].isnan().all()


def check_convolution(case: Any, dtype: torch.dtype, device: str, backend: Backend) -> None:
    rows, features, taps = case
    torch.manual_seed(0)
    weight = draw(features, features, dtype=dtype, device=device, scale=features**-0.5)
    bias, taps_bias = (draw(features, dtype=dtype, device=device) for _ in range(2))
    filters = draw(features, taps, dtype=dtype, device=device, scale=taps**-0.5)
    state = draw(rows, taps - 1, features, dtype=dtype, device=device)
    norm = make_norm("layer", features, dtype, device)
    assert norm is not None
    if rows > 1:
        state[1] = torch.nan
    exact = double(state)
    kept = [row for row in range(rows) if row != 1]
    for _ in range(taps + 1):  # the state moves on
        x = 1 + draw(rows, features, dtype=dtype, device=device)
        given = (norm, weight, bias, filters, taps_bias)
        got = gated_conv_step_(x, *given, state, backend=backend)
        want = gated_conv_step_(double(x), *map(double, given), exact)  # type: ignore[arg-type]
        near(got[kept], want[kept], dtype, features, features, taps, condition=8.0)
        near(state[kept], exact[kept], dtype, features, features, condition=2.0)


def check_polynomial(case: Any, dtype: torch.dtype, device: str, backend: Backend) -> None:
    rows, heads, K, V, coefficients, kind, joint, shared = case
    torch.manual_seed(0)
    F = feature_count(K, coefficients)
    past = draw(rows, 2 * K, heads, K + V, dtype=torch.float32, device=device)
    kv, z = poly_state(past[..., :K], past[..., K:], coefficients=coefficients)
    if rows > 1:
        kv[1], z[1] = torch.nan, torch.nan
    state, exact = PolyState(kv, z), PolyState(kv.double(), z.double())
    norms = [make_norm(kind, K if shared else heads * K, dtype, device) for _ in "qk"]
    kept = [row for row in range(rows) if row != 1]
    options = {"heads": heads, "key_width": K, "joint": joint, "coefficients": coefficients}
    options |= {"scale": K**-0.5, "eps": 1e-12}
    for g in (None, -torch.rand(rows, heads, device=device)):
        qkv = draw(rows, heads * (2 * K + V), dtype=dtype, device=device)
        got = poly_step_(qkv, state, *norms, **options, log_decay=g, backend=backend)
        want = poly_step_(double(qkv), exact, *map(double, norms), **options, log_decay=double(g))
        sums = (heads * K, heads * K, F)
        size = float(want[kept].abs().max())
        assert_near(got[kept].double(), want[kept], *sums, condition=FIRST_TOKEN, roundings=3, size=size, dtype=dtype)
        assert got.dtype == dtype
        assert rows == 1 or got[1].isnan().all()
        for ours, theirs in zip(state, exact, strict=True):
            assert_near(ours[kept].double(), theirs[kept], *sums, condition=2.0, roundings=3, dtype=dtype)


def check_embedding(dtype: torch.dtype, device: str, backend: Backend) -> None:
    torch.manual_seed(0)
    table, positions = (draw(11, 40, dtype=dtype, device=device) for _ in range(2))
    tokens = torch.tensor([0, 10, 3], device=device)
    lengths = torch.tensor([0, 10, 12], device=device)
    for some in (None, positions):
        got = embed_step(tokens, table, some, lengths, backend=backend)
        near(got, embed_step(tokens, double(table), double(some), lengths), dtype, 1)


def check_tokens(size: tuple[int, int], dtype: torch.dtype, device: str, backend: Backend) -> None:
    """The best tokens with and without a penalty, of several equal ones the first; then all that a slot remembers."""
    rows, vocab = size
    torch.manual_seed(0)
    logits = draw(rows, vocab, dtype=dtype, device=device, scale=3.0)
    logits[0, [7, 5, 20]] = 20.0
    seen = torch.rand(rows, vocab, device=device) < 0.5
    seen[0] = False
    penalty = 1 + torch.rand(rows, device=device)
    if rows > 1:
        logits[1, 17] = torch.nan
    chosen, log_sums = best_tokens(logits, seen, penalty, backend=backend)
    want, want_sums = best_tokens(logits.double(), seen, penalty.double())
    kept = [row for row in range(rows) if row != 1]
    assert chosen[0] == 5
    assert torch.equal(chosen[kept], want[kept])
    assert_near(log_sums[kept].double(), want_sums[kept], vocab, size=20.0, dtype=torch.float32)
    assert ((chosen >= 0) & (chosen < vocab)).all()
    assert rows == 1 or log_sums[1].isnan()
    active = torch.arange(rows, device=device) % 3 != 2
    numbers = [torch.randint(100, (rows,), device=device) for _ in range(3)]
    ours = [*(each.clone() for each in numbers), seen.clone()]
    theirs = [*(each.clone() for each in numbers), seen.clone()]
    logprobs = advance_slots_(chosen, logits, log_sums, active, *ours, backend=backend)
    wanted = advance_slots_(chosen, logits.double(), log_sums.double(), active, *theirs)
    assert_near(logprobs[kept].double(), wanted[kept], 1, size=20.0, dtype=torch.float32)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
    assert seen.sum() <= ours[3].sum()
    everything = torch.full_like(logits, -torch.inf)
    assert best_tokens(everything, seen, penalty, backend=backend)[0].tolist() == [0] * rows
