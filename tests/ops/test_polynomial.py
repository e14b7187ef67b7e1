"""Polynomial attention: every path is the reference's equation, values and gradients, at any length and any split."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ops.polynomial_cases import check_packed_extend
from polynomial_inputs import COEFFICIENTS, Shape, inputs
from rebased.ops import (
    BASED,
    REBASED,
    Backend,
    Coefficients,
    PolyState,
    feature_count,
    init_poly_state,
    poly_attention,
    poly_attention_extend,
    poly_attention_extend_,
    poly_state,
)
from rebased.ops.polynomial import chunk_plan, summary
from rebased.ops.polynomial.api import EPS
from rebased.ops.polynomial.features import expand, state_order
from rebased.ops.polynomial.reference import similarity
from rebased.ops.polynomial.state import key_features, query_features
from tolerances import FEATURES, FIRST_TOKEN, assert_close, assert_near

NAMES = ("o", "dq", "dk", "dv")
STATE_NAMES = ("o", "kv", "z", "dq", "dk", "dv", "d kv", "d z")


def attend(shape: Shape, backend: Backend, coefficients: Coefficients, **options: float) -> tuple[Tensor, ...]:
    """o, dq, dk, dv."""
    q, k, v, do = inputs(shape, coefficients=coefficients)
    o = poly_attention(q, k, v, coefficients=coefficients, backend=backend, **options)  # type: ignore[arg-type]
    return o, *torch.autograd.grad(o, (q, k, v), do)


def past(shape: Shape, coefficients: Coefficients) -> PolyState:
    """The state after nine tokens, as a leaf that wants gradients."""
    q, k, v, _ = inputs(shape._replace(T=9), coefficients=coefficients, seed=1)
    state = init_poly_state(shape.B, shape.H, shape.K, shape.V, coefficients, dtype=q.dtype)
    _, state = poly_attention_extend(q, k, v, state, coefficients=coefficients, backend="reference")
    return PolyState(*(x.detach().requires_grad_() for x in state))


def extend(
    shape: Shape, lengths: list[int], backend: Backend, coefficients: Coefficients, **options: float
) -> tuple[Tensor, ...]:
    """o, the state after, and all gradients of a loss of both, in pieces of these lengths that follow a past."""
    q, k, v, do = inputs(shape, coefficients=coefficients)
    before = state = past(shape, coefficients)
    outputs = []
    for piece in zip(*(x.split(lengths, dim=1) for x in (q, k, v)), strict=True):
        o, state = poly_attention_extend(*piece, state, coefficients=coefficients, backend=backend, **options)  # type: ignore[arg-type]
        outputs.append(o)
    o = torch.cat(outputs, dim=1)
    generator = torch.Generator().manual_seed(2)
    d_state = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in state]
    return o, *state, *torch.autograd.grad((o, *state), (q, k, v, *before), (do, *d_state))


@pytest.mark.parametrize("coefficients", COEFFICIENTS, ids=str)
@pytest.mark.parametrize("T", [1, 7, 64, 65, 1000])
def test_chunked_is_the_reference(T: int, coefficients: Coefficients) -> None:
    shape = Shape(B=2, T=T, H=3, K=16, V=5) if T < 1000 else Shape(B=1, T=T, H=2, K=16, V=5)
    assert_close(
        attend(shape, "chunked", coefficients), attend(shape, "reference", coefficients), NAMES, condition=FIRST_TOKEN
    )
    assert_close(
        extend(shape, [T], "chunked", coefficients),
        extend(shape, [T], "reference", coefficients),
        STATE_NAMES,
        condition=FIRST_TOKEN,
    )


@pytest.mark.parametrize("coefficients", COEFFICIENTS, ids=str)
@pytest.mark.parametrize("T", [1, 7, 65])
def test_recurrent_is_the_reference(T: int, coefficients: Coefficients) -> None:
    shape = Shape(B=2, T=T, H=3, K=16, V=5)
    assert_close(
        attend(shape, "recurrent", coefficients), attend(shape, "reference", coefficients), NAMES, condition=FEATURES
    )
    assert_close(
        extend(shape, [T], "recurrent", coefficients),
        extend(shape, [T], "reference", coefficients),
        STATE_NAMES,
        condition=FIRST_TOKEN,
    )


def test_recurrent_is_the_reference_over_a_thousand_tokens() -> None:
    shape = Shape(B=1, T=1000, H=2, K=16, V=5)
    assert_close(attend(shape, "recurrent", REBASED), attend(shape, "reference", REBASED), NAMES, condition=FEATURES)


@pytest.mark.parametrize("coefficients", [REBASED, BASED], ids=str)
@pytest.mark.parametrize("K", [1, 2, 3, 16, 17, 64, 128])
@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
def test_any_key_width(backend: Backend, K: int, coefficients: Coefficients) -> None:
    shape = Shape(B=1, T=19, H=2, K=K, V=5)
    assert_close(
        attend(shape, backend, coefficients), attend(shape, "reference", coefficients), NAMES, condition=FEATURES
    )
    want = extend(shape, [19], "reference", coefficients)
    assert_close(extend(shape, [8, 11], backend, coefficients), want, STATE_NAMES, condition=FIRST_TOKEN)


@pytest.mark.parametrize("lengths", [(16, 16), (32, 16), (50, 16), (7, 7), (3, 1)], ids=str)
@pytest.mark.parametrize("coefficients", COEFFICIENTS, ids=str)
def test_any_segment_and_tile(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int], coefficients: Coefficients
) -> None:
    """One mechanism from the chunked to the quadratic form, also where rows and chunks go in groups."""
    shape = Shape(B=3, T=50, H=3, K=5, V=4)
    want = attend(shape, "reference", coefficients), extend(shape, [50], "reference", coefficients)
    monkeypatch.setattr(chunk_plan, "_lengths", lambda *_, **__: (lengths, 1.0))
    for words in (1, 2**13, 2**30, 40_000):  # one row at a time, some, all with all chunks, all with a few
        monkeypatch.setattr(chunk_plan, "CPU_WORDS", words)
        assert_close(attend(shape, "chunked", coefficients), want[0], NAMES, condition=FIRST_TOKEN)
    assert_close(extend(shape, [50], "chunked", coefficients), want[1], STATE_NAMES, condition=FIRST_TOKEN)


@pytest.mark.parametrize("backend", ["reference", "chunked", "recurrent"])
@pytest.mark.parametrize("lengths", [[1, 64], [64, 1], [7, 30, 28], [1] * 5 + [60]], ids=str)
def test_any_split_of_extend(backend: Backend, lengths: list[int]) -> None:
    shape = Shape(B=2, T=65, H=2, K=3, V=5)
    assert_close(extend(shape, lengths, backend, BASED), extend(shape, [65], "reference", BASED), STATE_NAMES)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.builds(Shape, *(st.integers(1, high) for high in (3, 40, 3, 9, 9))),
    coefficients=st.sampled_from(COEFFICIENTS),
    cut=st.floats(0, 1),
    tile=st.integers(1, 16),
)
def test_any_shape_and_split(shape: Shape, coefficients: Coefficients, cut: float, tile: int) -> None:
    first = round(cut * shape.T)
    lengths = [n for n in (first, shape.T - first) if n > 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_plan, "TILE", tile)
        got = extend(shape, lengths, "chunked", coefficients)
    assert_close(got, extend(shape, [shape.T], "reference", coefficients), STATE_NAMES, condition=FIRST_TOKEN)


@pytest.mark.parametrize("backend", ["chunked", "recurrent"])
def test_scale_and_eps_are_used(backend: Backend) -> None:
    shape, options = Shape(B=1, T=30, H=2, K=4, V=3), {"scale": 0.3, "eps": 0.5}
    want = attend(shape, "reference", BASED, **options)
    assert_close(attend(shape, backend, BASED, **options), want, NAMES)
    assert_close(
        extend(shape, [30], backend, BASED, **options), extend(shape, [30], "reference", BASED, **options), STATE_NAMES
    )
    for other in ({"scale": 0.4, "eps": 0.5}, {"scale": 0.3, "eps": 0.25}):
        assert not torch.allclose(attend(shape, backend, BASED, **other)[0], want[0])


def test_scale_is_by_default_one_over_the_root_of_the_key_width() -> None:
    shape = Shape(B=1, T=9, H=1, K=4, V=3)
    assert torch.equal(attend(shape, "chunked", BASED)[0], attend(shape, "chunked", BASED, scale=0.5)[0])


def test_features_are_the_similarity_in_one_order() -> None:
    for coefficients in COEFFICIENTS:
        q, k, _, _ = inputs(Shape(B=1, T=6, H=2, K=5, V=1))
        dot = torch.einsum("bihf,bjhf->bhij", query_features(q, coefficients, 0.3), key_features(k, coefficients))
        assert_close([dot.tril()], [similarity(q, k, coefficients=coefficients, scale=0.3)], ["sim"])


@pytest.mark.parametrize("K", [1, 2, 4, 5])
def test_a_chunks_features_are_the_states_in_another_order(K: int) -> None:
    for coefficients in COEFFICIENTS:
        q, k, _, _ = (x.detach() for x in inputs(Shape(B=1, T=6, H=2, K=K, V=1)))
        c0, c1, c2 = coefficients
        weights = (c0, 0.3 * c1, 0.09 * c2)
        order = state_order(K, coefficients, k.device)
        phi_k, phi_q = (
            expand(x[0].permute(1, 2, 0), coefficients, k.dtype, w)[:, order] for x, w in ((k, None), (q, weights))
        )
        want = key_features(k, coefficients), query_features(q, coefficients, 0.3)
        assert_close([phi_k, phi_q], [x[0].permute(1, 2, 0) for x in want], ["keys", "queries"])


@pytest.mark.parametrize("coefficients", [REBASED, BASED], ids=str)
def test_similarity_is_never_negative(coefficients: Coefficients) -> None:
    q, k, _, _ = inputs(Shape(B=2, T=50, H=2, K=3, V=1))
    sim = similarity(q, k, coefficients=coefficients, scale=3**-0.5)
    lowest = {REBASED: 0.0, BASED: 0.5}[coefficients]
    below = torch.ones(50, 50, dtype=torch.bool).tril()
    assert (sim[..., below] >= lowest).all()


@pytest.mark.parametrize("backend", ["reference", "chunked", "recurrent"])
def test_the_first_token_sees_itself(backend: Backend) -> None:
    q, k, v, _ = inputs(Shape(B=2, T=5, H=2, K=16, V=5))
    o = poly_attention(q, k, v, coefficients=REBASED, backend=backend)
    sim = ((q[:, 0] * k[:, 0]).sum(-1, keepdim=True) / 4).square()
    assert_near(o[:, 0], v[:, 0] * sim / (sim + EPS), 16, condition=FEATURES)


@pytest.mark.parametrize("lengths", [(16, 16), (64, 16)], ids=str)
def test_no_token_sees_a_later_one(monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int]) -> None:
    monkeypatch.setattr(chunk_plan, "_lengths", lambda *_, **__: (lengths, 1.0))
    q, k, v, _ = inputs(Shape(B=1, T=64, H=2, K=3, V=5))
    o = poly_attention(q, k, v, coefficients=BASED, backend="chunked")
    for t in (1, 15, 16, 40, 63):
        later = (torch.arange(64) >= t).view(1, 64, 1, 1)
        changed = poly_attention(
            *(torch.where(later, 7.0, x) for x in (q, k, v)), coefficients=BASED, backend="chunked"
        )
        assert torch.equal(changed[:, :t], o[:, :t])
        assert not torch.isclose(changed[:, t:], o[:, t:]).all()


@pytest.mark.parametrize("backend", ["reference", "chunked", "recurrent"])
@pytest.mark.parametrize("zero", ["q", "k", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_zeros_give_zeros(backend: Backend, zero: str, dtype: torch.dtype) -> None:
    """ReBased of nothing similar is 0 / eps; no NaN, also in the gradients, and the same for every path."""
    q, k, v, do = inputs(Shape(B=1, T=40, H=2, K=4, V=3), dtype=dtype)
    q = torch.zeros_like(q, requires_grad=True) if zero in ("q", "both") else q
    k = torch.zeros_like(k, requires_grad=True) if zero in ("k", "both") else k
    o = poly_attention(q, k, v, coefficients=REBASED, backend=backend)
    for x in (o, *torch.autograd.grad(o, (q, k, v), do)):
        assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize("backend", ["reference", "chunked", "recurrent"])
def test_packed_documents_do_not_see_each_other(backend: Backend) -> None:
    shape, bounds = Shape(B=1, T=30, H=2, K=4, V=3), [0, 1, 12, 12, 30]
    q, k, v, do = inputs(shape)
    packed = poly_attention(q, k, v, coefficients=BASED, cu_seqlens=torch.tensor(bounds), backend=backend)
    alone = torch.cat(
        [
            poly_attention(q[:, i:j], k[:, i:j], v[:, i:j], coefficients=BASED, backend="reference")
            for i, j in ((0, 1), (1, 12), (12, 30))
        ],
        dim=1,
    )
    got, want = (torch.autograd.grad(o, (q, k, v), do) for o in (packed, alone))
    assert_close((packed, *got), (alone, *want), NAMES)


@pytest.mark.parametrize("backend", ["reference", "chunked", "recurrent"])
def test_packed_documents_follow_states_of_their_own(backend: Backend) -> None:
    check_packed_extend(Shape(B=1, T=30, H=2, K=4, V=3), [0, 1, 12, 30], BASED, torch.float64, backend)


def test_packed_documents_need_a_state_each() -> None:
    q, k, v, _ = inputs(Shape(B=1, T=5, H=1, K=2, V=3))
    state = init_poly_state(1, 1, 2, 3, REBASED, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"these inputs need kv \[2, 1, 3, 3\]"):
        poly_attention_extend(q, k, v, state, coefficients=REBASED, cu_seqlens=torch.tensor([0, 2, 5]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("coefficients", [REBASED, BASED], ids=str)
def test_other_dtypes(dtype: torch.dtype, coefficients: Coefficients) -> None:
    """The caller's dtype comes back; sums and states are fp32."""
    shape = Shape(B=1, T=300, H=2, K=8, V=5)
    results = []
    for backend in ("chunked", "reference"):
        q, k, v, do = inputs(shape, dtype=dtype)
        o = poly_attention(q, k, v, coefficients=coefficients, backend=backend)
        results.append((o, *torch.autograd.grad(o, (q, k, v), do)))
    assert results[0][0].dtype == dtype
    assert_close(*results, NAMES)
    state = init_poly_state(1, 2, 8, 5, coefficients, dtype=dtype)
    o, state = poly_attention_extend(q, k, v, state, coefficients=coefficients, backend="chunked")
    assert (o.dtype, state.kv.dtype, state.z.dtype) == (dtype, torch.float32, torch.float32)


@pytest.mark.parametrize("coefficients", [REBASED, BASED], ids=str)
def test_state_is_small_and_stays_so(coefficients: Coefficients) -> None:
    F = {REBASED: 136, BASED: 153}[coefficients]
    assert feature_count(16, coefficients) == F
    state = init_poly_state(2, 3, 16, 5, coefficients)
    for T in (1, 300):
        q, k, v, _ = inputs(Shape(B=2, T=T, H=3, K=16, V=5), dtype=torch.float32)
        _, state = poly_attention_extend(q, k, v, state, coefficients=coefficients, backend="chunked")
        assert (state.kv.shape, state.z.shape) == ((2, 3, F, 5), (2, 3, F))
        assert state.kv.is_contiguous()
        assert state.kv.untyped_storage().nbytes() == 4 * state.kv.numel()


def test_strided_inputs() -> None:
    """Views of one fused projection, heads before tokens, and one key for all heads."""
    torch.manual_seed(0)
    fused = torch.randn(2, 70, 3, 4 + 4 + 5, dtype=torch.float64, requires_grad=True)
    views = fused.split([4, 4, 5], dim=-1)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in views]
    shared = [views[0], views[1][:, :, :1].expand(2, 70, 3, 4), views[2][:, :, :1].expand(2, 70, 3, 5)]
    for q, k, v in (views, heads_first, shared):
        results = []
        for backend in ("chunked", "reference"):
            o = poly_attention(q, k, v, coefficients=BASED, backend=backend)
            results.append((o, *torch.autograd.grad(o.sum(), fused)))  # a sum's gradient has stride 0
        assert_close(*results, ("o", "d fused"))


@pytest.mark.parametrize("wanted", [[0], [1], [2], [3], [0, 2], [1, 4]], ids=str)
def test_only_some_inputs_want_gradients(wanted: list[int]) -> None:
    shape, results = Shape(B=1, T=40, H=2, K=3, V=5), []
    for backend in ("chunked", "reference"):
        *qkv, do = inputs(shape)
        tensors = [x.detach().requires_grad_(i in wanted) for i, x in enumerate((*qkv, *past(shape, BASED)))]
        o, _ = poly_attention_extend(
            *tensors[:3],
            PolyState(*tensors[3:]),
            coefficients=BASED,
            backend=backend,  # type: ignore[arg-type]
        )
        results.append(torch.autograd.grad(o, [tensors[i] for i in wanted], do))
    assert_close(*results, [str(i) for i in wanted])


def test_a_loss_of_the_state_alone() -> None:
    shape, results = Shape(B=1, T=40, H=2, K=3, V=5), []
    for backend in ("chunked", "reference"):
        q, k, v, _ = inputs(shape)
        before = past(shape, BASED)
        _, after = poly_attention_extend(q, k, v, before, coefficients=BASED, backend=backend)
        results.append(torch.autograd.grad(after.kv.square().sum(), (k, v, before.kv)))
    assert_close(*results, ("dk", "dv", "d kv"))


def test_inference_mode_leaves_nothing_behind() -> None:
    """Indices cached in inference mode must serve a later training step."""
    q, k, v, _ = inputs(Shape(B=1, T=20, H=1, K=11, V=3))
    with torch.inference_mode():
        state = init_poly_state(1, 1, 11, 3, BASED, dtype=torch.float64)
        poly_attention_extend(q, k, v, state, coefficients=BASED, backend="chunked")
    with torch.no_grad():
        assert not poly_attention(q, k, v, coefficients=BASED, backend="chunked").requires_grad
    for backend in ("reference", "chunked"):
        before = PolyState(*(x.clone() for x in state))
        o, _ = poly_attention_extend(q, k, v, before, coefficients=BASED, backend=backend)
        assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum(), (q, k, v)))


def test_autocast_does_not_reach_inside() -> None:
    q, k, v, _ = inputs(Shape(B=1, T=50, H=1, K=4, V=3), dtype=torch.float32)
    o = poly_attention(q, k, v, coefficients=BASED, backend="chunked")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(poly_attention(q, k, v, coefficients=BASED, backend="chunked"), o)


def test_the_backward_keeps_no_states() -> None:
    """What autograd saves grows with T and holds nothing as wide as the features."""
    F, sizes = feature_count(16, REBASED), []
    for T in (2000, 4000):
        q, k, v, _ = inputs(Shape(B=1, T=T, H=2, K=16, V=8), dtype=torch.float32)
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
            poly_attention(q, k, v, coefficients=REBASED, backend="chunked")
        assert kept
        assert all(x.shape[1] == T and F not in x.shape for x in kept)
        sizes.append(sum(x.untyped_storage().nbytes() for x in kept))
        assert sizes[-1] == 4 * T * 2 * (16 + 16 + 8 + 8 + 1)  # q, k, v, o and the denominator
    assert sizes[1] == 2 * sizes[0]


def test_work_grows_linearly() -> None:
    counts = []
    for T in (2048, 4096, 8192):
        q, k, v, do = inputs(Shape(B=1, T=T, H=1, K=4, V=4), dtype=torch.float32)
        with FlopCounterMode(display=False) as counter:
            poly_attention(q, k, v, coefficients=REBASED, backend="chunked").backward(do)
        counts.append(counter.get_total_flops())
    assert counts[1] / counts[0] == pytest.approx(2, rel=0.05)
    assert counts[2] / counts[1] == pytest.approx(2, rel=0.05)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiles_as_one_graph_at_any_length() -> None:
    """The default path, chosen by "auto", for a first length and for others after it."""
    compiled = torch.compile(
        lambda q, k, v: poly_attention(q, k, v, coefficients=REBASED), fullgraph=True, backend="aot_eager"
    )
    for T in (64, 96, 300):
        q, k, v, do = inputs(Shape(B=1, T=T, H=2, K=4, V=3), dtype=torch.float32)
        want = torch.autograd.grad(poly_attention(q, k, v, coefficients=REBASED), (q, k, v), do)
        got = torch.autograd.grad(compiled(q, k, v), (q, k, v), do)
        for a, b in zip(got, want, strict=True):
            assert_near(a, b, T, condition=FIRST_TOKEN)


def test_no_state_is_the_state_before_the_first_token() -> None:
    q, k, v, _ = inputs(Shape(B=2, T=9, H=2, K=4, V=3))
    o, state = poly_attention_extend(q, k, v, None, coefficients=BASED)
    assert_near(o, poly_attention(q, k, v, coefficients=BASED), 9)
    assert state.kv.shape == (2, 2, feature_count(4, BASED), 3)


@pytest.mark.parametrize("coefficients", COEFFICIENTS, ids=str)
def test_states_of_parts_add_up(coefficients: Coefficients, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part's output from the sum of the earlier parts' states, and every gradient through them."""
    monkeypatch.setattr(summary, "CPU_WORDS", 1)  # 64 tokens at a time
    shape, results = Shape(B=2, T=210, H=2, K=4, V=3), []
    for parts in (3, 1):
        q, k, v, do = inputs(shape, coefficients=coefficients)
        pieces = list(zip(*(x.chunk(parts, dim=1) for x in (q, k, v)), strict=True))
        states = [poly_state(k, v, coefficients=coefficients) for _, k, v in pieces]
        outputs = []
        for number, piece in enumerate(pieces):
            before = init_poly_state(2, 2, 4, 3, coefficients, dtype=q.dtype)
            for state in states[:number]:
                before = PolyState(before.kv + state.kv, before.z + state.z)
            outputs.append(poly_attention_extend(*piece, before, coefficients=coefficients)[0])
        o = torch.cat(outputs, dim=1)
        results.append((o, *torch.autograd.grad(o, (q, k, v), do)))
    want = poly_attention(q, k, v, coefficients=coefficients, backend="reference")
    assert_close(results[0], results[1], NAMES, condition=FIRST_TOKEN)
    assert_close([results[0][0]], [want], ["o"])


@pytest.mark.parametrize("coefficients", COEFFICIENTS, ids=str)
def test_state_of_tokens_is_the_sum_of_their_features(coefficients: Coefficients) -> None:
    results = []
    for own in (True, False):
        _, k, v, _ = inputs(Shape(B=2, T=70, H=3, K=4, V=5), coefficients=coefficients)
        if own:
            kv, z = poly_state(k, v, coefficients=coefficients)
        else:
            phi = key_features(k, coefficients)
            kv, z = torch.einsum("bthf,bthv->bhfv", phi, v), phi.sum(1)
        loss = kv.sin().sum() + z.cos().sum()
        results.append((kv, z, *torch.autograd.grad(loss, (k, v))))
    assert_close(*results, ("kv", "z", "dk", "dv"), condition=100)  # sin and cos of sums as large as 100


@pytest.mark.parametrize("coefficients", [REBASED, BASED], ids=str)
def test_one_token_may_overwrite_the_state(coefficients: Coefficients) -> None:
    shape = Shape(B=2, T=1, H=3, K=5, V=4)
    q, k, v, _ = inputs(shape, coefficients=coefficients)
    before = PolyState(*(x.detach().clone() for x in past(shape, coefficients)))
    o, after = poly_attention_extend(q, k, v, before, coefficients=coefficients, backend="reference")
    places = [x.data_ptr() for x in before]
    written = poly_attention_extend_(q, k, v, before, coefficients=coefficients)
    assert_close((written, *before), (o, *after), ("o", "kv", "z"), condition=FEATURES)
    assert [x.data_ptr() for x in before] == places
    assert not written.requires_grad


def test_what_cannot_be_overwritten() -> None:
    shape = Shape(B=1, T=2, H=2, K=4, V=3)
    q, k, v, _ = inputs(shape, coefficients=REBASED)
    state = init_poly_state(1, 2, 4, 3, REBASED, dtype=q.dtype)
    with pytest.raises(ValueError, match="one token at a time can overwrite a state; q has 2: use poly_attention_ext"):
        poly_attention_extend_(q, k, v, state, coefficients=REBASED)
    strided = PolyState(state.kv.transpose(2, 3).contiguous().transpose(2, 3), state.z)
    with pytest.raises(ValueError, match="only a contiguous state can be overwritten"):
        poly_attention_extend_(q[:, :1], k[:, :1], v[:, :1], strided, coefficients=REBASED)


@pytest.mark.parametrize("coefficients", COEFFICIENTS, ids=str)
@pytest.mark.parametrize("T", [1, 70])
def test_without_a_mask_every_token_sees_all(T: int, coefficients: Coefficients) -> None:
    """Against the equation over all pairs, values and gradients; in fp32 too."""
    q, k, v, do = inputs(Shape(B=2, T=T, H=3, K=6, V=5), coefficients=coefficients)
    c0, c1, c2 = coefficients
    s = 0.5 * torch.einsum("bihk,bjhk->bhij", q, k)
    sim = c0 + s * (c1 + c2 * s)
    want = torch.einsum("bhij,bjhv->bihv", sim, v) / (sim.sum(-1).transpose(1, 2).unsqueeze(-1) + 0.01)
    exact = (want, *torch.autograd.grad(want, (q, k, v), do))
    for dtype in (torch.float64, torch.float32):
        given = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        o = poly_attention(*given, coefficients=coefficients, scale=0.5, eps=0.01, causal=False)
        assert o.dtype == dtype
        got = (o, *torch.autograd.grad(o, given, do.to(dtype)))
        for a, b, name in zip(got, exact, NAMES, strict=True):
            assert_near(a, b, T, T, 28, condition=FIRST_TOKEN, name=name)


def test_what_goes_not_without_a_mask() -> None:
    q, k, v, _ = inputs(Shape(1, 5, 2, 4, 3))
    for change in (
        {"log_decay": torch.zeros(1, 5, 2, dtype=q.dtype)},
        {"cu_seqlens": torch.tensor([0, 2, 5])},
        {"backend": "triton"},
    ):
        with pytest.raises(ValueError, match="causal=False takes neither"):
            poly_attention(q, k, v, coefficients=REBASED, causal=False, **change)  # type: ignore[arg-type]
    empty = poly_attention(q[:, :0], k[:, :0], v[:, :0], coefficients=REBASED, causal=False)
    assert empty.shape == (1, 0, 2, 3)
