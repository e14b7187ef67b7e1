"""The paper's released checkpoint: read its layout into a LanguageModel, and write a model in that layout."""

import pickle
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rebased.files import refuse_pipe
from rebased.models.config import LMConfig
from rebased.models.language_model import LanguageModel

FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pt", "model.pt")
"""Names of the file that holds the weights, if a folder is given; the first that is there is read."""
TIED = "lm_head.weight"
"""The head. It is the embedding under a second name; safetensors may leave it out."""
HEADS = {1024: 8, 192: 12}
"""Heads by the width of all queries together, which is what a file tells: the released checkpoint, the paper's text."""
_WORDS, _POSITIONS = "backbone.embeddings.word_embeddings.weight", "backbone.embeddings.position_embeddings.weight"
_RENAMED = (  # our names, theirs
    (r"^embedding\.weight$", _WORDS),
    (r"^positions\.weight$", _POSITIONS),
    (r"^norm\.", "backbone.ln_f."),
    (r"^blocks\.(\d+)\.mixer\.conv\.", r"backbone.layers.\1.sequence_mixer.mixer.conv.conv."),
    (r"^blocks\.(\d+)\.mixer\.", r"backbone.layers.\1.sequence_mixer.mixer."),
    (r"^blocks\.(\d+)\.mlp\.", r"backbone.layers.\1.state_mixer."),
    (r"^blocks\.(\d+)\.", r"backbone.layers.\1."),
)
_KINDS = {"ln_q": "rebased", "ln_k": "rebased", "conv": "short_conv", "projection": "short_conv"}
_MIXERS = ("short_conv", "rebased", "based")


def read_authors_checkpoint(path: Path | str, n_heads: int | None = None) -> LanguageModel:
    """Return the model of a file in the layout of the authors' released checkpoint, in fp32 and in eval mode.

    Args:
        path: a safetensors file, a state dict of torch.save (loaded with weights only), or a folder with one of FILES.
        n_heads: heads of Based and ReBased layers, which the file does not tell. Default: 8 if all queries together are
            1,024 wide, as in the released checkpoint; 12 if they are 192 wide, as in the paper's text.

    Raises ValueError that names every missing and unexpected weight, and every one of another shape.
    """
    path = Path(path)
    if path.is_dir():
        found = next((path / name for name in FILES if (path / name).is_file()), None)
        if found is None:
            raise ValueError(f"{path} holds none of {', '.join(FILES)}; give the file itself")
        path = found
    tensors = _read(path)
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn and then overwritten
        model = LanguageModel(_config_of(tensors, path, n_heads))
    own = authors_layout(model)
    _check_names(own, tensors, path)
    with torch.no_grad():
        for name, weight in own.items():
            if name != TIED:
                weight.copy_(tensors[name])
    if TIED in tensors and not torch.equal(tensors[TIED], tensors[_WORDS]):
        raise ValueError(f"{path}: {TIED} differs from {_WORDS}; the head of this model is tied to its embedding")
    return model.eval()


def authors_layout(model: LanguageModel) -> dict[str, Tensor]:
    """Return the model's weights under the names of the released checkpoint. They share memory with the model's.

    Raises ValueError for a model that the layout cannot hold: its mixers are short_conv, rebased and based.
    """
    config = model.config
    if other := sorted({mixer.name for mixer in config.mixers} - set(_MIXERS)):
        raise ValueError(f"the authors' layout has no {', '.join(other)}; its mixers are {', '.join(_MIXERS)}")
    if (config.block, config.norm, config.mlp) != ("double_norm", "layer", "gelu"):
        raise ValueError(
            f"the authors' layout has no block {config.block!r} with norm {config.norm!r} and mlp {config.mlp!r}; "
            "it has two LayerNorms and a GELU per layer"
        )
    for mixer in config.mixers:
        arguments = {**mixer.arguments(), **mixer.options()}
        plain = arguments.get("qk_transform", "norm_affine") == "norm_affine" and not arguments.get("conv_width")
        if not plain or arguments.get("norm_axis") == "per_head" or arguments.get("output_gate", "none") != "none":
            raise ValueError(f"the authors' layout has the paper's ReBased only; this model has {arguments}")
    named = {
        next(re.sub(ours, theirs, name) for ours, theirs in _RENAMED if re.search(ours, name)): weight.detach()
        for name, weight in model.named_parameters()
    }
    return named | {TIED: named[_WORDS]}


def _read(path: Path) -> dict[str, Tensor]:
    refuse_pipe(path)
    if path.suffix == ".safetensors":
        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or not a safetensors file: {error}") from error
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is neither a safetensors file nor a state dict of torch.save that holds weights alone; no code in "
            "it was executed"
        ) from error
    for wrapper in ("state_dict", "model"):
        state = state[wrapper] if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping) else state
    if not isinstance(state, Mapping) or not all(isinstance(weight, Tensor) for weight in state.values()):
        raise ValueError(f"{path} holds no state dict, names with their tensors; it is a {type(state).__name__}")
    return dict(state)


def _config_of(tensors: Mapping[str, Tensor], path: Path, n_heads: int | None) -> LMConfig:
    """Return the config of the model that these weights belong to. Weights that are missing elsewhere do not matter."""
    layers: dict[int, set[str]] = {}
    for name in tensors:
        if match := re.match(r"backbone\.layers\.(\d{1,4})\.(?:sequence_mixer\.mixer\.(\w+))?", name):
            layers.setdefault(int(match[1]), set()).add(match[2] or "")
    if not layers:
        raise ValueError(f"{path} has no backbone.layers.*: it is not in the layout of the authors' checkpoint")
    kinds = [_kind(layers.get(layer, set())) for layer in range(max(layers) + 1)]
    words, positions = _shape(tensors, _WORDS, path), _shape(tensors, _POSITIONS, path)
    hidden = next((w.shape[0] for name, w in tensors.items() if name.endswith("state_mixer.fc1.weight")), 0)
    heads = {}
    if set(kinds) != {"short_conv"}:
        keys, values = _width(tensors, "proj_q", path), _width(tensors, "proj_v", path)
        n_heads = n_heads or HEADS.get(keys)
        if n_heads is None or keys % n_heads or values % n_heads:
            raise ValueError(
                f"{path}: queries are {keys} and values {values} wide, and the file does not tell how many heads they "
                f"are divided into{'' if n_heads is None else f' (not {n_heads})'}; give the number of heads"
            )
        heads = {"n_heads": n_heads, "key_width": keys // n_heads, "value_width": values // n_heads}
    pattern = next(kinds[:n] for n in range(1, len(kinds) + 1) if all(k == kinds[i % n] for i, k in enumerate(kinds)))
    return LMConfig(
        vocab_size=words[0],
        d_model=words[1],
        n_layers=len(kinds),
        max_len=positions[0],
        mixers=tuple({"name": kind} | ({} if kind == "short_conv" else heads) for kind in pattern),
        mlp_ratio=hidden // words[1],
        embed_dropout=0.0,
    )


def _kind(parts: set[str]) -> str:
    """Return the mixer that a layer with these parts has. Based has no part of its own: it is what is left."""
    return next((_KINDS[part] for part in sorted(parts) if part in _KINDS), "based")


def _shape(tensors: Mapping[str, Tensor], name: str, path: Path) -> tuple[int, int]:
    if name not in tensors or tensors[name].ndim != 2:
        found = list(tensors[name].shape) if name in tensors else "missing"
        raise ValueError(f"{path}: {name} is {found}; without it the model's size is not known")
    rows, columns = tensors[name].shape
    return rows, columns


def _width(tensors: Mapping[str, Tensor], part: str, path: Path) -> int:
    """Return the number of rows of the first projection of this name."""
    for name, weight in tensors.items():
        if name.endswith(f"sequence_mixer.mixer.{part}.weight"):
            return weight.shape[0]
    raise ValueError(f"{path} has no {part}.weight in any layer; without it the width of its heads is not known")


def _check_names(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise ValueError that lists what is missing, unexpected and of another shape or kind."""
    both = sorted(own.keys() & tensors.keys())
    told = {
        "missing": sorted(own.keys() - tensors.keys() - {TIED}),
        "unexpected": sorted(tensors.keys() - own.keys()),
        "of another shape": [
            f"{name} ({list(tensors[name].shape)} instead of {list(own[name].shape)})"
            for name in both
            if tensors[name].shape != own[name].shape
        ],
        "not floating": [f"{name} ({tensors[name].dtype})" for name in both if not tensors[name].is_floating_point()],
    }
    if wrong := [f"{len(names)} {what}: {', '.join(names)}" for what, names in told.items() if names]:
        raise ValueError(f"{path} does not fit the authors' layout: {'; '.join(wrong)}")
