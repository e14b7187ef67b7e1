"""Cut long texts into chunks that can be encoded one by one, at places where no tokenizer merges across the cut."""

from collections.abc import Iterable, Iterator
from typing import BinaryIO

CHUNK_BYTES = 2**20
SEARCHES = 1000  # places that `safe_cut` looks at per kind: a table of numbers may have no good one


def read_chunks(stream: BinaryIO, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """All bytes of a stream, in chunks of at most `size` bytes that end at a safe cut."""
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
    """The last place up to `limit` where the text can be cut without changing its tokens.

    That is after a line break or before a space that stands between two visible ASCII characters: every pre-tokenizer
    in use cuts there too. If there is none, it is the start of a UTF-8 character.
    """
    for separator, before, after in ((b"\n", 1, 1), (b" ", 0, 1)):
        end = limit - 1
        for _ in range(SEARCHES):
            end = text.rfind(separator, limit // 2, end)
            if end < 1:
                break
            if 0x21 <= text[end - 1] <= 0x7E and 0x21 <= text[end + after] <= 0x7E:
                return end + before
    return character_start(text, limit)


def character_start(text: bytes, at: int) -> int:
    """`at` or, if that is inside a UTF-8 character, where the character starts."""
    for back in range(min(4, at + 1)):
        if at - back >= len(text) or text[at - back] & 0xC0 != 0x80:
            return at - back
    return at  # not UTF-8


def divide(chunks: Iterable[bytes], ends: list[int], align: int) -> Iterator[tuple[int, bytes, bool]]:
    """Divide a document, given in chunks, into consecutive ranges that end at these byte offsets.

    The last range reaches to the document's end. Yields (range index, bytes, whether the range ends with them). A cut
    inside a UTF-8 character moves back to its start; with `align` > 1 a cut moves back to a multiple of `align` bytes.
    """
    held: tuple[int, bytes] | None = None  # yielded when it is known whether the range goes on
    index, offset = 0, 0
    for chunk in chunks:
        rest = chunk
        while rest:
            cut = len(rest)
            if index < len(ends) and ends[index] < offset + len(rest):
                cut = ends[index] - offset
                cut = cut - cut % align if align > 1 else character_start(rest, cut)
            if cut:
                if held is not None:
                    yield (*held, held[0] != index)
                held = (index, rest[:cut])
                rest, offset = rest[cut:], offset + cut
            if rest:  # belongs to the next range
                index += 1
    if held is not None:
        yield (*held, True)
