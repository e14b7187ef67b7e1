"""Read a prompt in one call, then decode one token per call. The state does not grow."""

import torch

from rebased import LanguageModel, preset
from rebased.mixers import count_numbers

torch.manual_seed(0)
model = LanguageModel(preset("rebased", d_model=96, vocab_size=1000, max_len=512)).eval()
prompt = torch.randint(1000, (1, 400))

with torch.inference_mode():
    hidden, state = model.extend(prompt, model.init_state(batch=1))  # prefill
    before = count_numbers(state.layers)  # numbers in the states of all layers
    tokens = [model.logits(hidden[:, -1]).argmax(-1)]  # logits of the last position only
    for _ in range(99):
        hidden, state = model.extend(tokens[-1][:, None], state)  # decode
        tokens.append(model.logits(hidden[:, -1]).argmax(-1))

    whole = torch.cat([prompt, torch.stack(tokens, dim=1)], dim=1)
    again = model(whole[:, :-1])[:, 399:].argmax(-1)  # the same tokens from one pass over the whole sequence

assert torch.equal(again, whole[:, 400:])
assert count_numbers(state.layers) == before == model.state_size(499)
print(f"{len(tokens)} tokens decoded; the state holds {before:,} numbers before and after")
