"""The option `--mixer NAME`: a registered mixer, or one that a user's file or module registers."""

import pytest

MIXER = pytest.StashKey[str]()
"""The key under which pytest stores the name given with --mixer, after its module was imported."""


def find_mixer(wanted: str) -> str:
    """Return the name after the colon, after importing the file or module before it. The name must be registered."""
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
