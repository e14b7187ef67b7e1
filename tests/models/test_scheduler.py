"""The scheduler: when prompts are read. What sequences get is tested with `generate` and with the engine."""

from types import SimpleNamespace

import pytest

from rebased.models import Decoder, GenerateOptions, scheduler
from rebased.models.job import Job, NewTokens
from rebased.models.scheduler import PATIENCE, Scheduler
from served_model import small_model

PASS, STEP = 10.0, 1.0  # seconds of the clock in these tests


class Clocked:
    """A scheduler whose clock goes on by PASS in each pass over prompts and by STEP in each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: object) -> None:
        decoder = Decoder(small_model(), slots=8)
        self.scheduler = Scheduler(decoder, prefill_budget=64, **options)  # type: ignore[arg-type]
        self.now, self.passes = 0.0, list[int]()
        monkeypatch.setattr(scheduler, "time", SimpleNamespace(perf_counter=lambda: self.now))
        read, step = self.scheduler._reader.read, decoder.step

        def timed_read(readings, budget):  # type: ignore[no-untyped-def]
            self.now += PASS
            self.passes.append(len(readings))
            return read(readings, budget)

        def timed_step():  # type: ignore[no-untyped-def]
            self.now += STEP
            return step()

        monkeypatch.setattr(self.scheduler._reader, "read", timed_read)
        monkeypatch.setattr(decoder, "step", timed_step)

    def add(self, count: int) -> None:
        for n in range(count):
            options = GenerateOptions(max_tokens=200, temperature=0.0)
            self.scheduler.add(Job([[1 + n, 2, 3, 4]], options))

    def steps_until_passes(self, count: int) -> int:
        """Make steps until so many passes were made. Returns how many steps came before the last one."""
        for steps in range(500):
            if len(self.passes) >= count:
                return steps - 1
            self.scheduler.step()
        pytest.fail(f"prompts were not read within 500 steps: {self.passes}")


@pytest.mark.parametrize("lag", [0, 1])
def test_prompts_gather_while_sequences_decode(monkeypatch: pytest.MonkeyPatch, lag: int) -> None:
    clocked = Clocked(monkeypatch, gathers=True, lag=lag)
    clocked.add(4)
    assert clocked.steps_until_passes(1) == 0  # nobody decodes: they are read at once, in one pass
    clocked.add(2)  # 4 decode and 2 wait: for twice the time of the pass and of the steps that end with it
    assert clocked.steps_until_passes(2) == pytest.approx(2 * (PASS + STEP) / STEP, abs=2 + 3 * lag)
    clocked.add(1)  # 6 decode and 1 waits: not longer than its patience
    assert clocked.steps_until_passes(3) == pytest.approx(PATIENCE * (PASS + STEP) / STEP, abs=2 + 4 * lag)
    for _ in range(100):
        clocked.scheduler.step()
    clocked.add(1)
    assert clocked.steps_until_passes(4) == 0  # the last pass is long ago
    assert clocked.passes == [4, 2, 1, 1]


def test_prompts_that_need_no_pass_teach_nothing_about_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of one token is read by the first step."""
    clocked = Clocked(monkeypatch, gathers=True)
    clocked.scheduler.add(Job([[1]], GenerateOptions(max_tokens=200, temperature=0.0)))
    for _ in range(3):
        clocked.scheduler.step()
    passes = len(clocked.passes)
    clocked.add(1)
    assert clocked.steps_until_passes(passes + 1) == 0
    clocked.add(1)  # 2 decode and 1 waits
    assert clocked.steps_until_passes(passes + 2) == pytest.approx(2 * (PASS + STEP) / STEP, abs=3)


def test_prompts_are_read_at_once_where_they_do_not_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch)
    for number in range(3):
        clocked.add(1)
        assert clocked.steps_until_passes(number + 1) == 0


def test_all_that_gathered_get_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked(monkeypatch, gathers=True, lag=1)
    made = 0
    for _ in range(12):  # more than slots
        clocked.add(1)
        made += sum(len(told.tokens) for told in clocked.scheduler.step() if isinstance(told, NewTokens))
    while clocked.scheduler.busy:
        made += sum(len(told.tokens) for told in clocked.scheduler.step() if isinstance(told, NewTokens))
    assert made == 12 * 200
