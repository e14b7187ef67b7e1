"""Long texts in parts that can be encoded one by one: cut where no tokenizer joins what stands on either side."""

from collections.abc import Iterable, Iterator
from typing import BinaryIO

PART = 2**20  # bytes


def read_parts(stream: BinaryIO, size: int = PART) -> Iterator[bytes]:
    """All of a stream, in parts of about `size` bytes."""
    held = b""
    while block := stream.read(size):
        held += block
        while len(held) > size:
            at = safe_cut(held, size)
            yield held[:at]
            held = held[at:]
    if held:
        yield held


def safe_cut(text: bytes, limit: int) -> int:
    """The last place up to `limit` that is right after a line's end, or right before a space, and between two visible
    ASCII characters otherwise: there every pre-tokeniser in use cuts by itself. Failing that, a character's start."""
    for sign, before, after in ((b"\n", 1, 1), (b" ", 0, 1)):
        end = limit - 1
        for _ in range(1000):  # tables of numbers may have no such place, and need not be searched for ever
            end = text.rfind(sign, limit // 2, end)
            if end < 1:
                break
            if 0x21 <= text[end - 1] <= 0x7E and 0x21 <= text[end + after] <= 0x7E:
                return end + before
    return character_start(text, limit)


def character_start(text: bytes, at: int) -> int:
    """`at`, or the start of the UTF-8 character in whose middle it is."""
    for back in range(min(4, at + 1)):
        if at - back >= len(text) or text[at - back] & 0xC0 != 0x80:
            return at - back
    return at  # not UTF-8


def divide(parts: Iterable[bytes], ends: list[int], align: int) -> Iterator[tuple[int, bytes, bool]]:
    """(which stretch, bytes, whether it ends there) of a document whose stretches end at these offsets; the last goes
    on to the document's end. A cut is moved back to a character's start, or with `align` > 1 to a multiple of it."""
    held: tuple[int, bytes] | None = None
    stretch, offset = 0, 0
    for whole in parts:
        part = whole
        while part:
            cut = len(part)
            if stretch < len(ends) and ends[stretch] < offset + len(part):
                cut = ends[stretch] - offset
                cut = cut - cut % align if align > 1 else character_start(part, cut)
            if cut:
                if held is not None:
                    yield (*held, held[0] != stretch)
                held = (stretch, part[:cut])
                part, offset = part[cut:], offset + cut
            if part:  # what is left belongs to the next stretch
                stretch += 1
    if held is not None:
        yield (*held, True)
