"""Split a text into words as GPT-2's regular expression does, with numpy for a million characters at once.

The pattern is `'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+`. A word is a
run of letters, digits, white space or other characters. One plain space before a run that is not white space belongs to
that run; any other single white space character before it is a word of its own. The endings of English contractions are
words too.
"""

import unicodedata
from functools import lru_cache

import numpy as np

OTHER, LETTER, NUMBER, SPACE, UNKNOWN = 0, 1, 2, 3, 4
WHITE_SPACE = (
    9,
    10,
    11,
    12,
    13,
    32,
    0x85,
    0xA0,
    0x1680,
    *range(0x2000, 0x200B),
    0x2028,
    0x2029,
    0x202F,
    0x205F,
    0x3000,
)
ASSIGNED = 0x33480  # above it there are only tags, variation selectors and characters for private use
APOSTROPHE, BLANK = ord("'"), ord(" ")


@lru_cache(maxsize=1)
def character_classes() -> np.ndarray:
    """[0x110000] uint8: the class of each character. UNKNOWN: not assigned in this Python's version of Unicode."""
    classes = np.full(0x110000, UNKNOWN, dtype=np.uint8)
    of_category = {"L": LETTER, "N": NUMBER}
    for code, category in enumerate(map(unicodedata.category, map(chr, range(ASSIGNED)))):
        if category != "Cn":
            classes[code] = of_category.get(category[0], OTHER)
    classes[list(WHITE_SPACE)] = SPACE
    return classes


def word_starts(codes: np.ndarray, cuts: np.ndarray) -> np.ndarray | None:
    """[words] int64: where words begin among these code points [n]; None if a character is unknown.

    `cuts` are positions that separate texts: no word and no rule extends across them.
    """
    n = len(codes)
    classes = character_classes()[codes]  # [n]
    if UNKNOWN in classes:
        return None
    codes = np.concatenate([codes, np.zeros(3, codes.dtype)])  # for looking ahead of the last character
    cut = np.zeros(n + 4, dtype=bool)
    cut[cuts] = cut[0] = True
    cut[n:] = True
    start = cut.copy()
    start[1:n] |= classes[1:] != classes[:-1]

    is_space = classes == SPACE
    after_space = np.flatnonzero(is_space[:-1] & ~is_space[1:]) + 1
    after_space = after_space[~cut[after_space]]
    start[after_space - 1] = True
    start[after_space] = codes[after_space - 1] != BLANK

    quotes = np.flatnonzero(codes[: n - 1] == APOSTROPHE)
    quotes = quotes[start[quotes] & (classes[quotes + 1] == LETTER) & ~cut[quotes + 1]]
    first, second = codes[quotes + 1], codes[quotes + 2]
    one = (first == ord("s")) | (first == ord("t")) | (first == ord("m")) | (first == ord("d"))
    two = ((first == ord("r")) | (first == ord("v"))) & (second == ord("e"))
    two |= (first == ord("l")) & (second == ord("l"))
    two &= ~cut[quotes + 2]
    start[quotes[one | two] + 1] = False
    start[quotes[one] + 2] = True
    start[quotes[two] + 3] = True
    return np.flatnonzero(start[:n])
