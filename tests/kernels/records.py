"""The committed records of kernels: of what kernels they are, and whether these have changed since."""

import json
from pathlib import Path

from kernels.classes import source_hashes

COMPUTED, COMPILED = (Path(__file__).parent / name for name in ("computed.json", "compiled.json"))


def unchanged_operators() -> set[str]:
    """The operators whose kernels were computed on a GPU and compiled for all GPUs as they are now. `whole`: those of
    which that was so before the last change added kernels, and left the others as they were (same_code)."""
    hashes = source_hashes()
    unchanged = set(hashes)
    for path in (COMPUTED, COMPILED):
        record = json.loads(path.read_text()) if path.exists() else {"hashes": {}, "complete": False}
        whole = record["hashes"] if record["complete"] else record.get("whole", ())
        unchanged &= {operator for operator in whole if record["hashes"].get(operator) == hashes.get(operator)}
    return unchanged
