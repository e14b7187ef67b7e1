"""rebased leaderboard: accuracy against bytes of state, from the bundles of many people."""

import shlex
from pathlib import Path
from typing import Annotated

from rebased.cli.imports import Imports, import_all
from rebased.cli.output import OUT_OPTION, TO_TERMINAL, Output, say
from rebased.report.leaderboard import Leaderboard
from rebased.report.page import check_replaceable, write_page
from rebased.runs.collect import collect


def leaderboard(
    bundles: tuple[Path, ...],
    /,
    *,
    out: Annotated[Path, OUT_OPTION] = Path("leaderboard.html"),
    title: str | None = None,
    imports: Imports = (),
    to: Output = TO_TERMINAL,
) -> None:
    """Rank every mixer in these bundles by accuracy and bytes of state, and write one HTML page.

    Parameters
    ----------
    bundles
        Bundles (*.jsonl.xz, *.jsonl.gz), records, or folders of them. No code of the submitters is run.
    out
        The page. An older page is replaced, another file is not.
    title
        The page's heading.
    imports
        Python file or module with mixers of your own, which tell the size of their states.
    """
    to.check()
    import_all(imports)
    if out.suffix not in (".html", ".htm"):
        raise ValueError(f"-o {out}: the page is HTML, give a name ending in .html")
    check_replaceable(out)
    if not bundles:
        raise ValueError("give at least one bundle or folder, such as results")
    board = Leaderboard(collect(bundles))
    words = ["rebased", "leaderboard", *map(str, bundles), "-o", str(out)]
    write_page(board.page(title, shlex.join(words)), out)
    for sentence in board.summary:
        say(to.result_console(), sentence)
    to.warn(board.warnings)
    say(to.console(), f"wrote {out}")
    tables = {name: table.to_records() for name, table in board.tables().items()}
    to.emit({"summary": board.summary, "warnings": board.warnings, "wrote": [out], "tables": tables})
