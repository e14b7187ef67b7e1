"""Executors train many runs at once, in processes of this machine or on a Ray cluster."""
