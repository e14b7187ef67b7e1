"""Calls of all operators but polynomial attention that together launch every class of their kernels.

An operator here is a function that makes its inputs and a function of them. The same function of the same inputs in
fp64, which no kernel takes, is the law. `calls` are sizes and options in turn, not crossed; `reachable` sweeps wider.
"""

from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack
from functools import cache
from itertools import cycle, product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from kernels.classes import (
    ARITHMETICS,
    DTYPES,
    GUARD,
    Arithmetic,
    Launched,
    classes_of,
    cover,
    recorded_launches,
)
from rebased.ops import (
    Norm,
    PolyState,
    WKVState,
    advance_slots_,
    best_tokens,
    delta_attention_extend,
    delta_attention_extend_,
    embed,
    embed_step,
    gated_conv_step_,
    init_delta_state,
    layer_norm,
    linear_cross_entropy,
    linear_layer_norm,
    linear_step,
    mlp_step,
    poly_state,
    poly_step_,
    rms_norm,
    selective_scan_extend,
    short_conv_extend,
    token_shift,
    use_backend,
    wkv_extend,
)
from rebased.ops.backend import SMALLEST_SHARED_MEMORY
from rebased.ops.delta.gpu.operators import WIDEST_EXACT
from rebased.ops.polynomial.gpu.plan import LARGE

Inputs = dict[str, Tensor]
Run = Callable[[Inputs], Inputs]


class OperatorCall(NamedTuple):
    """A call of an operator."""

    op: str
    arithmetic: Arithmetic
    sizes: tuple[int, ...]
    options: tuple[str, ...] = ()


class Draw:
    """Makes inputs: normal numbers in guards of NaN, in the dtype of the call or in another."""

    def __init__(self, call: OperatorCall, device: str) -> None:
        self.dtype, self.device, self.made = DTYPES[call.arithmetic], device, Inputs()

    def __call__(
        self, name: str, *shape: int, scale: float = 1.0, shift: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        values = shift + scale * torch.randn(*shape)
        self.made[name] = self.guarded(values.to(self.device, dtype or self.dtype))

    def integers(self, name: str, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> None:
        self.made[name] = torch.randint(high, shape, dtype=dtype).to(self.device)

    def guarded(self, values: Tensor) -> Tensor:
        buffer = torch.full((values.numel() + 2 * GUARD,), torch.nan, device=values.device, dtype=values.dtype)
        return buffer[GUARD : GUARD + values.numel()].view(values.shape).copy_(values)


def norm(call: OperatorCall, draw: Draw) -> Run:
    rows, D = call.sizes
    out = next((DTYPES[each] for each in ("bf16", "fp16") if each in call.options), torch.float32)
    draw("x", rows, D, scale=2.0, shift=3.0)
    if "bare" not in call.options:
        draw("weight", D, dtype=torch.float32)
    if "bias" in call.options:
        draw("bias", D, dtype=torch.float32)

    def run(x: Inputs) -> Inputs:
        dtype = torch.float64 if x["x"].dtype == torch.float64 else out
        if "rms" in call.options:
            return {"y": rms_norm(x["x"], x.get("weight"), dtype=dtype)}
        residual = "residual" in call.options
        return {"y": layer_norm(x["x"], x.get("weight"), x.get("bias"), dtype=dtype, residual=residual)}

    return run


def linear_norm(call: OperatorCall, draw: Draw) -> Run:
    rows, D, N = call.sizes
    draw("x", rows, D)
    draw("projection", N, D)
    if "bare" not in call.options:
        draw("weight", N, dtype=torch.float32)
        draw("bias", N, dtype=torch.float32)
    return lambda x: {"y": linear_layer_norm(x["x"], x["projection"], x.get("weight"), x.get("bias"))}


def cross_entropy(call: OperatorCall, draw: Draw) -> Run:
    rows, D, vocab = call.sizes
    draw("hidden", rows, D)
    draw("weight", vocab, D, scale=D**-0.5)
    draw.integers("targets", vocab, rows)
    draw.made["targets"][1::3] = -100
    return lambda x: {"loss": linear_cross_entropy(x["hidden"], x["weight"], x["targets"])}


def embedding(call: OperatorCall, draw: Draw) -> Run:
    B, T, D, vocab = call.sizes
    draw("weight", vocab, D)
    draw.integers("tokens", vocab, B, T, dtype=torch.int32 if "int32" in call.options else torch.int64)
    if "positions" in call.options:
        draw("positions", T, D)
    return lambda x: {"y": embed(x["tokens"], x["weight"], x.get("positions"))}


def convolution(call: OperatorCall, draw: Draw) -> Run:
    B, T, D, W = call.sizes
    draw("x", B, T, 2 * D if "strided" in call.options else D)
    draw("weight", D, W, dtype=torch.float32)
    draw("state", B, W - 1, D)
    if "bias" in call.options:
        draw("bias", D, dtype=torch.float32)

    def run(x: Inputs) -> Inputs:
        activation: Any = "silu" if "silu" in call.options else None
        y, after = short_conv_extend(x["x"][..., :D], x["weight"], x.get("bias"), x["state"], activation=activation)
        return {"y": y, "after": after}

    return run


def shift(call: OperatorCall, draw: Draw) -> Run:
    B, T, D, M = call.sizes
    draw("x", B, T, D)
    draw("last", B, D)
    draw("mixes", M, D, scale=0.3, shift=0.5, dtype=torch.float32)
    return lambda x: {f"y{i}": y for i, y in enumerate(token_shift(x["x"], x["last"], x["mixes"]))}


def wkv(call: OperatorCall, draw: Draw) -> Run:
    B, T, D = call.sizes
    for name in ("k", "v"):
        draw(name, B, T, D)
    draw("w", D, scale=0.5, shift=-2.0, dtype=torch.float32)
    draw("u", D, dtype=torch.float32)
    draw("num", B, D, dtype=torch.float32)
    draw("den", B, D, scale=0.1, shift=2.0, dtype=torch.float32)

    def run(x: Inputs) -> Inputs:
        state = WKVState(x["num"], x["den"], torch.zeros_like(x["num"]))
        y, after = wkv_extend(x["k"], x["v"], x["w"], x["u"], state)
        return {"y": y, "mean": after.num / after.den, "size": after.max + torch.log(after.den)}

    return run


def scan(call: OperatorCall, draw: Draw) -> Run:
    B, T, D, N = call.sizes
    for name, width in (("x", D), ("dt", D), ("B", N), ("C", N)):
        draw(name, B, T, width)
    draw("A", D, N, dtype=torch.float32)
    draw("skip", D, dtype=torch.float32)
    draw("state", B, D, N, dtype=torch.float32)
    draw.made["A"] = -draw.made["A"].abs() - 0.1
    if "dt" in call.options:  # step sizes are given
        draw.made["dt"] = functional.softplus(draw.made["dt"])
    else:
        draw("dt_bias", D, shift=-1.0, dtype=torch.float32)
    if "gate" in call.options:
        draw("gate", B, T, 2 * D)

    def run(x: Inputs) -> Inputs:
        gate = x["gate"][..., D:] if "gate" in x else None
        tensors = (x[name] for name in ("x", "dt", "A", "B", "C", "skip", "state"))
        y, after = selective_scan_extend(*tensors, dt_bias=x.get("dt_bias"), gate=gate)
        return {"y": y, "after": after}

    return run


def delta(call: OperatorCall, draw: Draw) -> Run:
    B, T, H, K, V, degree = call.sizes
    for name, width in (("q", K), ("k", K), ("v", V)):
        draw(name, B, T, H, width)
    draw.made["beta"] = draw.guarded(2 * torch.rand(B, T, H).to(draw.device, draw.dtype))
    if "gate" in call.options:
        draw.made["log_decay"] = draw.guarded(-torch.rand(B, T, H).to(draw.device))
    bounds = [0, 1, 1, T // 2, T] if "packed" in call.options else list(range(B + 1))
    cu_seqlens = {"cu_seqlens": torch.tensor(bounds, device=draw.device)} if "packed" in call.options else {}
    draw("state", *init_delta_state(len(bounds) - 1, H, K, V, degree=degree).shape, dtype=torch.float32)  # type: ignore[arg-type]
    if "unit" in call.options:
        for name in "qk":
            draw.made[name] = functional.normalize(draw.made[name].float(), dim=-1).to(draw.dtype)

    def run(x: Inputs) -> Inputs:
        rule: Any = {"degree": degree, "normalise": "unit" not in call.options}
        o, after = delta_attention_extend(**x, **rule, **cu_seqlens)
        return {"o": o, "after": after}

    return run


def _norm(call: OperatorCall, x: Inputs, D: int) -> Norm | None:
    kind: Any = next((each for each in ("layer", "rms", "none") if each in call.options), None)
    return None if kind is None else Norm(x.get("gamma"), None if kind == "rms" else x.get("beta"), 1e-5, kind)


def step_linear(call: OperatorCall, draw: Draw) -> Run:
    rows, D, N = call.sizes
    draw("x", rows, D, shift=1.0)
    draw("weight", N, D, scale=D**-0.5)
    for name, width in (("gamma", D), ("beta", D), ("bias", N)):
        draw(name, width)
    draw("residual", rows, N)

    def run(x: Inputs) -> Inputs:
        bias, residual = (x[name].clone() if name in call.options else None for name in ("bias", "residual"))
        norm, gelu = _norm(call, x, D), "gelu" in call.options
        return {"y": linear_step(x["x"], x["weight"], bias, norm=norm, gelu=gelu, residual=residual)}

    return run


def step_mlp(call: OperatorCall, draw: Draw) -> Run:
    rows, D, N = call.sizes
    draw("x", rows, D, shift=1.0)
    draw("weight1", N, D, scale=D**-0.5)
    draw("weight2", D, N, scale=N**-0.5)
    for name, width in (("gamma", D), ("beta", D), ("bias1", N), ("bias2", D)):
        draw(name, width)

    def run(x: Inputs) -> Inputs:
        norm = _norm(call, x, D)
        assert norm is not None
        weights = (x["weight1"], x["bias1"], x["weight2"], x["bias2"])
        return {"y": mlp_step(x["x"].clone(), norm, *weights)}

    return run


def step_convolution(call: OperatorCall, draw: Draw) -> Run:
    rows, D, W = call.sizes
    draw("x", rows, D, shift=1.0)
    draw("weight", D, D, scale=D**-0.5)
    draw("taps", D, W)
    draw("state", rows, W - 1, D)
    for name in ("gamma", "beta", "bias", "taps_bias"):
        draw(name, D)

    def run(x: Inputs) -> Inputs:
        norm, state = _norm(call, x, D), x["state"].clone()
        assert norm is not None
        bias, taps_bias = (x[name] if "bias" in call.options else None for name in ("bias", "taps_bias"))
        return {"y": gated_conv_step_(x["x"], norm, x["weight"], bias, x["taps"], taps_bias, state), "after": state}

    return run


def step_polynomial(call: OperatorCall, draw: Draw) -> Run:
    rows, H, K, V = call.sizes
    c = (1.0, 1.0, 0.5) if "low" in call.options else (0.0, 0.0, 1.0)
    draw("qkv", rows, H * (2 * K + V))
    past = torch.randn(rows, 2 * K + 2, H, K + V, dtype=torch.float64)
    kv, z = poly_state(past[..., :K], past[..., K:], coefficients=c)
    draw.made["kv"], draw.made["z"] = (draw.guarded(x.float().to(draw.device)) for x in (kv, z))
    shared = "shared" in call.options
    for name in ("gamma", "beta"):
        draw(name, K if shared else H * K, scale=0.3, shift=1.0)
    options: dict[str, Any] = {"heads": H, "key_width": K, "joint": not shared, "coefficients": c, "scale": K**-0.5}
    if "gated" in call.options:
        draw.made["g"] = draw.guarded(-torch.rand(rows, H).to(draw.device))

    def run(x: Inputs) -> Inputs:
        norm, state = _norm(call, x, K), PolyState(x["kv"].clone(), x["z"].clone())
        o = poly_step_(x["qkv"], state, norm, norm, **options, eps=1e-12, log_decay=x.get("g"))
        return {"o": o, "kv": state.kv, "z": state.z}

    return run


def step_delta(call: OperatorCall, draw: Draw) -> Run:
    rows, H, K, V, degree = call.sizes
    rule: Any = {"degree": degree, "centred": "centred" in call.options, "normalise": "unit" not in call.options}
    for name, width in (("q", K), ("k", K), ("v", V)):
        draw(name, rows, 1, H, width)
    if "unit" in call.options:
        for name in "qk":
            draw.made[name] = functional.normalize(draw.made[name].float(), dim=-1).to(draw.dtype)
    if "sum" not in call.options:
        draw.made["beta"] = draw.guarded(2 * torch.rand(rows, 1, H).to(draw.device, draw.dtype))
    if "head" in call.options or "channel" in call.options:
        shape = (rows, 1, H, *([K] if "channel" in call.options else []))
        draw.made["log_decay"] = draw.guarded(-torch.rand(shape).to(draw.device))
    state = init_delta_state(rows, H, K, V, degree=rule["degree"], centred=rule["centred"])
    draw("state", *state.shape, dtype=torch.float32)

    def run(x: Inputs) -> Inputs:
        given, after = {"beta": None, **x}, x["state"].clone()
        o, new = delta_attention_extend(**given, **rule)  # type: ignore[arg-type]
        o_ = delta_attention_extend_(**given | {"state": after}, **rule)  # type: ignore[arg-type]
        return {"o": o, "new": new, "o_": o_, "after": after}

    return run


def step_tokens(call: OperatorCall, draw: Draw) -> Run:
    rows, D, vocab = call.sizes
    draw("table", vocab, D)
    draw("positions", 7, D)
    draw("logits", rows, vocab, scale=3.0)
    draw.integers("tokens", vocab, rows)
    draw.integers("lengths", 9, rows)
    draw.integers("seen", 2, rows, vocab)
    draw("penalty", rows, scale=0.01, shift=1.3, dtype=torch.float32)

    def run(x: Inputs) -> Inputs:
        seen, positions = x["seen"].bool(), x["positions"] if "positions" in call.options else None
        y = embed_step(x["tokens"], x["table"], positions, x["lengths"])
        chosen, sums = best_tokens(x["logits"], seen, x["penalty"])
        active = torch.arange(rows, device=seen.device) % 3 != 2
        slots = [x["tokens"].clone(), x["lengths"].clone(), x["lengths"].clone(), seen.clone()]
        logprobs = advance_slots_(chosen, x["logits"], sums, active, *slots)
        counted = {f"slot{i}": each.double() for i, each in enumerate(slots)}
        return {"y": y, "chosen": chosen.double(), "sums": sums, "logprobs": logprobs} | counted

    return run


OPERATORS: dict[str, Callable[[OperatorCall, Draw], Run]] = {
    each.__name__: each
    for each in (
        norm,
        linear_norm,
        cross_entropy,
        embedding,
        convolution,
        shift,
        wkv,
        scan,
        delta,
        step_linear,
        step_mlp,
        step_convolution,
        step_polynomial,
        step_delta,
        step_tokens,
    )
}
WIDE = (1, 5, 16, 24, 48, 64, 100, 128, 192, 256, 500, 512, 768, 1000, 1024, 2048, 3000, 4096)
NORMS = (("layer", "bias"), ("residual", "bias"), ("bare",), ("rms",), ("layer",), ("residual", "bare"))
STEPS = ((), ("layer",), ("rms",), ("layer", "bias"), ("bias", "gelu"), ("layer", "bias", "gelu"), ("residual", "bias"))


def sweep() -> Iterator[OperatorCall]:
    """Every operator over its sizes, with dtypes in turn; over dtypes and options at one size."""
    exact: tuple[Arithmetic, ...] = ("bf16", "fp16", "fp32")
    narrow: tuple[Arithmetic, ...] = ("bf16", "tf32")
    turn, turn_exact, turn_narrow, turn_all = (cycle(each) for each in (ARITHMETICS[:3], exact, narrow, ARITHMETICS))
    for D in (*WIDE, 5000, 8192):
        yield OperatorCall("norm", next(turn), (37, D), ("layer", "bias"))
    for a, out, options in product(ARITHMETICS[:3], ("bf16", "fp16", "fp32"), NORMS):
        yield OperatorCall("norm", a, (70, 48), (*options, out))
    for D, N in product((5, 8, 16, 24, 32, 48, 64), (5, 16, 40, 64, 96, 128, 192, 256)):
        yield OperatorCall("linear_norm", next(turn_narrow), (300, D, N))
    yield from (
        OperatorCall("linear_norm", a, (70, 48, 96), options) for a, options in product(narrow, ((), ("bare",)))
    )
    for D, vocab in product((5, 16, 24, 64, 100, 128), (50, 128, 1000)):
        yield OperatorCall("cross_entropy", next(turn_all), (130, D, vocab))
    for a, D, options in product(ARITHMETICS, (64, 130), ((), ("no gradient",))):
        yield OperatorCall("cross_entropy", a, (70, D, 300), options)
        yield OperatorCall("cross_entropy", a, (70, D, 256), options)
    for vocab in (1, 2, 3, 5, 9, 20, 40, 70, 150, 300, 600, 1500, 3000, 5000, 12_000, 20_000):
        yield OperatorCall("cross_entropy", "fp32", (2, 130, vocab))
        yield OperatorCall("cross_entropy", "fp32", (2, 130, vocab), ("no gradient",))
    for D in WIDE:
        yield OperatorCall("embedding", next(turn), (3, 300, D, 11), ("positions",))
    for a, options in product(ARITHMETICS[:3], ((), ("positions",), ("int32",), ("positions", "int32"))):
        yield OperatorCall("embedding", a, (2, 30, 64, 5), options)
    for D, W, silu in product((5, 16, 24, 48, 64, 100), (1, 2, 3, 4, 5, 6, 7), ((), ("silu",))):
        yield OperatorCall("convolution", next(turn), (2, 75, D, W), silu)
    for a, options in product(ARITHMETICS[:3], ((), ("bias",), ("silu", "bias"), ("strided",), ("silu", "strided"))):
        yield OperatorCall("convolution", a, (2, 75, 24, 3), options)
    for a, M in product(ARITHMETICS[:3], (1, 2, 3, 5)):
        yield OperatorCall("shift", a, (2, 70, 5 if M % 2 else 100, M))
    for a, T in product(ARITHMETICS[:3], (1, 100, 300)):
        yield OperatorCall("wkv", a, (2, T, 5 if T == 1 else 40))
    for T, D, N in product((32, 300, 512), (5, 16, 32), (1, 2, 4, 5, 8, 16, 24, 32, 48, 64)):
        yield OperatorCall("scan", next(turn), (2, T, D, N))
    for a, T, options in product(ARITHMETICS[:3], (1, 32, 300, 512), ((), ("gate",), ("dt",), ("dt", "gate"))):
        yield OperatorCall("scan", a, (2, T, 32, 16), options)
    options = ((), ("gate",), ("unit",), ("gate", "unit"))
    widths = [*product((8, 12), (2,)), *product((5, 32, 50, 128), (1,))]  # degree 2 has one tile of features or three
    for a, V, (K, degree) in product(ARITHMETICS, (5, 32, 64, 100), widths):
        if a == "bf16" or K <= WIDEST_EXACT:
            yield OperatorCall("delta", a, (1, 70, 2, K, V, degree), ("gate",))
    yield from (OperatorCall("delta", "bf16", (1, 70, 2, 100, V, 1), ("gate", "small")) for V in (5, 32, 64, 128))
    for a, degree, each in product(ARITHMETICS, (1, 2), options):
        yield OperatorCall("delta", a, (2, 130, 3, 16, 64, degree), each)
    for a, degree, each in product(ARITHMETICS, (1, 2), options[:2]):
        yield OperatorCall("delta", a, (1, 130, 3, 16, 64, degree), (*each, "packed"))
    for rows, D, N in product((1, 3), (5, 24, 64, 100, 300, 1000, 2048), (40, 1500, 3000, 5000)):
        if N == 40 or D <= 100 or D + N == 3500:
            yield OperatorCall("step_linear", next(turn_exact), (rows, D, N), ("layer", "bias"))
    for a, rows, options in product(exact, (1, 5, 17), STEPS):
        yield OperatorCall("step_linear", a, (rows, 64, 40), options)
    for rows, D in product((1, 5, 17), (5, 16, 24, 64, 100, 300, 768, 1500, 3000, 5000)):
        yield OperatorCall("step_mlp", next(turn_exact), (rows, D, 16), ("layer",))
    yield from (OperatorCall("step_mlp", a, (17, 64, 16), (kind,)) for a, kind in product(exact, ("layer", "rms")))
    for rows, D, W in product((1, 5, 40, 70), (5, 16, 24, 64), (1, 2, 3, 4)):
        yield OperatorCall("step_convolution", next(turn_exact), (rows, D, W), ("layer", "bias"))
    for a, rows, options in product(
        exact, (1, 5, 70), (("layer",), ("rms", "bias"), ("none", "bias"), ("layer", "bias"))
    ):
        yield OperatorCall("step_convolution", a, (rows, 24, 3), options)
    kinds = ((), ("layer",), ("rms", "shared"), ("layer", "shared"), ("none",), ("rms",))
    for a, options in product(exact, kinds):
        yield OperatorCall("step_polynomial", a, (2, 3, 16, 20), options)
    for (H, K), V, low in product(
        ((3, 16), (3, 5), (2, 24), (4, 64), (2, 32), (1, 128)), (5, 16, 40, 64, 100), ((), ("low",))
    ):
        yield OperatorCall("step_polynomial", next(turn_exact), (2, H, K, V), ("layer", *low))
    for a, kind in product(exact, ("layer", "rms")):
        yield OperatorCall("step_polynomial", a, (2, 3, 16, 64), (kind, "gated"))
    rules = ((2, ()), (2, ("head",)), (2, ("centred",)), (2, ("sum", "head")), (2, ("sum", "centred")), (1, ()))
    rules += ((1, ("head",)), (1, ("channel",)), (1, ("sum", "channel")), (1, ("sum", "head", "unit")), (2, ("unit",)))
    for a, (degree, options) in product(exact, rules):
        yield OperatorCall("step_delta", a, (2, 3, 16, 20, degree), options)
    for (K, degree), V in product(
        ((1, 1), (5, 2), (16, 2), (24, 2), (40, 1), (64, 1), (100, 1), (128, 1)), (1, 5, 16, 24, 32, 50, 64, 128, 200)
    ):
        yield OperatorCall("step_delta", next(turn_exact), (2, 3, K, V, degree), ("head",))
    for a, D in product(exact, (5, 64, 300, 1000, 3000)):
        yield OperatorCall("step_tokens", a, (3, D, 29), ("positions",) if D % 3 else ())
    for rows, vocab in ((1, 5000), (2, 20_000), (5, 40_000), (70, 29), (300, 29)):
        yield OperatorCall("step_tokens", next(turn_exact), (rows, 16, vocab))


def launches(call: OperatorCall) -> list[Launched]:
    """The launches of a call, which do not happen: tensors are on the CPU."""
    with ExitStack() as stack:
        found = stack.enter_context(recorded_launches(run=False))
        stack.enter_context(patch("rebased.ops.backend.triton_interpreted", lambda: True))
        stack.enter_context(use_backend("triton"))
        run(call, "cpu")
    return [(launch, tuple(x.new_empty(0) if isinstance(x, Tensor) else x for x in args)) for launch, args in found]


@cache
def found() -> dict[OperatorCall, tuple[str, ...]]:
    """The calls of the sweep and their classes."""
    return {
        call: tuple(dict.fromkeys(name for each in launches(call) for name in classes_of(each))) for call in sweep()
    }


def reachable() -> set[str]:
    """The classes of all operators but polynomial attention that the sweep finds."""
    return {name for names in found().values() for name in names}


def calls(known: Set[str] = frozenset()) -> list[OperatorCall]:
    """Those calls of the sweep that add a class."""
    return cover(found(), known)


def run(call: OperatorCall, device: str, law: bool = False) -> Inputs:
    """Outputs and gradients of a call; `law`: in fp64."""
    memory = SMALLEST_SHARED_MEMORY if "small" in call.options else LARGE
    with patch("rebased.ops.delta.gpu.operators.shared_memory", lambda: memory):
        return _run(call, device, law)


def _run(call: OperatorCall, device: str, law: bool) -> Inputs:
    torch.manual_seed(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if call.arithmetic == "tf32" else "highest")
    try:
        draw = Draw(call, device)
        function = OPERATORS[call.op](call, draw)
        wanted = not call.op.startswith("step_") and "no gradient" not in call.options
        leaves = {
            name: (x.double() if law else x).detach().requires_grad_(wanted) if x.is_floating_point() else x
            for name, x in draw.made.items()
        }
        with torch.set_grad_enabled(wanted):
            outputs = function(leaves)
        if not wanted:
            return outputs
        ends = [x for x in outputs.values() if x.requires_grad]
        generator = torch.Generator().manual_seed(1)
        weights = [
            torch.randn(x.shape, generator=generator).bfloat16().to(device, x.dtype) for x in ends
        ]  # exact in all
        floats = {name: x for name, x in leaves.items() if x.requires_grad}
        gradients = torch.autograd.grad(ends, list(floats.values()), weights, allow_unused=True)
        found = {f"d{name}": x for name, x in zip(floats, gradients, strict=True) if x is not None}
        return {name: x.detach() for name, x in outputs.items()} | found
    finally:
        torch.set_float32_matmul_precision(before)
