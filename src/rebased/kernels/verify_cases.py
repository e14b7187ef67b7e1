"""The calls that `verify` computes: what a user meets of every operator, in usual and in unusual widths."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from rebased.ops import (
    BASED,
    REBASED,
    Backend,
    Coefficients,
    Norm,
    PolyState,
    advance_slots_,
    best_tokens,
    delta_attention,
    delta_attention_extend_,
    delta_coefficients,
    embed,
    embed_step,
    feature_count,
    gated_conv_step_,
    layer_norm,
    linear_cross_entropy,
    linear_layer_norm,
    linear_step,
    mlp_step,
    poly_attention,
    poly_attention_at,
    poly_attention_extend,
    poly_attention_extend_,
    poly_state,
    poly_step_,
    rms_norm,
    selective_scan,
    short_conv,
    token_shift,
    use_backend,
    wkv,
)

Regime = Literal["quadratic", "chunked"]
REGIMES: tuple[Regime, ...] = ("quadratic", "chunked")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTHS = ((16, 64), (16, 5), (24, 10), (32, 64), (64, 64), (128, 128))
"""K and V of polynomial attention."""
HEADS = 3
"""No other axis of a case has this size: so heads are found."""
ROWS = 5  # sequences of a decoding step
PAST = 40  # tokens that a state has seen
TILE = 128  # tokens that are summed before their sums are


Drawn = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Data, which are rounded to the dtype of a case unless they are integers; and what is never in half precision: states,
and the weights of norms and scans."""


class Case(NamedTuple):
    """A call of an operator. Tensors are drawn in fp64 on the CPU, so they are the same on every machine."""

    operator: str
    dtype: torch.dtype
    widths: str
    T: int
    draw: Callable[[Generator], Drawn]
    compute: Callable[..., dict[str, Tensor]]
    """(all of these, by name) -> results by name, with backend="auto". What it overwrites, it copies before."""
    sums: tuple[int, ...]
    """Lengths of the sums that follow each other."""
    products: bool = False
    """True if matrices are multiplied, so that torch may allow TF32."""
    gradients: bool = True
    """True if results are differentiated by all that is drawn."""
    key_value_width: tuple[int, int] | None = None
    """K and V, if the self-check may exchange the tiles of this call for safe ones."""
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    """What surrounds the call."""


@contextmanager
def forced(regime: Regime) -> Iterator[None]:
    """Within the block all calls of the kernels take one regime, backward passes included.

    The tiles are those that the plan has for this regime. A call with a state is always chunked.
    """
    from rebased.ops.polynomial.gpu import plan
    from rebased.ops.polynomial.gpu.call import make_call

    cost = plan.chunked_cost
    plan.chunked_cost = lambda *_: inf if regime == "quadratic" else 0.0
    make_call.cache_clear()  # no plan of before or of this block is taken for the other
    try:
        yield
    finally:
        plan.chunked_cost = cost
        make_call.cache_clear()


def gpu_cases() -> Iterator[Case]:
    """For the kernels. Not all widths in every dtype and regime: a call takes one to four seconds to compile."""
    for K, V in WIDTHS:
        for dtype in (BF16, FP16, FP32):
            for regime in REGIMES:
                if regime == "quadratic" or dtype == BF16 or K == 16:
                    T = 256 if regime == "quadratic" else 1024
                    yield _attention(f"poly_attention {regime}", dtype, K, V, T, within=partial(forced, regime))
    yield _attention("poly_attention Based", BF16, 16, 64, 256, BASED)
    for dtype in (BF16, FP32):
        yield _attention("poly_attention packed", dtype, 16, 64, 1024, bounds=[0, 1, 300, 301, 1024])
        yield _at(dtype, 16, 64, 256)
        yield _extend(dtype, 16, 64, 300)
        yield _decode(dtype, 16, 64)
        yield _decode(dtype, 24, 10)
        yield from _other_operators(dtype, 300)


def torch_cases() -> Iterator[Case]:
    """For plain torch, on any device."""
    paths: tuple[tuple[Backend, int], ...] = (("chunked", 256), ("recurrent", 64))
    for dtype in (BF16, FP32):
        for K, V in WIDTHS:
            for path, T in paths[: 2 if K < 32 else 1]:
                yield _attention(f"poly_attention {path}", dtype, K, V, T, within=partial(use_backend, path))
        yield _attention("poly_attention packed", dtype, 16, 64, 256, bounds=[0, 1, 130, 131, 256])
        yield _at(dtype, 16, 64, 256)
        yield _extend(dtype, 16, 64, 200)
        yield _decode(dtype, 16, 64)
        yield from _other_operators(dtype, 100)


def _randn(generator: Generator, *shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def _draw_qkv(generator: Generator, B: int, T: int, K: int, V: int) -> dict[str, Tensor]:
    """Each query contains its own key: no sum of similarities is near zero, where the exact gradients would move by
    far more than one rounding of the inputs."""
    k = _randn(generator, B, T, HEADS, K)
    return {"q": k + _randn(generator, B, T, HEADS, K), "k": k, "v": _randn(generator, B, T, HEADS, V)}


def _draw_state(generator: Generator, B: int, K: int, V: int, coefficients: Coefficients) -> dict[str, Tensor]:
    past = _draw_qkv(generator, B, PAST, K, V)
    return poly_state(past["k"], past["v"], coefficients=coefficients)._asdict()


def _sums(K: int, T: int, coefficients: Coefficients = REBASED) -> tuple[int, ...]:
    """Of polynomial attention: a score, tokens of a tile, tiles, features."""
    return K, min(T, TILE), -(-T // TILE), feature_count(K, coefficients)


def _attention(
    operator: str, dtype: torch.dtype, K: int, V: int, T: int, coefficients: Coefficients = REBASED,
    bounds: list[int] | None = None, **options: Any,
) -> Case:  # fmt: skip
    """Two sequences; or with `bounds` packed documents, which begin there."""

    def compute(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32, device=q.device)
        return {"o": poly_attention(q, k, v, coefficients=coefficients, cu_seqlens=cu_seqlens)}

    return Case(
        operator, dtype, f"K {K} V {V}", T, lambda generator: (_draw_qkv(generator, 1 if bounds else 2, T, K, V), {}),
        compute, _sums(K, T, coefficients), products=True, key_value_width=(K, V), **options,
    )  # fmt: skip


def _at(dtype: torch.dtype, K: int, V: int, T: int, n: int = 32) -> Case:
    def draw(generator: Generator) -> Drawn:
        data = _draw_qkv(generator, 2, T, K, V)
        positions = torch.randperm(T, generator=generator)[:n]
        return data | {"q": data["q"][:, positions], "positions": positions.expand(2, n).contiguous()}, {}

    def compute(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> dict[str, Tensor]:
        return {"o": poly_attention_at(q, k, v, positions, coefficients=REBASED)}

    sums = _sums(K, T)
    return Case(
        "poly_attention_at", dtype, f"K {K} V {V}", T, draw, compute, sums, products=True, key_value_width=(K, V)
    )


def _extend(dtype: torch.dtype, K: int, V: int, T: int) -> Case:
    def draw(generator: Generator) -> Drawn:
        return _draw_qkv(generator, 2, T, K, V), _draw_state(generator, 2, K, V, REBASED)

    def compute(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> dict[str, Tensor]:
        o, after = poly_attention_extend(q, k, v, PolyState(kv, z), coefficients=REBASED)
        return {"o": o, **after._asdict()}

    sums = _sums(K, T)
    return Case(
        "poly_attention_extend", dtype, f"K {K} V {V}", T, draw, compute, sums, products=True, key_value_width=(K, V)
    )


def _decode(dtype: torch.dtype, K: int, V: int) -> Case:
    def draw(generator: Generator) -> Drawn:
        return _draw_qkv(generator, ROWS, 1, K, V), _draw_state(generator, ROWS, K, V, REBASED)

    def compute(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, z: Tensor) -> dict[str, Tensor]:
        state = PolyState(kv.clone(), z.clone())
        return {"o": poly_attention_extend_(q, k, v, state, coefficients=REBASED), **state._asdict()}

    return Case("poly_attention_extend_", dtype, f"K {K} V {V}", 1, draw, compute, _sums(K, 1), gradients=False)


def _other_operators(dtype: torch.dtype, T: int) -> Iterator[Case]:
    for activation in (None, "silu"):
        yield _short_conv(dtype, T, 48, activation)
    yield _token_shift(dtype, T, 48)
    yield _norm("layer_norm", dtype, 4 * T, 64)
    yield _norm("rms_norm", dtype, T, 768)
    yield _linear_layer_norm(dtype, T, 64, 192)
    yield _cross_entropy(dtype, T, 64, 1000)
    yield _cross_entropy(dtype, T, 512, 1000)
    yield _embed(dtype, T, 64)
    yield _wkv(dtype, T, 48)
    yield _scan(dtype, T, 48, 16)
    for gate in (False, True):
        yield _delta(dtype, 2, 16, 64, T, gate)
        yield _delta(dtype, 1, 32, 64, T, gate)
        yield _delta_step(dtype, 2, 16, 64, gate)
    yield _linear_step(dtype, 1, 256, 512)
    yield _linear_step(dtype, 16, 256, 512)
    yield _mlp_step(dtype, 256)
    yield _gated_conv_step(dtype, 256)
    yield _poly_step(dtype, 16, 64)
    yield _embed_step(dtype, 256)
    yield _best_tokens(dtype, 1000)
    yield _advance_slots(dtype, 1000)


def _short_conv(dtype: torch.dtype, T: int, D: int, activation: Any, taps: int = 4) -> Case:
    def draw(generator: Generator) -> Drawn:
        parameters = {"weight": _randn(generator, D, taps), "bias": _randn(generator, D)}
        return {"x": _randn(generator, 2, T, D)}, parameters

    def compute(x: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
        return {"y": short_conv(x, weight, bias, activation=activation)}

    name = f"short_conv{' silu' if activation else ''}"
    return Case(name, dtype, f"D {D}", T, draw, compute, (taps, *_tokens(2 * T)))


def _tokens(count: int) -> tuple[int, int]:
    """The lengths of a sum over tokens: within a tile, over tiles."""
    return min(count, TILE), -(-count // TILE)


def _token_shift(dtype: torch.dtype, T: int, D: int) -> Case:
    def draw(generator: Generator) -> Drawn:
        mixes = torch.rand(4, D, generator=generator, dtype=torch.float64)
        return {"x": _randn(generator, 2, T, D), "last": _randn(generator, 2, D)}, {"mixes": mixes}

    def compute(x: Tensor, last: Tensor, mixes: Tensor) -> dict[str, Tensor]:
        return {"y": torch.stack(token_shift(x, last, mixes))}

    return Case("token_shift", dtype, f"D {D}", T, draw, compute, _tokens(2 * T))


def _norm(operator: str, dtype: torch.dtype, rows: int, D: int) -> Case:
    def draw(generator: Generator) -> Drawn:
        parameters = {"weight": _randn(generator, D), "bias": _randn(generator, D)}
        if operator == "rms_norm":
            del parameters["bias"]
        return {"x": 1 + _randn(generator, rows, D)}, parameters

    def compute(x: Tensor, **parameters: Any) -> dict[str, Tensor]:
        return {"y": layer_norm(x, **parameters) if operator == "layer_norm" else rms_norm(x, **parameters)}

    return Case(operator, dtype, f"D {D}", rows, draw, compute, (D, D, *_tokens(rows)))


def _linear_layer_norm(dtype: torch.dtype, rows: int, D: int, N: int) -> Case:
    def draw(generator: Generator) -> Drawn:
        data = {"x": _randn(generator, rows, D), "projection": _randn(generator, N, D, scale=D**-0.5)}
        return data, {"weight": _randn(generator, N), "bias": _randn(generator, N)}

    def compute(x: Tensor, projection: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
        return {"y": linear_layer_norm(x, projection, weight, bias)}

    sums = (D, N, N, *_tokens(rows))
    return Case("linear_layer_norm", dtype, f"D {D} N {N}", rows, draw, compute, sums, products=True)


def _cross_entropy(dtype: torch.dtype, rows: int, D: int, vocab: int) -> Case:
    def draw(generator: Generator) -> Drawn:
        targets = torch.randint(vocab, (rows,), generator=generator)
        targets[1::3] = -100
        weight = _randn(generator, vocab, D, scale=D**-0.5)
        return {"hidden": _randn(generator, rows, D), "weight": weight, "targets": targets}, {}

    def compute(hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": linear_cross_entropy(hidden, weight, targets)}

    sums = (D, vocab, *_tokens(rows))
    return Case("linear_cross_entropy", dtype, f"D {D}", rows, draw, compute, sums, products=True)


def _embed(dtype: torch.dtype, T: int, D: int, vocab: int = 100) -> Case:
    def draw(generator: Generator) -> Drawn:
        tokens = torch.randint(vocab, (2, T), generator=generator)
        tokens[torch.rand(2, T, generator=generator) < 0.5] = 0  # filler
        table = {"weight": _randn(generator, vocab, D), "positions": _randn(generator, T, D)}
        return {"tokens": tokens, **table}, {}

    def compute(tokens: Tensor, weight: Tensor, positions: Tensor) -> dict[str, Tensor]:
        return {"y": embed(tokens, weight, positions)}

    return Case("embed", dtype, f"D {D}", T, draw, compute, _tokens(2 * T))


def _wkv(dtype: torch.dtype, T: int, D: int) -> Case:
    def draw(generator: Generator) -> Drawn:
        w = torch.linspace(-6, 4, D, dtype=torch.float64)
        data = {"k": _randn(generator, 2, T, D), "v": _randn(generator, 2, T, D)}
        return data, {"w": w, "u": _randn(generator, D)}

    def compute(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> dict[str, Tensor]:
        return {"y": wkv(k, v, w, u)}

    return Case("wkv", dtype, f"D {D}", T, draw, compute, (T, *_tokens(2 * T)))


def _scan(dtype: torch.dtype, T: int, D: int, N: int) -> Case:
    def draw(generator: Generator) -> Drawn:
        widths = {"x": D, "dt": D, "B": N, "C": N, "gate": D}
        A = -0.01 - 4 * torch.rand(D, N, generator=generator, dtype=torch.float64)
        parameters = {"A": A, "skip": _randn(generator, D), "dt_bias": _randn(generator, D) - 1}
        return {name: _randn(generator, 2, T, width) for name, width in widths.items()}, parameters

    def compute(**given: Any) -> dict[str, Tensor]:
        return {"y": selective_scan(**given)}

    return Case("selective_scan", dtype, f"D {D} N {N}", T, draw, compute, (N, T, *_tokens(2 * T)))


def _delta(dtype: torch.dtype, degree: Any, K: int, V: int, T: int, gate: bool) -> Case:
    def draw(generator: Generator) -> Drawn:
        given = _draw_qkv(generator, 2, T, K, V)
        given["beta"] = 2 * torch.rand(2, T, HEADS, generator=generator, dtype=torch.float64)
        decay = -torch.rand(2, T, HEADS, generator=generator, dtype=torch.float64)
        return given, {"log_decay": decay} if gate else {}

    def compute(**given: Any) -> dict[str, Tensor]:
        return {"o": delta_attention(**given, degree=degree)}

    name = f"delta_attention {degree}{' gate' if gate else ''}"
    sums = (K, *_tokens(T), 64, feature_count(K, delta_coefficients(degree, K)))  # 64: tokens of a triangular system
    return Case(name, dtype, f"K {K} V {V}", T, draw, compute, sums, products=True)


def _delta_step(dtype: torch.dtype, degree: Any, K: int, V: int, gate: bool) -> Case:
    def draw(generator: Generator) -> Drawn:
        given = {name: x.transpose(0, 1) for name, x in _draw_qkv(generator, 1, ROWS, K, V).items()}
        given["beta"] = 2 * torch.rand(ROWS, 1, HEADS, generator=generator, dtype=torch.float64)
        state = _randn(generator, ROWS, HEADS, feature_count(K, delta_coefficients(degree, K)), V)
        decay = -torch.rand(ROWS, 1, HEADS, generator=generator, dtype=torch.float64)
        return given, {"state": state} | ({"log_decay": decay} if gate else {})

    def compute(state: Tensor, **given: Any) -> dict[str, Tensor]:
        after = state.clone()
        return {"o": delta_attention_extend_(**given, state=after, degree=degree), "state": after}

    name = f"delta step {degree}{' gate' if gate else ''}"
    sums = (K, feature_count(K, delta_coefficients(degree, K)))
    return Case(name, dtype, f"K {K} V {V}", 1, draw, compute, sums, gradients=False)


def _linear_step(dtype: torch.dtype, rows: int, D: int, N: int) -> Case:
    def draw(generator: Generator) -> Drawn:
        data = {"x": 1 + _randn(generator, rows, D), "weight": _randn(generator, N, D, scale=D**-0.5)}
        return data | {"bias": _randn(generator, N), **_draw_norm(generator, D)}, {}

    def compute(x: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor) -> dict[str, Tensor]:
        return {"y": linear_step(x, weight, bias, norm=Norm(gamma, beta, 1e-5, "layer"), gelu=True)}

    return _step("linear_step", dtype, f"D {D} N {N}", rows, draw, compute, (D, D, D))


def _draw_norm(generator: Generator, D: int) -> dict[str, Tensor]:
    return {"gamma": 1 + _randn(generator, D, scale=0.3), "beta": _randn(generator, D)}


def _step(operator: str, dtype: torch.dtype, widths: str, rows: int, draw: Any, compute: Any, sums: Any) -> Case:
    """A step of decoding: one token of some sequences."""
    return Case(operator, dtype, f"{widths} x{rows}", 1, draw, compute, sums, products=True, gradients=False)


def _mlp_step(dtype: torch.dtype, D: int) -> Case:
    N = 4 * D

    def draw(generator: Generator) -> Drawn:
        data = {"x": 1 + _randn(generator, ROWS, D), **_draw_norm(generator, D)}
        data |= {"weight1": _randn(generator, N, D, scale=D**-0.5), "bias1": _randn(generator, N)}
        return data | {"weight2": _randn(generator, D, N, scale=N**-0.5), "bias2": _randn(generator, D)}, {}

    def compute(x: Tensor, gamma: Tensor, beta: Tensor, **weights: Any) -> dict[str, Tensor]:
        return {"y": mlp_step(x.clone(), Norm(gamma, beta, 1e-5, "layer"), **weights)}

    return _step("mlp_step", dtype, f"D {D}", ROWS, draw, compute, (D, D, D, N))


def _gated_conv_step(dtype: torch.dtype, D: int, taps: int = 4) -> Case:
    def draw(generator: Generator) -> Drawn:
        data = {"x": 1 + _randn(generator, ROWS, D), **_draw_norm(generator, D)}
        data |= {"weight": _randn(generator, D, D, scale=D**-0.5), "bias": _randn(generator, D)}
        data |= {"taps": _randn(generator, D, taps, scale=taps**-0.5), "taps_bias": _randn(generator, D)}
        return data | {"state": _randn(generator, ROWS, taps - 1, D)}, {}

    def compute(x: Tensor, gamma: Tensor, beta: Tensor, state: Tensor, **weights: Any) -> dict[str, Tensor]:
        after = state.clone()
        return {"y": gated_conv_step_(x, Norm(gamma, beta, 1e-5, "layer"), **weights, state=after), "state": after}

    return _step("gated_conv_step_", dtype, f"D {D}", ROWS, draw, compute, (D, D, D, taps))


def _poly_step(dtype: torch.dtype, K: int, V: int) -> Case:
    def draw(generator: Generator) -> Drawn:
        data = {"qkv": _randn(generator, ROWS, HEADS * (2 * K + V)), **_draw_norm(generator, HEADS * K)}
        return data, _draw_state(generator, ROWS, K, V, REBASED)

    def compute(qkv: Tensor, gamma: Tensor, beta: Tensor, kv: Tensor, z: Tensor) -> dict[str, Tensor]:
        norm, state = Norm(gamma, beta, 1e-5, "layer"), PolyState(kv.clone(), z.clone())
        o = poly_step_(
            qkv, state, norm, norm, heads=HEADS, key_width=K, joint=True, coefficients=REBASED, scale=K**-0.5, eps=1e-12
        )
        return {"o": o.unflatten(-1, (HEADS, V)), **state._asdict()}

    return _step("poly_step_", dtype, f"K {K} V {V}", ROWS, draw, compute, (HEADS * K, HEADS * K, *_sums(K, 1)))


def _embed_step(dtype: torch.dtype, D: int, vocab: int = 100) -> Case:
    def draw(generator: Generator) -> Drawn:
        numbers = {name: torch.randint(vocab, (ROWS,), generator=generator) for name in ("tokens", "lengths")}
        return numbers | {name: _randn(generator, vocab, D) for name in ("table", "positions")}, {}

    def compute(**given: Any) -> dict[str, Tensor]:
        return {"y": embed_step(**given)}

    return _step("embed_step", dtype, f"D {D}", ROWS, draw, compute, (1,))


def _draw_logits(generator: Generator, vocab: int) -> dict[str, Tensor]:
    seen = torch.rand(ROWS, vocab, generator=generator) < 0.5
    return {"logits": _randn(generator, ROWS, vocab, scale=3.0), "seen": seen}


def _best_tokens(dtype: torch.dtype, vocab: int) -> Case:
    def draw(generator: Generator) -> Drawn:
        penalty = 1 + torch.rand(ROWS, generator=generator, dtype=torch.float64)
        return _draw_logits(generator, vocab), {"penalty": penalty}

    def compute(logits: Tensor, seen: Tensor, penalty: Tensor) -> dict[str, Tensor]:
        return dict(zip(("tokens", "log_sums"), best_tokens(logits, seen, penalty), strict=True))

    return _step("best_tokens", dtype, f"vocab {vocab}", ROWS, draw, compute, (vocab,))


def _advance_slots(dtype: torch.dtype, vocab: int) -> Case:
    def draw(generator: Generator) -> Drawn:
        data = {**_draw_logits(generator, vocab), "active": torch.arange(ROWS) % 3 != 2}
        numbers = ("chosen", "tokens", "lengths", "drawn")
        data |= {name: torch.randint(vocab, (ROWS,), generator=generator) for name in numbers}
        return data, {"log_sums": data["logits"].logsumexp(-1)}

    def compute(chosen: Tensor, logits: Tensor, log_sums: Tensor, active: Tensor, **slots: Any) -> dict[str, Tensor]:
        slots = {name: x.clone() for name, x in slots.items()}
        return {"logprobs": advance_slots_(chosen, logits, log_sums, active, **slots), **slots}

    return _step("advance_slots_", dtype, f"vocab {vocab}", ROWS, draw, compute, (1,))
