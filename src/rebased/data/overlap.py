"""How much of some texts occurs in another text, by runs of tokens."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rebased.data.windows import TokenStream

RUN = 32  # tokens, a power of two: long enough that chance and idiom do not matter
BLOCK = 2**21  # tokens that are hashed at once, a multiple of RUN
BASE = 0x9E3779B97F4A7C15  # odd, so that no power of it vanishes


def shared_runs(streams: Mapping[Any, TokenStream], other: TokenStream) -> dict[Any, float]:
    """For each stream, the share of its consecutive runs of RUN tokens that occur anywhere in another stream.

    Runs are compared by hashes of 64 bits. The share is 0 for a stream shorter than a run.
    """
    wanted = {
        name: np.concatenate([_hashes(stream, start)[::RUN] for start in range(0, len(stream), BLOCK)])
        for name, stream in streams.items()
    }
    known = np.unique(np.concatenate([*wanted.values(), np.zeros(1, dtype=np.uint64)]))
    seen = np.zeros(len(known), dtype=bool)
    for start in range(0, len(other), BLOCK):
        found = _hashes(other, start)
        places = np.searchsorted(known, found).clip(max=len(known) - 1)
        seen[places[known[places] == found]] = True
    return {
        name: float(seen[np.searchsorted(known, hashes)].mean()) if len(hashes) else 0.0
        for name, hashes in wanted.items()
    }


def _hashes(stream: TokenStream, start: int) -> np.ndarray:
    """[n] uint64: a hash of the run that begins at each of the next BLOCK tokens, as far as runs are whole."""
    hashes = stream.read(start, min(start + BLOCK + RUN - 1, len(stream))).astype(np.uint64) + np.uint64(1)
    length = 1
    while length < RUN:  # the hash of a run from those of its halves, modulo 2**64
        power = np.uint64(pow(BASE, length, 2**64))
        hashes = hashes[: max(0, len(hashes) - length)] * power + hashes[length:]
        length *= 2
    return hashes ^ (hashes >> np.uint64(29))
