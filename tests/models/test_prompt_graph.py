"""Passes over prompts that are filled up: the states of prompts are those of `extend`."""

from typing import Any

import pytest
import torch

from rebased.mixers import tensors_of
from rebased.models import LanguageModel, LMConfig
from rebased.models.prompt_graph import DOCUMENTS, FILLING, SIZES, PromptGraphs, reads_in_graphs
from rebased.models.step_graph import WARM_UP

REBASED = {"name": "rebased", "n_heads": 2, "key_width": 4}


def make_model(*mixers: object, positions: str = "none", device: str = "cpu") -> LanguageModel:
    torch.manual_seed(0)
    given = {"vocab_size": 64, "d_model": 16, "n_layers": len(mixers), "mixers": mixers, "max_len": 600}
    return LanguageModel(LMConfig(**given, positions=positions)).to(device).eval()  # type: ignore[arg-type]


def prompts_of(lengths: list[int]) -> list[list[int]]:
    random = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(64, (length,), generator=random).tolist() for length in lengths]


@torch.no_grad()
def check(model: LanguageModel, graphs: PromptGraphs, lengths: list[int], tolerance: float) -> None:
    device = model.embedding.weight.device
    beginnings = [torch.tensor([[1, 2, 3][: n % 4]], dtype=torch.int64, device=device) for n in range(len(lengths))]
    before = [
        model.extend(each, model.init_state(1))[1] if each.numel() else model.init_state(1) for each in beginnings
    ]
    prompts = prompts_of(lengths)
    found = graphs.read(prompts, before)
    for prompt, state_before, state in zip(prompts, before, found, strict=True):
        _, expected = model.extend(torch.tensor([prompt], device=device), state_before)
        assert state.position == expected.position
        for mine, theirs in zip(tensors_of(state.layers), tensors_of(expected.layers), strict=True):
            assert mine.shape == theirs.shape
            assert (mine - theirs).abs().max() <= tolerance * max(1.0, float(theirs.abs().max()))


LENGTHS = [[1], [3, 70, 1], [15] * (DOCUMENTS - 1), [SIZES[0]], [SIZES[0] - 31] + [1] * 31]
EPS = 2.0**-23


@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
@pytest.mark.parametrize("positions", ["none", "learned"])
def test_a_pass_that_is_filled_up_reads_prompts(lengths: list[int], positions: str) -> None:
    model = make_model("short_conv", REBASED, positions=positions)
    assert reads_in_graphs(model)
    graphs = PromptGraphs(model, SIZES[0], capture=False)
    for _ in range(2):  # what a pass leaves behind does not change the next one
        check(model, graphs, lengths, 64 * EPS)


def test_what_is_thrown_away_may_be_anything() -> None:
    """Rows that fill up a pass may hold what a model that diverged has left."""
    model = make_model("short_conv", REBASED)
    graphs = PromptGraphs(model, SIZES[0], capture=False)
    for tensor in [*tensors_of(graphs._before), *tensors_of(graphs._after)]:
        tensor.fill_(torch.nan)
    check(model, graphs, [3, 70, 1], 64 * EPS)


def test_passes_that_do_not_fit_into_memory_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(REBASED)
    graphs, extend = PromptGraphs(model, SIZES[2], capture=False), model.extend_packed

    def in_little_memory(tokens: torch.Tensor, *others: Any) -> Any:
        if len(tokens) > SIZES[2]:
            raise torch.OutOfMemoryError
        return extend(tokens, *others)

    monkeypatch.setattr(model, "extend_packed", in_little_memory)
    graphs.warm_up()
    assert (graphs.sizes, graphs.most_tokens) == (list(SIZES[:2]), SIZES[1])
    assert "memory is too small for 2048 tokens of prompts at once; 1024 are read" in caplog.text
    check(model, graphs, [SIZES[1]], 64 * EPS)


def test_warming_up_ends_where_a_pass_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        captures, read = True, list[int]()

        def run(self, N: int) -> None:
            self.read.append(N)
            self.captures = len(self.read) <= WARM_UP

    graphs = PromptGraphs(make_model(REBASED), SIZES[2], capture=False)
    monkeypatch.setattr(graphs, "_graphs", Fails())
    graphs.warm_up()
    assert Fails.read == [SIZES[0] + FILLING] * (WARM_UP + 1)


def test_learned_positions_are_bounded() -> None:
    model = make_model(REBASED, positions="learned")
    graphs = PromptGraphs(model, 2 * SIZES[0], capture=False)
    with pytest.raises(ValueError, match="601 tokens are more than the 600 learned positions"):
        graphs.read([[1] * 601], [model.init_state(1)])


@pytest.mark.parametrize("mixer", ["attention", "hyena", {"name": "rwkv"}])
def test_mixers_that_read_one_prompt_after_the_other_take_no_graphs(mixer: object) -> None:
    assert not reads_in_graphs(make_model(REBASED, mixer if mixer != "attention" else {"name": mixer, "n_heads": 2}))


@pytest.mark.gpu
@pytest.mark.parametrize("mixer", ["rebased", "based", "gated_rebased"])
def test_graphs_read_prompts_of_any_length(mixer: str) -> None:
    model = make_model("short_conv", {**REBASED, "name": mixer}, device="cuda")
    graphs = PromptGraphs(model, 2048)
    graphs.warm_up()
    for lengths in [*LENGTHS, [600, 1000, 440], [2048]]:
        check(model, graphs, lengths, 1e-2)  # products in TF32, which have 10 bits
    assert graphs.works
    assert len(graphs._graphs._graphs) == len(graphs.sizes) == 3  # type: ignore[union-attr]
