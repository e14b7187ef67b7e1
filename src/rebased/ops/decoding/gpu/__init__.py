"""Triton kernels of a decoding step. Importing one of these files imports Triton; api.py does so when it is needed."""
