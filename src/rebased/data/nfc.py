"""Unicode's normal form C where it makes a difference: most lines have no character that it could change."""

import unicodedata
from functools import lru_cache

import numpy as np


@lru_cache(maxsize=1)
def suspects() -> np.ndarray:
    """[0x110000] bool: characters that normal form C may change, or join with the one before."""
    found = np.zeros(0x110000, dtype=bool)
    for code in range(0x300, 0x33480):  # below are none; above are none but by name unknown
        character = chr(code)
        if unicodedata.combining(character):
            found[code] = True
        elif (parts := unicodedata.decomposition(character)) and not parts.startswith("<"):
            found[code] |= unicodedata.normalize("NFC", character) != character
            found[int(parts.split()[-1], 16)] = True
    found[0x1161:0x1176] = found[0x11A8:0x11C3] = True  # vowels and endings of Hangul, joined by rule
    return found


def normalise(text: str) -> str:
    """unicodedata.normalize("NFC", text), by lines: nothing joins with a line's end."""
    if text.isascii():
        return text
    places = np.flatnonzero(suspects()[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")])
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
