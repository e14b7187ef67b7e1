"""Models of ours under lm-evaluation-harness: its tasks by name, and tasks of recall that are ours."""
