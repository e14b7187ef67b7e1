"""Sweeps: a grid of runs, its plan and stages, an estimate of its time, known results, and how it is trained."""

from rebased.train.sweep.cost import Estimate, estimate
from rebased.train.sweep.grid import Point, Select, Sweep, from_python, load_sweep
from rebased.train.sweep.known import Known, describe_known, read_known, write_union
from rebased.train.sweep.plan import Plan, PlannedRun, breakdown, make_plan, status_of
from rebased.train.sweep.queue import Ending, SweepQueue, TimeBudget, Watcher, order_of_work, train_runs
from rebased.train.sweep.stages import Stages
from rebased.train.sweep.unfinished import pack, unpack

__all__ = [
    "Ending",
    "Estimate",
    "Known",
    "Plan",
    "PlannedRun",
    "Point",
    "Select",
    "Stages",
    "Sweep",
    "SweepQueue",
    "TimeBudget",
    "Watcher",
    "breakdown",
    "describe_known",
    "estimate",
    "from_python",
    "load_sweep",
    "make_plan",
    "order_of_work",
    "pack",
    "read_known",
    "status_of",
    "train_runs",
    "unpack",
    "write_union",
]
