"""flash-linear-attention's ReBased over our operators: its equation, its layer, its weights, its backends."""

import inspect
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fake_fla
from rebased.compat.fla import ReBasedLinearAttention, parallel_rebased, register
from rebased.mixers import ReBased
from tolerances import assert_near, unit_roundoff

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "fla_gradient.py"
RECORD = ROOT / "benchmarks" / "results" / "ops-2026-11-15-201731-h200.json"
B, T, H, K, V = 2, 150, 3, 8, 12  # T: two chunks and a rest


def equation(q: Tensor, k: Tensor, v: Tensor, eps: float = 1e-5, use_scale: bool = True) -> tuple[Tensor, Tensor]:
    """Numerator [B,T,H,V] and sum of similarities [B,T,H], pair by pair."""
    s = torch.einsum("bihk,bjhk->bhij", q, k) * (q.shape[-1] ** -0.5 if use_scale else 1.0)
    weights = s.square().tril()
    return torch.einsum("bhij,bjhv->bihv", weights, v), weights.sum(-1).transpose(1, 2)


def inputs(dtype: torch.dtype = torch.float64, seed: int = 0, shape: tuple[int, ...] = (B, T, H, K, V)) -> list[Tensor]:
    generator, (*rows, key_width, value_width) = torch.Generator().manual_seed(seed), shape
    widths = (key_width, key_width, value_width, value_width)
    return [torch.randn(*rows, w, generator=generator, dtype=torch.float64).to(dtype) for w in widths]


@pytest.mark.parametrize("use_scale", [True, False])
@pytest.mark.parametrize("use_normalize", [True, False])
def test_it_is_the_naive_equation_with_its_gradients(use_scale: bool, use_normalize: bool) -> None:
    *made, dy = inputs()
    ours, theirs = ([x.clone().requires_grad_() for x in made] for _ in range(2))
    o = parallel_rebased(*ours, eps=1e-2, use_scale=use_scale, use_normalize=use_normalize)
    numerator, z = equation(*theirs, use_scale=use_scale)
    want = numerator / (z + 1e-2).unsqueeze(-1) if use_normalize else numerator
    assert_near(o, want, T, K, K, condition=K)
    for name, got, expected in zip(
        "qkv", torch.autograd.grad(o, ours, dy), torch.autograd.grad(want, theirs, dy), strict=True
    ):
        assert_near(got, expected, T, T, K, condition=32.0, name=f"d{name}")


def test_both_are_returned_heads_first() -> None:
    q, k, v, _ = inputs()
    numerator, z = equation(q, k, v)
    found = parallel_rebased(q, k, v, return_both=True)
    assert_near(found[0], numerator.transpose(1, 2), T, K, K)
    assert_near(found[1], z.transpose(1, 2), T, K, K)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(parallel_rebased(*heads_first, head_first=True), parallel_rebased(q, k, v).transpose(1, 2))


def test_gradients_are_right_in_half_precision_where_theirs_are_not() -> None:
    """Their rounding, emulated: two rounded terms cancel where a query is nearly orthogonal to the first key."""
    eps, dtype = 1e-12, torch.bfloat16
    q, k, v, dy = inputs(dtype)
    q[:, 0], k[:, 0] = torch.eye(K, dtype=dtype)[0], torch.eye(K, dtype=dtype)[1]
    k[:, 0, :, 0] = 2.0**-8  # s = 2^-8 / sqrt(K)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    numerator, z = equation(*exact)
    want = torch.autograd.grad(numerator / (z + eps).unsqueeze(-1), exact, dy.double())[0]
    errors = []
    for attend in (fake_fla.rounded_rebased, parallel_rebased):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        got = torch.autograd.grad(attend(*leaves, eps=eps), leaves, dy)[0]
        errors.append(float((got.double() - want).norm() / want.norm()))
    assert errors[0] > 0.06
    assert errors[1] < 2 * unit_roundoff(dtype)


def naive_layer(layer: ReBasedLinearAttention, x: Tensor, eps: float) -> Tensor:
    """Their layer by its equation: one LayerNorm for q, k and all heads; key heads shared by groups of query heads."""
    q, k, v = (
        proj(x).unflatten(-1, (-1, width))
        for proj, width in ((layer.q_proj, layer.feature_dim), (layer.k_proj, layer.feature_dim),
                            (layer.v_proj, layer.head_dim))
    )  # fmt: skip
    gamma, beta = layer.feature_map.gamma, layer.feature_map.beta
    if layer.normalize:
        q, k = (nn.functional.layer_norm(each, (layer.feature_dim,), gamma, beta) for each in (q, k))
    else:
        q, k = (each * gamma + (0 if beta is None else beta) for each in (q, k))
    group = torch.arange(layer.num_heads) // layer.num_kv_groups
    numerator, z = equation(q, k[:, :, group], v[:, :, group])
    return (numerator / (z + eps).unsqueeze(-1)).flatten(-2) @ layer.o_proj.weight.T


@pytest.mark.parametrize(
    ("options", "eps"),
    [
        ({}, 1e-5),
        ({"num_key_value_heads": 2, "eps": 1e-3}, 1e-3),
        ({"use_beta": False}, 1e-5),
        ({"use_beta": False, "normalize": False}, 1e-5),
        ({"normalize": False}, 1e-5),
        ({"mode": "chunk", "eps": 0.5}, 1e-10),
        ({"mode": "fused_chunk", "layer_idx": 3, "l_max": 8, "something_else": 1}, 1e-10),
    ],
)
def test_the_layer_is_theirs(options: dict[str, Any], eps: float) -> None:
    torch.manual_seed(0)
    heads = {"feature_dim": 6, "num_heads": 4, "num_key_value_heads": 4}
    layer = ReBasedLinearAttention(16, **(heads | options)).double()
    with torch.no_grad():
        for weight in layer.feature_map.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    x = torch.randn(2, 70, 16, dtype=torch.float64)
    want = naive_layer(layer, x, eps)
    assert_near(layer(x, attention_mask=None), want, 16, 6, 70, 16, condition=8.0)
    state, outputs = layer.init_state(2), []
    for part in x.split([40, 29, 1], dim=1):
        y, state = layer.extend(part, state)
        outputs.append(y)
    assert_near(torch.cat(outputs, dim=1), want, 16, 6, 70, 16, condition=8.0)


def test_weights_have_their_names_and_shapes_and_load_into_our_mixer() -> None:
    layer = ReBasedLinearAttention(16, feature_dim=6, num_heads=4, num_key_value_heads=2)
    assert {name: list(weight.shape) for name, weight in layer.state_dict().items()} == {
        "feature_map.gamma": [6],
        "feature_map.beta": [6],
        "q_proj.weight": [24, 16],
        "k_proj.weight": [12, 16],
        "v_proj.weight": [8, 16],
        "o_proj.weight": [16, 16],
    }
    full = ReBasedLinearAttention(16, feature_dim=6, num_heads=4, num_key_value_heads=4)
    names = {"q_proj": "proj_q", "k_proj": "proj_k", "v_proj": "proj_v", "o_proj": "proj_o"}
    mixer = ReBased(16, n_heads=4, key_width=6, norm_axis="per_head", eps=1e-5)
    renamed = {f"{names[n]}.weight": getattr(full, n).weight for n in names}
    shared = {"weight": full.feature_map.gamma, "bias": full.feature_map.beta}
    mixer.load_state_dict(renamed | {f"{ln}.{n}": w for ln in ("ln_q", "ln_k") for n, w in shared.items()})
    x = torch.randn(1, 9, 16)
    assert_near(full(x), mixer(x), 16, 6, 9, 16, condition=8.0)


def test_signatures_are_those_of_the_library() -> None:
    named = {name: each.default for name, each in inspect.signature(parallel_rebased).parameters.items()}
    assert list(named) == ["q", "k", "v", "eps", "use_scale", "use_normalize", "return_both", "head_first"]
    assert [*named.values()][3:] == [1e-5, True, True, False, False]
    named = {name: each.default for name, each in inspect.signature(ReBasedLinearAttention).parameters.items()}
    assert list(named)[:6] == [
        "hidden_size", "l_max", "feature_dim", "num_key_value_heads", "num_heads", "use_gamma",
    ]  # fmt: skip
    assert [*named.values()][1:-1] == [2048, 16, 16, 16, True, True, True, True, 1e-5, "parallel", None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "recurrent"}, "mode 'recurrent' is unknown"),
        ({"causal": False}, "causal=False is not supported"),
        ({"num_heads": 3}, "multiple of num_heads 3"),
        ({"use_gamma": False, "normalize": False}, "set normalize or use_gamma"),
    ],
)
def test_what_cannot_be_computed_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ReBasedLinearAttention(16, **({"num_heads": 4, "num_key_value_heads": 4} | options))


@pytest.mark.parametrize("registration", ["global", "local"])
def test_one_call_registers_a_backend(monkeypatch: pytest.MonkeyPatch, registration: Any) -> None:
    theirs = fake_fla.install(monkeypatch, registration)
    own = theirs.parallel_rebased
    register()
    chosen = theirs.parallel_rebased
    register()
    assert theirs.parallel_rebased is chosen is sys.modules["fla.layers.rebased"].parallel_rebased is not own
    q, k, v, _ = inputs(torch.bfloat16)
    assert torch.equal(chosen(q, k, v), parallel_rebased(q, k, v))
    assert not torch.equal(chosen(q, k, v), own(q, k, v))
    monkeypatch.setenv("FLA_REBASED", "0")
    assert torch.equal(chosen(q, k, v), own(q, k, v))


def test_a_library_that_is_missing_or_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(ModuleNotFoundError, match="flash-linear-attention is not installed here"):
        register()
    fake_fla.install(monkeypatch, "none")
    with pytest.raises(RuntimeError, match=r"flash-linear-attention 0\.6\.0 has no backends"):
        register()


def test_the_report_of_the_gradient_needs_nothing_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_fla.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "rebased", None)
    monkeypatch.setattr(
        sys, "argv", [SCRIPT.name, "--device", "cpu", "--seeds", "2", "--shape", "4", "64", "6", "16", "16"]
    )
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert len(lines) == 3 * 2 * 2
    for dtype, _, _, *errors, share in lines:
        if dtype == "float16":  # 1 / z^2 overflows
            continue
        o, dq, _, dv = map(float, errors)
        assert max(o, dv) < 4 * unit_roundoff(getattr(torch, dtype))
        assert dq < 1e-5 or dtype == "bfloat16"
        assert int(share.rstrip("%")) > 50  # most of the error stands in the first tokens


def test_the_page_has_the_numbers_of_the_record() -> None:
    page = (ROOT / "docs" / "flash_linear_attention.md").read_text()
    lengths = json.loads(RECORD.read_text())["lengths"]
    theirs, ours = (
        {each["T"]: each["graph_both_ms"] for each in lengths if each["way"] == way and "graph_both_ms" in each}
        for way in ("fla parallel_rebased", "ours")
    )
    rows = [f"| {T:,} | {theirs[T]:.2f} ms | {ours[T]:.2f} ms | {theirs[T] / ours[T]:.1f} |" for T in theirs]
    assert [line for line in page.splitlines() if " ms | " in line] == rows
    errors = [each["errors"]["dq"] for each in lengths if each["way"] == "fla parallel_rebased"]
    assert f"{100 * min(errors):.1f} to {100 * max(errors):.0f} %" in page
    assert RECORD.name in page
