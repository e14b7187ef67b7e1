"""Real files of facts, encoded with the paper's tokenizer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from real_data import real_data
from rebased.data.tokenizer import load_tokenizer
from rebased.evaluate.facts.episodes import build_recall
from rebased.evaluate.facts.sources import Fact, read_facts, read_squad

SOURCES = [
    (read_facts, "bigbench_qa_wikidata.jsonl.xz", 20_320),  # one of its 20,321 lines asks what another asks
    (read_squad, "squad_dev-v2.0.json.xz", 4_850),
]


@pytest.mark.parametrize(("read", "name", "count"), SOURCES, ids=["facts", "squad"])
def test_real_files(read: Callable[[Path], list[Fact]], name: str, count: int) -> None:
    facts = read(real_data(name))
    assert len(facts) == count
    tokenizer = load_tokenizer(str(real_data("gpt-neox-20b.20B_tokenizer.json.xz")))
    recall = build_recall(facts, tokenizer.encode, length=512, questions=20)
    asked = [(episode.tokens, *asked) for episode in recall.episodes["present"] for asked in episode.asked]
    assert len(asked) == 20
    for tokens, fact, begin, end, distance in asked:
        assert tokens[begin:end] == tokens[begin - distance : end - distance]
        assert tokenizer.decode(tokens[begin:end]) == facts[fact].answer
    assert max(len(episode.tokens) for episodes in recall.episodes.values() for episode in episodes) <= 512
