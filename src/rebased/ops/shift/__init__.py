"""The token shift of RWKV: mixtures of each token with the one before it."""
