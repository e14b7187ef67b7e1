"""Runs on synthetic tasks: results and statistics of any number of runs, beside reference values."""
