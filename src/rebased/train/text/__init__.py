"""Language modelling: a model trained on windows of text, and measured on them."""
