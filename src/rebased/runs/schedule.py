"""Learning rates: a cosine over epochs, and a cosine over steps after a linear warm-up."""

import math

from rebased.runs.lm_config import LMTrainConfig


def epoch_lr(lr: float, epoch: int, epochs: int) -> float:
    """The learning rate of an epoch counted from 0: from lr down to nearly 0, one value per epoch."""
    return _cosine(lr, math.pi * epoch / epochs)


def step_lr(config: LMTrainConfig, step: int) -> float:
    """The learning rate of a step counted from 0.

    The last step of the warm-up has the rate lr. The cosine reaches lr * final_lr one step after the last one.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return config.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, config.steps - warmup)  # 0 .. 1
    return _cosine(config.lr, math.pi * done, config.final_lr)


def _cosine(lr: float, angle: float, final: float = 0.0) -> float:
    """lr at angle 0, lr * final at angle pi."""
    return lr * (final + (1 - final) * (1 + math.cos(angle)) / 2)
