"""Your own task, checked by the contract suite. Here ReBased learns it: own_task.py [EPOCHS]"""

import sys
from tempfile import TemporaryDirectory

import torch

from rebased.evaluate.task_contract import run_task_contract
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.tasks import IGNORE, Examples, Split, Task, register_task
from rebased.train import train


@register_task("induction")
class Induction(Task):
    """A sequence of different tokens ends with one of them again. The model must say which token followed it."""

    seq_len: int = 16
    vocab_size: int = 32

    def draw(self, rows: int, generator: torch.Generator, split: Split) -> Examples:
        order = torch.rand(rows, self.vocab_size, generator=generator, device=generator.device).argsort(1)
        inputs = order[:, : self.seq_len].clone()  # [rows,T], all different
        at = torch.randint(self.seq_len - 2, (rows, 1), generator=generator, device=generator.device)  # which token
        inputs[:, -1:] = inputs.gather(1, at)
        labels = torch.full_like(inputs, IGNORE)  # nothing is asked, except at the last position:
        labels[:, -1:] = inputs.gather(1, at + 1)
        return Examples(inputs, labels)


if __name__ == "__main__":
    print(*run_task_contract("induction"), sep="\n")
    task = {"name": "induction", "train": [{"examples": 8000}], "test": [{"examples": 1000}]}
    settings = {"epochs": [*sys.argv[1:], 16][0], "batch_size": 64, "lr": 5e-3}
    run = SyntheticRunConfig(
        task=task, model={"d_model": 32, "mixers": ["short_conv", {"name": "rebased", "n_heads": 2}]}, train=settings
    )
    with TemporaryDirectory() as folder:
        print(f"ReBased gets {train(run, folder).accuracy:.0%} right", flush=True)
