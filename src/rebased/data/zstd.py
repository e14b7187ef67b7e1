"""Read .zst files of one or many frames. A truncated file is an error, unlike with the library's own reader."""

import io
from pathlib import Path
from typing import BinaryIO

BLOCK = 2**17  # compressed bytes to read at once


class ZstandardReader(io.RawIOBase):
    """The decompressed bytes of `raw`; EOFError if they are damaged or truncated. `path` is for messages."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ImportError(f"{path} needs the zstandard library: pip install 'rebased[data]'") from error
        self._raw, self._error = raw, zstandard.ZstdError
        self._begin_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._begin_frame()
        self._packed, self._held, self._inside = b"", b"", False

    def readable(self) -> bool:
        """True: `io.BufferedReader` asks for it."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` with decompressed bytes and return how many there were; 0 at the end."""
        while not self._held:
            packed = self._packed or self._raw.read(BLOCK)
            if not packed:
                if self._inside:
                    raise EOFError("it ends before its last frame does")
                return 0
            try:
                self._held = self._frame.decompress(packed)
            except self._error as error:
                raise EOFError(str(error)) from error
            self._packed, self._inside = b"", not self._frame.eof
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, self._begin_frame()
        size = min(len(buffer), len(self._held))
        buffer[:size] = self._held[:size]
        self._held = self._held[size:]
        return size
