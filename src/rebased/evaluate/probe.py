"""Where a trained model looks on a synthetic task, against where the answers stand: Table 3, Figures 5, 8 and 9."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rebased.analysis.attention import UNIT, entropy, noisy_tokens, soft_iou, target_mass
from rebased.analysis.spread import student_interval
from rebased.evaluate.attention_layers import captured_inputs, layers_with_maps, sequences_at_once
from rebased.evaluate.similarity import describe_similarity, scored_examples
from rebased.mixers import HasSimilarity, attention_map, mixer_name
from rebased.models import LanguageModel
from rebased.ops import linear_argmax
from rebased.tasks import IGNORE, Examples, Questions, Task, find_questions, task_name

DRAWN = 3
"""Examples whose matrices are kept, to be drawn."""
MOST_DRAWN = 2**17
"""Cells of a matrix (queries times keys) that is kept: 256 queries of 512 keys."""


class Measured(NamedTuple):
    """What is measured of one layer in one batch, each [B,H] but `matrix_iou` [B]."""

    iou: Tensor  # soft IoU of each head's matrix, queries x context
    mass: Tensor  # attention on the answer, mean over queries
    entropy: Tensor  # nats, mean over queries
    noisy: Tensor  # wrong keys above a uniform share, mean over queries
    matrix_iou: Tensor  # soft IoU of the mean matrix over heads


@torch.no_grad()
def probe_task(
    model: LanguageModel,
    task: Task,
    examples: Examples,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Compare the attention of every layer that has a matrix with the positions of the answers.

    Rows of a matrix are the questions, columns the positions before the first question (`task.context_length`). The
    model is in eval mode. Returns numbers and lists only:

        {"examples", "accuracy", "seq_len", "context", "layers": [layer, ...], "not_drawn": why no matrix is kept}
        layer: {"layer", "mixer", "heads", "best_head", "iou": measure, "mass", "entropy", "noisy", "matrix_iou",
                "matrix_iou_interval", "similarity", "drawn": [{"queries", "targets", "mean", "best"}]}
        measure: {"mean", "interval", "best", "best_interval", "by_head"}

    The best head is the one with the highest soft IoU. Intervals are of the mean over examples, 95 %.
    """
    answers = task.answer_positions(examples)
    if answers is None:
        raise ValueError(
            f"task {task_name(type(task))!r} does not say where its answers stand (answer_positions), so attention "
            "cannot be compared with them; probe a run on mqar or forgetting_mqar"
        )
    mixers = layers_with_maps(model)
    rows = sequences_at_once(mixers, task.seq_len, "probe a run on shorter sequences")
    questions = find_questions(examples)
    found: dict[int, list[Measured]] = {layer: [] for layer in mixers}
    samples: dict[int, list[Tensor]] = {layer: [] for layer in mixers}
    kept: dict[int, list[Tensor]] = {layer: [] for layer in mixers}
    n, correct, asked_for = len(examples.inputs), 0, 0
    Q, context, not_drawn = questions.positions.shape[1], task.context_length, None
    if Q * context > MOST_DRAWN:
        not_drawn = f"{Q:,} questions x {context:,} positions are too many to draw: at most {MOST_DRAWN:,} cells"
    scored = {layer: scored_examples(mixer, questions) for layer, mixer in mixers.items()}
    for first in range(0, n, rows):
        batch = Questions(*(part[first : first + rows] for part in questions))
        asked = batch.targets != IGNORE  # [B,Q]
        truth = answer_map(answers[first : first + rows], batch.positions, asked)  # [B,Q,T]
        with captured_inputs(model) as inputs:
            hidden = model.hidden_at(batch.inputs, batch.positions)
        guesses = linear_argmax(hidden, model.embedding.weight).view_as(batch.targets)
        correct += int(((guesses == batch.targets) & asked).sum())
        asked_for += int(asked.sum())
        for layer, mixer in mixers.items():
            A = rows_at(attention_map(mixer, inputs[layer]), batch.positions, asked)  # [B,H,Q,T]
            found[layer].append(measure(A, truth, batch.positions, asked, context))
            if isinstance(mixer, HasSimilarity) and first < scored[layer]:
                samples[layer].append(inputs[layer][: scored[layer] - first])
            if first < DRAWN and not_drawn is None:
                kept[layer].append(A[: DRAWN - first, :, :, :context].cpu())
        on_progress(min(first + rows, n), n)
    layers = []
    for layer, mixer in mixers.items():
        about = {"layer": layer, "mixer": mixer_name(mixer), **summarise(found[layer])}
        about["similarity"] = describe_similarity(mixer, samples[layer], questions) if samples[layer] else None
        about["drawn"] = draw(kept[layer], about["best_head"], questions, answers) if kept[layer] else []
        layers.append(about)
    return {
        "examples": n,
        "accuracy": correct / asked_for,
        "seq_len": task.seq_len,
        "context": context,
        "layers": layers,
        "not_drawn": not_drawn,
    }


def answer_map(answers: Tensor, positions: Tensor, asked: Tensor) -> Tensor:
    """G [B,Q,T] bool: True where the answer of a question stands; answers [B,T], positions and asked [B,Q]."""
    places = answers.gather(1, positions).clamp(min=0)
    truth = torch.zeros(*positions.shape, answers.shape[1], dtype=torch.bool, device=answers.device)
    return truth.scatter_(2, places.unsqueeze(2), True) & asked.unsqueeze(2)


def rows_at(A: Tensor, positions: Tensor, asked: Tensor) -> Tensor:
    """The rows of A [B,H,T,T] at positions [B,Q], zero where nothing is asked: [B,H,Q,T]."""
    B, H, _, T = A.shape
    picked = A.gather(2, positions[:, None, :, None].expand(B, H, -1, T))
    return picked * asked[:, None, :, None]


def measure(A: Tensor, truth: Tensor, positions: Tensor, asked: Tensor, context: int) -> Measured:
    """All measures of one layer: A [B,H,Q,T], truth [B,Q,T], positions and asked [B,Q]."""
    weights = asked.unsqueeze(1) / asked.sum(1)[:, None, None]  # [B,1,Q]: the mean over a row's questions
    right = truth[:, :, :context]
    spread = entropy(A).nan_to_num(0.0)  # nan where nothing is asked
    noise = noisy_tokens(A, truth, positions + 1).to(A.dtype)
    return Measured(
        soft_iou(A[..., :context], right),
        target_mass(A, truth),
        (spread * weights).sum(2),
        (noise * weights).sum(2),
        soft_iou(A[..., :context].mean(1, keepdim=True), right)[:, 0],
    )


def summarise(parts: list[Measured]) -> dict[str, Any]:
    """The measures of one layer over all examples, as `probe_task` returns them."""
    whole = Measured(*(torch.cat(each).double().cpu() for each in zip(*parts, strict=True)))
    best = int(whole.iou.mean(0).argmax())
    measures = {
        name: {
            "mean": float(values.mean()),
            "interval": list(student_interval(values.mean(1).tolist())),
            "best": float(values[:, best].mean()),
            "best_interval": list(student_interval(values[:, best].tolist())),
            "by_head": [round(value, 6) for value in values.mean(0).tolist()],
        }
        for name, values in zip(Measured._fields[:-1], whole[:-1], strict=True)  # [N,H] each
    }
    return {
        "heads": whole.iou.shape[1],
        "best_head": best,
        **measures,
        "matrix_iou": float(whole.matrix_iou.mean()),
        "matrix_iou_interval": list(student_interval(whole.matrix_iou.tolist())),
    }


def draw(parts: list[Tensor], best: int, questions: Questions, answers: Tensor) -> list[dict[str, Any]]:
    """Matrices to be drawn, in units of 1 / UNIT: the mean over heads, and the best head, [Q, context] each."""
    drawn = []
    for A, positions, places in zip(torch.cat(parts), questions.positions, answers, strict=False):  # A [H,Q,context]
        mean, strongest = ((each * UNIT).round().int().tolist() for each in (A.mean(0), A[best]))
        targets = places[positions].tolist()
        drawn.append({"queries": positions.tolist(), "targets": targets, "mean": mean, "best": strongest})
    return drawn
