"""Training on a synthetic task."""
