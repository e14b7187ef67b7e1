"""Seeds made of several numbers, none of which can stand in for another."""

import numpy as np


def mix_seed(seed: int, *stream: int) -> int:
    """One 64-bit seed for (seed, stream). seed + epoch would make epoch 1 of seed 42 the epoch 0 of seed 43."""
    if min((seed, *stream)) < 0:
        raise ValueError(f"seeds and counters must be 0 or more, got {(seed, *stream)}")
    return int(np.random.SeedSequence(seed, spawn_key=stream).generate_state(1, np.uint64)[0])
