"""Draw the pictures of pages: python docs/images/make_report.py [FOLDER]. Needs Chromium.

The pages are those of the committed records: `rebased report results/table1-t256/table1-t256.jsonl.gz` and `rebased
paper`. One figure of another page is drawn by itself.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
PAGES = {  # by file name: the words of the command, and the size of what is shown
    "report.png": (["report", str(ROOT / "results" / "table1-t256/table1-t256.jsonl.gz")], (1000, 1250)),
    "paper.png": (["paper"], (1000, 1000)),
}
# By picture: records, and the figure's name in --tables.
FIGURES = {"extrapolation.svg": ("extrapolation-d64/extrapolation-d64.jsonl.gz", "figure-by-pairs.svg")}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def screenshot(address: str, target: Path, size: tuple[int, int], temporary: str) -> None:
    """Write what a browser shows of a page, in 128 colours."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"error: none of {', '.join(BROWSERS)} was found; install one")
    picture = Path(temporary, "page.png")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    options += ["--virtual-time-budget=20000", f"--user-data-dir={temporary}/browser"]
    options += ["--window-size={},{}".format(*size), f"--screenshot={picture}"]
    subprocess.run([browser, *options, address], check=True, capture_output=True)
    Image.open(picture).convert("RGB").quantize(128).save(target, optimize=True)


def main(folder: Path) -> None:
    """Write the top of each page at its desktop width."""
    for name, (words, size) in PAGES.items():
        with tempfile.TemporaryDirectory() as temporary:
            page = Path(temporary, "page.html")
            subprocess.run([sys.executable, "-m", "rebased", *words, "-o", str(page)], check=True)
            screenshot(page.as_uri(), folder / name, size, temporary)
    for name, (records, figure) in FIGURES.items():
        with tempfile.TemporaryDirectory() as temporary:
            words = ["report", str(ROOT / "results" / records), "--tables", temporary, "--formats", "svg"]
            subprocess.run([sys.executable, "-m", "rebased", *words], check=True)
            shutil.copy(Path(temporary, figure), folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
