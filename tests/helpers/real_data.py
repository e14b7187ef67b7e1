"""Real texts for tests, where they are at hand: in the folder REBASED_DATA names, or in ../shared/data."""

import os
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("REBASED_DATA") or Path(__file__).parents[3] / "shared" / "data")


def real_data(name: str) -> Path:
    """The file, or a skip that names it."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{name} is not at hand: name its folder with REBASED_DATA")
    return path
