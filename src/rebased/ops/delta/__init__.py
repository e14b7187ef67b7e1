"""The delta rule: attention whose state is corrected, not only added to. Degree 1 (DeltaNet) and degree 2 (squares)."""
