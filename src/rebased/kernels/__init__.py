"""Tools for Triton kernels, ours and other people's: what a call launches, compiling ahead of time, machine code."""
