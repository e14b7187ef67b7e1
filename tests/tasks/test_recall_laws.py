"""Fuzzy recall, memorisation, compositional MQAR, n-gram copying and needles: rows read by loops, and their laws."""

import math
from itertools import product

import pytest
import torch
from scipy.stats import chisquare

from rebased.tasks import (
    IGNORE,
    MQAR,
    CompositionalMQAR,
    Examples,
    ForgettingMQAR,
    FuzzyRecall,
    Memorisation,
    Needle,
    NgramCopying,
    Overwriting,
    Split,
)
from rebased.tasks.copying import BEGIN, END, PAD, SEPARATOR
from rebased.tasks.draws import first_equal
from rebased.tasks.needle import FOR, IS, STOP

P_VALUE = 1e-3  # the seeds are fixed, so a test that passes always passes


def is_uniform(numbers: torch.Tensor, size: int) -> bool:
    return bool(chisquare(numbers.flatten().bincount(minlength=size)).pvalue > P_VALUE)


def rows_of(examples: Examples) -> list[tuple[list[int], list[int]]]:
    return list(zip(examples.inputs.tolist(), examples.labels.tolist(), strict=True))


def test_the_first_of_equal_numbers() -> None:
    numbers = torch.randint(5, (200, 9), generator=torch.Generator().manual_seed(0))
    for row, found in zip(numbers.tolist(), first_equal(numbers).tolist(), strict=True):
        assert found == [row.index(number) for number in row]


def read_motifs(tokens: list[int], first_value: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The pairs of a row: a run of tokens of keys, then a run of tokens of values."""
    pairs: list[tuple[list[int], list[int]]] = []
    for before, token in zip([first_value, *tokens], tokens, strict=False):
        if token < first_value and before >= first_value:
            pairs.append(([], []))
        pairs[-1][token >= first_value].append(token)
    return [(tuple(key), tuple(value)) for key, value in pairs]


FUZZY = [FuzzyRecall(), FuzzyRecall(seq_len=31, vocab_size=10, motif=2), FuzzyRecall(seq_len=7, vocab_size=4, motif=1)]


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("task", FUZZY, ids=str)
def test_fuzzy_recall(task: FuzzyRecall, split: Split) -> None:
    m, pad = task.motif, task.vocab_size - 1
    train = task.build(300, 42, "cpu", split)
    for row, asked in rows_of(train):
        tokens = [*row, asked[-1]]
        n_pad = next(t for t, token in enumerate(tokens) if token != pad)
        pairs = read_motifs(tokens[n_pad:], task.n_keys)
        probe = pairs[-1]
        size = len(probe[0]) + len(probe[1])
        assert n_pad + sum(len(key) + len(value) for key, value in pairs) == task.seq_len + 1
        value_of: dict[tuple[int, ...], tuple[int, ...]] = {}
        wanted = [IGNORE] * (n_pad - 1)
        length = 0
        for i, (key, value) in enumerate(pairs):
            assert (1 if split == "train" else m) <= len(key) <= m
            assert 1 <= len(value) <= m
            assert len(set(key)) == len(key)
            assert len(set(value)) == len(value)
            assert (length < task.seq_len - size - 2 * m) == (i < len(pairs) - 1)
            length += len(key) + len(value)
            wanted += [IGNORE] * len(key)
            wanted += value if key in value_of else [IGNORE] * len(value)
            assert value_of.setdefault(key, value) == value
        assert probe in pairs[:-1]
        assert asked == (tokens[1:] if split == "train" else wanted[-task.seq_len :])


def test_the_law_of_motifs_and_of_the_probes_place() -> None:
    """MAD's base settings have 4.5 labels per row. Lengths are uniform, tokens too, and the place of the probe."""
    task = FuzzyRecall()
    inputs, labels, _ = task.build(4_000, 1, "cpu", "test")
    assert float((labels != IGNORE).sum(1).double().mean()) == pytest.approx(4.5, abs=0.1)
    pairs = [read_motifs([t for t in row if t < 15], 7) for row in inputs.tolist()]
    lengths = torch.tensor([len(of_row[0][1]) for of_row in pairs])
    assert is_uniform(lengths - 1, 3)
    assert is_uniform(torch.tensor([of_row[0][0] for of_row in pairs])[:, 1], 7)
    assert is_uniform(torch.tensor([of_row[0][1][0] for of_row in pairs]) - 7, 8)
    # Pairs of two tokens begin at 0, 2, 4, 6 and 8. The probe stands at the first at or after a uniform 0 to 9; at 8
    # for 9. Among 2,000 keys it is seldom drawn by chance.
    inputs = FuzzyRecall(seq_len=14, vocab_size=4_001, motif=1).build(10_000, seed=2).inputs
    assert (inputs[:, :3] == 4_000).all()
    place = (inputs[:, 3:13:2] == inputs[:, -1:]).int().argmax(1)
    assert chisquare(place.bincount(minlength=5), [1_000, 2_000, 2_000, 2_000, 3_000]).pvalue > P_VALUE


def test_memorisation() -> None:
    task = Memorisation(seq_len=6, vocab_size=12)  # 5 keys, values 5 to 10
    value_of = task.value_of().tolist()
    assert len(set(value_of)) == 5
    assert all(5 <= value < 11 for value in value_of)
    assert Memorisation(seq_len=6, vocab_size=12, map_seed=1).value_of().tolist() != value_of
    for split in ("train", "test", "held_out"):
        for row, asked in rows_of(task.build(200, 3, "cpu", split)):  # type: ignore[arg-type]
            assert row[1::2] == [11] * 3
            assert asked == [word for key in row[::2] for word in (IGNORE, value_of[key])]
    assert is_uniform(task.build(5_000, seed=1).inputs[:, ::2], 5)
    assert task.count() == 125
    assert len(task.build(3_000, seed=0).inputs.unique(dim=0)) == 125


def test_mads_memorisation_shows_every_key() -> None:
    base = Memorisation.sizes["paper"]
    task = Memorisation(seq_len=base["seq_len"], vocab_size=base["vocab_size"])
    assert (task.n_keys, base["train"]) == (127, 256)
    assert len(task.build(256, seed=42).inputs[:, ::2].unique()) == 127


@pytest.mark.parametrize(
    "task",
    [
        CompositionalMQAR(),
        CompositionalMQAR(seq_len=26, kv_pairs=4, vocab_size=36, alpha=1.0),
        CompositionalMQAR(seq_len=9, kv_pairs=1, vocab_size=12),
    ],
    ids=str,
)
def test_compositional_mqar(task: CompositionalMQAR) -> None:
    n, m, third = task.kv_pairs, math.isqrt(task.kv_pairs), task.vocab_size // 3
    examples = task.build(300, seed=42)
    for row, asked in rows_of(examples):
        triples = [tuple(row[3 * i : 3 * i + 3]) for i in range(n)]
        first, second = sorted({k1 for k1, _, _ in triples}), sorted({k2 for _, k2, _ in triples})
        assert (len(first), len(second)) == (m, m)
        assert sorted((k1, k2) for k1, k2, _ in triples) == list(product(first, second))
        assert all(1 <= k1 < third <= k2 < 2 * third <= v < task.vocab_size for k1, k2, v in triples)
        queries = [t for t, label in enumerate(asked) if label != IGNORE]
        assert sorted((row[t - 1], row[t], asked[t]) for t in queries) == sorted(triples)
        assert all(t >= 3 * n and (t - 3 * n) % 3 == 1 for t in queries)
        rest = set(range(3 * n, task.seq_len)) - {t - i for t in queries for i in (0, 1)}
        assert all(row[t] == 0 for t in rest)


def test_the_law_of_compositional_mqar() -> None:
    task = CompositionalMQAR(seq_len=24, kv_pairs=4, vocab_size=18)
    inputs = task.build(24_000, seed=5).inputs
    k1, k2 = inputs[:, 0:12:3], inputs[:, 1:12:3]
    assert is_uniform(k1 - 1, 5)  # 5 first tokens, 6 second ones, 6 values
    assert is_uniform(k2[:, :1] - 6, 6)
    assert is_uniform(inputs[:, 2] - 12, 6)
    order = 2 * (k1 == k1.amax(1, keepdim=True)).long() + (k2 == k2.amax(1, keepdim=True)).long()
    assert is_uniform((order * 4 ** torch.arange(4)).sum(1).unique(return_inverse=True)[1], 24)  # all orders of 4 pairs
    assert task.count() == 10 * 15 * 24 * 360 * 24


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_ngram_copying(n: int, split: Split) -> None:
    task = NgramCopying(seq_len=18, min_length=4, max_length=8, vocab_size=7, ngram=n)  # three letters: many repeats
    for row, asked in rows_of(task.build(400, 42, "cpu", split)):
        length = row.index(SEPARATOR) - 1
        string, again = row[1 : length + 1], [token for token in row[length + 2 :] if token != PAD]
        first = next(i for i in range(length) if string[i : i + n] == again[:n])
        assert again == string[first:]
        assert len(again) > n
        wanted = [BEGIN, *string, SEPARATOR, *again]
        assert row == wanted + [PAD] * (18 - len(wanted))
        answers = [*again[n:], END if split == "train" else IGNORE]
        assert asked == [IGNORE] * (length + 1 + n) + answers + [IGNORE] * (18 - len(wanted))


def test_nobody_has_counted_the_rows_of_ngram_copying() -> None:
    """A string is asked for from several places, so there are more rows than strings."""
    task = NgramCopying(seq_len=8, min_length=2, max_length=3, vocab_size=6, ngram=1)  # 4 + 8 strings
    assert len(task.build(2_000, seed=0).inputs.unique(dim=0)) == 4 + 8 + 4  # of 8 strings 4 have two different starts
    assert task.count() is None


def test_the_place_of_an_ngram_is_uniform() -> None:
    inputs = NgramCopying(seq_len=14, min_length=6, max_length=6, vocab_size=2_000, ngram=2).build(8_000, seed=1).inputs
    place = (inputs[:, 1:7] == inputs[:, 8:9]).int().argmax(1)  # repeats are rare among 2,000 letters
    assert is_uniform(place, 4)
    with pytest.raises(ValueError, match="ngram=5 leaves nothing to ask; use min_length >= 6"):
        NgramCopying(ngram=5)


NEEDLES = [
    Needle(),
    Needle(haystack="needles"),
    Needle(seq_len=30, vocab_size=26, digits=3, line=4, haystack="needles"),
    Needle(seq_len=12, vocab_size=18, digits=2, line=1),
]


@pytest.mark.parametrize("task", NEEDLES, ids=str)
def test_needles(task: Needle) -> None:
    size, words = task.digits + 5, 13 + task.line
    for row, asked in rows_of(task.build(300, seed=42)):
        context, question = row[: task.context_length], row[task.context_length :]
        at = [t for t, token in enumerate(context) if token == FOR]
        assert len(at) == task.n_needles
        needles = [context[t : t + size] for t in at]
        numbers = {}
        for sign, k1, k2, is_, *digits, stop in needles:
            assert (sign, is_, stop) == (FOR, IS, STOP)
            assert words <= k1 < words + task.key_words[0] <= k2 < task.vocab_size
            assert all(0 <= digit <= 9 for digit in digits)
            numbers[k1, k2] = digits
        assert len(numbers) == task.n_needles
        rest = [token for t, token in enumerate(context) if not any(begin <= t < begin + size for begin in at)]
        assert rest == [13 + i % task.line for i in range(len(rest))]
        assert at[0] % task.line == 0 if task.haystack == "noise" else at[0] == len(rest)
        digits = numbers[question[1], question[2]]
        assert question == [FOR, question[1], question[2], IS, *digits[:-1]]
        assert asked == [IGNORE] * (task.seq_len - task.digits) + digits


def test_the_law_of_needles() -> None:
    noise = Needle(seq_len=30, vocab_size=26, digits=3, line=4)  # 16 words: five places
    inputs, labels, _ = noise.build(8_000, seed=1)
    assert is_uniform((inputs == FOR).int().argmax(1) // 4, 5)
    assert is_uniform(labels[:, -3:], 10)
    inputs = NEEDLES[2].build(8_000, seed=1).inputs  # three needles and 4 x 5 keys
    asked = (inputs[:, 25:26] == inputs[:, 1:24:8]) & (inputs[:, 26:27] == inputs[:, 2:24:8])
    assert (asked.sum(1) == 1).all()
    assert is_uniform(asked.int().argmax(1), 3)
    assert is_uniform((inputs[:, 1] - 17) * 5 + inputs[:, 2] - 21, 20)


@pytest.mark.parametrize(
    ("cls", "arguments", "message"),
    [
        (FuzzyRecall, {"seq_len": 18}, "motif=3 needs more than 18 tokens; seq_len is 18"),
        (FuzzyRecall, {"vocab_size": 6}, "vocab_size 6 is too small; use at least 7"),
        (Memorisation, {"seq_len": 31}, "seq_len must be even, got 31: use 30 or 32"),
        (CompositionalMQAR, {"kv_pairs": 8}, "kv_pairs must be a square, .*; got 8"),
        (CompositionalMQAR, {"kv_pairs": 49}, "kv_pairs=49 needs 294 tokens .6 per pair., but seq_len is 256"),
        (CompositionalMQAR, {"vocab_size": 110}, "vocab_size 110 is too small for 36 pairs; use at least 111"),
        (Needle, {"seq_len": 21}, "digits=7 needs seq_len >= 22, got 21"),
        (Needle, {"vocab_size": 41}, "line=25 needs vocab_size >= 42, got 41"),
        (Needle, {"vocab_size": 42, "haystack": "needles"}, "41 needles need as many keys; vocab_size 42 has too few"),
    ],
)
def test_impossible_sizes_are_named_with_their_remedy(cls: type, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**arguments)


SETTINGS = [
    MQAR(seq_len=32, kv_pairs=4, vocab_size=40, random_non_queries=True),
    ForgettingMQAR(seq_len=32, kv_pairs=4, updates=2, vocab_size=40, random_non_queries=True),
    Overwriting(seq_len=32, kv_pairs=4, updates=2, vocab_size=40, random_non_queries=True),
    CompositionalMQAR(seq_len=32, kv_pairs=4, vocab_size=42, random_non_queries=True),
]


@pytest.mark.parametrize("task", SETTINGS, ids=str)
def test_fillers_without_keys(task: MQAR) -> None:
    """They change nothing but fillers that are keys, and are uniform among all other tokens."""
    plain, noisy, spared = (
        task.model_copy(update={"random_non_queries": kind}).build(3_000, seed=3) for kind in (False, True, "no_keys")
    )
    filler = plain.inputs == 0
    assert torch.equal(spared.labels, noisy.labels)
    assert torch.equal(spared.inputs[~filler], plain.inputs[~filler])
    keys = [{row[t] for t, label in enumerate(asked) if label != IGNORE} for row, asked in rows_of(plain)]
    is_key = torch.stack([torch.tensor([token in of_row for token in range(task.vocab_size)]) for of_row in keys])
    assert not is_key.gather(1, spared.inputs)[filler].any()
    was_key = is_key.gather(1, noisy.inputs)
    assert torch.equal(spared.inputs[~was_key], noisy.inputs[~was_key])
    share = len(keys[0]) / task.vocab_size
    assert float(was_key[filler].double().mean()) == pytest.approx(share, abs=5 * math.sqrt(share / filler.sum()))
    redrawn = spared.inputs[filler & was_key]  # a token is missing in every row whose key it is
    free = (~is_key).double().mean(0)
    assert chisquare(redrawn.bincount(minlength=task.vocab_size), len(redrawn) * (free / free.sum())).pvalue > P_VALUE
    few = task.model_copy(update={"random_non_queries": "no_keys"}).build(1_025, seed=3)
    assert torch.equal(few.inputs, spared.inputs[:1_025])


@pytest.mark.parametrize(("seq_len", "kv_pairs", "rows"), [(128, 16, 0.145), (256, 64, 0.395), (2048, 512, 1.0)])
def test_how_often_a_random_filler_is_a_key_of_its_row(seq_len: int, kv_pairs: int, rows: float) -> None:
    """docs/tasks.md says these numbers: 1 - (1 - n / N) ^ fillers of rows have at least one, at the paper's sizes."""
    task = MQAR(seq_len=seq_len, kv_pairs=kv_pairs, random_non_queries=True)
    inputs, labels, _ = task.build(1_024, seed=1)
    keys, area = inputs[:, 0 : 2 * kv_pairs : 2], inputs[:, 2 * kv_pairs :]
    is_key = torch.zeros(1_024, task.vocab_size, dtype=torch.bool).scatter_(1, keys, True)
    unasked = (is_key.gather(1, area) & (labels[:, 2 * kv_pairs :] == IGNORE)).any(1)
    fillers = seq_len - 3 * kv_pairs
    assert 1 - (1 - kv_pairs / 8192) ** fillers == pytest.approx(rows, abs=1e-3)
    assert float(unasked.double().mean()) == pytest.approx(rows, abs=5 * math.sqrt(rows * (1 - rows) / 1_024) + 1e-3)
