"""Polynomial attention: ReBased and Based as one operator, with coefficients (0, 0, 1) and (1, 1, 1/2)."""
