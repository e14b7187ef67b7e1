"""WKV, the recurrence of RWKV-4."""
