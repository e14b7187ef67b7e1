"""A trained language model as a folder for others: Hugging Face's layout with tokenizer and card, or the authors'."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file

from rebased.data.tokenizer import Tokenizer
from rebased.models import LanguageModel
from rebased.models.authors_checkpoint import authors_layout
from rebased.models.config import MixerConfig

Layout = Literal["hf", "authors"]
SPLITS = ("valid", "test")
FLAT = "modeling_rebased.py"
FLAT_MIXERS = ("attention", "based", "rebased", "short_conv")
"""The mixers of models/modeling_rebased.py, the file that is copied into a folder so that it loads without us."""
INSTALLED = "`pip install '.[hf]'` in a clone of its repository"


def export_model(
    model: LanguageModel,
    tokenizer: Tokenizer | None,
    folder: Path,
    *,
    layout: Layout = "hf",
    record: list[dict[str, Any]] | None = None,
) -> None:
    """Write a model to a new folder, which appears when it is whole.

    layout "hf": weights and config as `AutoModelForCausalLM` reads them, the tokenizer, and a model card (README.md);
    with FLAT_MIXERS alone also the code that computes the model (modeling_rebased.py), for trust_remote_code=True.
    layout "authors": model.safetensors with the names of the paper's released checkpoint.
    `record` is that of its run: the card says what it holds.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and not an empty folder; choose another")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        if layout == "authors":
            weights = {name: weight.contiguous().clone() for name, weight in authors_layout(model).items()}
            save_file(weights, partial / "model.safetensors")
        else:
            _write_hf(model, tokenizer, partial, record or [])
        partial.chmod(0o755)
        for file in partial.iterdir():  # libraries write weights for their owner alone
            file.chmod(0o755 if file.is_dir() else 0o644)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_hf(model: LanguageModel, tokenizer: Tokenizer | None, folder: Path, record: list[dict[str, Any]]) -> None:
    # here: transformers takes seconds to import
    from rebased.models import modeling_rebased
    from rebased.models.hf import RebasedForCausalLM, no_progress_bars, to_hf_tokenizer

    shell = RebasedForCausalLM.from_language_model(model)
    if is_flat(model):
        names = {"AutoConfig": "RebasedConfig", "AutoModelForCausalLM": "RebasedForCausalLM"}
        shell.config.auto_map = {auto: f"{Path(FLAT).stem}.{name}" for auto, name in names.items()}
        shutil.copyfile(modeling_rebased.__file__, folder / FLAT)
    if tokenizer is not None:
        shell.config.eos_token_id = shell.generation_config.eos_token_id = tokenizer.end_of_text
        shell.generation_config.pad_token_id = tokenizer.end_of_text
        to_hf_tokenizer(tokenizer, model.config.length_limit).save_pretrained(folder)
    with no_progress_bars():
        shell.save_pretrained(folder)
    (folder / "README.md").write_text(model_card(model, tokenizer, record), encoding="utf-8")


def is_flat(model: LanguageModel) -> bool:
    """True if models/modeling_rebased.py computes this model."""
    return all(_is_flat(mixer) for mixer in model.config.mixers)


def _is_flat(mixer: MixerConfig) -> bool:
    return mixer.name in FLAT_MIXERS and not mixer.chosen_options()


def model_card(model: LanguageModel, tokenizer: Tokenizer | None, record: list[dict[str, Any]]) -> str:
    """The card of a model: what it is, how to use it, what it was trained on and what was measured."""
    config, run = model.config, record[0] if record else {}
    mixers = ", ".join(mixer.name for mixer in config.mixers)
    imports = [] if is_flat(model) else [*config.own_modules(), "rebased.models.hf"]
    folder = '"this folder"' + (", trust_remote_code=True" if is_flat(model) else "")
    positions = "no learned positions" if config.length_limit is None else f"{config.length_limit:,} learned positions"
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [rebased, linear-attention]",
        "---",
        "",
        f"# A language model of {model.num_parameters():,} parameters",
        "",
        f"{config.n_layers} layers that repeat {mixers}; width {config.d_model}, {positions}, "
        f"vocabulary {config.vocab_size:,}. Made with [rebased](https://arxiv.org/abs/2402.10644).",
        "",
        *_about_loading(model),
        "```python",
        *(f"import {module}" for module in imports),
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"model = AutoModelForCausalLM.from_pretrained({folder})",
    ]
    if tokenizer is not None:
        lines += [
            f"tokenizer = AutoTokenizer.from_pretrained({folder})",
            'inputs = tokenizer("Once", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))",
        ]
    settings = run.get("config", {"model": config.model_dump(mode="json")})
    lines += ["```", "", *_about_training(record, config.own_modules())]
    lines += ["## Config", "", "```json", json.dumps(settings, indent=1), "```", ""]
    return "\n".join(lines)


def _about_loading(model: LanguageModel) -> list[str]:
    if is_flat(model):
        return [
            f"`{FLAT}` in this folder computes it in plain torch and needs transformers alone. With rebased "
            f"({INSTALLED}) and `import rebased.models.hf`, the same folder loads without `trust_remote_code`, with "
            "fast kernels.",
            "",
        ]
    own = model.config.own_mixers()
    names = [_in_words(mixer) for mixer in model.config.mixers if not _is_flat(mixer) and mixer.name not in own]
    computes = f"; it computes {', '.join(dict.fromkeys(names))}" if names else ""
    lines = [f"To load it, install rebased: {INSTALLED}{computes}.", ""]
    if own:
        modules = ", ".join(f"`{module}`" for module in model.config.own_modules())
        lines += [
            f"Not part of rebased: {', '.join(own)}. Below, {modules} stands for your file that registers it.",
            "",
        ]
    return lines


def _in_words(mixer: MixerConfig) -> str:
    """A mixer and what is around it: "rebased with conv_width 4"."""
    options = [f"{key} {value}" for key, value in mixer.chosen_options().items()]
    return f"{mixer.name} with {' and '.join(options)}" if options else mixer.name


def _about_training(record: list[dict[str, Any]], own_modules: list[str]) -> list[str]:
    if not record:
        return ["It came without a record: what it was trained on is not known.", ""]
    run, end = record[0], record[-1]
    corpus, code, data = run["corpus"], run["code"], run["config"]["data"]
    steps, rows, length = end["step"], run["config"]["train"]["batch_size"], data["seq_len"]
    words = ["rebased lm train --config config.yaml", *(f"--import {module}" for module in own_modules)]
    lines = [
        "## Training",
        "",
        f"{steps * rows * length:,} tokens ({steps:,} steps of {rows} x {length:,}) drawn from a text of "
        f"{corpus['tokens']['train']:,} tokens, tokenizer {corpus['tokenizer']}, checksum of the text "
        f"`{corpus['sha256']}`. Code version {code['version']}, commit `{code['commit']}`.",
        *([f"The text: {run['text']}"] if "text" in run else []),
        f"The same run: `{' '.join(words)}` with the config below (digest `{run['digest']}`).",
        "",
    ]
    if measured := [split for split in SPLITS if split in end]:
        lines += [
            "## Measured",
            "",
            "| split | tokens | perplexity | AR tokens | other tokens |",
            "|---|---|---|---|---|",
        ]
        for split in measured:
            found = end[split]
            values = [found.get(kind, {}).get("perplexity") for kind in ("all", "ar", "non_ar")]
            shown = ["" if value is None else f"{value:.2f}" for value in values]  # None: there was no such token
            lines.append(f"| {split} | {found.get('tokens', 0):,} | {' | '.join(shown)} |")
        lines += ["", "Measured after training by `rebased lm train`; `rebased lm eval RUN` measures again.", ""]
    return lines
