"""How a call is cut up: sizes that the kernels can take, and a cost model that picks the faster regime."""

import json
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("triton")  # the kernels' package imports it, though the plan itself is arithmetic

from rebased.ops.polynomial.gpu import features, plan
from rebased.ops.polynomial.gpu.forward import EARLY
from rebased.ops.polynomial.gpu.plan import Plan, Products, feature_tiles, make_plan, padded
from rebased.ops.polynomial.state import feature_count
from tolerances import SLOWER_REGIME

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WIDTHS = (1, 5, 8, 9, 16, 17, 32, 64, 96, 128)
PRODUCTS: tuple[Products, ...] = get_args(Products)
LENGTHS = (1, 64, 256, 1000, 4096, 131_072)


def test_numbers_shared_with_the_kernels() -> None:
    assert (features.SLICE.value, features.TILE.value) == (plan.SLICE, plan.FEATURE_TILE)


@pytest.mark.parametrize(("width", "wide"), [(1, 16), (16, 16), (17, 32), (42, 64), (64, 64), (96, 128), (128, 128)])
def test_padded(width: int, wide: int) -> None:
    assert padded(width) == wide


@pytest.mark.parametrize(("K", "blocks", "with_low"), [(1, 1, 2), (8, 1, 2), (16, 3, 4), (64, 36, 38), (128, 136, 139)])
def test_feature_tiles(K: int, blocks: int, with_low: int) -> None:
    """Pairs of tiles of eight columns; for K columns and a one, steps of 64: 64 columns need two."""
    assert (feature_tiles(K, False), feature_tiles(K, True)) == (blocks, with_low)


@pytest.mark.parametrize("K", WIDTHS)
def test_blocks_have_room_for_every_feature(K: int) -> None:
    assert 64 * feature_tiles(K, False) >= feature_count(K, (0.0, 0.0, 1.0))
    assert 64 * feature_tiles(K, True) >= feature_count(K, (1.0, 1.0, 1.0))


def plans() -> list[tuple[int, bool, Plan]]:
    """(T, has_state, plan) over all kinds of calls."""
    return [
        (T, has_state, make_plan(T, K, V, low=low, products=products, has_state=has_state))
        for T, K, V in product(LENGTHS, WIDTHS, WIDTHS)
        for low, has_state, products in product((False, True), (False, True), PRODUCTS)
    ]


def test_every_plan_is_one_the_kernels_can_take() -> None:
    for T, has_state, made in plans():
        where = f"T = {T}, has_state = {has_state}: {made}"
        for tile in made.tiles[:3]:
            assert tile.rows % tile.step == 0, where  # the loops before the diagonal end where it begins
            assert made.chunk is None or made.chunk % tile.rows == 0, where  # no tile lies in two chunks
        for tile in made.tiles[:2]:
            assert EARLY.value % tile.rows == 0 or tile.rows % EARLY.value == 0, where  # kept: tiles, or part of one
        for tile in made.tiles:
            assert tile.step >= 16, where  # the least a tensor core takes
            assert tile.step & (tile.step - 1) == tile.rows & (tile.rows - 1) == 0, where
            assert tile.warps in (1, 2, 4, 8), where
        assert made.chunk is None or made.chunk % made.tiles.sums.step == 0, where
        assert made.chunk is not None or not has_state, where  # a state needs the kernels that read and write it


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("K", WIDTHS)
def test_one_crossing(K: int, low: bool, products: Products) -> None:
    """Quadratic up to some length and chunked from there on; the crossing does not fall as K grows."""

    def crossing(K: int) -> int:
        plans = [make_plan(2**i, K, 64, low=low, products=products, has_state=False) for i in range(4, 24)]
        regimes = [plan.chunk is not None for plan in plans]
        assert regimes == sorted(regimes)
        return regimes.index(True)

    assert crossing(K) <= crossing(min(128, 2 * K))


def test_only_long_sequences_in_bf16_pay_for_features_as_hi_and_lo() -> None:
    for T in (plan.LONG, plan.LONG + 1):
        hi_lo = {p: make_plan(T, 16, 64, low=False, products=p, has_state=False).hi_lo for p in PRODUCTS}
        assert hi_lo == {"bf16": T > plan.LONG, "tf32": False, "tf32x3": False}


def newest_result() -> dict[str, Any]:
    results = sorted(RESULTS.glob("ops-*.json"))
    records = [json.loads(path.read_text()) for path in results]
    complete = [record for record in records if record.get("regimes")]
    if not complete:
        pytest.skip("no result of benchmarks/ops.py with both regimes is committed yet")
    return complete[-1]


def test_the_cost_model_against_measurements() -> None:
    """The regime that is chosen is the faster one, or hardly slower, wherever both were timed."""
    record = newest_result()
    times: dict[tuple[int, int, int], dict[str, float]] = {}
    for row in record["regimes"]:
        if "graph_both_ms" in row:  # a wrong result is not timed
            times.setdefault((row["T"], row["K"], row["V"]), {})[row["regime"]] = row["graph_both_ms"]
    both = {at: ms for at, ms in times.items() if len(ms) == 2}
    assert len(both) >= 20
    assert record["shape"]["dtype"] == "torch.bfloat16"
    for (T, K, V), ms in both.items():
        chunk = make_plan(T, K, V, low=False, products="bf16", has_state=False).chunk
        chosen = "quadratic" if chunk is None else "chunked"
        assert ms[chosen] <= SLOWER_REGIME * min(ms.values()), f"T = {T}, K = {K}: {chosen} is chosen of {ms}"
