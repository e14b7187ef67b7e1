"""The examples have the structure of the task, and keys, values and slots have its law."""

import itertools
import random

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare
from torch import Tensor

from rebased.paper.values import FIGURE_1_PAIRS
from rebased.tasks import IGNORE, MQAR, Examples
from rebased.tasks.draws import draw_distinct

P_VALUE = 1e-3  # below it a law is refuted; the seeds are fixed, so a test that passes always passes

TASKS = [
    MQAR(),  # 4n = T: every slot is filled
    MQAR(seq_len=256, kv_pairs=32),
    MQAR(seq_len=128, kv_pairs=1, vocab_size=300),
    MQAR(seq_len=64, kv_pairs=16, vocab_size=65),  # the smallest vocabulary, and an odd one
    MQAR(seq_len=4, kv_pairs=1, vocab_size=5),  # one key, one slot
    MQAR(seq_len=2048, kv_pairs=512),
    MQAR(seq_len=256, kv_pairs=32, alpha=50.0),  # weights (g + 1) ** 49
    MQAR(seq_len=64, kv_pairs=8, random_non_queries=True),
]


def slots_of(task: MQAR, examples: Examples) -> Tensor:
    """[N,n] the slot at which key i is asked for, read from the examples (which must have no random fillers)."""
    keys = examples.inputs[:, 0 : 2 * task.kv_pairs : 2, None]  # [N,n,1]
    area = examples.inputs[:, None, 2 * task.kv_pairs :: 2]  # [N,1,S]
    return (keys == area).int().argmax(2)


def ordered_counts(tuples: Tensor, size: int) -> np.ndarray:
    """How often each ordered n-tuple of distinct numbers below size occurs, in lexicographic order."""
    cells = list(itertools.permutations(range(size), tuples.shape[1]))
    digits = size ** torch.arange(tuples.shape[1])  # a tuple as a number in base size
    counts = (tuples * digits).sum(1).bincount(minlength=size ** tuples.shape[1])
    of_cells = counts[(torch.tensor(cells) * digits).sum(1)]
    assert of_cells.sum() == len(tuples)  # no tuple holds a number twice
    return of_cells.numpy()


def successive_probabilities(weights: np.ndarray, n: int) -> np.ndarray:
    """P of each ordered n-tuple when one number after another is drawn by weight among those left."""
    probabilities = []
    for cell in itertools.permutations(range(len(weights)), n):
        left, probability = weights.sum(), 1.0
        for slot in cell:
            probability *= weights[slot] / left
            left -= weights[slot]
        probabilities.append(probability)
    return np.array(probabilities)


def successive_sample(weights: np.ndarray, rows: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Successive sampling word for word: draw by weight, strike the drawn one out, draw again."""
    left = np.tile(weights, (rows, 1))
    drawn = []
    for _ in range(n):
        cumulative = left.cumsum(1)
        pick = (cumulative > rng.random((rows, 1)) * cumulative[:, -1:]).argmax(1)
        left[np.arange(rows), pick] = 0
        drawn.append(pick)
    return np.stack(drawn, axis=1)


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_structure(task: MQAR) -> None:
    n, half = task.kv_pairs, task.vocab_size // 2
    inputs, labels, _ = task.build(300, seed=42)
    assert inputs.shape == labels.shape == (300, task.seq_len)
    assert inputs.dtype == labels.dtype == torch.int64
    for row, asked in zip(inputs.tolist(), labels.tolist(), strict=True):
        keys, values = row[0 : 2 * n : 2], row[1 : 2 * n : 2]
        assert len(set(keys)) == len(set(values)) == n
        assert min(keys) >= 1
        assert max(keys) <= half - 1
        assert min(values) >= half
        assert max(values) <= task.vocab_size - 1
        value_of = dict(zip(keys, values, strict=True))
        queries = [t for t, label in enumerate(asked) if label != IGNORE]
        assert sorted(row[t] for t in queries) == sorted(keys)  # each key is asked for once
        assert all(asked[t] == value_of[row[t]] for t in queries)
        assert all(t >= 2 * n and t % 2 == 0 for t in queries)
        if not task.random_non_queries:
            assert all(row[t] == 0 for t in set(range(2 * n, task.seq_len)) - set(queries))


@pytest.mark.parametrize(("seq_len", "kv_pairs"), FIGURE_1_PAIRS.items())
def test_the_papers_pairs_fit_their_lengths(seq_len: int, kv_pairs: int) -> None:
    labels = MQAR(seq_len=seq_len, kv_pairs=kv_pairs).build(2, seed=0).labels
    assert (labels != IGNORE).sum(1).tolist() == [kv_pairs, kv_pairs]


def test_random_non_queries_touch_only_fillers() -> None:
    plain = MQAR(seq_len=32, kv_pairs=4, vocab_size=40).build(3_000, seed=3)
    noisy = MQAR(seq_len=32, kv_pairs=4, vocab_size=40, random_non_queries=True).build(3_000, seed=3)
    assert torch.equal(noisy.labels, plain.labels)
    filler = plain.inputs == 0
    assert torch.equal(noisy.inputs[~filler], plain.inputs[~filler])
    counts = noisy.inputs[filler].bincount(minlength=40)  # any token may stand there: 0, keys and values as well
    assert chisquare(counts.numpy()).pvalue > P_VALUE


@pytest.mark.parametrize("alpha", [0.01, 0.5, 1.0, 3.0])
def test_slots_have_the_exact_law_of_successive_sampling(alpha: float) -> None:
    task = MQAR(seq_len=12, kv_pairs=2, alpha=alpha)  # 2 of 4 slots: 12 ordered draws
    slots = slots_of(task, task.build(200_000, seed=1))
    counts = ordered_counts(slots, task.n_slots)
    law = successive_probabilities(np.arange(1, 5) ** (alpha - 1), 2)
    assert law.sum() == pytest.approx(1)
    assert chisquare(counts, 200_000 * law).pvalue > P_VALUE
    other_law = successive_probabilities(np.arange(1, 5) ** (alpha - 0.95), 2)
    assert chisquare(counts, 200_000 * other_law).pvalue < 1e-6  # so many examples tell alpha from alpha + 0.05
    if alpha != 1:
        swapped = ordered_counts(slots.flip(1), task.n_slots)
        assert chisquare(swapped, 200_000 * law).pvalue < 1e-6  # and key 0's slot from key 1's


def test_slots_agree_with_a_word_for_word_sampler() -> None:
    task = MQAR(seq_len=18, kv_pairs=3)  # 3 of 6 slots: 120 ordered draws
    ours = ordered_counts(slots_of(task, task.build(100_000, seed=1)), task.n_slots)
    sample = successive_sample(np.arange(1, 7) ** -0.99, 100_000, 3, np.random.default_rng(1))
    theirs = ordered_counts(torch.from_numpy(sample), task.n_slots)
    assert chi2_contingency(np.stack([ours, theirs])).pvalue > P_VALUE


def test_slots_agree_with_a_word_for_word_sampler_at_length() -> None:
    """At S = 992 ordered draws are too many to count: compare where the first, second and last draw fall."""
    task = MQAR(seq_len=2048, kv_pairs=32)
    slots = slots_of(task, task.build(4_000, seed=1))
    sample = successive_sample(np.arange(1, task.n_slots + 1) ** -0.99, 4_000, 32, np.random.default_rng(2))
    edges = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 992]
    for draw in (0, 1, 31):
        counts = [np.histogram(of_draw, edges)[0] for of_draw in (slots[:, draw].numpy(), sample[:, draw])]
        assert chi2_contingency(np.stack(counts)).pvalue > P_VALUE


def test_keys_and_values_are_uniform_in_every_order() -> None:
    inputs = MQAR(seq_len=8, kv_pairs=2, vocab_size=10).build(100_000, seed=5).inputs
    keys, values = inputs[:, 0:4:2], inputs[:, 1:4:2]
    assert chisquare(ordered_counts(keys - 1, 4)).pvalue > P_VALUE  # keys 1..4: 12 ordered pairs
    assert chisquare(ordered_counts(values - 5, 5)).pvalue > P_VALUE  # values 5..9: 20 ordered pairs
    together = np.zeros((4, 5))
    np.add.at(together, (keys[:, 0] - 1, values[:, 0] - 5), 1)
    assert chi2_contingency(together).pvalue > P_VALUE  # a key says nothing about its value


def test_rows_with_too_few_distinct_draws_are_redrawn() -> None:
    drawn = draw_distinct(1_000_000, 2, 4, torch.Generator().manual_seed(0))  # 9 draws, all alike in 1 of 65,536 rows
    assert chisquare(ordered_counts(drawn, 4)).pvalue > P_VALUE


def test_a_seed_gives_the_same_rows_and_fewer_rows_are_a_prefix() -> None:
    for task in (MQAR(), MQAR(random_non_queries=True)):
        many = task.build(2_500, seed=7)  # three blocks
        assert torch.equal(many.inputs, task.build(2_500, seed=7).inputs)
        for n_examples in (1, 1_024, 1_025):
            few = task.build(n_examples, seed=7)
            assert torch.equal(few.inputs, many.inputs[:n_examples])
            assert torch.equal(few.labels, many.labels[:n_examples])
        assert not torch.equal(many.inputs, task.build(2_500, seed=8).inputs)
        assert len(many.inputs.unique(dim=0)) == 2_500  # blocks do not repeat


def test_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    first = MQAR().build(10, seed=42)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[1], strict=True))  # noqa: NPY002
    assert random.getstate() == before[2]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        assert torch.equal(MQAR().build(10, seed=42).inputs, first.inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_rows_have_the_same_structure_and_law() -> None:
    task = MQAR(seq_len=12, kv_pairs=2)
    examples = task.build(200_000, seed=1, device="cuda")
    assert examples.inputs.device.type == "cuda"
    on_host = examples.map(torch.Tensor.cpu)
    law = successive_probabilities(np.arange(1, 5) ** -0.99, 2)
    assert chisquare(ordered_counts(slots_of(task, on_host), 4), 200_000 * law).pvalue > P_VALUE
    assert torch.equal(task.build(100, seed=1, device="cuda").inputs, examples.inputs[:100])
    values, asked = on_host.inputs[:, 1:4:2].sort(1).values, on_host.labels[on_host.labels != IGNORE].view(-1, 2)
    assert torch.equal(asked.sort(1).values, values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seq_len": 255}, "seq_len must be even, got 255: use 254 or 256"),
        ({"kv_pairs": 0}, "kv_pairs must be at least 1, got 0"),
        ({"kv_pairs": 65}, "kv_pairs=65 needs 260 tokens.*seq_len is 256.*seq_len >= 260 or kv_pairs <= 64"),
        ({"vocab_size": 256}, "vocab_size must exceed seq_len=256, got 256: use at least 257"),
        ({"alpha": 0.0}, "greater than 0"),
        ({"alpha": float("nan")}, "alpha"),
        ({"alpha": float("inf")}, "finite"),
        ({"seqlen": 128}, "unknown key 'seqlen'; did you mean 'seq_len'"),
    ],
)
def test_bad_tasks_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MQAR(**arguments)


@pytest.mark.parametrize("n_examples", [0, -3])
def test_no_examples_are_refused(n_examples: int) -> None:
    with pytest.raises(ValueError, match=f"n, the number of examples, must be at least 1, got {n_examples}"):
        MQAR().build(n_examples, seed=0)


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seeds and counters must be 0 or more, got \(-1, 0\)"):
        MQAR().build(1, seed=-1)
