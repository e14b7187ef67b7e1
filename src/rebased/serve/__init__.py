"""Serving: a trained language model behind an OpenAI-compatible HTTP interface."""
