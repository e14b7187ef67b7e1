"""The learning rate schedule: linear warm-up, then cosine decay."""

import math

from rebased.runs.lm_config import LMTrainConfig


def learning_rate(config: LMTrainConfig, step: int) -> float:
    """The learning rate of a step; steps count from 0.

    The last step of the warm-up has the rate lr. The cosine reaches lr * final_lr one step after the last one.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)  # 0 .. 1
    return config.lr * (config.final_lr + (1 - config.final_lr) * (1 + math.cos(math.pi * done)) / 2)
