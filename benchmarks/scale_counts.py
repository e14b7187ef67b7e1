"""What the cost model of docs/scaling.md counts in a language model: parameters, and bytes of its states."""

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a file, the repository's root is not on the path

from benchmarks.scaling import Model

from rebased.models import LanguageModel, LMConfig, shape_of


def count(config: LMConfig) -> Model:
    """The counts of a model of this config."""
    shape = shape_of(config)
    in_blocks = sum(parameter.numel() for parameter in shape.blocks.parameters())
    return Model(blocks=in_blocks, root=shape.num_parameters() - in_blocks, layers=config.n_layers)


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
