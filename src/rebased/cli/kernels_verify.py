"""rebased kernels verify: compute with every operator on this machine and compare with fp64."""

import os
from typing import Literal

from rebased.cli.output import TO_TERMINAL, Output, Terminal, progress_bars, say
from rebased.config import plural
from rebased.kernels.verify import Checked, Verification
from rebased.kernels.verify import verify as check_machine

WRONG = 1
FALLBACKS = ("safe tiles", "torch")
HEAD = ("operator", "dtype", "widths", "T", "result", "error", "tolerance", "computed by")
COLUMNS = "{:24} {:8} {:15} {:>5}  {:11} {:>8} {:>9}  {}"


def verify(device: Literal["auto", "cuda", "cpu"] = "auto", *, to: Output = TO_TERMINAL) -> int:
    """Compute with every operator on this machine and compare values and gradients with the equations in fp64.

    One line per case: the largest error of a result beside the tolerance that its arithmetic allows, and what computed
    it: "safe tiles" or "torch" where the usual kernels were found wrong here, or could not be used. On a GPU it takes
    a minute, most of it for compiling. The exit code is 1 if an error is beyond its tolerance.

    Parameters
    ----------
    device
        Where to compute: auto takes a GPU if there is one. On a CPU the paths in plain torch are checked.
    """
    to.check()
    with progress_bars(Terminal(stderr=True, quiet=to.quiet)) as begin_bar:
        found = check_machine(device, processes=min(4, os.cpu_count() or 1), on_progress=begin_bar("cases"))
    result = to.result_console()
    say(result, COLUMNS.format(*HEAD))
    for case in found.cases:
        say(result, line_of(case))
    for name, value in machine_of(found).items():
        say(result, f"{name}: {value}")
    say(result, verdict(found))
    cases = [{**case._asdict(), "right": case.right} for case in found.cases]
    to.emit({**found._asdict(), "right": found.right, "verdict": verdict(found), "cases": cases})
    return 0 if found.right else WRONG


def line_of(case: Checked) -> str:
    """The line of a case; a second one says what is wrong."""
    numbers = f"{case.error:.1e}", f"{case.tolerance:.1e}"
    by = case.computed_by if case.right else "WRONG"
    line = COLUMNS.format(case.operator, case.dtype, case.widths, f"{case.T:,}", case.result, *numbers, by)
    return f"{line}\n    {case.problem}" if case.problem else line


def machine_of(found: Verification) -> dict[str, str]:
    """What was computed with, by name."""
    why = f" ({found.reason})" if found.reason else ""
    return {
        **found.versions,
        "device": found.device,
        "backend auto": f"{found.path}{why}",
        "float32 matmul precision": found.matmul_precision,
    }


def verdict(found: Verification) -> str:
    """The last line, one sentence."""
    count, seconds = plural(len(found.cases), "case"), f"{found.seconds:.0f} s"
    if found.wrong:
        names = ", ".join(dict.fromkeys(case.operator for case in found.wrong))
        return f"WRONG on this machine: {names} ({len(found.wrong)} of {count}, {seconds})"
    fell_back = sum(case.computed_by in FALLBACKS for case in found.cases)
    without = f"; {fell_back} of them without their usual kernels" if fell_back else ""
    return f"this machine computes right: {count}{without} ({seconds})"
