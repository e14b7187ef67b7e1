"""Make the small MQAR models that come with the package, for `rebased explore`, from finished runs.

    rebased train --config mqar/explorer --model.mixers.1.key_width 8 --out runs/explorer-rebased
    python scripts/recall_models.py runs/explorer-rebased

The last command writes model.safetensors, about.json (what the run's record says) and README.md (the card, made from
about.json) into src/rebased/shipped/mqar/NAME. The name is that of the command in COMMANDS whose run it is.
"""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from rebased.config import load_config
from rebased.files import replacing
from rebased.models.weights import WEIGHTS, load_model, save_model
from rebased.runs.record import read_record
from rebased.runs.shipped import ABOUT, MODELS, find_config
from rebased.runs.synthetic_config import SyntheticRunConfig

CONFIG_NAME = "mqar/explorer"
COMMANDS = {
    "rebased": {"model.preset": "rebased", "model.mixers.1.key_width": "8"},
    "based": {"model.preset": "based", "model.mixers.1.key_width": "7"},
    "attention": {"model.preset": "conv_attention"},
}
"""The settings of each model besides those of the config."""

CARD = """# The shipped MQAR model `{name}`

A model of {parameters:,} parameters that reads pairs of keys and values and says the value of a key that comes again.
It is here so that `rebased explore` has something to show. There are three, with one seed each: an illustration, not a
comparison (that is `rebased report results/table1-small`).

| | |
|---|---|
| model | {mixers}, width {d_model}; no positions, so that sequences may be of any length |
| tokens | {vocab_size}: 0 is the filler, 1 to {last_key} are keys, {first_value} to {last_token} values |
| trained on | {trained_on} |
| training | {epochs} epochs, seed {seed}, on {device} |
| accuracy | {accuracy}, at T = {test_len} |
| state | {state} |
| file | fp32, {size:,} bytes |

Made by:

```
{command}
python scripts/recall_models.py {out}
```
"""


def ship_recall(run: Path, folder: Path | None = None) -> dict[str, Any]:
    """Write the model of a finished run into `folder`, and return what about.json then says.

    The default folder is the one that the package reads. Raises ValueError if the run is not done, or is not one that
    a command in COMMANDS makes.
    """
    lines = read_record(run)
    first, end = lines[0], lines[-1]
    if end.get("type") != "end" or end.get("status") != "done":
        raise ValueError(f"{run} is not done; finish it with --resume")
    digests = {_config(name).digest(): name for name in COMMANDS}
    if first["digest"] not in digests:
        commands = "; ".join(f"{digest} is {_command(name)}" for digest, name in digests.items())
        raise ValueError(f"{run} is run {first['digest']}, which no command here makes: {commands}")
    name = digests[first["digest"]]
    model = load_model(run)
    by_pairs = next(line["test"]["by_pairs"] for line in reversed(lines) if "test" in line)  # of the last epoch
    about = {
        "name": name,
        "config": first["config"],
        "digest": first["digest"],
        "parameters": first["parameters"],
        "accuracy_by_pairs": by_pairs,
        "state_bytes": {str(n): 4 * model.state_size(n) for n in (64, 128, 256)},
        "code": first["code"],
        "machine": first["machine"],
        "command": _command(name),
    }
    folder = folder or MODELS / "mqar" / name
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, folder)
    with replacing(folder / ABOUT) as file:
        file.write(json.dumps(about, indent=1).encode() + b"\n")
    with replacing(folder / "README.md") as file:
        file.write(_card(about, (folder / WEIGHTS).stat().st_size).encode())
    return about


def _config(name: str) -> SyntheticRunConfig:
    return load_config(SyntheticRunConfig, find_config(CONFIG_NAME, "run"), COMMANDS[name])


def _out(name: str) -> str:
    return f"runs/explorer-{name}"


def _command(name: str) -> str:
    """The command that trains this model."""
    words = ["rebased", "train", "--config", CONFIG_NAME]
    for key, value in COMMANDS[name].items():
        words += [f"--{key}", value]
    return shlex.join([*words, "--out", _out(name)])


def _card(about: dict[str, Any], size: int) -> str:
    config = about["config"]
    task, model = config["task"], config["model"]
    states, machine = about["state_bytes"], about["machine"]
    grows = len(set(states.values())) > 1
    in_words = [f"{value:,} bytes after {n} tokens" for n, value in states.items()]
    return CARD.format(
        name=about["name"],
        parameters=about["parameters"],
        mixers=" and ".join(mixer["name"] for mixer in model["mixers"]),
        d_model=model["d_model"],
        vocab_size=task["vocab_size"],
        last_key=task["vocab_size"] // 2 - 1,
        first_value=task["vocab_size"] // 2,
        last_token=task["vocab_size"] - 1,
        trained_on=", ".join(
            f"{part['examples']:,} examples of {part['kv_pairs']} pairs in {part['seq_len']} tokens"
            for part in task["train"]
        ),
        epochs=config["train"]["epochs"],
        seed=config["train"]["seed"],
        device=machine["gpu"] or f"one thread of a {machine['cpu']} CPU",
        accuracy=", ".join(f"{value:.3f} of {n} pairs" for n, value in about["accuracy_by_pairs"].items()),
        test_len=task["test"][0]["seq_len"],
        state=", ".join(in_words) if grows else f"{states['64']:,} bytes, however long the sequence is",
        size=size,
        command=about["command"],
        out=_out(about["name"]),
    )


if __name__ == "__main__":
    ship_recall(Path(sys.argv[1]))
