"""What a model predicts after each token of one sequence: the likeliest tokens, and what the real one costs."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rebased.models import IGNORE, LanguageModel


class Predictions(NamedTuple):
    """One row per position: what is predicted there."""

    tokens: Tensor  # [T,k] int64, likeliest first
    probabilities: Tensor  # [T,k] fp32
    target: Tensor  # [T] fp32, the probability of the label; nan where there is none
    rank: Tensor  # [T] int64, how many tokens are likelier than the label; -1 where there is none


@torch.no_grad()
def predict_next(model: LanguageModel, tokens: Sequence[int], labels: Sequence[int], top: int = 5) -> Predictions:
    """Return the `top` likeliest tokens at each position, and how likely the label there is (IGNORE: no label).

    The label of a position stands at the position itself, as in training. The model is in eval mode.
    """
    device = model.embedding.weight.device
    likely = model(torch.tensor([tokens], device=device))[0].float().softmax(-1)  # [T,vocab]
    wanted = torch.tensor(labels, device=device)
    best = likely.topk(min(top, likely.shape[1]), dim=-1)
    of_label = likely.gather(1, wanted.clamp(min=0).unsqueeze(1))  # [T,1]
    has_label = wanted != IGNORE
    rank = (likely > of_label).sum(1)
    return Predictions(
        best.indices.cpu(),
        best.values.cpu(),
        torch.where(has_label, of_label[:, 0], torch.nan).cpu(),
        torch.where(has_label, rank, -1).cpu(),
    )
