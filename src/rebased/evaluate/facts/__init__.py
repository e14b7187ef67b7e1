"""Recall of facts in real text: a context holds facts, then questions ask for some of them."""
