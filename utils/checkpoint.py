"""Checkpoints: written whole or not at all, verified before use, the same for all three scripts."""

import io
import math
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from utils.errors import DISK, describe
from utils.files import replace_file
from utils.progress import POSITION, Progress
from utils.weights import CheckpointError, is_plain, match_weights, read_tensors

FORMAT = 2
PARTS = {"identity": dict, "progress": dict, "model": dict, "optimizer": dict, "scaler": dict}


@dataclass
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

    folder: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    identity: dict[str, Any]
    _: KW_ONLY
    keep: int = 2
    every: int | None = None
    write: bool = True
    read: Callable[[Callable[[], Any]], Any] = lambda function: function()
    last_step: int = field(default=0, init=False)  # of last.pt; 0 where it is damaged

    def due(self, progress: Progress) -> bool:
        """Tell whether ``every`` asks for a checkpoint after this step."""
        return self.every is not None and progress.global_step % self.every == 0

    def save(self, progress: Progress) -> None:
        """Write ``last.pt``; the one before it is kept under the number of its step.

        Raises:
            CheckpointError: a number is not finite, or disk full, no permission...; the
                checkpoint before is whole.
        """
        state = {
            "format": FORMAT,
            "identity": self.identity,
            "progress": progress.position(),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer_state(),
            "scaler": self.scaler.state_dict(),
            "torch_version": str(torch.__version__),
        }
        # By every rank, also those that do not write: all of them end here then.
        if not _is_finite(state):
            raise CheckpointError(
                f"weights or losses are not finite at step {progress.global_step}: nothing saved;"
                " go on from the last checkpoint with a lower --lr or --max-grad-norm"
            )
        if not self.write:
            return
        content = io.BytesIO()
        torch.save(state, content)
        last = self.folder / "last.pt"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = None
            if self.keep > 1 and last.exists():
                kept = self.folder / f"step-{self.last_step:08d}.pt"
            replace_file(last, content.getbuffer(), keep_as=kept)
            older = sorted(filter(Path.is_file, self.folder.glob("step-*.pt")), reverse=True)
            for path in older[self.keep - 1 :]:
                path.unlink()
            self.last_step = progress.global_step
        except OSError as error:
            advice = "make room (or lower --keep) and " if error.errno in DISK else ""
            raise CheckpointError(
                f"cannot save {error.filename2 or error.filename or last}: {error.strerror}; the"
                f" one before is whole: {advice}continue with --resume"
            ) from error

    def resume(self, progress: Progress, resume: bool = True) -> None:
        """Load the newest whole checkpoint, if there is one, and set ``progress`` to its position.

        Collective where ``read`` is. Every process gets the same file, also where their disks
        are not shared.

        Raises:
            CheckpointError: there are checkpoints, and none is whole; or it belongs to another
                model, data set or seed.
        """
        state = self.read(self._read_newest) if resume else None
        if state is None:
            return
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
        groups = self.optimizer.state_dict()["param_groups"]
        try:
            self.model.load_state_dict(state["model"])
            optimizer_state = self._fit_optimizer_state(state["optimizer"])
            self.optimizer.load_state_dict({"state": optimizer_state, "param_groups": groups})
            if state["scaler"] and self.scaler.is_enabled():
                if not _is_like(state["scaler"], self.scaler.state_dict()):
                    raise ValueError("the loss scaler cannot have such a state")
                self.scaler.load_state_dict(state["scaler"])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint in {self.folder} is damaged ({describe(error)})"
            ) from error
        if state["progress"]["epoch_samples"] > progress.epoch_size:
            raise CheckpointError(
                f"the checkpoint in {self.folder} stands beyond the {progress.epoch_size} samples"
                " of this data set: use the same, or another --run-dir"
            )
        progress.go_on_from(state["progress"])

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state by the names of the parameters, whose order may change."""
        names = [name for name, _ in self.model.named_parameters()]
        return {names[i]: own for i, own in self.optimizer.state_dict()["state"].items()}

    def _fit_optimizer_state(self, given: dict[Any, Any]) -> dict[int, Any]:
        """Return what the optimizer is to load; a parameter that was not trained keeps its own.

        Raises:
            ValueError: a state that its parameter cannot have. The fused SGD would not notice.
        """
        fitting = dict(self.optimizer.state_dict()["state"])
        for i, (name, parameter) in enumerate(self.model.named_parameters()):
            theirs = given.get(name, given.get(i))  # format 1 had them by number
            if theirs is None:
                continue
            theirs = {key: value for key, value in theirs.items() if value is not None}
            own = fitting.get(i, {})
            for key, value in theirs.items():
                shapes = (own[key].shape,) if key in own else (parameter.shape, ())
                if not (is_plain(value) and value.shape in shapes) and key != "step":
                    raise ValueError(f"the optimizer's state of {name} has another shape")
            fitting[i] = own | theirs
        return fitting

    def _read_newest(self) -> dict[str, Any] | None:
        """Read the newest whole checkpoint, naming those that are damaged."""
        paths = sorted(self.folder.glob("step-*.pt"), reverse=True)
        paths = [p for p in (self.folder / "last.pt", *paths) if p.exists()]
        problems: list[str] = []
        for path in paths:
            try:
                state = read_checkpoint(path)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            if path.name == "last.pt":
                self.last_step = state["progress"]["global_step"]
            for problem in problems:
                print(f"warning: {problem}; going on from {path}", file=sys.stderr)
            return state
        if problems:
            raise CheckpointError(f"no whole checkpoint to resume from: {'; '.join(problems)}")
        print(f"warning: no checkpoint in {self.folder}: starting at step 0", file=sys.stderr)
        return None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint of this project, with all of its parts.

    Raises:
        CheckpointError: damaged, of another project, or of a newer version of this one.
    """
    state = read_tensors(path)
    number = state.get("format") if isinstance(state, dict) else None
    if not isinstance(number, int):
        raise CheckpointError(f"{path} is not a checkpoint of this project")
    if number > FORMAT:
        raise CheckpointError(f"{path} was written by a newer version of this project")
    for part, kind in PARTS.items():
        if not isinstance(state.get(part), kind):
            raise CheckpointError(f"{path} is damaged: its part {part!r} is missing or no {kind}")
    if not all(isinstance(value, str | int | None) for value in state["identity"].values()):
        raise CheckpointError(f"{path} is damaged: its part 'identity' is no text")
    if number == 1:  # which counted the same position in other words
        old = state["progress"]
        state["progress"] = {name: old.get(name) for name in POSITION} | {
            "epoch_samples": old.get("samples"),
            # It did not say whether an evaluation was owed: at worst one is made again.
            "evaluated_step": -1,
        }
    _check_position(path, state["progress"])
    return state


def _check_position(path: Path, position: dict[str, Any]) -> None:
    for name, value in position.items():
        if name not in POSITION:
            raise CheckpointError(f"{path} was written by a newer version of this project ({name})")
        if name.endswith("_sums"):
            is_owed = name == "train_sums" or position.get("evaluated_step") == -1
            is_right = _are_sums(value) or (value == [] and is_owed)
        else:
            least = -1 if name == "evaluated_step" else 0
            is_right = type(value) is int and least <= value < 2**53
        if not is_right:
            raise CheckpointError(f"{path} is damaged: its {name} is {str(value)[:50]}")
    if missing := [name for name in POSITION if name not in position]:
        raise CheckpointError(f"{path} is damaged: its {missing[0]} is missing")


def _are_sums(value: Any) -> bool:
    kinds = [type(number) for number in value] if isinstance(value, list) else []
    if len(kinds) != 3 or not {int, float}.issuperset(kinds):
        return False
    loss, correct, count = value
    # Neither nan nor infinite, nor a whole number that no float can hold.
    return abs(loss) < 1e300 and 0 <= correct <= count and 0 < count < 2**53


def _is_finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, dict | list):
        return all(map(_is_finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def _is_like(given: dict[str, Any], own: dict[str, Any]) -> bool:
    """Tell whether a state consists of numbers of the same names and kinds, of a usual size."""
    kinds = [{name: type(value) for name, value in state.items()} for state in (given, own)]
    most = {int: 2**31, float: math.inf}  # the scaler counts in int32
    return kinds[0] == kinds[1] and all(0 <= v < most[type(v)] for v in given.values())
