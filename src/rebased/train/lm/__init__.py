"""Training a language model on text, in one process or many."""
