"""Serving: a trained language model behind an OpenAI-compatible HTTP interface, and the explorer of any two models."""
