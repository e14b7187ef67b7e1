"""A process of a context-parallel group in the tests: computes its part of the loss, and all gradients."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from rebased.models import IGNORE, LanguageModel, LMConfig
from rebased.train.lm.context_parallel import ContextParallel

VOCAB, B, T = 40, 2, 24
LINEAR = {"n_heads": 3, "key_width": 4}
MODELS: dict[str, tuple[Any, ...]] = {
    "rebased": ("short_conv", {"name": "rebased", **LINEAR}),
    "based": ("short_conv", {"name": "based", **LINEAR}),
    "attention": ("attention", {"name": "sliding_window", "window": 17}),
}


def build(mixers: tuple[Any, ...]) -> LanguageModel:
    torch.manual_seed(0)
    config = LMConfig(vocab_size=VOCAB, d_model=24, n_layers=4, max_len=T, mixers=mixers, mlp_ratio=2)
    return LanguageModel(config).eval()


def batch(labelled: slice = slice(None)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (B, T + 1), generator=generator)
    labels = torch.full((B, T), IGNORE)
    labels[:, labelled] = tokens[:, 1:][:, labelled]
    return tokens[:, :-1], labels


def join(rank: int, size: int, folder: str) -> None:
    """Run one process of the group. Its results are written to folder/rank.pt."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    context, found = ContextParallel(), {}
    for name, mixers in MODELS.items():
        for labelled in (slice(None), slice(2, 4)):  # the second: only the first process has labels
            model = build(mixers)
            loss = context.loss(model, *batch(labelled))
            loss.backward()
            context.sum_gradients(model.parameters())
            gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
            found[f"{name} {labelled.start}"] = {"loss": context.total(loss), **gradients}
    errors = {}
    for name, call in {
        "length": lambda: context.share(torch.zeros(1, T + 1)),
        "mixer": lambda: context.loss(build(("mamba",)), *batch()),
        "data": lambda: ContextParallel().loss(model, batch()[0] + rank, batch()[1]),
    }.items():
        try:
            call()
        except ValueError as error:
            errors[name] = str(error)
    torch.save({"found": found, "errors": errors}, Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()
