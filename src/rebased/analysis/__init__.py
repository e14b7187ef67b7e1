"""Pure functions of numbers: means and intervals, paired tests, choice of rates, perplexity, attention maps."""
