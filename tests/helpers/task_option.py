"""What `--task NAME` means: a registered task, or one that a file or module of the user's registers."""

import pytest

TASK = pytest.StashKey[str]()
"""Where the name given with --task is kept, once its module is imported and the name is known."""


def find_task(wanted: str) -> str:
    """Import what stands before the colon, and check that the name after it is registered then."""
    from rebased.cli.imports import import_user_code
    from rebased.tasks import task_class

    source, _, name = wanted.rpartition(":")
    try:
        if source:
            import_user_code(source)
        task_class(name)
    except ValueError as error:
        raise pytest.UsageError(f"--task {wanted}: {error}") from error
    return name
