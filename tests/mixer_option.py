"""What `--mixer NAME` means: a registered mixer, or one that a file or module of the user's registers."""

import pytest

MIXER = pytest.StashKey[str]()
"""Where the name given with --mixer is kept, once its module is imported and the name is known."""


def find_mixer(wanted: str) -> str:
    """Import what stands before the colon, and check that the name after it is registered then."""
    from rebased.cli.imports import import_user_code
    from rebased.mixers import mixer_class

    source, _, name = wanted.rpartition(":")
    try:
        if source:
            import_user_code(source)
        mixer_class(name)
    except ValueError as error:
        raise pytest.UsageError(f"--mixer {wanted}: {error}") from error
    return name
