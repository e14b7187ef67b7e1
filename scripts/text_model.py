"""Make the language model that comes with the package from a finished run.

    rebased data prepare -o data/stdlib
    rebased lm train --config lm/stdlib-bytes --out runs/stdlib-bytes
    python scripts/text_model.py runs/stdlib-bytes

The last command writes model.safetensors (weights in bf16), about.json (what the run's record says) and README.md (the
card, made from about.json) into src/rebased/shipped.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from rebased.config import load_config
from rebased.files import replacing
from rebased.models.weights import WEIGHTS, load_model, save_model
from rebased.runs.lm_config import LMRunConfig
from rebased.runs.record import read_record
from rebased.runs.shipped import ABOUT, MODELS, find_config

MAX_BYTES = 4 * 10**6

TEXT = (
    "the standard library of Python {python}, without tests and site-packages. Its licence is the PSF License "
    "Agreement: https://docs.python.org/3/license.html. The model may write passages of it word for word; the licence "
    "then applies to them."
)
CARD = """# The shipped model

A ReBased language model of bytes with {parameters:,} parameters that writes Python. It is here so that
`rebased lm generate` has something to say without a download, and so that tests have a real model. It is far too small
to be useful as an assistant.

| | |
|---|---|
| model | {mixers}, {n_layers} layers, width {d_model}; no positions, so that text may be of any length |
| tokens | one per byte, 0 to 255; 256 begins and ends a text |
| text | the standard library of Python {python}, {train_bytes:,} bytes; tests and site-packages are left out |
| licence of the text | PSF License Agreement: https://docs.python.org/3/license.html |
| training | {steps:,} steps of {batch_size} x {seq_len} bytes, {tokens:,} bytes in all, on {device} |
| result | {test_bits:.3f} bits per byte (valid: {valid_bits:.3f}), each on {measured:,} bytes of held-out files |
| file | weights rounded to bf16, {size:,} bytes |

It may write passages of that library word for word; the licence of the text then applies to them.

Made by:

```
rebased data prepare -o data/stdlib
{command}
python scripts/text_model.py runs/stdlib-bytes
```
"""


def ship(run: Path, folder: Path = MODELS) -> dict[str, Any]:
    """Write the model of a finished run on bytes into `folder`, and return what about.json then says.

    Raises ValueError if the run is not done, was not trained on bytes, or is larger than 4 MB in bf16.
    """
    lines = read_record(run)
    first, end = lines[0], lines[-1]
    if end.get("type") != "end" or end.get("status") != "done":
        raise ValueError(f"{run} is not done; finish it with --resume")
    if first.get("corpus", {}).get("tokenizer") != "bytes":
        raise ValueError(f"{run} was not trained on bytes; the shipped model must need no tokenizer file")
    model = load_model(run)
    if 2 * model.num_parameters() > MAX_BYTES:
        raise ValueError(
            f"{run} has {model.num_parameters():,} parameters; in bf16 they are more than {MAX_BYTES:,} bytes"
        )
    config = first["config"]
    steps = max(line["step"] for line in lines if line["type"] == "step")
    about = {
        "config": config,
        "digest": first["digest"],
        "parameters": first["parameters"],
        "corpus": first["corpus"],
        "text": TEXT.format(python=first["machine"]["python"]),
        "steps": steps,
        "tokens": steps * config["train"]["batch_size"] * config["data"]["seq_len"],
        "bits_per_byte": {split: end[split]["all"]["loss"] / math.log(2) for split in ("valid", "test")},
        "measured_tokens": {split: end[split]["tokens"] for split in ("valid", "test")},
        "code": first["code"],
        "machine": first["machine"],
        "command": _command(config),
    }
    folder.mkdir(exist_ok=True)
    save_model(model.to(torch.bfloat16), folder)
    with replacing(folder / ABOUT) as file:
        file.write(json.dumps(about, indent=1).encode() + b"\n")
    with replacing(folder / "README.md") as file:
        file.write(_card(about, (folder / WEIGHTS).stat().st_size).encode())
    return about


def _card(about: dict[str, Any], size: int) -> str:
    config, machine = about["config"], about["machine"]
    return CARD.format(
        parameters=about["parameters"],
        mixers=" and ".join(mixer["name"] for mixer in config["model"]["mixers"]) + " in turn",
        n_layers=config["model"]["n_layers"],
        d_model=config["model"]["d_model"],
        python=machine["python"],
        train_bytes=sum(about["corpus"]["text_bytes"].values()),
        steps=about["steps"],
        batch_size=config["train"]["batch_size"],
        seq_len=config["data"]["seq_len"],
        tokens=about["tokens"],
        device=machine["gpu"] or f"one thread of a {machine['cpu']} CPU",
        test_bits=about["bits_per_byte"]["test"],
        valid_bits=about["bits_per_byte"]["valid"],
        measured=min(about["measured_tokens"].values()),
        size=size,
        command=about["command"],
    )


def _command(config: dict[str, Any]) -> str:
    """The command that trains this run: the config file, and each setting in which the run differs from it."""
    plain = load_config(LMRunConfig, find_config("lm/stdlib-bytes", "lm")).model_dump(mode="json")
    words = [
        f"--{section}.{key} {value}"
        for section in ("data", "train")
        for key, value in config[section].items()
        if value != plain[section][key]
    ]
    return " ".join(["rebased lm train --config lm/stdlib-bytes --out runs/stdlib-bytes", *words])


if __name__ == "__main__":
    ship(Path(sys.argv[1]))
