"""The selective scan of Mamba (S6)."""
