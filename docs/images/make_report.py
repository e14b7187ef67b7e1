"""Draw the picture of a report's page: python docs/images/make_report.py [FOLDER]. Needs Chromium.

The page is that of the committed records, `rebased report results/table1-small.jsonl.xz`.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "results" / "table1-small.jsonl.xz"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = (1000, 1220)


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
    """Write report.png: the top of the page at its desktop width."""
    with tempfile.TemporaryDirectory() as temporary:
        page = Path(temporary, "page.html")
        subprocess.run([sys.executable, "-m", "rebased", "report", str(RECORDS), "-o", str(page)], check=True)
        screenshot(page.as_uri(), folder / "report.png", SIZE, temporary)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
