"""Sweeps: a grid of runs, its plan and stages, an estimate of its time, known results, and how it is trained."""
