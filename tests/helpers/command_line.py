"""The command `rebased`, called in this process."""

import pytest

from rebased.cli import main


def rebased(*words: object) -> int:
    """The exit code of `rebased WORDS`."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return int(left.value.code or 0)
