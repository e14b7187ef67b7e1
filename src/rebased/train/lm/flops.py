"""Floating-point operations per token of training, and the peak rate of devices. MFU is computed from both.

In the forward pass a token costs two operations (a product and a sum) per weight that it is multiplied with. The
backward pass costs twice as much. Counted are all linear layers and the tied head; embedding rows and learned positions
are looked up, not multiplied. Mixers add what they compute between tokens:

    softmax attention   2 T D   a query meets T / 2 keys on average: 2 D operations for the score, 2 D for the value
    a window of W       4 W D   for T > W
    ReBased, Based      4 H F (V + 1)   phi(k) is added to a state of F (V + 1) numbers per head, phi(q) reads it
    delta rule          6 H F V   phi(k) reads the state of F V numbers per head and corrects it, phi(q) reads it
    GLA, Mamba-2        4 H F V   phi(k) is added, phi(q) reads
    other mixers        0       a few operations per channel, which are not counted

These are the operations that the equations need. Extra work, such as computing activations twice, is not counted.
"""

from typing import Any

from torch import nn

from rebased.mixers import PolynomialAttention, RecurrentMixer, unwrap
from rebased.models import LMConfig, shape_of
from rebased.ops import feature_count

# Dense bf16 operations per second, as the vendors state them, by a part of the device's name. The first match counts.
PEAK_BF16 = {
    "B200": 2250e12,
    "GH200": 989.4e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A40": 149.7e12,
    "RTX A6000": 154.8e12,
    "RTX 6000 Ada": 364.2e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


def flops_per_token(config: LMConfig, seq_len: int) -> int:
    """Operations per token of a training step (forward and backward), averaged over windows of seq_len tokens."""
    model = shape_of(config)
    weights = config.vocab_size * config.d_model
    between = 0
    for layer, block in enumerate(model.blocks):
        weights += sum(module.weight.numel() for module in block.modules() if isinstance(module, nn.Linear))
        between += _between_tokens(unwrap(block.mixer), config.mixer_of(layer).name, config.d_model, seq_len)
    return 3 * (2 * weights + between)


def _between_tokens(mixer: Any, name: str, d_model: int, seq_len: int) -> int:
    """Forward operations per token that the mixer spends between tokens: the table above."""
    if name == "attention":
        return 2 * seq_len * d_model
    if name == "sliding_window":
        return 2 * min(2 * mixer.window, seq_len) * d_model
    if isinstance(mixer, PolynomialAttention):
        features = feature_count(mixer.operator_width, mixer.operator_coefficients())
        return 4 * mixer.n_heads * features * (mixer.value_width + 1)
    if isinstance(mixer, RecurrentMixer):
        return (6 if mixer.overwrites else 4) * mixer.init_state(1).memory.numel()
    return 0


def peak_flops(device_name: str | None, precision: str) -> float | None:
    """Peak operations per second of a device; None for fp32, for a CPU, and for a GPU that is not in the table."""
    if device_name is None or precision != "bf16":
        return None
    return next((peak for part, peak in PEAK_BF16.items() if part in device_name), None)
