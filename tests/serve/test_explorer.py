"""The explorer's HTTP interface: what it answers about the shipped models, and what it refuses."""

import asyncio
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("uvicorn", reason="serving needs it: pip install 'rebased[serve]'")
pytest.importorskip("httpx", reason="serving needs it: pip install openai httpx")

import httpx
import torch

from live_explorer import live_explorer
from rebased.data.tokenizer import ByteTokenizer
from rebased.runs.load import RecallModel, TextModel, open_model
from rebased.runs.shipped import shipped_models
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.serve.errors import ApiError
from rebased.serve.explorer.api import MAX_WAITING, Turns
from rebased.serve.explorer.schema import BODY_BYTES, MAX_TOKENS, RecallBody, TextBody
from rebased.serve.explorer.workbench import Workbench, check_comparable
from rebased.train import train
from served_model import SMALL, small_model
from tiny_run import tiny

FORGETTING = {"seq_len": 24, "kv_pairs": 4, "updates": 2, "examples": 16}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The shipped models, and those of tiny runs: with positions, without a matrix, and on another task."""
    folder = tmp_path_factory.mktemp("runs")
    found = {name: open_model(path) for name, path in shipped_models().items()}
    mixers = {"short": ["short_conv", {"name": "rebased", "n_heads": 2, "key_width": 4}], "mamba": ["mamba", "mamba"]}
    for name, pattern in mixers.items():
        train(tiny({"model": {"mixers": pattern}, "train": {"epochs": 1}}), folder / name)
        found[name] = open_model(folder / name)
    task = {"name": "forgetting_mqar", "vocab_size": 32, "train": [FORGETTING], "test": [FORGETTING]}
    settings = tiny({"train": {"epochs": 1}}).model_dump() | {
        "task": task,
        "model": {"d_model": 8, "mixers": mixers["short"]},
    }
    train(SyntheticRunConfig.model_validate(settings), folder / "forgetting")
    found["forgetting"] = open_model(folder / "forgetting")
    return found


@pytest.fixture(scope="module")
def http(models: dict[str, Any]) -> Iterator[httpx.Client]:
    with (
        live_explorer(Workbench(models, "mqar/rebased", "mqar/based")) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


def draw(http: httpx.Client, name: str = "mqar/rebased", pairs: int = 4, seq_len: int = 32) -> list[int]:
    answer = http.post("/api/sequence", json={"model": name, "pairs": pairs, "seq_len": seq_len, "seed": 3})
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


def test_the_models(http: httpx.Client) -> None:
    about = http.get("/api/models").json()
    assert (about["left"], about["right"]) == ("mqar/rebased", "mqar/based")
    by_name = {each["name"]: each for each in about["models"]}
    assert by_name["mqar/rebased"]["layers"] == [{"layer": 1, "mixer": "rebased", "heads": 1}]
    assert by_name["mqar/attention"]["trained_pairs"] == [4, 16]
    assert by_name["lm/stdlib-bytes"]["kind"] == "text"
    assert by_name["mamba"]["layers"] == []
    assert by_name["short"]["longest"] == 16  # its positions


@pytest.mark.parametrize("name", ["mqar/rebased", "mqar/based", "mqar/attention"])
def test_the_shipped_models_recall_few_pairs(http: httpx.Client, name: str) -> None:
    tokens = draw(http)
    found = http.post("/api/recall", json={"model": name, "tokens": tokens}).json()
    assert [pair["key"] for pair in found["pairs"]] == tokens[0:8:2]
    assert [pair["value"] for pair in found["pairs"]] == tokens[1:8:2]
    assert len(found["questions"]) == 4
    values = dict(zip(tokens[0:8:2], tokens[1:8:2], strict=True))
    for question in found["questions"]:
        assert tokens[question["position"]] == question["key"]
        assert question["answer"] == values[question["key"]]
        said = found["predictions"][question["position"]]
        assert said["top"][0][0] == question["answer"]
        assert said["rank"] == 0
        assert said["probability"] == pytest.approx(said["top"][0][1], abs=1e-4)
    readout = http.post("/api/readout", json={"model": name, "tokens": tokens}).json()
    assert readout["after"] == list(range(2, 33, 2))
    assert readout["keys"] == tokens[0:8:2]
    assert readout["rank"][0] == [0, -1, -1, -1]  # after the first pair
    assert readout["rank"][-1] == [0, 0, 0, 0]
    rows = http.post("/api/attention", json={"model": name, "tokens": tokens, "layer": 1}).json()["rows"]
    assert [len(row) for row in rows] == list(range(1, 33))
    for question in found["questions"]:  # each question looks at its answer more than at any other token
        row = rows[question["position"]]
        assert row.index(max(row)) == question["answer_position"]


def test_recall_fails_as_pairs_become_more(http: httpx.Client) -> None:
    """What the page is there to show: at equal bytes of state Based fails first, and attention does not fail."""

    def accuracy(name: str, pairs: int) -> float:
        return http.post("/api/curve", json={"model": name, "pairs": pairs, "seq_len": 128}).json()["accuracy"]

    few = {name: accuracy(f"mqar/{name}", 4) for name in ("rebased", "based", "attention")}
    many = {name: accuracy(f"mqar/{name}", 32) for name in ("rebased", "based", "attention")}
    assert min(few.values()) > 0.98
    assert many["attention"] > 0.98 > many["rebased"] + 0.05
    assert many["rebased"] > many["based"] + 0.1


def test_the_state_grows_in_attention_alone(http: httpx.Client) -> None:
    sizes: dict[tuple[str, int], dict[str, Any]] = {}
    for name in ("mqar/rebased", "mqar/based", "mqar/attention"):
        for seq_len in (32, 64):
            tokens = draw(http, name, 4, seq_len)
            sizes[name, seq_len] = http.post("/api/recall", json={"model": name, "tokens": tokens}).json()["state"]
    assert sizes["mqar/rebased", 32] == sizes["mqar/rebased", 64] == sizes["mqar/based", 64]
    assert not sizes["mqar/rebased", 32]["grows"]
    assert sizes["mqar/attention", 32]["bytes"] < sizes["mqar/attention", 64]["bytes"]
    assert sizes["mqar/attention", 32]["grows"]


def test_a_curve_has_an_interval_and_is_the_same_again(http: httpx.Client) -> None:
    body = {"model": "mqar/based", "pairs": 8, "seq_len": 64}
    first = http.post("/api/curve", json=body).json()
    assert first == http.post("/api/curve", json=body).json()
    assert (first["pairs"], first["asked"]) == (8, 8 * 64)
    assert first["low"] < first["accuracy"] < first["high"]


def test_a_text(http: httpx.Client) -> None:
    name, text = "lm/stdlib-bytes", "import é<b>"
    found = http.post("/api/text", json={"model": name, "text": text}).json()
    assert found["tokens"] == [256, *text.encode()]
    assert found["texts"][:4] == ["<|endoftext|>", "i", "m", "p"]
    assert "bytes:\\xc3" in found["texts"]
    assert len(found["predictions"]) == len(found["tokens"])
    assert found["predictions"][5]["texts"][0] == "t"  # impor-
    assert not any("token_id" in text for row in found["predictions"] for text in row["texts"])
    assert "probability" not in found["predictions"][-1]  # nothing comes after it
    assert 0 < found["loss"] < 8
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))  # here a token is a byte
    matrices = [
        http.post("/api/attention", json={"model": name, "tokens": found["tokens"], "layer": 3, "head": head}).json()
        for head in (None, 0, 4)
    ]
    assert matrices[0] != matrices[1] != matrices[2]
    assert sum(matrices[1]["rows"][-1]) == pytest.approx(10_000, abs=10)


RECALL = {"model": "mqar/rebased", "tokens": [3, 90, 3]}
REFUSED = [
    ("recall", b"{", 400, "JSON"),
    ("recall", b"[]", 400, "should be an object"),
    ("recall", {"model": "mqar/rebased"}, 400, "tokens: Field required"),
    ("recall", RECALL | {"tokens": []}, 400, "at least 1 item"),
    ("recall", RECALL | {"tokens": [160]}, 400, "token 160 is out of range; the model has tokens 0 to 159"),
    ("recall", RECALL | {"tokens": [-1]}, 400, "greater than or equal to 0"),
    ("recall", RECALL | {"tokens": ["3"]}, 400, "valid integer"),
    ("recall", RECALL | {"tokens": [1] * (MAX_TOKENS + 1)}, 400, f"at most {MAX_TOKENS} items"),
    ("recall", RECALL | {"extra": 1}, 400, "extra: Extra inputs are not permitted"),
    ("recall", RECALL | {"model": "mqar/rebasd"}, 404, "did you mean 'mqar/rebased'?"),
    ("recall", RECALL | {"model": "lm/stdlib-bytes"}, 400, "was trained on text, not to recall"),
    (
        "recall",
        RECALL | {"model": "short", "tokens": [1] * 17},
        400,
        "17 tokens, more than the model's 16 positions",
    ),
    ("recall", b" " * (BODY_BYTES + 1), 413, "larger than"),
    ("text", {"model": "mqar/rebased", "text": "x"}, 400, "was trained to recall, not on text"),
    ("text", {"model": "lm/stdlib-bytes", "text": ""}, 400, "at least 1 character"),
    ("text", {"model": "lm/stdlib-bytes", "text": "x" * 300}, 400, "has 301 tokens, more than the 256 that are drawn"),
    ("attention", RECALL | {"layer": 0}, 400, "short_conv' (class ShortConv of"),
    ("attention", RECALL | {"layer": 9}, 400, "there is no layer 9: the model's are 0 to 1"),
    ("attention", RECALL | {"layer": 1, "head": 1}, 400, "head 1 is out of range: layer 1 has 1"),
    ("sequence", {"model": "mqar/rebased", "pairs": 0, "seq_len": 64}, 400, "pairs: Input should be greater than"),
    ("sequence", {"model": "mqar/rebased", "pairs": 17, "seq_len": 64}, 400, "kv_pairs <= 16"),
    (
        "sequence",
        {"model": "mqar/rebased", "pairs": 4, "seq_len": 160},
        400,
        "is more than this model's 158",
    ),
    ("sequence", {"model": "mqar/rebased", "pairs": 4, "seq_len": 63}, 400, "seq_len must be even"),
    ("curve", {"model": "short", "pairs": 4, "seq_len": 64}, 400, "seq_len 64 is more than this model's 16"),
]


@pytest.mark.parametrize(("path", "body", "status", "message"), REFUSED)
def test_what_is_refused(http: httpx.Client, path: str, body: Any, status: int, message: str) -> None:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = http.post(f"/api/{path}", headers={"Content-Type": "application/json"}, **content)
    assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), answer.text


def test_other_sites_get_nothing(http: httpx.Client) -> None:
    """A page of another site may lead here by its own name, or post a form: neither is answered."""
    refused = http.get("/api/models", headers={"Host": "evil.example"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "host_not_allowed")
    form = http.post("/api/recall", content="x", headers={"Content-Type": "text/plain"})
    assert form.status_code == 415
    assert http.get("/api/nothing").status_code == 404
    assert "script-src 'self'" in http.get("/").headers["content-security-policy"]


def test_a_mixer_without_a_matrix_still_recalls(http: httpx.Client) -> None:
    body = {"model": "mamba", "tokens": draw(http, "mamba", 2, 12)}
    assert len(http.post("/api/recall", json=body).json()["questions"]) == 2
    assert len(http.post("/api/readout", json=body).json()["keys"]) == 2
    refused = http.post("/api/attention", json=body | {"layer": 0})
    assert (refused.status_code, "has no attention matrix" in refused.text) == (400, True)


def test_a_run_on_forgetting_mqar(http: httpx.Client) -> None:
    tokens = [3, 20, 5, 21, 3, 22, 3, 0]
    found = http.post("/api/recall", json={"model": "forgetting", "tokens": tokens}).json()
    assert [question["answer"] for question in found["questions"]] == [22]  # the new value
    assert len(draw(http, "forgetting", 4, 24)) == 24


def test_positions_leave_no_room_for_a_question_after_the_last_token(http: httpx.Client) -> None:
    tokens = draw(http, "short", 4, 16)
    readout = http.post("/api/readout", json={"model": "short", "tokens": tokens}).json()
    assert readout["after"] == [2, 4, 6, 8, 10, 12, 14]


def test_weights_that_give_nan_are_said_so(models: dict[str, Any]) -> None:
    broken = open_model(shipped_models()["mqar/rebased"])
    with torch.no_grad():
        broken.model.embedding.weight.fill_(torch.nan)
    with pytest.raises(ApiError, match="the model predicts NaN here"):
        Workbench({"broken": broken}, "broken", None).recall(RecallBody(model="broken", tokens=[3, 90, 3]))


def test_a_mixer_without_a_state(models: dict[str, Any]) -> None:
    """One that can be trained and measured, but not continued: `forward` alone is enough for a mixer."""
    opened = open_model(shipped_models()["mqar/rebased"])
    opened.model.blocks[0].mixer = torch.nn.Identity()
    workbench, body = Workbench({"own": opened}, "own", None), RecallBody(model="own", tokens=[3, 90, 3])
    assert workbench.recall(body)["state"] is None
    with pytest.raises(ApiError, match="mixer 'Identity' has no init_state"):
        workbench.readout(body)


def test_a_text_beyond_the_positions() -> None:
    config = SMALL.model_copy(update={"positions": "learned", "max_len": 16})
    workbench = Workbench({"tiny": TextModel(small_model(config), ByteTokenizer())}, "tiny", None)
    assert len(workbench.text(TextBody(model="tiny", text="x" * 15))["tokens"]) == 16
    with pytest.raises(ApiError, match="the text has 17 tokens, more than the model's 16 positions; shorten it"):
        workbench.text(TextBody(model="tiny", text="x" * 16))


def test_requests_wait_for_their_turn_but_not_too_many() -> None:
    async def fill() -> list[Any]:
        turns, go_on = Turns(), threading.Event()
        waiting = [asyncio.create_task(turns.run(go_on.wait)) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many requests"):
            await turns.run(go_on.wait)
        go_on.set()
        done = await asyncio.gather(*waiting)
        return [*done, await turns.run(lambda: "again")]

    assert asyncio.run(fill()) == [True] * MAX_WAITING + ["again"]


def test_which_models_stand_side_by_side(models: dict[str, Any], tmp_path: Path) -> None:
    check_comparable("mqar/rebased", "mqar/attention", models)
    with pytest.raises(ValueError, match="lm/stdlib-bytes was trained on text and mqar/based to recall"):
        check_comparable("mqar/based", "lm/stdlib-bytes", models)
    with pytest.raises(ValueError, match="short and mqar/based have 24 and 160 tokens"):
        check_comparable("short", "mqar/based", models)
    assert isinstance(models["short"], RecallModel)
