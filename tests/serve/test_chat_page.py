"""The server's page in a real browser: it completes and chats, fetches from its own server alone, fits a phone."""

import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("uvicorn", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("prometheus_client", reason="serving needs it: pip install 'rebased[serve]'")

from fastapi.responses import HTMLResponse

from browser import NEEDS_BROWSER, browse
from live_server import live_server
from rebased.data.tokenizer import ByteTokenizer
from served_model import small_model

pytestmark = NEEDS_BROWSER

PHONE = 375  # pixels
KEY = "secret"
PROMPT = "begin"
# The page in a frame, and a script beside it that uses it as a person would, by keyboard and clicks.
HARNESS = f"""<!doctype html><iframe id="frame" src="/" style="width:{PHONE}px; height:700px; border:0"></iframe>
<pre id="seen"></pre>
<script>
const until = async condition => {{ while (!condition()) await new Promise(go => setTimeout(go, 20)); }};
document.getElementById("frame").addEventListener("load", async event => {{
  const view = event.target.contentWindow, page = view.document, at = id => page.getElementById(id);
  const press = (key, more) => at("input").dispatchEvent(
    new view.KeyboardEvent("keydown", {{key, bubbles: true, cancelable: true, ...more}}));
  const answers = n => until(() => at("log").dataset.answers === String(n));
  const seen = {{}};
  await until(() => at("status").textContent);
  seen.refused = at("status").textContent;
  at("key").value = "{KEY}";
  at("key").dispatchEvent(new view.Event("change"));
  await until(() => at("model").textContent === "tiny");
  await answers(1);
  seen.about = at("about").textContent;
  seen.example = page.querySelector(".completion").textContent;
  seen.hints = page.querySelectorAll(".hint").length;
  at("max_tokens").value = "12";
  at("temperature").value = "0";
  at("input").value = "{PROMPT}";
  press("Enter", {{ctrlKey: true}});
  await answers(2);
  seen.completion = page.querySelector(".completion:last-child div").textContent;
  seen.status = at("status").textContent;
  page.querySelector("[value=chat]").click();
  at("input").value = "Hello";
  press("Enter", {{}});
  await answers(3);
  seen.chat = Array.from(page.querySelectorAll(".message"), each => each.className);
  at("max_tokens").value = "10000000";
  at("input").value = "again";
  at("send").click();
  await answers(4);
  seen.error = [at("status").textContent, at("status").className, at("input").value];
  seen.width = page.documentElement.scrollWidth;
  seen.resources = view.performance.getEntriesByType("resource").map(entry => new URL(entry.name).host);
  seen.host = view.location.host;
  seen.unnamed = Array.from(page.querySelectorAll("input, textarea")).filter(each => !each.labels.length).length;
  document.getElementById("seen").textContent = JSON.stringify(seen);
}});
</script>"""


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    model = small_model()
    with live_server(model, api_key=KEY) as live:
        live.app.get("/harness")(lambda: HTMLResponse(HARNESS))
        seen, console = browse(f"{live.url}/harness", tmp_path)
    expected = model.generate(PROMPT, max_tokens=12, temperature=0.0, tokenizer=ByteTokenizer()).texts[0]
    assert "API key" in seen["refused"]
    begun = model.generate("", max_tokens=120, temperature=0.6, top_p=0.95, seed=1, tokenizer=ByteTokenizer()).texts[0]
    size = f"{model.num_parameters():,} parameters"
    assert seen["about"] == f"A language model of {size}: 2 layers of short_conv and rebased, tokenizer bytes."
    assert seen["example"] == f"Example: the beginning of a text{begun}"
    assert seen["hints"] == 2  # what the page is for, and the label of its field
    assert seen["completion"] == PROMPT + expected
    assert re.fullmatch(r"12 tokens in \d+\.\d s; more would follow", seen["status"])
    assert seen["chat"] == ["message user", "message assistant"]
    assert "max_tokens 10,000,000 is more than" in seen["error"][0]
    assert seen["error"][1:] == ["bad", "again"]
    assert seen["width"] <= PHONE
    assert set(seen["resources"]) == {seen["host"]}
    assert seen["unnamed"] == 0
    assert [line for line in console if "401" not in line and "400" not in line] == []  # as the browser notes refusals
