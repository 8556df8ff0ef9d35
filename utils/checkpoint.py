"""Checkpoints: written whole or not at all, verified before use, the same for all three scripts."""

import hashlib
import io
import math
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FORMAT = 1


class CheckpointError(Exception):
    """A checkpoint that cannot be written, or cannot be trusted; the message says what to do."""

    exit_status = 1


@dataclass
class Progress:
    """Where a training stands, counted in samples so that any world size can go on from it.

    Attributes:
        epoch_size: samples in the training set, the tail that an epoch drops included.
        global_batch_size: samples that an optimizer step takes over all processes.
        epoch: complete epochs.
        samples: samples of the current epoch that all processes together have seen.
        global_step: optimizer steps.
        train_sums: ``Metrics.state`` of the current epoch, over all processes.
        test_sums: the same of the latest evaluation.
    """

    epoch_size: int
    global_batch_size: int
    epoch: int = 0
    samples: int = 0
    global_step: int = 0
    train_sums: list[float] = field(default_factory=list)
    test_sums: list[float] = field(default_factory=list)

    @property
    def images(self) -> int:
        """Images of training behind us: the x-axis, the same at any world size."""
        return self.epoch * self.epoch_size + self.samples

    def step(self) -> None:
        """Count an optimizer step."""
        self.samples += self.global_batch_size
        self.global_step += 1

    def end_epoch(self, train_sums: list[float], test_sums: list[float]) -> None:
        """Go to the next epoch, unless this one was left with whole batches still in it."""
        self.train_sums, self.test_sums = train_sums, test_sums
        if self.samples + self.global_batch_size > self.epoch_size:
            self.epoch, self.samples, self.train_sums = self.epoch + 1, 0, []

    def reached(self, epochs: int, max_steps: int | None) -> bool:
        """Tell whether the training is over."""
        return self.epoch >= epochs or (max_steps is not None and self.global_step >= max_steps)


class Checkpointer:
    """Save and resume a training in ``run_dir/checkpoints``.

    Args:
        folder: where the checkpoints are.
        model: never wrapped, so that the keys are those of the model itself.
        optimizer: of it only ``state`` is restored. Its ``param_groups`` would bring back the
            learning rate of the world size that saved it.
        scaler: the gradient scaler; a disabled one has an empty state.
        identity: what a run cannot change on the way (model, data set, seed), name to value.
        keep: how many checkpoints to keep.
        every: save each so many optimizer steps, or None.
        write: whether this process writes. All load, one writes.
        read: calls the function it is given; DDP has rank 0 do so and hands out the result.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        identity: dict[str, Any],
        *,
        keep: int = 2,
        every: int | None = None,
        write: bool = True,
        read: Callable[[Callable[[], Any]], Any] = lambda function: function(),
    ) -> None:
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.identity = identity
        self.keep = keep
        self.every = every
        self.write = write
        self.read = read
        self.saved_step: int | None = None  # of last.pt, once this process has written it

    def due(self, progress: Progress) -> bool:
        """Tell whether ``every`` asks for a checkpoint after this step."""
        return self.every is not None and progress.global_step % self.every == 0

    def save(self, progress: Progress) -> None:
        """Write ``last.pt``; the one before it is kept under the number of its step.

        Raises:
            CheckpointError: disk full, no permission...; the checkpoint before is whole.
        """
        if not self.write:
            return
        if not all(map(math.isfinite, progress.train_sums)):
            # On a GPU the loss is looked at less often than it may be saved.
            raise CheckpointError(
                f"the loss is not finite at step {progress.global_step} or shortly before: nothing"
                " saved; go on from the last checkpoint with a lower --lr or --max-grad-norm"
            )
        last = self.folder / "last.pt"
        content = io.BytesIO()
        torch.save(
            {
                "format": FORMAT,
                "identity": self.identity,
                "progress": asdict(progress),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict()["state"],
                "scaler": self.scaler.state_dict(),
                "torch_version": str(torch.__version__),
            },
            content,
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = self.folder / "last.pt.tmp"
            write_durably(temporary, content.getbuffer())
            if self.keep > 1 and last.exists():
                # A second name for the file, not a move: last.pt is there at every moment.
                step = self.saved_step if self.saved_step is not None else _step_of(last)
                kept = self.folder / f"step-{step:08d}.pt"
                kept.unlink(missing_ok=True)
                os.link(last, kept)
            os.replace(temporary, last)
            sync_folder(self.folder)
            older = sorted(self.folder.glob("step-*.pt"), reverse=True)
            for path in older[self.keep - 1 :]:
                path.unlink()
            self.saved_step = progress.global_step
        except OSError as error:
            raise CheckpointError(
                f"cannot save a checkpoint in {self.folder}: {error.strerror}; the one before is"
                " whole: make room (or lower --keep) and continue with --resume"
            ) from error

    def resume(self, start: Progress, resume: bool = True) -> Progress:
        """Load the newest whole checkpoint and return where it stands, or ``start``.

        Collective where ``read`` is. Every process gets the same file, also where their disks
        are not shared.

        Raises:
            CheckpointError: there are checkpoints, and none is whole; or it belongs to another
                model, data set or seed.
        """
        state = self.read(self._read_newest) if resume else None
        if state is None:
            return start
        for key, ours in self.identity.items():
            theirs = state["identity"].get(key)
            if theirs != ours:
                raise CheckpointError(
                    f"the checkpoint in {self.folder} was trained with {key} {theirs}, this"
                    f" command says {ours}: use the same, or another --run-dir"
                )
        report = match_weights(self.model.state_dict(), state["model"])
        if report.problems:
            raise CheckpointError(
                f"the checkpoint in {self.folder} does not fit --model: {report.problems[0]}"
            )
        self.model.load_state_dict(state["model"])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        # The sizes are those of this command: its world may be another.
        sizes = {"epoch_size": start.epoch_size, "global_batch_size": start.global_batch_size}
        return Progress(**{**state["progress"], **sizes})

    def _read_newest(self) -> dict[str, Any] | None:
        """Read the newest whole checkpoint, naming those that are damaged."""
        paths = sorted(self.folder.glob("step-*.pt"), reverse=True)
        paths = [p for p in (self.folder / "last.pt", *paths) if p.exists()]
        problems: list[str] = []
        for path in paths:
            try:
                state = read_checkpoint(path)
                if not isinstance(state, dict) or state.get("format") != FORMAT:
                    raise CheckpointError(f"{path} is not a checkpoint of this project")
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                print(f"warning: {problem}; going on from {path}", file=sys.stderr)
            return state
        if problems:
            raise CheckpointError(f"no whole checkpoint to resume from: {'; '.join(problems)}")
        return None


def _step_of(path: Path) -> int:
    try:
        return read_checkpoint(path)["progress"]["global_step"]
    except (CheckpointError, KeyError, TypeError):
        return 0  # damaged: the first to go


def write_durably(path: Path, content: bytes | memoryview) -> None:
    """Write a file and wait until the disk has it; what is only half-written is removed."""
    try:
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's names, or a crash could undo a replacement."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_checkpoint(path: Path) -> Any:
    """Read a file of tensors and plain values, verifying it first.

    ``torch.load`` takes a file with a flipped bit without a word; the archive's own checksums
    find it.

    Raises:
        CheckpointError: missing, damaged, or holding more than tensors and plain values.
    """
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if archive.testzip() is not None:
                    raise CheckpointError(f"{path} is damaged (checksum)")
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        # torch's own message advises weights_only=False, which would run what the file holds.
        raise CheckpointError(
            f"{path} is refused: it is damaged, or holds more than tensors and plain values,"
            " and such a file can run code when it is loaded"
        ) from error
    except Exception as error:  # a damaged archive fails in torch, zlib and pickle alike
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} cannot be read ({reason})") from error


@dataclass
class WeightReport:
    """Which tensors fit, by name and shape, and what is wrong with the others."""

    loaded: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        skipped = "".join(f"\n  skipped: {problem}" for problem in self.problems)
        return f"loaded {len(self.loaded)} tensors{skipped}"


def match_weights(own: dict[str, Tensor], given: dict[str, Tensor]) -> WeightReport:
    """Compare two state dicts by name and shape, without copying anything."""
    report = WeightReport()
    for name, tensor in own.items():
        if name not in given:
            report.problems.append(f"{name} is missing")
        elif given[name].shape != tensor.shape:
            theirs, ours = tuple(given[name].shape), tuple(tensor.shape)
            report.problems.append(f"{name} has the shape {theirs}, not {ours}")
        else:
            report.loaded.append(name)
    report.problems += [f"{name} is not in the model" for name in given if name not in own]
    return report


def init_weights(model: nn.Module, path: str, tell: bool = True) -> WeightReport:
    """Copy the weights of a file that fit ``model`` by name and shape; report (``tell``) the rest.

    The file may be a checkpoint of this project, a state dict, or a dict that holds one under
    ``model`` or ``model_state_dict``; a ``module.`` that DP or DDP left in the names is stripped.
    Everything is compared before anything is copied.

    Raises:
        CheckpointError: the file cannot be read, or nothing in it fits.
    """
    content = read_checkpoint(Path(path))
    for key in ("model", "model_state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(f"{path} holds no state dict (a dict of names to tensors)")
    given = {str(name).removeprefix("module."): tensor for name, tensor in content.items()}
    report = match_weights(model.state_dict(), given)
    if not report.loaded:
        first = f" ({report.problems[0]})" if report.problems else ""
        raise CheckpointError(f"nothing in {path} fits the model{first}: take another --model")
    model.load_state_dict({name: given[name] for name in report.loaded}, strict=False)
    if tell:
        print(f"{path}: {report}")
    return report


def weights_sha256(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters and buffers, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        values = tensor.detach().cpu().contiguous()
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
