"""Cross-entropy and argmax of a linear head, without its logits."""
