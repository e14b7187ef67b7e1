"""The committed records of kernels: of what kernels they are, and whether these have changed since."""

import json
from pathlib import Path

from kernels.classes import source_hashes

COMPUTED, COMPILED = (Path(__file__).parent / name for name in ("computed.json", "compiled.json"))


def unchanged_operators() -> set[str]:
    """The operators whose kernels were computed on a GPU and compiled for all GPUs as they are now."""
    now = set(source_hashes().items())
    for path in (COMPUTED, COMPILED):
        record = json.loads(path.read_text()) if path.exists() else {}
        now &= set(record.get("hashes", {}).items()) if record.get("complete") else set()
    return {operator for operator, _ in now}
