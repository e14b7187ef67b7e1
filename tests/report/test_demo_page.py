"""The demo's page: its three sentences follow from the numbers, whatever these are."""

import json
from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

import pytest
import torch

from fake_records import fake_run
from page_reader import assert_self_contained
from rebased.evaluate.attention_speed import Timing, time_attention
from rebased.evaluate.readout import UNREAD, Readout
from rebased.report.demo import cost_sentence, demo_page, recall_sentence, state_sentence, verdicts
from rebased.report.demo_figures import crossing, labelled, recall_by_pairs, time_by_length
from rebased.runs.finished import Run

PAIRS = (4, 16)  # fake records have half the accuracy at the second
TIMINGS = [
    Timing(T, poly=T, softmax=T * T / 1000, poly_both=3 * T, softmax_both=T * T / 500) for T in (512, 2048, 8192)
]
CLEAR = {
    "linear_attention": (0.20, 0.24, 0.22) * 2,
    "based": (1.22, 1.3, 1.26) * 2,
    "rebased": (1.8, 1.9, 1.84) * 2,
    "conv_attention": (2.0, 2.0, 2.0) * 2,
}


def planted(accuracies: Mapping[str, Sequence[float]], first_seed: int = 42) -> list[Run]:
    """Runs of these models, one per accuracy, which is twice that of the most pairs."""
    return [
        fake_run(model, [0.01, accuracy], seed=seed, pairs=PAIRS, d_model=32, seq_len=64)
        for model, values in accuracies.items()
        for seed, accuracy in enumerate(values, start=first_seed)
    ]


def readout(held: int, keys: int = 4) -> Readout:
    rank = torch.tensor([[UNREAD] * keys, [0] * held + [3] * (keys - held)])
    return Readout([2, 4], list(range(keys)), (rank == 0).float(), rank)


MAPS = {
    "LinearAttention, keys of 16": readout(1),
    "Based, keys of 16": readout(2),
    "ReBased, keys of 16": readout(4),
    "ConvAttention": readout(4),
}


def test_what_is_decided_is_said() -> None:
    assert recall_sentence(planted(CLEAR)) == (
        "Recall: at 16 pairs ReBased answers 92% over 6 seeds, more than LinearAttention, keys of 16 (11%) and Based, "
        "keys of 16 (63%), less than ConvAttention (100%)."
    )


def test_what_is_not_decided_is_said() -> None:
    close = CLEAR | {"based": (1.5, 1.95, 1.7) * 2, "conv_attention": (1.7, 1.95, 1.9) * 2}
    assert recall_sentence(planted(close)) == (
        "Recall: at 16 pairs ReBased answers 92% over 6 seeds, more than LinearAttention, keys of 16 (11%), undecided "
        "against Based, keys of 16 (86%) and ConvAttention (92%)."
    )
    assert "undecided" in recall_sentence(planted({model: values[:1] for model, values in CLEAR.items()}))  # one seed


def test_the_shipped_seeds_decide() -> None:
    few = planted({model: values[:2] for model, values in CLEAR.items()})
    assert "undecided against" in recall_sentence(few)
    assert recall_sentence(few, planted(CLEAR, first_seed=100)) == (
        recall_sentence(planted(CLEAR)).replace("6 seeds", "6 shipped seeds") + " Your 2 seeds: 92%."
    )


def test_a_reversed_result_is_said() -> None:
    reversed_ = CLEAR | {"rebased": CLEAR["linear_attention"], "linear_attention": CLEAR["rebased"]}
    assert recall_sentence(planted(reversed_)) == (
        "Recall: at 16 pairs ReBased answers 11% over 6 seeds, less than LinearAttention, keys of 16 (92%), Based, "
        "keys of 16 (63%) and ConvAttention (100%)."
    )


def test_comparisons_are_corrected() -> None:
    """Six runs against six that all differ: 2 of 924 orders are as extreme; three such comparisons."""
    assert [one.p for one in verdicts(planted(CLEAR))] == [pytest.approx(3 * 2 / 924, rel=0.5)] * 3


@pytest.mark.parametrize(
    ("ours", "theirs", "at"),
    [
        ([4, 4, 4, 4], [1, 2, 8, 32], 1024),  # between 512 and 2,048 in the middle, on logarithmic axes
        ([1, 1, 1, 1], [2, 2, 2, 2], 256),  # faster at every length
        ([1, 3, 1, 3], [2, 2, 2, 2], None),  # behind at the end
        ([1, 4, 4, 4], [2, 2, 8, 32], 1024),  # an early lead that is lost does not count
    ],
)
def test_the_crossing_point(ours: list[float], theirs: list[float], at: float | None) -> None:
    assert crossing([256, 512, 2048, 8192], ours, theirs) == (None if at is None else pytest.approx(at))


def test_the_sentence_about_time() -> None:
    assert cost_sentence(TIMINGS) == (
        "Cost: on this machine the operator is faster than softmax attention from about 1,500 tokens on, 5.5 times at "
        "8,192 tokens (forward and backward)."
    )
    slow = [one._replace(poly_both=100 * one.poly_both) for one in TIMINGS]
    assert (
        "the operator is slower than softmax attention up to 8,192 tokens: it takes 18.3 times as long there"
        in cost_sentence(slow)
    )
    fast = [one._replace(poly_both=one.poly_both / 100) for one in TIMINGS]
    assert "faster than softmax attention at every length" in cost_sentence(fast)


def test_the_sentence_about_states_has_their_bytes() -> None:
    sentence = state_sentence(planted(CLEAR), MAPS)
    assert sentence.startswith("State: at the end of a sequence it still holds, of 4 pairs, 1 from ")
    # 12 heads of 2 values and a norm, with 16 or 136 features; two tokens of the convolution
    assert f"1 from LinearAttention, keys of 16 ({4 * (12 * 16 * 3 + 64):,} B)" in sentence
    assert f"4 from ReBased, keys of 16 ({4 * (12 * 136 * 3 + 64):,} B)" in sentence
    assert f"4 from ConvAttention ({4 * (2 * 64 * 32 + 64):,} B and growing)" in sentence


def test_the_page_is_whole() -> None:
    runs, shipped = planted(CLEAR), planted(CLEAR, first_seed=100)
    page = demo_page(runs, shipped, TIMINGS, MAPS, "rebased demo", "../suite-quick/report.html")
    reader = assert_self_contained(page.to_html())
    assert [value for tag, name, value in reader.attributes if (tag, name) == ("a", "href")][-1] == (
        "../suite-quick/report.html"
    )
    answers = " ".join(reader.texts["li"])
    for sentence in (recall_sentence(runs, shipped), cost_sentence(TIMINGS), state_sentence(runs, MAPS)):
        assert sentence in answers
    assert "6 seeds trained on your machine, now. Bands: 6 shipped seeds" in " ".join(reader.texts["figcaption"])
    data = json.loads(reader.texts["script"][0])
    assert data["runs"] == {run.folder: run.lines for run in runs}
    assert data["timings"] == [one._asdict() for one in TIMINGS]


def test_figures_name_the_models_with_their_bytes() -> None:
    runs = planted(CLEAR)
    for svg, wanted in (
        (recall_by_pairs(runs, []).to_html(), {f"ReBased, keys of 16: {4 * (12 * 136 * 3 + 64):,} B"}),
        (time_by_length(TIMINGS).to_html(), {"poly_attention (ReBased)", "where they cross"}),
    ):
        words = {"".join(element.itertext()).strip() for element in ElementTree.fromstring(f"<div>{svg}</div>").iter()}
        assert wanted <= words
    assert list(labelled(runs)) == list(MAPS)


def test_attention_is_timed() -> None:
    seen: list[int] = []
    timings = time_attention((8, 16), seen.append)
    assert seen == [8, 16] == [one.T for one in timings]
    assert all(0 < one.poly < 1e4 and 0 < one.softmax_both < 1e4 for one in timings)
