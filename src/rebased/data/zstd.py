"""Reading .zst files, of one frame or many, and noticing that the last is cut short: the library's reader does not."""

import io
from pathlib import Path
from typing import BinaryIO

BLOCK = 2**17


class ZstandardReader(io.RawIOBase):
    def __init__(self, raw: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ImportError(f"{path} needs the zstandard library: pip install 'rebased[data]'") from error
        self._raw, self._damage = raw, zstandard.ZstdError
        self._begin_frame = zstandard.ZstdDecompressor().decompressobj
        self._frame = self._begin_frame()
        self._packed, self._held, self._inside = b"", b"", False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._held:
            packed = self._packed or self._raw.read(BLOCK)
            if not packed:
                if self._inside:
                    raise EOFError("it ends before its last frame does")
                return 0
            try:
                self._held = self._frame.decompress(packed)
            except self._damage as error:
                raise EOFError(str(error)) from error
            self._packed, self._inside = b"", not self._frame.eof
            if self._frame.eof:
                self._packed, self._frame = self._frame.unused_data, self._begin_frame()
        size = min(len(buffer), len(self._held))
        buffer[:size] = self._held[:size]
        self._held = self._held[size:]
        return size
