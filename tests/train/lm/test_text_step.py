"""One training step against the same step written with torch; and settings that must not change it."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rebased.config import merge
from rebased.data import TextBatch
from rebased.models import IGNORE, LanguageModel, LMConfig, preset
from rebased.runs.lm_config import LMTrainConfig
from rebased.runs.schedule import step_lr
from rebased.train.lm.flops import flops_per_token, peak_flops
from rebased.train.lm.step import LMStep, TokenLoss, to_device
from rebased.train.optimiser import parameter_groups
from rebased.train.world import World
from tiny_lm_run import TINY
from tolerances import TRAINED, assert_same_weights

SHAPE = LMConfig.model_validate(merge(TINY["model"], {"max_len": 16}))
ONE = World(0, 1, torch.device("cpu"))


def settings(**changes: Any) -> LMTrainConfig:
    return LMTrainConfig.model_validate({"steps": 10, "warmup_steps": 2, "batch_size": 6, "device": "cpu"} | changes)


def some_text(seed: int = 0) -> TextBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(257, (6, 16), generator=generator)
    labels = torch.randint(257, (6, 16), generator=generator)
    labels[0, 3:] = IGNORE  # rows with few labels have less weight
    return TextBatch(tokens, labels, None)


def rows(batch: TextBatch, size: int) -> list[TextBatch]:
    return [TextBatch(x, y, None) for x, y in zip(batch.tokens.split(size), batch.labels.split(size), strict=True)]


def trained(config: LMTrainConfig, size: int = 6, steps: int = 3) -> tuple[list[Tensor], list[float]]:
    torch.manual_seed(0)
    step = LMStep(LanguageModel(SHAPE), config, ONE)
    norms = [float(step(rows(some_text(i), size), i)[2]) for i in range(steps)]
    return [parameter.detach() for parameter in step.model.parameters()], norms


def test_a_step_is_what_torch_does_by_hand() -> None:
    config = settings(clip_norm=0.1)
    torch.manual_seed(0)
    model = LanguageModel(SHAPE).double()
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    norms = []
    for i, lr in enumerate((0.0005, 0.001, 0.001)):  # two steps of warm-up, then the first of the cosine
        batch = some_text(i)
        for group in optimiser.param_groups:
            group["lr"] = lr
        optimiser.zero_grad()
        functional.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten()).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimiser.step()
    got, got_norms = trained(config)
    assert got_norms == pytest.approx(norms, rel=TRAINED)
    assert min(norms) > 0.1  # so there was something to clip
    want = [each.detach().float() for each in model.parameters()]
    assert_same_weights(got, want)


@pytest.mark.parametrize("changes", [{"recompute": True}, {"clip_norm": None}, {"decay": "all"}])
def test_options(changes: dict[str, Any]) -> None:
    """Recomputing changes nothing. The other settings change the weights, so the test above can see them."""
    common = {"clip_norm": 0.1, "lr": 0.1}
    got, want = trained(settings(**common | changes)), trained(settings(**common))
    if "recompute" in changes:
        assert_same_weights(got[0], want[0])
    else:
        with pytest.raises(AssertionError, match="the weights differ by"):
            assert_same_weights(got[0], want[0])


@pytest.mark.parametrize("size", [1, 4])
def test_micro_batches_make_the_same_step(size: int) -> None:
    got, want = trained(settings(), size), trained(settings())
    assert got[1] == pytest.approx(want[1], rel=TRAINED)
    assert_same_weights(got[0], want[0])


def test_documents_are_kept_apart() -> None:
    """The first document of a row does not influence the second, if cu_seqlens says where it begins."""
    tokens, labels, _ = some_text()
    labels = labels.clone()
    labels[1, :5] = IGNORE
    bounds = torch.tensor([0, 16, 21, 32, 48, 64, 80, 96], dtype=torch.int32)
    other = tokens.clone()
    other[1, :5] = 1
    loss = TokenLoss(LanguageModel(SHAPE).double(), "fp32")
    assert loss(tokens, labels, bounds) == loss(other, labels, bounds)
    assert loss(tokens, labels, None) != loss(other, labels, None)


LM_SHAPES = {
    "rebased": ["short_conv", {"name": "rebased", "n_heads": 2, "key_width": 4}],
    "attention": [{"name": "attention", "n_heads": 2, "dropout": 0.0}],
}


@pytest.mark.parametrize("name", LM_SHAPES)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_model_compiles_as_one_graph_and_blocks_of_one_kind_share_theirs(name: str) -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    shape = SHAPE.model_copy(update={"n_layers": 3, "mixers": LMConfig(mixers=LM_SHAPES[name]).mixers})
    model, batch = LanguageModel(shape), some_text()
    loss = TokenLoss(model, "fp32")
    want = loss(*batch)
    assert torch.compile(loss, backend=keep, fullgraph=True)(*batch) == want
    assert len(graphs) == 1
    for block in model.blocks:
        block.compile(backend=keep, fullgraph=True)
    assert loss(*batch) == want
    assert len(graphs) == 1 + len(LM_SHAPES[name])
    torch._dynamo.reset()


@pytest.mark.parametrize("mixers", [*LM_SHAPES.values(), ["gated_delta_net"], ["mamba2"]])
def test_blocks_compile_once_for_any_number_of_documents(mixers: list[Any]) -> None:
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    model = LanguageModel(SHAPE.model_copy(update={"n_layers": 2, "mixers": LMConfig(mixers=mixers).mixers}))
    loss, compiled, counts = TokenLoss(model, "fp32"), TokenLoss(copy.deepcopy(model), "fp32"), []
    for block in compiled.model.blocks:
        block.compile(backend=keep, dynamic=False)
    for begins in ([3, 70], [5], [1, 2, 40, 41, 90], [33, 34, 35]):
        starts = torch.tensor(sorted({*range(0, 97, 16), *begins}), dtype=torch.int32)
        batch = to_device(some_text()._replace(cu_seqlens=starts), torch.device("cpu"))
        assert compiled(*batch) == loss(*batch)
        counts.append(len(graphs))
    assert counts[1] == counts[-1] > 0  # the second batch may compile what follows a call that is not compiled
    torch._dynamo.reset()


def test_the_rate_rises_in_a_line_and_falls_along_a_cosine() -> None:
    config = LMTrainConfig(steps=110, warmup_steps=10, lr=2.0, final_lr=0.25)
    rates = [step_lr(config, step) for step in range(110)]
    assert rates[:10] == pytest.approx([0.2 * i for i in range(1, 11)])
    assert rates[60] == pytest.approx(2.0 * (0.25 + 0.75 / 2))  # half way
    assert rates[109] == pytest.approx(0.5 + 1.5 * (1 + math.cos(math.pi * 0.99)) / 2)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert step_lr(LMTrainConfig(steps=4, warmup_steps=0, lr=1.0), 0) == 1.0


def test_what_decays() -> None:
    named = dict(LanguageModel(SHAPE).named_parameters())
    decays, stays = parameter_groups(named.values(), 0.1, "matrices")
    assert decays["weight_decay"] == 0.1
    assert stays["weight_decay"] == 0.0
    names = {id(parameter): name for name, parameter in named.items()}
    ends = {names[id(parameter)].rsplit(".", 2)[-2] for parameter in stays["params"]}
    assert ends == {"norm", "norm1", "norm2", "ln_q", "ln_k", "fc1", "fc2", "projection", "conv"}  # biases of the last
    (everything,) = parameter_groups(named.values(), 0.1, "all")
    assert len(everything["params"]) == len(named)


def test_operations_of_a_token() -> None:
    """Computed by hand for the attention model of Table 9 at T = 4,096, and for one layer of ReBased."""
    linear = 12 * (3 + 1 + 8) * 768**2 + 50304 * 768
    assert flops_per_token(preset("lm-attention"), 4096) == 3 * (2 * linear + 12 * 2 * 4096 * 768)
    weights = (2 * 192 + 2 * 768) * 768 + 8 * 768**2
    one = preset("lm-paper-text-rebased").model_copy(update={"n_layers": 2})
    between = 4 * 12 * 136 * 65
    conv = 768**2 + 8 * 768**2
    assert flops_per_token(one, 4096) == 3 * (2 * (weights + conv + 50304 * 768) + between)


def test_peaks_are_known_or_said_not_to_be() -> None:
    assert peak_flops("NVIDIA H200", "bf16") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe", "bf16") == 756e12
    assert peak_flops("NVIDIA L40S", "bf16") == 362e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bf16") == 312e12
    assert peak_flops("NVIDIA H200", "fp32") is None
    assert peak_flops("Some Card", "bf16") is None
    assert peak_flops(None, "bf16") is None
