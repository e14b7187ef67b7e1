"""The registers of mixers and tasks, left as they were."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def registers_kept() -> Iterator[None]:
    """Mixers and tasks that the block registers are forgotten after it. Each test runs in such a block."""
    names = ("rebased.mixers.contract", "rebased.tasks.contract")
    registers = [(module, module._REGISTER) for name in names if (module := sys.modules.get(name))]
    for module, register in registers:
        module._REGISTER = dict(register)
    try:
        yield
    finally:
        for module, register in registers:
            module._REGISTER = register
