"""CUDA graphs of a decoder's step: captured after real steps, replayed with what was put into slots since."""

from typing import Any

import pytest
import torch

from rebased.mixers import tensors_of
from rebased.models import Decoder, LanguageModel, LMConfig, Sampling, Stepped, preset
from rebased.models.step_graph import WARM_UP, StepGraphs
from tolerances import assert_near


class FakeGraph:
    """Remembers what was computed while it was captured, and counts its replays."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1

    def pool(self) -> None:
        return None


class FakeCapture:
    def __init__(self, graph: FakeGraph, pool: Any = None) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def test_a_step_is_captured_after_real_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", FakeCapture)
    monkeypatch.setattr(torch.cuda, "device", lambda device: FakeCapture(FakeGraph()))
    computed: list[tuple[int, str]] = []

    def compute(longest: int, mode: str) -> Stepped:
        computed.append((longest, mode))
        return Stepped(torch.tensor([longest]), torch.zeros(1))

    graphs = StepGraphs(compute, torch.device("cuda"))  # type: ignore[arg-type]
    for _ in range(WARM_UP + 3):
        assert graphs.run(8, "draw").tokens.tolist() == [8]
    assert computed == [(8, "draw")] * (WARM_UP + 1)  # the last one was captured, not computed
    (graph, _) = graphs._graphs[8, "draw"]
    assert graph.replays == 3
    graphs.run(16, "draw")
    graphs.run(8, "greedy")
    assert computed[-2:] == [(16, "draw"), (8, "greedy")]
    graphs.clear()
    graphs.run(8, "draw")
    assert computed[-1] == (8, "draw")
    assert graph.replays == 3


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError])
def test_a_step_that_cannot_be_captured(
    kind: type[RuntimeError], required: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error where graphs are required; else one warning, and steps go on as they are."""

    def fail(graph: FakeGraph, pool: Any = None) -> None:
        raise kind("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", fail)
    monkeypatch.setattr(torch.cuda, "device", lambda device: FakeCapture(FakeGraph()))
    made = Stepped(torch.zeros(1), torch.zeros(1))
    graphs = StepGraphs(lambda *_: made, torch.device("cuda"), required=required)
    for _ in range(WARM_UP):
        assert graphs.run(8, "draw") is made
    if required:
        expected = ValueError if kind is RuntimeError else kind
        words = r"as a CUDA graph \(operation not permitted .* Decode without capture"
        with pytest.raises(expected, match=words if kind is RuntimeError else "operation not permitted"):
            graphs.run(8, "draw")
        return
    for _ in range(3):
        assert graphs.run(8, "draw") is made
    (record,) = caplog.records
    assert record.message.endswith(". Steps run without a CUDA graph, which is slower")


def test_a_graph_needs_a_gpu() -> None:
    model = LanguageModel(LMConfig(d_model=8, mixers=("short_conv",))).eval()
    with pytest.raises(ValueError, match="CUDA graphs need a GPU; the model is on cpu: leave out capture"):
        Decoder(model, 1, capture=True)
    with pytest.raises(ValueError, match="CUDA graphs need a GPU"):
        model.stream([1, 2]).capture()


SUMS = (96, 96, 40, 136, 96, 384) * 4 + (96, 96)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 3, 64, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["lm-paper-text-rebased", "lm-paper-text-based", "lm-attention"])
def test_fused_steps_are_the_steps(name: str, dtype: torch.dtype, slots: int) -> None:
    """Captured and fused against neither, where both are made to read the same text; one slot in three is empty."""
    torch.manual_seed(0)
    config = preset(name, d_model=96, vocab_size=200, max_len=64).model_copy(update={"n_layers": 4})
    model = LanguageModel(config).to("cuda", dtype).eval()
    logits = []
    for fusion in ("none", "kernels"):
        decoder = Decoder(model, slots, capacity=64, capture=fusion == "kernels", fusion=fusion)  # type: ignore[arg-type]
        used = [slot for slot in range(slots) if slot % 3 != 1]
        for slot in used:
            prompt = [(7 * slot + i) % 200 for i in range(1 + slot % 20)]
            decoder.put(slot, prompt, decoder.prefill(prompt[:-1]), Sampling(temperature=0.0))
        made = []
        for step in range(10):
            decoder.step()
            made.append(decoder.logits[used].clone())
            decoder.tokens.copy_((torch.arange(slots, device="cuda") * 11 + step) % 200)
        logits.append(torch.stack(made))
    assert_near(logits[1], logits[0], *SUMS, condition=8.0, roundings=24)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["lm-paper-text-rebased", "lm-paper-text-based", "lm-attention", "conv_rwkv"])
def test_prompts_read_together_are_those_read_alone(name: str, dtype: torch.dtype) -> None:
    """Of many lengths, some of them after a prefix."""
    torch.manual_seed(0)
    config = preset(name, d_model=96, vocab_size=200, max_len=512)
    model = LanguageModel(config.model_copy(update={"n_layers": 4})).to("cuda", dtype).eval()
    decoder = Decoder(model, 1, capacity=512)
    lengths = [1, 2, 63, 64, 65, 130, 300]
    prompts = [[(7 * n + i) % 200 for i in range(length)] for n, length in enumerate(lengths)]
    before = [decoder.prefill([3, 1, 4][: n % 4]) for n in range(len(lengths))]
    for states in ([model.init_state(1)] * len(lengths), before):
        _, together = model.extend_documents(prompts, states)
        for number, prompt in enumerate(prompts):
            alone = decoder.prefill(prompt, states[number])
            assert together[number].position == alone.position
            for ours, theirs in zip(tensors_of(together[number].layers), tensors_of(alone.layers), strict=True):
                assert_near(ours, theirs, *SUMS, 300, condition=8.0, roundings=24, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["rebased", "based", "conv_attention", "conv_sliding", "mamba", "conv_rwkv"])
def test_replayed_steps_are_the_steps(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are taken, freed and taken again between replays; caches grow. Equal to the bit to steps never captured."""
    torch.manual_seed(0)
    model = LanguageModel(preset(name, d_model=96, vocab_size=200, max_len=256)).to("cuda", dtype).eval()
    results = []
    for warm_up in (10**9, WARM_UP):
        monkeypatch.setattr("rebased.models.step_graph.WARM_UP", warm_up)
        decoder = Decoder(model, 3, capacity=16, capture=True)
        made = []
        for step in range(70):
            if step in (0, 20, 45):
                prompt = [step + 1, 2, 3, *range(step)]
                decoder.put(step % 3, prompt, decoder.prefill(prompt[:-1]), Sampling(seed=step, top_k=50))
            if step == 40:
                decoder.free(0)
            made.append([each.clone() for each in decoder.step()])
        results.append((made, decoder.active.tolist()))
        assert bool(decoder._graphs is not None and decoder._graphs._graphs) == (warm_up == WARM_UP)
    active = [slot for slot, on in enumerate(results[0][1]) if on]
    assert results[0][1] == results[1][1]
    for ours, theirs in zip(results[0][0][46:], results[1][0][46:], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a[active], b[active])


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["lm-paper-text-rebased", "lm-attention"])
def test_a_captured_generation_writes_the_same(name: str, temperature: float) -> None:
    """More sequences than slots, to the bit; a cache that grows is not captured."""
    torch.manual_seed(0)
    config = preset(name, d_model=96, vocab_size=200, max_len=64).model_copy(update={"n_layers": 4})
    model = LanguageModel(config).to("cuda").eval()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8], [9, 10]]
    plain, captured = (
        model.stream(prompts, max_tokens=20, temperature=temperature, slots=3, end_of_text=0) for _ in range(2)
    )
    assert captured.capture().run() == plain.run()
    graphs = captured._scheduler.decoder._graphs
    assert (graphs is not None and bool(graphs._graphs)) == (name != "lm-attention")
