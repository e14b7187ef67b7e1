"""Unicode's normal form C (NFC), faster than Python's: only lines that it may change are normalised."""

import unicodedata
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=1)
def changeable() -> np.ndarray:
    """[0x110000] bool: the characters that NFC may change or merge with the one before."""
    found = np.zeros(0x110000, dtype=bool)
    for code in range(0x300, 0x33480):  # outside this range there are none
        character = chr(code)
        if unicodedata.combining(character):
            found[code] = True
        elif (parts := unicodedata.decomposition(character)) and not parts.startswith("<"):
            found[code] |= unicodedata.normalize("NFC", character) != character
            found[int(parts.split()[-1], 16)] = True
    found[0x1161:0x1176] = found[0x11A8:0x11C3] = True  # Hangul vowels and final consonants, which are merged by rule
    return found


def normalise(text: str) -> str:
    """unicodedata.normalize("NFC", text), line by line: no character merges with a line break."""
    if text.isascii():
        return text
    places = np.flatnonzero(changeable()[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")])
    if not len(places):
        return text
    parts, done = [], 0
    for place in places.tolist():
        if place >= done:
            begin, end = text.rfind("\n", done, place) + 1 or done, text.find("\n", place)
            end = len(text) if end < 0 else end
            parts += [text[done:begin], unicodedata.normalize("NFC", text[begin:end])]
            done = end
    return "".join([*parts, text[done:]])
