"""Threads that share the rows of one computation change nothing but the time."""

import threading
from collections.abc import Iterator

import pytest
import torch

from polynomial_inputs import Shape, inputs
from rebased.ops import BASED, poly_attention
from rebased.ops.polynomial import chunk_plan
from rebased.ops.threads import run_on_threads
from tolerances import assert_near

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[int]:
    """Two threads for torch, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_parts_run_once_each_on_single_threaded_torch(two_threads: int) -> None:
    seen: list[tuple[int, int, int, bool]] = []

    def note(part: int) -> None:
        seen.append((part, threading.get_ident(), torch.get_num_threads(), torch.is_grad_enabled()))

    run_on_threads(note, range(20), two_threads, CPU)
    assert sorted(part for part, *_ in seen) == list(range(20))
    assert all(rest == [1, False] for _, _, *rest in seen)
    assert threading.get_ident() not in {thread for _, thread, *_ in seen}
    assert torch.get_num_threads() == 2
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [2], "a thread of the user's own was left with one thread"


def test_one_thread_is_the_callers_own() -> None:
    seen: list[int] = []
    run_on_threads(lambda _: seen.append(threading.get_ident()), range(3), 1, CPU)
    assert seen == [threading.get_ident()] * 3


def test_an_error_in_a_part_arrives(two_threads: int) -> None:
    def fail(part: int) -> None:
        raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match="part 0"):
        run_on_threads(fail, range(4), two_threads, CPU)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("inference", [False, True])
def test_attention_is_the_same_on_threads(monkeypatch: pytest.MonkeyPatch, two_threads: int, inference: bool) -> None:
    results = []
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    for least_work in (0, 2**60):
        monkeypatch.setattr(chunk_plan, "THREADED", least_work)
        q, k, v, do = inputs(Shape(B=2, T=300, H=3, K=4, V=5))
        with torch.inference_mode(inference):
            o = poly_attention(q, k, v, coefficients=BASED, backend="chunked")
        results.append((o,) if inference else (o, *torch.autograd.grad(o, (q, k, v), do)))
    for a, b in zip(*results, strict=True):
        assert_near(a, b, 4, 300)
