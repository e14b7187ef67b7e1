"""Makes our kernels take one regime, whatever the cost model would choose: for tests and measurements."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Literal

Regime = Literal["quadratic", "chunked"]
REGIMES: tuple[Regime, ...] = ("quadratic", "chunked")


@contextmanager
def forced(regime: Regime) -> Iterator[None]:
    """Within the block, backward passes included. The tiles are those that the plan has for this regime; a call with a
    state is always chunked."""
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
