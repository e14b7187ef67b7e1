"""One token of every sequence, forward only: what a step of decoding computes, in as few kernels as possible."""
