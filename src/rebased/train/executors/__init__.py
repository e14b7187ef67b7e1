"""Executors train many runs at once, in processes of this machine or on a Ray cluster."""

from rebased.train.executors.jobs import Executor, Failed, Job, Outcome, Queue
from rebased.train.executors.local import LocalExecutor
from rebased.train.executors.ray_cluster import RayExecutor

__all__ = ["Executor", "Failed", "Job", "LocalExecutor", "Outcome", "Queue", "RayExecutor"]
