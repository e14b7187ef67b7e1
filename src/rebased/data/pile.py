"""Tokenised text in Megatron's format, a pair of files NAME.bin and NAME.idx. EleutherAI publishes the Pile so.

NAME.bin holds the tokens. NAME.idx is little-endian: nine bytes of magic; uint64 version; uint8 code of the tokens'
dtype; uint64 number of sequences; uint64 length of the document list; int32 size of each sequence in tokens; int64
offset of each sequence in NAME.bin in bytes; int64 document list: the first sequence of each document, then the number
of sequences.
"""

from pathlib import Path

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
HEADER = len(MAGIC) + 8 + 1 + 8 + 8
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class TokenisedFile:
    """The documents of one .bin/.idx pair, memory-mapped. `path` may name either file.

    Attributes: `dtype` of the tokens, `bin_size` in bytes, and `offsets` [documents+1], where documents begin in bytes.
    Raises ValueError if a file is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.bin_path, self.index_path = path.with_suffix(".bin"), path.with_suffix(".idx")
        for needed in (self.bin_path, self.index_path):
            if not needed.is_file():
                raise ValueError(f"{needed} is missing: tokenised text is a pair of files, NAME.bin and NAME.idx")
        with open(self.index_path, "rb") as file:
            header = file.read(HEADER)
        if len(header) < HEADER or not header.startswith(MAGIC):
            raise ValueError(f"{self.index_path} is not a Megatron index: it does not begin with {MAGIC[:7].decode()}")
        version = int.from_bytes(header[9:17], "little")
        code = header[17]
        if version != 1 or code not in DTYPES:
            raise ValueError(
                f"{self.index_path}: version {version} with dtype code {code} is not known; "
                f"version 1 with codes {', '.join(map(str, DTYPES))} is"
            )
        self.dtype = np.dtype(DTYPES[code])
        self._read_index(int.from_bytes(header[18:26], "little"), int.from_bytes(header[26:34], "little"))

    def _read_index(self, sequences: int, listed: int) -> None:
        there, needed = self.index_path.stat().st_size, HEADER + 12 * sequences + 8 * listed
        if there < needed:
            raise ValueError(f"{self.index_path} is cut short: {there:,} of {needed:,} bytes; download it again")
        self.bin_size = self.bin_path.stat().st_size
        index = np.memmap(self.index_path, dtype=np.uint8, mode="r")
        sizes = np.frombuffer(index, "<i4", sequences, HEADER)
        pointers = np.frombuffer(index, "<i8", sequences, HEADER + 4 * sequences)
        documents = np.frombuffer(index, "<i8", listed, HEADER + 12 * sequences)
        stops = pointers + sizes.astype(np.int64) * self.dtype.itemsize
        if sequences and (pointers[0] != 0 or (pointers[1:] != stops[:-1]).any()):
            raise ValueError(f"{self.index_path}: its sequences do not follow one another; download it again")
        expected = int(stops[-1]) if sequences else 0
        if self.bin_size != expected:
            raise ValueError(
                f"{self.bin_path} has {self.bin_size:,} bytes and its index describes {expected:,}; download both again"
            )
        bounds = documents[[0, -1]].tolist() if listed > 1 else None
        if not sequences or bounds != [0, sequences] or (np.diff(documents) < 0).any():
            raise ValueError(f"{self.index_path}: its list of documents is empty or out of order; download it again")
        self._content = np.memmap(self.bin_path, dtype=np.uint8, mode="r") if expected else np.empty(0, dtype=np.uint8)
        self.offsets = np.append(pointers, expected)[documents]  # [documents+1] bytes

    def document(self, index: int) -> np.ndarray:
        """The tokens of a document as bytes, [n] uint8; view them as `dtype`."""
        return self._content[self.offsets[index] : self.offsets[index + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1
