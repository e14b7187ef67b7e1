"""Everything that changes while a run trains, and so everything that a checkpoint must hold."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from rebased.models import LanguageModel
from rebased.train.synthetic.checkpoint import load_checkpoint, read_pointer, save_checkpoint


@dataclass
class Progress:
    """Where a run stands, in plain numbers."""

    epoch: int = 0  # epochs that have ended
    step: int = 0
    batch: int = 0  # batches of the current epoch that have been trained on; what follows are sums over them
    loss: float = 0.0  # over labelled tokens
    labels: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def next_epoch(self) -> "Progress":
        return Progress(epoch=self.epoch + 1, step=self.step)


class TrainState:
    def __init__(self, model: LanguageModel, optimiser: Optimizer, device: torch.device) -> None:
        self.model, self.optimiser, self.device = model, optimiser, device
        self.progress = Progress()

    def save(self, folder: Path, digest: str, record_bytes: int) -> None:
        """Write a checkpoint, unless the one of this very step is there. The record's size goes with it: what is
        written there afterwards is written again by a run that resumes from here."""
        former = read_pointer(folder)
        if former and former["step"] == self.progress.step:
            return
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "random": torch.get_rng_state(),
            "random_gpu": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
            "progress": asdict(self.progress),
            "record_bytes": record_bytes,
        }
        save_checkpoint(folder, state, digest=digest, epoch=self.progress.epoch, step=self.progress.step)

    def restore(self, folder: Path, digest: str) -> int | None:
        """Take up the folder's checkpoint and return the record's size at that time; None: there is no checkpoint."""
        state: dict[str, Any] | None = load_checkpoint(folder, digest)
        if state is None:
            return None
        try:
            self.model.load_state_dict(state["model"])
            # Moments alone: rates are the config's, and where they are kept (a tensor on a GPU) is this device's.
            groups = self.optimiser.state_dict()["param_groups"]
            self.optimiser.load_state_dict(state["optimiser"] | {"param_groups": groups})
            self.progress = Progress(**state["progress"])
            torch.set_rng_state(state["random"])
            if self.device.type == "cuda" and state["random_gpu"] is not None:
                torch.cuda.set_rng_state(state["random_gpu"], self.device)
            return int(state["record_bytes"])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            file = (read_pointer(folder) or {})["file"]
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{folder / file} is of another architecture than this code builds ({reason}); resume with the code "
                "that wrote it (record.jsonl names the commit), or start the run again in another folder"
            ) from error
