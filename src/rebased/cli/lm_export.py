"""rebased lm export: a trained language model as a folder for Hugging Face transformers, or in the authors' layout."""

from pathlib import Path
from typing import Annotated, Literal

from rebased.cli.imports import import_all
from rebased.cli.model_options import ModelPath, OwnMixers, TokenizerFolder, TokenizerName
from rebased.cli.output import OUT_OPTION, TO_TERMINAL, Output, say
from rebased.models.weights import load_model
from rebased.runs.export import export_model
from rebased.runs.load import open_text_model, record_beside
from rebased.runs.shipped import find_model


def lm_export(
    model: ModelPath = None,
    /,
    *,
    out: Annotated[Path, OUT_OPTION],
    layout: Literal["hf", "authors"] = "hf",
    tokenizer: TokenizerName = None,
    data: TokenizerFolder = None,
    imports: OwnMixers = (),
    to: Output = TO_TERMINAL,
) -> int:
    """Write a trained language model as others read it.

    Layout `hf` is a folder for `AutoModelForCausalLM.from_pretrained` with the tokenizer and a model card; exporting
    needs transformers (pip install 'rebased[hf]'). A model of rebased, based, attention and short_conv is loaded with
    trust_remote_code=True and without this package; any other with it. Layout `authors` is that of the paper's released
    checkpoint; `rebased lm import` reads it.

    Parameters
    ----------
    out
        Folder to write; it must be new or empty.
    layout
        hf, or authors.
    """
    to.check()
    import_all(imports)
    path = find_model(model)
    if layout == "hf":
        opened, own = open_text_model(path, tokenizer, data)
    else:
        opened, own = load_model(path), None
    try:
        export_model(opened, own, out, layout=layout, record=record_beside(path))
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; exporting needs: pip install 'rebased[hf]'") from error
    files = ", ".join(sorted(path.name for path in out.iterdir()))
    say(to.console(), f"wrote {out}: {files}")
    to.emit({"folder": out, "layout": layout, "files": sorted(path.name for path in out.iterdir())})
    return 0
