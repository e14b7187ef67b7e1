"""Makes our kernels take one regime, whatever the cost model would choose: for tests and measurements."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Literal

Regime = Literal["quadratic", "chunked"]
REGIMES: tuple[Regime, ...] = ("quadratic", "chunked")


@contextmanager
def forced(regime: Regime) -> Iterator[None]:
    """Within the block, backward passes included. The tiles are those that the plan has for this regime; a call with a
    state is always chunked."""
    from rebased.ops.polynomial.gpu import launch, plan

    make_plan, cost = launch.make_plan, plan.chunked_cost
    launch.make_plan = partial(make_plan)  # another planner, so that no call is remembered under this one
    plan.chunked_cost = lambda *_: inf if regime == "quadratic" else 0.0
    try:
        yield
    finally:
        launch.make_plan, plan.chunked_cost = make_plan, cost
