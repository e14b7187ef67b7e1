"""The ReBased layer: x [B, T, D] in, y [B, T, D] out. It never looks ahead."""

import torch

from rebased import ReBased

layer = ReBased(d_model=768, n_heads=12, key_width=16)
x = torch.randn(2, 1024, 768)
y = layer(x)  # time and memory are linear in T
prompt, state = layer.extend(x[:, :1000], layer.init_state(batch=2))  # constant size
rest, state = layer.extend(x[:, 1000:], state)  # more tokens, or one

assert torch.allclose(torch.cat([prompt, rest], dim=1), y, atol=1e-4)
print(f"the state holds {layer.state_size(1024):,} numbers per sequence, whatever its length")
