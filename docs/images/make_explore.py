"""Draw the picture of the explorer: python docs/images/make_explore.py [FOLDER]. Needs Chromium."""

import subprocess
import sys
import tempfile
from pathlib import Path

from make_report import screenshot

SIZE = (1100, 1020)


def main(folder: Path) -> None:
    """Write explore.png: the top of the page of `rebased explore`."""
    command = [sys.executable, "-u", "-m", "rebased", "explore", "--port", "0"]
    with (
        tempfile.TemporaryDirectory() as temporary,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            address = next(line.split()[1] for line in process.stdout if line.startswith("page "))
            screenshot(address, folder / "explore.png", SIZE, temporary)
        finally:
            process.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
