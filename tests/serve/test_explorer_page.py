"""The explorer's page in a real browser, used by keyboard, pointer and slider, at the width of a phone."""

import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("uvicorn", reason="serving needs it: pip install 'rebased[serve]'")

import torch
from fastapi.responses import HTMLResponse

from browser import NEEDS_BROWSER, browse
from live_explorer import live_explorer
from rebased.models import LanguageModel, LMConfig
from rebased.runs.load import RecallModel, open_model
from rebased.runs.shipped import shipped_models
from rebased.serve.explorer.workbench import Workbench

pytestmark = NEEDS_BROWSER

PHONE = 390  # pixels
HARNESS = (
    Path(__file__).parent / "explorer_harness.html"
).read_text()  # the page in a frame, and a script that uses it


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    models = {name: open_model(path) for name, path in shipped_models().items()}
    task = models["mqar/rebased"].task  # type: ignore[union-attr]
    torch.manual_seed(0)
    config = LMConfig(vocab_size=160, d_model=8, n_layers=1, mixers=("mamba",), positions="none")  # type: ignore[arg-type]
    models["mamba"] = RecallModel(LanguageModel(config).eval(), task)
    workbench = Workbench(models, "mqar/rebased", "mqar/based")
    with live_explorer(workbench, lambda app: app.get("/harness")(lambda: HTMLResponse(HARNESS))) as url:
        seen, console = browse(f"{url}/harness", tmp_path)
    assert seen.get("end"), (seen, console)
    assert seen["names"] == ["mqar/rebased", "mqar/based"]
    assert seen["pairs"] == ["24", "32"]
    assert seen["few"] == ["4 of 4 questions answered"] * 2
    assert seen["held"] == ["4 of 4 keys"] * 2
    right = [int(score.split()[0]) for score in seen["many"]]
    assert 32 > right[0] > right[1]
    assert re.match(r"At 32 pairs in 128 tokens, over 64 sequences: mqar/rebased \d", seen["curve"][0])
    assert seen["curve"][1:] == [9, 9]  # 1, 4, 8, ... 32
    assert seen["length"] == ["32", "8", "8", "8"]
    first = seen["first"][0]
    assert first >= 16  # a question
    assert seen["next"] == [[first + 1] * 2, True, True]
    assert seen["home"] == [0, 0]
    assert seen["hover"] == [[20, 20], True]
    assert seen["matrix"][0] == [31, 31]
    assert "Token 32 looks most at token" in seen["matrix"][1]
    assert re.match(r"After 30 tokens, key \d+: value \d+ has probability", seen["cell"][0])
    assert seen["another"]
    assert seen["noNumber"] == ["“<b>” is no token number; write whole numbers with spaces between them", "bad"]
    assert seen["composed"][1:] == ["", True]
    assert seen["composed"][0][0].endswith("of 2 questions answered")
    assert seen["tooLarge"] == "token 900 is out of range; the model has tokens 0 to 159"
    assert seen["attention"][0] == ["mqar/attention", "mqar/based"]
    assert seen["attention"][1] == "8 of 8 questions answered"
    assert "bytes after 32 tokens, and growing" in seen["attention"][2][0]
    assert "5,008 bytes however long" in seen["attention"][2][1]
    assert seen["noMatrix"][0][0] == "No layer of this model has an attention matrix: its mixers are mamba."
    assert seen["noMatrix"][1:3] == [True, ["mamba", "mqar/based"]]
    assert "lm/stdlib-bytes" not in seen["noMatrix"][3]
    assert seen["sample"][0].startswith("Loss ")
    assert seen["sample"][2:] == [True, True]
    assert seen["text"][:2] == ["<|endoftext|>import␣<b>x</b>⏎", 0]
    assert "“⏎”. It is the last" in seen["text"][2]
    assert seen["text"][3] == 5
    assert "Next comes “⏎”: probability" in seen["before"]
    assert seen["long"] == "the text has 301 tokens, more than the 256 that are drawn; shorten it"
    assert seen["head"] == [["mean of all", "1", "2", "3", "4", "5"], True]
    assert seen["width"] <= PHONE
    assert seen["hosts"] == [seen["host"]]
    assert seen["unnamed"] == 0
    assert [line for line in console if "400" not in line] == []  # as the browser notes refusals
