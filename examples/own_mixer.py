"""Your own mixer with a state for generation, trained on a small MQAR beside ReBased, which learns it. One minute."""

from tempfile import TemporaryDirectory

import torch

from rebased import register_mixer
from rebased.cli.progress import progress_sink
from rebased.runs.synthetic_config import SyntheticRunConfig
from rebased.train import train


@register_mixer("running_mean")
class RunningMean(torch.nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.out_proj = torch.nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B,T,D] -> [B,T,D]
        return self.extend(x, self.init_state(len(x), device=x.device, dtype=x.dtype))[0]

    def init_state(self, batch: int, *, device=None, dtype=None) -> torch.Tensor:  # [B,D+1]
        return self.out_proj.weight.new_zeros(batch, self.state_size(0), device=device, dtype=dtype)

    def extend(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # T may be 1
        seen = torch.nn.functional.pad(x, (0, 1), value=1.0).cumsum(1) + state.unsqueeze(1)  # [B,T,D+1]
        return self.out_proj(seen[..., :-1] / seen[..., -1:]), seen[:, -1]

    def state_size(self, seq_len: int) -> int:
        return len(self.out_proj.weight) + 1  # the sum of x over the tokens so far, and their number


if __name__ == "__main__":
    task = {"vocab_size": 16} | {key: [{"seq_len": 8, "kv_pairs": 2, "examples": 8000}] for key in ("train", "test")}
    for mixer in ({"name": "running_mean"}, {"name": "rebased", "n_heads": 1}):
        model = {"d_model": 32, "mixers": ["short_conv", mixer]}
        settings = {"epochs": 6, "batch_size": 32, "lr": 1e-2, "seed": 43}
        run = SyntheticRunConfig(task=task, model=model, train=settings)
        with TemporaryDirectory() as folder, progress_sink() as progress:
            print(f"{mixer['name']} recalls {train(run, folder, sinks=[progress]).accuracy:.0%}", flush=True)
