"""Checkpoints, written whole or not at all, verified before use, and the same for all scripts."""

import io
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from utils import distributed
from utils.errors import DISK
from utils.files import replace_file
from utils.progress import Progress
from utils.weights import CheckpointError, load_state, read_tensors

FORMAT = 3


@dataclass
class Checkpointer:
    """Save and restore a run in ``run_dir/checkpoints``: ``last.pt``, and ``previous.pt``.

    Args:
        folder: where the checkpoints are.
        model: never wrapped, so that the keys are those of the model itself.
        optimizer: only its ``state`` is restored. Its ``param_groups`` would bring back the
            learning rate of the world size that saved it.
        scaler: the gradient scaler. A disabled one has an empty state.
        identity: what has to stay the same in a run (model, data set, seed), name to value.
    """

    folder: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    identity: dict[str, Any]

    def save(self, progress: Progress) -> None:
        """Write ``last.pt`` on rank 0. The checkpoint before stays as ``previous.pt``.

        Raises:
            CheckpointError: a number is not finite, the disk is full, there is no permission...
                Earlier checkpoints are whole.
        """
        # By name, since the order of the parameters may change.
        names = [name for name, _ in self.model.named_parameters()]
        optimizer_state = self.optimizer.state_dict()["state"]
        state = {
            "format": FORMAT,
            "identity": self.identity,
            "progress": asdict(progress),  # the fields of Position
            "model": self.model.state_dict(),
            "optimizer": {names[i]: own for i, own in optimizer_state.items()},
            "scaler": self.scaler.state_dict(),
        }
        # Checked on every rank, so that all of them end here.
        if not _is_finite(state):
            not_finite = CheckpointError(
                f"weights or losses are not finite at step {progress.global_step}, which is not"
                " saved: choose a lower --lr or --max-grad-norm"
            )
            not_finite.reported_elsewhere = distributed.rank() != 0
            raise not_finite
        if distributed.rank() != 0:
            return
        content = io.BytesIO()
        torch.save(state, content)
        last = self.folder / "last.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(last, content.getbuffer(), keep_as=self.folder / "previous.pt")
        except OSError as error:
            advice = "make room and " if error.errno in DISK else ""
            raise CheckpointError(
                f"cannot save {error.filename2 or error.filename or last}: {error.strerror};"
                f" earlier checkpoints are whole: {advice}continue with --resume"
            ) from error

    def restore(self, progress: Progress) -> None:
        """Load the newest whole checkpoint, if there is one, and its position. Collective.

        Every rank gets the file that rank 0 reads, even if the ranks share no disk.

        Raises:
            CheckpointError: no checkpoint is whole, or it belongs to another model, data set or
                seed.
        """
        state = distributed.call_on_rank_0(self._read_newest)
        if state is None:
            return
        load_state(self.model, state["model"], self.folder)
        own = self.optimizer.state_dict()
        for i, (name, _) in enumerate(self.model.named_parameters()):
            # A parameter that was not trained keeps its own state.
            own["state"][i] = own["state"].get(i, {}) | state["optimizer"].get(name, {})
        self.optimizer.load_state_dict(own)
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        progress.restore(state["progress"])

    def _read_newest(self) -> dict[str, Any] | None:
        problems: list[str] = []
        for name in ("last.pt", "previous.pt"):
            path = self.folder / name
            if not path.exists():
                continue
            try:
                state = read_checkpoint(path)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                print(f"warning: {problem}; continuing from {path}", file=sys.stderr)
                # Otherwise the next save would keep the damaged file, and discard the good one.
                (self.folder / "last.pt").unlink()
            for key, ours in self.identity.items():
                if (theirs := state["identity"].get(key)) != ours:
                    raise CheckpointError(
                        f"{path} was trained with {key} {theirs}, this command says {ours}: use the"
                        " same, or another --run-dir"
                    )
            return state
        if problems:
            raise CheckpointError(f"no whole checkpoint to resume from: {'; '.join(problems)}")
        print(f"warning: no checkpoint in {self.folder}: starting at step 0", file=sys.stderr)
        return None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint of this project.

    Raises:
        CheckpointError: the file is damaged, or not of this version of the project.
    """
    state = read_tensors(path)
    number = state.get("format") if isinstance(state, dict) else None
    if number != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of this version (its format is {number}, not {FORMAT}):"
            f" its weights can start a new run, by --init-weights {path}"
        )
    return state


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)
