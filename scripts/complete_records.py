"""Complete the settings of recorded runs: python scripts/complete_records.py BUNDLE...

Records written before version 0.1 was released lack settings that came later: the name of the task, positions, kernels,
norms, give_up. Each then had the value that is the default now. This script writes them out, and renames "how" to
"execution". Digests stay as they are. A bundle that lacks nothing is left alone.
"""

import sys
from pathlib import Path
from typing import Any

from rebased.runs.collect import gather, write_bundle
from rebased.runs.configs import parse_run
from rebased.runs.finished import Run


def complete_run(run: Run) -> Run:
    """The run with all settings in its first line. Raises ValueError if its digest would change."""
    config = parse_run(run.settings)
    if config.digest() != run.digest:
        raise ValueError(f"{run.folder}: its settings have the digest {config.digest()}, not {run.digest}")
    renamed = {"execution" if key == "how" else key: value for key, value in run.lines[0].items()}
    first: dict[str, Any] = renamed | {"config": config.model_dump(mode="json")}
    return Run(run.folder, [first, *run.lines[1:]], run.file)


def complete_bundle(path: Path) -> bool:
    """Write the bundle again with complete records; False if nothing was missing."""
    found = gather([path])
    runs = [*found.runs, *found.lm_runs]
    if found.damaged_lines or found.nameless or found.other or found.repeated:
        raise ValueError(f"{path} is damaged, or has two records of one run; mend it first")
    complete = [complete_run(run) for run in runs]
    if [run.lines for run in complete] == [run.lines for run in runs]:
        return False
    write_bundle(complete, path)
    return True


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, "completed" if complete_bundle(Path(name)) else "is complete")
