"""Sweeps: a grid of runs, its plan, an estimate of its time, and how it is trained."""

from rebased.train.sweep.cost import Estimate, estimate
from rebased.train.sweep.grid import Point, from_python, read_sweep
from rebased.train.sweep.plan import Plan, PlannedRun, breakdown, make_plan, status_of
from rebased.train.sweep.run import Watcher, train_runs

__all__ = [
    "Estimate",
    "Plan",
    "PlannedRun",
    "Point",
    "Watcher",
    "breakdown",
    "estimate",
    "from_python",
    "make_plan",
    "read_sweep",
    "status_of",
    "train_runs",
]
