"""Your own mixer is one class and a decorator. Here it learns a tiny MQAR next to ReBased: own_mixer.py [STEPS]"""

import sys

import torch

from rebased import MQAR, LanguageModel, LMConfig, register_mixer


@register_mixer("running_mean")
class RunningMean(torch.nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.out_proj = torch.nn.Linear(d_model, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B,T,D] -> [B,T,D]
        return self.out_proj(x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None])


def recall(mixer: object, steps: int, batch: int = 128) -> float:
    torch.manual_seed(0)
    task = MQAR(seq_len=16, kv_pairs=4, vocab_size=20)
    train, test = task.build(steps * batch, seed=0), task.build(500, seed=1)
    model = LanguageModel(LMConfig(vocab_size=20, d_model=32, max_len=16, mixers=("short_conv", mixer)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens, labels in zip(train.inputs.split(batch), train.labels.split(batch), strict=True):
        optimizer.zero_grad()
        model.loss(tokens, labels).backward()
        optimizer.step()
    logits, labels = model.eval().logits_at_labels(*test)
    return float((logits.argmax(-1) == labels).float().mean())


if __name__ == "__main__":
    steps = int(sys.argv[1]) if sys.argv[1:] else 500
    print(f"running mean recalls {recall('running_mean', steps):.0%}")
    print(f"ReBased recalls {recall({'name': 'rebased', 'n_heads': 2, 'key_width': 16}, steps):.0%}")
