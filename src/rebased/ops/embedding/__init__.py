"""Rows of a table by number."""
