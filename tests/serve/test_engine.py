"""The engine: requests get together what each gets alone; slots, queues, deadlines, cancellation, kept states."""

import threading
import time
from typing import Any

import pytest
import torch

from local_engine import LocalEngine
from rebased.data.tokenizer import ByteTokenizer
from rebased.mixers import tensors_of
from rebased.models import GenerateOptions, LanguageModel, LMConfig, LMState
from rebased.models.job import Event, Failed, Job, Made
from rebased.models.prefixes import GRID, PrefixStates, state_bytes
from rebased.models.scheduler import Stats
from rebased.serve.client import Closed, Full
from served_model import SMALL, TIE, Listener, is_greedy, make_engine, run, small_model

FIELDS = ("n", "temperature", "top_p", "seed", "max_tokens", "stop")


@pytest.fixture(autouse=True, params=[0, 1], ids=["no-lag", "lag"])
def lag(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Steps that are launched before the tokens of one are looked at: on a CPU none, on a GPU one."""
    monkeypatch.setattr(LocalEngine, "lag", request.param)
    return request.param


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return small_model()


def job_of(*prompts: str, **asked: Any) -> tuple[Job, Listener]:
    given = {name: asked.pop(name) for name in FIELDS if name in asked}
    options = GenerateOptions(**{"temperature": 0.0, "max_tokens": 12, "end_of_text": 256, **given})
    return Job([list(prompt.encode()) for prompt in prompts], options, **asked), Listener()


@pytest.mark.parametrize("mixer", ["rebased", "attention"])
def test_together_each_gets_what_it_gets_alone(mixer: str) -> None:
    config = SMALL if mixer == "rebased" else LMConfig(**{**SMALL.model_dump(), "mixers": ["short_conv", "attention"]})
    model = small_model(config)
    engine = make_engine(model, slots=3, context=200, prefill_chunk=16)
    pairs = [job_of("ab" * n + "c", max_tokens=5 + n % 7) for n in range(10)]
    run(engine, *pairs)
    for n, (job, heard) in enumerate(pairs):
        assert len(heard.tokens()) == 5 + n % 7
        assert is_greedy(model, job.prompts[0], heard.tokens())
        assert heard.text() == ByteTokenizer().decode(heard.tokens())
        assert heard.reasons() == ["length"]
    assert engine.running == engine.waiting == 0
    assert sorted(engine.scheduler._free) == [0, 1, 2]


def test_warming_up_leaves_nothing_behind(model: LanguageModel) -> None:
    engine = make_engine(model, slots=3, cache_bytes=2**20)
    engine.engine.warm_up()
    assert (vars(engine.stats), len(engine.prefixes), engine.prefixes.limit) == (vars(Stats()), 0, 2**20)
    job, heard = job_of("hello")
    run(engine, (job, heard))
    assert is_greedy(model, job.prompts[0], heard.tokens())


def test_what_is_wrong_shows_while_warming_up(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model, slots=3)

    def read(*_: object) -> int:
        raise RuntimeError("no prompt can be read")

    monkeypatch.setattr(engine.scheduler._reader, "read", read)
    with pytest.raises(ValueError, match="could not be read: RuntimeError: no prompt can be read"):
        engine.engine.warm_up()


def test_draws_are_those_of_generate(model: LanguageModel) -> None:
    job, heard = job_of("hello", "world!", n=3, temperature=0.9, top_p=0.9, seed=7)
    run(make_engine(model, slots=2), (job, heard))
    expected = model.generate(
        job.prompts, n=3, max_tokens=12, temperature=0.9, top_p=0.9, seed=7, tokenizer=ByteTokenizer()
    )
    assert [heard.tokens(choice) for choice in range(6)] == expected.tokens


def test_tokens_and_prompts_are_scored(model: LanguageModel) -> None:
    job, heard = job_of("scored", top=3, score_prompts=True, max_tokens=1)
    run(make_engine(model, prefill_chunk=2), (job, heard))
    prompt = job.prompts[0]
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt]))[0].log_softmax(-1)
    first, *scores = heard.read.scores
    assert (first.token, first.logprob) == (prompt[0], None)
    (made,) = next(event.scored for event in heard.events if isinstance(event, Made))
    for place, scored in enumerate([*scores, made]):
        assert scored.logprob == pytest.approx(logprobs[place, scored.token].item(), abs=TIE)
        assert [value for _, value in scored.top] == pytest.approx(logprobs[place].topk(3).values.tolist(), abs=TIE)
    assert [scored.token for scored in scores] == prompt[1:]
    assert made.logprob == made.top[0][1]  # to the bit: clients see by it that a token is the greedy one


def test_a_scored_prompt_needs_no_slot(model: LanguageModel) -> None:
    job, heard = job_of("only read", top=1, score_prompts=True, only_read=True)
    engine = make_engine(model)
    run(engine, (job, heard))
    assert len(heard.read.scores) == len("only read")
    assert (heard.tokens(), heard.reasons(), engine.stats.steps) == ([], ["length"], 0)


def test_a_stop_string_ends_a_choice_and_is_left_out(model: LanguageModel) -> None:
    job, heard = job_of("abc", max_tokens=30)
    run(make_engine(model), (job, heard))
    text = heard.text()
    stop = text[8:10]
    job, heard = job_of("abc", max_tokens=30, stop=(stop,))
    run(make_engine(model), (job, heard))
    assert heard.text() == text.partition(stop)[0]
    assert heard.reasons() == ["stop"]


def test_a_full_context_ends_a_choice(model: LanguageModel) -> None:
    job, heard = job_of("x" * 10, max_tokens=100)
    run(make_engine(model, context=16), (job, heard))
    assert heard.reasons() == ["length"]
    assert len(heard.tokens()) == 7  # the last one needs no place


def test_a_shared_beginning_is_read_once(model: LanguageModel) -> None:
    system = "You are a model that knows nothing. " * 5
    engine = make_engine(model, cache_bytes=2**20)
    alone = []
    for question in ("one", "two", "three"):
        job, heard = job_of(system + question, marks=[[len(system)]])
        run(engine, (job, heard))
        alone.append(heard.read.cached)
        assert is_greedy(model, job.prompts[0], heard.tokens())
    assert alone == [0, len(system), len(system)]
    again, heard = job_of(system + "two")
    run(engine, (again, heard))
    assert heard.read.cached == len(system + "two") - 1


def test_prompts_are_read_together_but_for_those_that_begin_alike(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    extend = model.extend_documents
    monkeypatch.setattr(model, "extend_documents", lambda some, states: read.append(len(some)) or extend(some, states))
    for cache_bytes, passes, cached in ((0, [4], 0), (2**20, [2, 2], len("one is on"))):
        read.clear()
        engine = make_engine(model, slots=4, cache_bytes=cache_bytes)
        pairs = [job_of(prompt) for prompt in ("one is one", "two is two", "one is oneself", "three")]
        run(engine, *pairs)
        for job, heard in pairs:
            assert is_greedy(model, job.prompts[0], heard.tokens())
        assert pairs[2][1].read.cached == cached
        assert read == passes


def test_a_prompt_that_cannot_be_read_fails_alone(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    together, alone = model.extend_documents, model.extend

    def extend(tokens: torch.Tensor, state: LMState) -> tuple[torch.Tensor, LMState]:
        if tokens[0, 0] == ord("b"):
            raise RuntimeError("no memory for this")
        return alone(tokens, state)

    def documents(some: list[list[int]], states: list[LMState]) -> tuple[list[torch.Tensor], list[LMState]]:
        if any(tokens[0] == ord("b") for tokens in some):
            raise RuntimeError("no memory for this")
        return together(some, states)

    monkeypatch.setattr(model, "extend", extend)
    monkeypatch.setattr(model, "extend_documents", documents)
    pairs = [job_of(prompt) for prompt in ("a good one", "bad", "another")]
    run(make_engine(model, slots=4), *pairs)
    assert [len(heard.tokens()) for _, heard in pairs] == [12, 0, 12]
    assert [heard.failure is None for _, heard in pairs] == [True, False, True]


def test_a_beginning_that_nobody_marked_is_kept_the_second_time(model: LanguageModel) -> None:
    engine = make_engine(model, cache_bytes=2**20)
    beginning, cached = "s" * (2 * GRID + 5), []
    for question in ("one", "two", "three"):
        job, heard = job_of(beginning + question)
        run(engine, (job, heard))
        cached.append(heard.read.cached)
        assert is_greedy(model, job.prompts[0], heard.tokens())
    assert cached == [0, 0, 2 * GRID]


def test_a_chat_goes_on_where_it_ended(model: LanguageModel) -> None:
    engine = make_engine(model, cache_bytes=2**20)
    first, heard = job_of("a chat", keep_end=True)
    run(engine, (first, heard))
    longer = [*first.prompts[0], *heard.tokens(), 65, 66]
    second, again = job_of("")
    second.prompts = [longer]
    run(engine, (second, again))
    assert again.read.cached == len(longer) - 3
    assert is_greedy(model, longer, again.tokens())


def test_kept_states_are_bounded(model: LanguageModel) -> None:
    state = model.init_state(1)
    size = state_bytes(state)
    kept = PrefixStates(3 * size)
    prompts = [[n, n + 1, n + 2] for n in range(6)]
    for prompt in prompts:
        _, after = model.extend(torch.tensor([prompt]), state)
        kept.keep([(prompt, after)])
        kept.find(prompts[0])  # which is used again and again
    assert kept.bytes <= 3 * size
    assert len(kept) == 3
    found = [kept.find([*prompt, 9]).state is not None for prompt in prompts]
    assert found == [True, False, False, False, True, True]
    PrefixStates(size - 1).keep([(prompts[0], state)])


def test_states_that_were_read_together_share_their_memory_until_one_is_used(model: LanguageModel) -> None:
    first, prompts = model.init_state(1), [[n, n + 1, n + 2] for n in range(4)]
    size = state_bytes(first)
    _, states = model.extend_documents(prompts, [first] * 4)
    kept = PrefixStates(8 * size)
    kept.keep(list(zip(prompts, states, strict=True)))
    assert kept.bytes == 4 * size
    again = kept.find([*prompts[1], 9]).state
    assert again is not None
    assert kept.bytes == 5 * size  # a copy, and what the others hold
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(again.layers), tensors_of(states[1].layers), strict=True))
    for n in range(3):  # they need the room
        kept.keep([([50 + n], model.extend(torch.tensor([[50 + n]]), first)[1])])
    assert kept.bytes == 8 * size
    kept.keep([([60], model.extend(torch.tensor([[60]]), first)[1])])
    assert kept.bytes == 5 * size  # all others of that pass are gone, and what was used again is not
    assert kept.find([*prompts[1], 9]).state is again
    assert [kept.find([*prompts[n], 9]).state for n in (0, 2, 3)] == [None] * 3


def test_states_do_not_share_more_than_half_of_the_memory(model: LanguageModel) -> None:
    first, prompts = model.init_state(1), [[n, n + 1, n + 2] for n in range(4)]
    kept = PrefixStates(3 * state_bytes(first))
    kept.keep(list(zip(prompts, model.extend_documents(prompts, [first] * 4)[1], strict=True)))
    assert (len(kept), kept.bytes) == (3, kept.limit)


def test_a_cancelled_job_frees_its_slots_and_places(model: LanguageModel) -> None:
    engine = make_engine(model, slots=2, max_waiting=8)
    long, heard = job_of("long", n=8, max_tokens=1000)
    engine.submit(long, heard)
    for _ in range(3):
        engine.turn()
    assert engine.running == 2
    other, other_heard = job_of("other")
    engine.submit(other, other_heard)
    before = len(heard.events)
    engine.cancel(long)
    engine.turn()
    assert engine.running == 1
    assert len(heard.events) == before
    run(engine)
    assert is_greedy(model, other.prompts[0], other_heard.tokens())


def test_a_full_queue_refuses(model: LanguageModel) -> None:
    engine = make_engine(model, slots=1, max_waiting=2)
    first, heard = job_of("a", n=3)
    engine.submit(first, heard)  # one for the slot, two that wait
    with pytest.raises(Full):
        engine.submit(*job_of("b"))
    while not heard.reasons():
        engine.turn()
    engine.submit(*job_of("b"))  # one of them is over


def test_a_job_whose_time_is_over_ends(model: LanguageModel) -> None:
    engine = make_engine(model, slots=1)
    slow, heard = job_of("slow", max_tokens=10**6)
    engine.submit(slow, heard, deadline=time.monotonic() + 0.5)
    engine.turn()
    assert engine.running == 1
    run(engine, job_of("next"))
    assert heard.failure is not None
    assert heard.failure.kind == "timeout"
    assert engine.running == 0


def test_a_prompt_that_fails_hurts_nobody_else(model: LanguageModel, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(model)
    good, heard = job_of("good")
    bad, bad_heard = job_of("bad")
    bad.prompts = [[1, 10**6, 3]]
    run(engine, (bad, bad_heard), (good, heard))
    assert bad_heard.failure is not None
    assert is_greedy(model, good.prompts[0], heard.tokens())
    assert engine.stats.failures == 1


def test_nothing_that_failed_or_left_counts_as_waiting(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model, slots=1, max_waiting=4)
    monkeypatch.setattr(engine.decoder, "put", lambda *_, **__: 1 / 0)
    failed, heard = job_of("x", n=4)
    run(engine, (failed, heard))
    assert heard.failure is not None
    monkeypatch.undo()
    left, unheard = job_of("y", n=4, max_tokens=1000)
    engine.submit(left, unheard)
    engine.turn()
    engine.cancel(left)
    run(engine)
    assert (engine.waiting, engine.running, engine.scheduler._free) == (0, 0, [0])
    job, heard = job_of("z", n=4)
    run(engine, (job, heard))
    assert heard.reasons() == ["length"] * 4


def test_a_sequence_that_cannot_begin_hurts_nobody_else(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the highest slot, which the step then does not compute."""
    engine = make_engine(model, slots=8)
    put = engine.decoder.put

    def fail(slot: int, tokens: Any, *rest: Any, **more: Any) -> None:
        put(slot, tokens, *rest, **more) if bytes(tokens) == b"good" else 1 / 0

    monkeypatch.setattr(engine.decoder, "put", fail)
    (good, heard), (bad, bad_heard) = job_of("good"), job_of("bad")
    run(engine, (good, heard), (bad, bad_heard))
    assert bad_heard.failure is not None
    assert heard.reasons() == ["length"]
    assert is_greedy(model, good.prompts[0], heard.tokens())


def test_a_step_that_fails_ends_the_requests_and_not_the_engine(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model)
    step = engine.decoder.step

    def fail() -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(engine.decoder, "step", fail)
    job, heard = job_of("first", n=2)
    run(engine, (job, heard))
    assert heard.failure is not None
    assert "the device is gone" in heard.failure.message
    assert engine.broken
    monkeypatch.setattr(engine.decoder, "step", step)
    job, heard = job_of("second")
    run(engine, (job, heard))
    assert is_greedy(model, job.prompts[0], heard.tokens())
    assert engine.broken is None


def test_a_model_that_diverged_is_an_error() -> None:
    model = small_model()
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    job, heard = job_of("x")
    engine = make_engine(model)
    run(engine, (job, heard))
    assert heard.failure is not None
    assert heard.failure.kind == "model"
    assert engine.running == 0


def test_draining_ends_what_was_taken_and_refuses_the_rest(model: LanguageModel) -> None:
    engine = make_engine(model, slots=1)
    job, heard = job_of("taken", n=2)
    engine.submit(job, heard)
    engine.drain()
    with pytest.raises(Closed):
        engine.submit(*job_of("late"))
    run(engine)
    assert heard.reasons() == ["length", "length"]


def test_closing_tells_those_that_wait(model: LanguageModel) -> None:
    engine = make_engine(model, slots=1)
    job, heard = job_of("long", max_tokens=4000)
    engine.start()
    engine.submit(job, heard)
    while not heard.tokens():
        time.sleep(0.001)
    engine.close()
    assert not engine.alive
    assert heard.failure is not None


def test_memory_is_flat(model: LanguageModel) -> None:
    engine = make_engine(model, slots=2, cache_bytes=20_000)
    sizes = []
    for n in range(30):
        run(engine, job_of(f"prompt number {n} " * 8, max_tokens=2))
        sizes.append((engine.decoder.state_bytes, engine.prefixes.bytes <= 20_000, len(engine._clients)))
    assert len(set(sizes)) == 1


def test_a_client_that_fails_to_listen_hurts_nobody_else(model: LanguageModel) -> None:
    class Deaf(Listener):
        def __call__(self, events: list[Event]) -> None:
            if not any(isinstance(event, Failed) for event in events):
                raise RuntimeError("not now")
            super().__call__(events)

    engine = make_engine(model, slots=2)
    (deaf_job, _), deaf = job_of("deaf", max_tokens=1000), Deaf()
    job, heard = job_of("good")
    run(engine, (deaf_job, deaf), (job, heard))
    assert deaf.failure is not None
    assert len(deaf.events) == 1
    assert is_greedy(model, job.prompts[0], heard.tokens())
    assert (engine.running, engine.waiting, len(heard.tokens())) == (0, 0, 12)


def test_whoever_waits_is_told_if_the_thread_fails(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(model)
    monkeypatch.setattr(engine.engine, "turn", lambda: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    job, heard = job_of("x")
    engine.submit(job, heard)
    engine.start()
    engine.line.thread.join(10)
    assert heard.failure is not None
    with pytest.raises(Closed):
        engine.submit(*job_of("late"))


def test_an_end_of_text_token_ends_a_choice_and_the_next_takes_its_slot(model: LanguageModel) -> None:
    prompts = [list(f"number {n}".encode()) for n in range(6)]
    whole = model.generate(prompts, max_tokens=12, temperature=0.0)
    end = whole.tokens[0][4]
    expected = model.generate(prompts, max_tokens=12, temperature=0.0, end_of_text=end)
    pairs = [(Job([prompt], GenerateOptions(temperature=0.0, max_tokens=12, end_of_text=end)), Listener())
             for prompt in prompts]  # fmt: skip
    run(make_engine(model, slots=2), *pairs)
    assert [heard.tokens() for _, heard in pairs] == expected.tokens
    assert [heard.reasons() for _, heard in pairs] == [[reason] for reason in expected.finish_reasons]
    assert "stop" in expected.finish_reasons
