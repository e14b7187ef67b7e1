"""Word problems: the groups are groups, of the right kind, and labels are products from left to right."""

import pytest
import torch

from rebased.tasks import WordProblem
from rebased.tasks.word_problem import ORDER, Group, multiplication_table

GROUPS: list[Group] = ["parity", "z60", "a4xz5", "a5"]


@pytest.mark.parametrize("group", GROUPS)
def test_the_table_is_a_group(group: Group) -> None:
    table, n = multiplication_table(group), ORDER[group]
    everything = torch.arange(n)
    assert table.shape == (n, n)
    assert torch.equal(table[0], everything)
    assert torch.equal(table[:, 0], everything)
    for rows in (table, table.t()):  # every equation a x = b has one solution
        assert torch.equal(rows.sort(1).values, everything.expand(n, n))
    assert torch.equal(table[table], table[:, table])  # (a b) c = a (b c)


def commutators(table: torch.Tensor, within: set[int]) -> set[int]:
    """The subgroup that a^-1 b^-1 a b of these elements make."""
    inverse = (table == 0).int().argmax(1)
    found = {int(table[table[inverse[a], inverse[b]], table[a, b]]) for a in within for b in within}
    while len(more := {int(table[a, b]) for a in found for b in found}) > len(found):
        found = more
    return found


def test_only_a5_is_not_solvable() -> None:
    """The elements that are left after commutators of commutators of ..."""
    sizes = {}
    for group in GROUPS:
        left, table = set(range(ORDER[group])), multiplication_table(group)
        chain = [len(left)]
        while len(less := commutators(table, left)) < len(left):
            left = less
            chain.append(len(left))
        sizes[group] = chain
    assert sizes == {"parity": [2, 1], "z60": [60, 1], "a4xz5": [60, 4, 1], "a5": [60]}


@pytest.mark.parametrize("group", GROUPS)
def test_labels_are_products_from_left_to_right(group: Group) -> None:
    task = WordProblem(group=group, seq_len=9)
    inputs, labels, slices = task.build(200, seed=42)
    table = multiplication_table(group).tolist()
    for row, asked in zip(inputs.tolist(), labels.tolist(), strict=True):
        state = 0
        for element, label in zip(row, asked, strict=True):
            state = table[state][element]
            assert label == state
    assert slices["last"].nonzero()[:, 1].eq(8).all()
    assert slices["last"].sum() == 200


def test_parity_says_whether_the_ones_are_odd() -> None:
    inputs, labels, _ = WordProblem(group="parity", vocab_size=2, seq_len=40).build(300, seed=1)
    assert torch.equal(labels, inputs.cumsum(1) % 2)


@pytest.mark.parametrize("group", GROUPS)
def test_elements_and_products_are_uniform(group: Group) -> None:
    """A product with a uniform element is uniform, at every position: chi2, 1 in 10,000."""
    inputs, labels, _ = WordProblem(group=group, seq_len=8).build(12_000, seed=3)
    n, most = ORDER[group], {2: 16, 60: 107}[ORDER[group]]
    for numbers in (inputs[:, 3], labels[:, 7]):
        counts = torch.bincount(numbers, minlength=n).double()
        assert float(((counts - 12_000 / n) ** 2 / (12_000 / n)).sum()) < most


def test_counts_and_mistakes() -> None:
    assert WordProblem(group="parity", seq_len=10).count() == 1024
    assert WordProblem(group="a5").chance() == 1 / 60
    with pytest.raises(ValueError, match="use vocab_size >= 60"):
        WordProblem(group="a5", vocab_size=59)
