"""rebased lm import: read the paper's released checkpoint into a model of ours."""

from pathlib import Path
from typing import Annotated

from rebased.cli.output import OUT_OPTION, TO_TERMINAL, Output, say
from rebased.models.authors_checkpoint import read_authors_checkpoint
from rebased.models.weights import WEIGHTS, save_model


def lm_import(
    source: Path,
    /,
    *,
    out: Annotated[Path, OUT_OPTION],
    n_heads: int | None = None,
    to: Output = TO_TERMINAL,
) -> int:
    """Read a checkpoint in the layout that the paper's authors released, and write it as a model.safetensors.

    The new folder can be given to `rebased lm eval --data TEXT`. Text must be prepared with GPT-NeoX-20B's tokenizer.

    Parameters
    ----------
    source
        A safetensors file, a state dict of torch.save (loaded with weights only, so nothing in it is executed), or a
        folder with a model.safetensors or pytorch_model.bin.
    out
        Folder to write; it must be new or empty.
    n_heads
        Heads of the Based and ReBased layers, which the file does not tell. Default: 8 for the released checkpoint's
        widths, 12 for those of the paper's text.
    """
    to.check()
    if not source.exists():
        raise ValueError(f"{source} does not exist; give the authors' checkpoint, a file or its folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already and not an empty folder; choose another")
    model = read_authors_checkpoint(source, n_heads)
    out.mkdir(parents=True, exist_ok=True)
    save_model(model, out)
    config = model.config
    mixers = " ".join(mixer.name for mixer in config.mixers)
    what = f"{model.num_parameters():,} parameters, {config.n_layers} layers ({mixers}), width {config.d_model}"
    sizes = f"{config.max_len:,} positions, vocabulary {config.vocab_size:,}"
    say(to.console(), f"{what}, {sizes}; wrote {out / WEIGHTS}")
    to.emit({"folder": out, "parameters": model.num_parameters(), "model": config.model_dump(mode="json")})
    return 0
