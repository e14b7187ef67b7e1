"""rebased --install-completion: the shell completes commands and options."""

from pathlib import Path
from typing import Literal

from cyclopts.completion.detect import ShellDetectionError

from rebased.cli import build_app


def install_completion(
    *, shell: Literal["bash", "zsh", "fish", "powershell"] | None = None, output: Path | None = None
) -> None:
    """Write a script that lets your shell complete commands and options, and load it in new shells.

    Run it again after an update. It takes some seconds, because it imports every command.

    Parameters
    ----------
    shell
        Which shell. Default: the one that this command was typed in.
    output
        File for the script. Default: where the shell looks for such scripts, and the shell's startup file loads it.
        With this option no startup file is changed.
    """
    try:
        path = build_app().install_completion(shell=shell, output=output, add_to_startup=output is None)
    except ShellDetectionError as error:
        raise ValueError("cannot tell which shell this is; name it, for example --shell bash") from error
    then = "start a new shell to use it" if output is None else f"load it with: source {path}"
    print(f"wrote {path}; {then}")
