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


def main(folder: Path) -> None:
    """Write report.png: the top of the page at its desktop width, in 128 colours."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit(f"error: none of {', '.join(BROWSERS)} was found; install one")
    with tempfile.TemporaryDirectory() as temporary:
        page, picture = Path(temporary, "page.html"), Path(temporary, "page.png")
        subprocess.run([sys.executable, "-m", "rebased", "report", str(RECORDS), "-o", str(page)], check=True)
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
        options += [
            f"--user-data-dir={temporary}/browser",
            "--window-size={},{}".format(*SIZE),
            f"--screenshot={picture}",
        ]
        subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True)
        Image.open(picture).convert("RGB").quantize(128).save(folder / "report.png", optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
