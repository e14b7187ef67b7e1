"""What the cost model of docs/scaling.md counts in a language model: parameters, and bytes that its layers hand on."""

import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.scaling import BF16, Model

from rebased.models import LanguageModel, LMConfig, shape_of
from rebased.models.block import Block

SHORT, LONG = 4, 8  # tokens of the shards that are tried; what is handed on is linear in them


def handed_on(config: LMConfig, layer: int, T: int, number: int) -> int:
    """Bytes that a layer's mixer hands on to later shards for T tokens of one sequence: its own code says so.

    number: bytes of a number that is multiplied, 2 under autocast.
    """
    mixer = Block(config, layer).mixer
    found = []

    def gather_earlier(x: Tensor) -> Tensor:
        found.append(x.numel() * x.element_size())
        return x.new_empty(0, *x.shape)  # the first shard: nothing is earlier

    half = number == BF16
    x = torch.zeros(1, T, config.d_model, dtype=torch.bfloat16 if half else torch.float32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, on CPUs that cannot multiply bf16
        mixer.forward_shard(x, gather_earlier)
    return sum(found)


def count(config: LMConfig, number: int) -> Model:
    """The counts of a model of this config; `number` as in `handed_on`."""
    shape = shape_of(config)
    in_blocks = sum(parameter.numel() for parameter in shape.blocks.parameters())
    fixed, per_token = 0.0, 0.0
    for layer in range(len(config.mixers)):
        short, long = (handed_on(config, layer, T, number) for T in (SHORT, LONG))
        slope = (long - short) / (LONG - SHORT)
        layers = -(-(config.n_layers - layer) // len(config.mixers))
        fixed, per_token = fixed + layers * (short - SHORT * slope), per_token + layers * slope
    return Model(
        blocks=in_blocks,
        root=shape.num_parameters() - in_blocks,
        tensors=len(list(shape.parameters())),
        layers=config.n_layers,
        handed_on=fixed,
        handed_on_per_token=per_token,
    )


def state_bytes(model: LanguageModel, T: int) -> int:
    """Bytes of the state of one sequence after T tokens when the model is served with bf16 weights."""
    total = 0
    for layer, block in enumerate(model.blocks):
        mixer = block.mixer
        state = mixer.init_state(1, dtype=torch.bfloat16)
        tensors = [state] if isinstance(state, Tensor) else list(state)
        sizes = {tensor.element_size() for tensor in tensors}
        assert len(sizes) == 1, f"layer {layer} keeps tensors of several dtypes"
        total += sizes.pop() * mixer.state_size(T)
    return total
