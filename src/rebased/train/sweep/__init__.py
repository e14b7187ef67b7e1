"""Sweeps: a grid of runs, its plan and what it will cost, and the folder that it resumes from."""

from rebased.train.sweep.cost import Estimate, estimate
from rebased.train.sweep.grid import Point, from_python, read_sweep
from rebased.train.sweep.plan import Plan, PlannedRun, breakdown, make_plan, stand
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
    "stand",
    "train_runs",
]
