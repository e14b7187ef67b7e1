"""A row has the same bits whatever else is in the batch: every row of the table in docs/batch_invariance.md."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from docs_text import ROOT
from rebased.mixers import can_extend, mixer_class, mixer_names
from rebased.models import Generated, GenerateOptions, LanguageModel, LMConfig, Sampling
from rebased.models.block import build_mixer
from rebased.models.invariant_decoder import InvariantDecoder
from rebased.models.job import Job, Made
from rebased.ops import (
    BASED,
    REBASED,
    PolyState,
    batch_invariant,
    init_poly_state,
    poly_attention,
    poly_attention_extend,
)
from rebased.ops.invariance import GRID, ask_for_equal_products, fixed_linear
from served_model import Listener, make_engine, run

B = 64
ROWS = (0, 1, 31, 63)  # of the large batch, that are also computed alone
D = 24
SHAPE: dict[str, Any] = {"vocab_size": 257, "d_model": D, "max_len": 512, "mlp_ratio": 2, "n_layers": 2}
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
ARGUMENTS: dict[str, dict[str, Any]] = {
    "rebased": {"n_heads": 3, "key_width": 4},
    "based": {"n_heads": 3, "key_width": 4},
    "attention": {"n_heads": 3},
    "sliding_window": {"n_heads": 3, "window": 5},
}
MIXERS = [name for name in mixer_names() if mixer_class(name).__module__.startswith("rebased.")]
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}


def build(device: str, *mixers: str, **changes: Any) -> LanguageModel:
    """A small model in eval mode, all of whose weights are random: roundings change its tokens soon."""
    torch.manual_seed(0)
    specs = tuple({"name": name, **ARGUMENTS.get(name, {})} for name in mixers or ("short_conv", "rebased"))
    model = LanguageModel(LMConfig(mixers=specs, **(SHAPE | changes))).eval()  # type: ignore[arg-type]
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.to(device)


def rows_are_equal(function: Callable[..., Any], *inputs: Tensor) -> bool:
    """Whether function(inputs [B,...]) is at some rows what it is of each of these rows alone, to the bit."""
    together = flat(function(*inputs))
    return all(
        torch.equal(alone[0], among[row])
        for row in ROWS
        for alone, among in zip(flat(function(*(x[row : row + 1] for x in inputs))), together, strict=True)
    )


def flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [x for each in outputs for x in flat(each)]


def prompt(number: int) -> list[int]:
    """Prompts of 1 to 300 tokens; each fourth one begins like the first."""
    length = (1, 7, 40, GRID + 1, 23, 300, 64, 2 * GRID)[number % 8]
    start = 0 if number % 4 == 0 else number
    return [(7 * start + 3 * i + i * i // 5) % 256 for i in range(length)]


def operator(device: str) -> None:
    for T in (1, 65, 300):
        generator = torch.Generator().manual_seed(T)
        q, k, v = (torch.randn(B, T, 3, width, generator=generator).to(device) for width in (16, 16, 24))
        for coefficients in (REBASED, BASED):
            kernel = {"coefficients": coefficients}
            assert rows_are_equal(lambda *x, kernel=kernel: poly_attention(*x, **kernel), q, k, v)
            state = init_poly_state(B, 3, 16, 24, coefficients, device=torch.device(device))

            def extend(*x: Tensor, kernel: Any = kernel) -> Any:
                return poly_attention_extend(*x[:3], PolyState(*x[3:]), **kernel)

            assert rows_are_equal(extend, q, k, v, *(torch.rand_like(x) for x in state))


def layer(device: str) -> None:
    x = torch.randn(B, 70, D, device=device)
    for name in ("rebased", "based", "short_conv"):
        mixer = build(device, name).blocks[0].mixer
        with batch_invariant(), torch.no_grad():
            assert rows_are_equal(mixer, x), name


def forward(device: str) -> None:
    tokens = torch.randint(257, (B, GRID + 9), device=device)
    places = torch.tensor([[3, GRID]] * B, device=device)
    model = build(device, "rebased", "attention")
    with batch_invariant(), torch.no_grad():
        assert rows_are_equal(model, tokens)
        assert rows_are_equal(lambda x, p: model.hidden_at(x, p).view(*p.shape, D), tokens, places)


def padding(device: str) -> None:
    model = build(device, "short_conv", "rebased", max_len=300)
    tokens = torch.randint(257, (1, 300), device=device)
    with batch_invariant(), torch.no_grad():
        whole = model(tokens)
        for length in (1, 5, GRID, GRID + 1, 299):
            assert torch.equal(model(tokens[:, :length]), whole[:, :length]), length


def generated(device: str, *mixers: str, among: int = B, **options: Any) -> None:
    """Some prompts, each alone in one slot; then among others, in 64 slots and in 5."""
    model = build(device, *mixers)
    prompts = [prompt(number) for number in range(among)]
    options = {"max_tokens": 6, "batch_invariant": True, **options}
    alone = {first: one(model.generate([prompts[first]], **options)) for first in (0, 5, 3)}
    if options.get("temperature") == 0.0:
        for slots in (B, 5):
            made = model.generate(prompts, slots=slots, **options)
            assert {first: one(made, first) for first in alone} == alone
        return
    for slots, first in ((B, 0), (B, 5), (B, 3), (5, 3)):
        order = [prompts[first], *prompts[:first], *prompts[first + 1 :]]  # a number has a random stream of its own
        assert one(model.generate(order, slots=slots, **options)) == alone[first]


def one(made: Generated, number: int = 0) -> tuple[list[int], list[float]]:
    return made.tokens[number], made.logprobs[number]


def greedy(device: str) -> None:
    generated(device, temperature=0.0)
    generated(device, temperature=0.0, repetition_penalty=1.3, among=12)


def drawn(device: str) -> None:
    """With fewer others: `greedy` has 64 for the same steps, and what is new is how tokens are drawn."""
    generated(device, among=16, **SAMPLING)


def answers(model: LanguageModel, requests: list[list[int]], *, cache_bytes: int = 0, waves: int = 1) -> list[Any]:
    """What each request gets from an engine that gets all of them in so many waves, one after the other."""
    engine = make_engine(model, slots=20, context=512, prefill_chunk=50, cache_bytes=cache_bytes, batch_invariant=True)
    heard = [Listener() for _ in requests]
    greedy, drawn = (GenerateOptions(temperature=t, seed=5, max_tokens=5, ignore_end_of_text=True) for t in (0.0, 0.7))
    jobs = [
        (Job([tokens], drawn if number % 2 else greedy, top=2, score_prompts=len(tokens) == 40,
             marks=[[len(tokens) // 2]], keep_end=True), listener)
        for number, (tokens, listener) in enumerate(zip(requests, heard, strict=True))
    ]  # fmt: skip
    size = -(-len(jobs) // waves)
    for start in range(0, len(jobs), size):
        run(engine, *jobs[start : start + size])
    assert not any(listener.failure for listener in heard)
    if cache_bytes:
        assert engine.stats.cached_tokens > 0
    return [
        ([each for event in listener.events if isinstance(event, Made) for each in event.scored], listener.read.scores)
        for listener in heard
    ]


def served(device: str) -> None:
    model = build(device)
    requests = [prompt(number) for number in range(B)]
    together = answers(model, requests)
    for number in (0, 1, 2, 5, 11):
        few = requests[number - number % 2 : number + 1]  # whether an answer is drawn goes by its number
        assert answers(model, few)[-1] == together[number]


def cached(device: str) -> None:
    """The same requests without a cache, and in waves that find states of earlier ones, some to their very end."""
    model = build(device)
    requests = [prompt(number) for number in range(24)]
    requests += [[*tokens, 65, 66] for tokens in requests[:8]] + requests[:8]
    fresh = answers(model, requests)
    assert answers(model, requests, cache_bytes=2**24, waves=4) == fresh


CHECKS: dict[str, Callable[[str], None]] = {
    "poly_attention, poly_attention_extend": operator,
    "a layer: rebased, based, short_conv": layer,
    "LanguageModel.forward, hidden, hidden_at": forward,
    "the same with padding after a row": padding,
    "generated tokens and log-probabilities, greedy": greedy,
    "the same, drawn with a seed": drawn,
    "served answers": served,
    "served answers with a cache of prefixes": cached,
}


@DEVICES
@pytest.mark.parametrize("name", CHECKS)
def test_rows_have_the_same_bits(name: str, device: str) -> None:
    torch.manual_seed(1)
    CHECKS[name](device)


def test_the_page_promises_what_is_tested() -> None:
    table = (ROOT / "docs" / "batch_invariance.md").read_text().split("\n| what |")[1].split("\n\n")[0]
    rows = [line.split(" | ")[0].removeprefix("| ").replace("`", "") for line in table.splitlines()[2:]]
    assert rows == [*CHECKS]


@DEVICES
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_with_states_generates_so(mixer: str, device: str) -> None:
    if not can_extend(build_mixer(build("cpu", mixer).config, 0)):
        pytest.skip("it has no state")
    generated(device, mixer, among=12, temperature=0.0, repetition_penalty=1.2)


@DEVICES
def test_products_of_one_shape(device: str) -> None:
    x, weight, bias = (torch.randn(*shape, device=device) for shape in ((3, 200, 33), (17, 33), (17,)))
    y = fixed_linear(x, weight, bias)
    torch.testing.assert_close(y, nn.functional.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    assert torch.equal(fixed_linear(x[1:2, :150], weight, bias)[0], y[1, :150])
    with batch_invariant():
        assert torch.equal(nn.functional.linear(x, weight, bias), y)
    assert fixed_linear(x[:0], weight, bias).shape == (0, 200, 17)


@DEVICES
def test_a_slot_does_not_matter(device: str) -> None:
    """The step of one sequence has the same bits in every slot, beside slots that are used, idle or left."""
    model = build(device)
    decoder = InvariantDecoder(model, 2 * B)
    tokens = prompt(3)
    state, found = decoder.prefill(tokens[:-1]), []
    for slot in range(0, 2 * B, 7):
        decoder.put(slot, tokens, state, Sampling(temperature=0.0))
        made = decoder.step()
        found.append((made.tokens[slot].item(), made.logprobs[slot].item(), decoder.logits[slot].tolist()))
        if slot % 2:
            decoder.free(slot)
    assert all(each == found[0] for each in found)


def test_states_are_continued_from_the_grid_only() -> None:
    decoder = InvariantDecoder(build("cpu"), 1)
    tokens = prompt(5)
    state = decoder.prefill(tokens[:GRID])
    whole, continued = decoder.prefill(tokens), decoder.prefill(tokens[GRID:], state)
    assert all(torch.equal(a, b) for a, b in zip(flat(whole.layers), flat(continued.layers), strict=True))
    with pytest.raises(ValueError, match=f"a state after 5 tokens cannot be continued .* multiples of {GRID}"):
        decoder.prefill(tokens, decoder.prefill(tokens[:5]))


def test_packed_documents_are_refused() -> None:
    model, tokens = build("cpu"), torch.zeros(1, 4, dtype=torch.int64)
    with batch_invariant(), pytest.raises(ValueError, match="leave out cu_seqlens"):
        model.hidden(tokens, torch.tensor([0, 2, 4]))


def test_nothing_changes_without_it() -> None:
    """The default path does not meet the fixed products, and an error inside leaves none behind."""
    x, weight = torch.randn(1, 3), torch.randn(5, 3)
    before = nn.functional.linear(x, weight)
    with pytest.raises(RuntimeError), batch_invariant():
        raise RuntimeError
    assert torch.equal(nn.functional.linear(x, weight), before)


def test_products_that_differ_are_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ask_for_equal_products.__wrapped__()
    assert not caplog.records
    monkeypatch.setattr(torch, "bmm", lambda a, b: torch.full((len(a), 35, 9), float(len(a))))
    ask_for_equal_products.__wrapped__()
    assert "set MKL_CBWR=AUTO,STRICT before Python starts" in caplog.text
