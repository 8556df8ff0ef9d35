"""Checkpoints, written whole or not at all, verified before use, and the same for all scripts."""

import inspect
import io
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from utils import distributed
from utils.errors import Diverged, UsageError
from utils.files import replace_file
from utils.training.progress import Progress
from utils.weights import CheckpointError, DamagedFile, load_state, read_tensors, to_plain

FORMAT = 5
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


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
        extra: more to save beside the model, by name, with ``state_dict`` and ``load_state_dict``.
    """

    folder: Path
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    identity: dict[str, Any]
    extra: dict[str, Any]

    def __post_init__(self) -> None:
        self._check_parts()
        self.identity |= {"optimizer": type(self.optimizer).__name__, "extra": [*self.extra]}
        # A buffer may be infinite on purpose, as a causal mask is.
        state = self.model.state_dict().items()
        self.finite = [name for name, v in state if isinstance(v, Tensor) and _is_finite(v)]
        self.is_damaged = False  # last.pt, instead of which previous.pt was read
        self._parts()  # which may fail: before the first step rather than at the first save

    def _check_parts(self) -> None:
        """Refuse what would be trained or resumed wrongly, without an error.

        Raises:
            UsageError: always one line, that says what to do.
        """
        for name, part in self.extra.items():
            kind = f"extra[{name!r}] is a {type(part).__name__}"
            if isinstance(part, LRScheduler):
                raise UsageError(
                    f"{kind}: after a resume it would go on from the peak, since the learning rate"
                    " is not saved; compute the rate from run.samples_seen at each step, as"
                    " optim.Schedule does"
                )
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise UsageError(f"{kind}, which has no state_dict and load_state_dict: add them")
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{type(self.optimizer).__name__} calls the model by itself (its step needs a"
                " closure), which this loop does not let it: choose another optimizer"
            )
        optimizers = [self.optimizer, *self.extra.values()]
        groups = [group for each in optimizers for group in getattr(each, "param_groups", ())]
        stepped = {parameter for group in groups for parameter in group["params"]}
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not trained:
            raise UsageError("the model has no parameters, or all are frozen: nothing to train")
        left = [name for name, parameter in trained.items() if parameter not in stepped]
        if left:
            raise UsageError(
                f"no optimizer has {', '.join(left[:3])} ({len(left)} of {len(trained)}"
                " parameters), whose gradients would add up from step to step: freeze them where"
                " the model is built, by requires_grad_(False), or pass their optimizer to Run in"
                " `extra`"
            )

    def _names(self) -> list[str]:
        """Return the names of the optimizer's parameters, in the order of its groups.

        Its state goes by them, since the order and the groups may be others when a run resumes.

        Raises:
            UsageError: a parameter is in no module, so that its value would not be saved.
        """
        parts = {"model": self.model} | self.extra
        modules = nn.ModuleDict({k: p for k, p in parts.items() if isinstance(p, nn.Module)})
        names = {parameter: name for name, parameter in modules.named_parameters()}
        try:
            return [names[p] for group in self.optimizer.param_groups for p in group["params"]]
        except KeyError:
            raise UsageError(
                "the optimizer trains a parameter that is not saved, since it is not the model's:"
                " pass its module to Run in `extra`"
            ) from None

    def _parts(self) -> dict[str, Any]:
        """Return the states of model, optimizer, scaler and ``extra``, as they can be read again.

        Raises:
            UsageError: a state holds what could not be read, or the optimizer what is not saved.
        """
        names, optimizer_state = self._names(), self.optimizer.state_dict()["state"]
        parts = {
            "model": self.model.state_dict(),
            "optimizer": {names[i]: own for i, own in optimizer_state.items()},
            "scaler": self.scaler.state_dict(),
            "extra": {name: part.state_dict() for name, part in self.extra.items()},
        }
        return {name: to_plain(part, name) for name, part in parts.items()}

    def save(self, progress: Progress, keep_previous: bool = True) -> None:
        """Write ``last.pt`` on rank 0.

        Args:
            progress: the position to save.
            keep_previous: whether the checkpoint before stays as ``previous.pt``. It is not kept if
                it holds the same step, without its evaluation.

        Raises:
            Diverged: a number is not finite.
            UsageError: a state holds what could not be read again.
            OSError: the disk is full, there is no permission... Earlier checkpoints are whole.
        """
        state = {
            "format": FORMAT,
            "identity": self.identity,
            "progress": progress.position,
            **self._parts(),
        }
        weights = [state["model"].get(name) for name in self.finite]
        # Checked on every rank, so that all of them end here.
        if not _is_finite([state["progress"], state["optimizer"], weights]):
            problem = f"weights or losses are not finite at step {progress.global_step}"
            raise Diverged(problem, distributed.rank() == 0)
        if distributed.rank() != 0:
            return
        content = io.BytesIO()
        torch.save(state, content)
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = self.folder / "previous.pt" if keep_previous else None
        if self.is_damaged:
            kept = self.folder / "damaged.pt"  # previous.pt is the good one then
        with content.getbuffer() as whole:  # left open, Python 3.13 complains after an error
            replace_file(self.folder / "last.pt", whole, keep_as=kept)
        self.is_damaged = False

    def restore(self, progress: Progress) -> list[str]:
        """Load the newest whole checkpoint, if there is one, and its position. Collective.

        Every rank gets the file that rank 0 reads, even if the ranks share no disk.

        Returns:
            The buffers that changed, without running statistics, which evaluations alone read.

        Raises:
            CheckpointError: no checkpoint is whole, or it belongs to another model, data set, seed
                or optimizer. Nothing on the disk has changed.
            OSError: a checkpoint cannot be read.
        """
        state = distributed.call_on_rank_0(self._read_newest)
        if state is None:
            return []
        fresh = {name: own.clone() for name, own in self.model.named_buffers()}
        load_state(self.model, state["model"], f"{self.folder} does not fit --model")
        own, saved = self.optimizer.state_dict(), state["optimizer"]
        for i, name in enumerate(self._names()):
            # A parameter that was not trained keeps its own state.
            own["state"][i] = own["state"].get(i, {}) | saved.get(name, {})
        load_state(self.optimizer, own, f"{self.folder} does not fit the optimizer")
        if state["scaler"] and self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        for name, part in self.extra.items():
            load_state(part, state["extra"][name], f"{self.folder} does not fit {name}")
        progress.restore(state["progress"])
        other = (name for name, own in self.model.named_buffers() if (own != fresh[name]).any())
        return [name for name in other if not name.endswith(STATISTICS)]

    def _read_newest(self) -> dict[str, Any] | None:
        damage = ""
        for path in filter(Path.exists, (self.folder / "last.pt", self.folder / "previous.pt")):
            try:
                state = read_checkpoint(path)
            except DamagedFile as error:
                self.is_damaged, damage = True, f"{damage}{error}; "
                continue
            for key, ours in self.identity.items():
                if (theirs := state["identity"].get(key)) != ours:
                    raise CheckpointError(
                        f"{path} was trained with {key} {theirs}, this command says {ours}: use the"
                        " same, or another --run-dir"
                    )
            if damage:
                print(f"warning: {damage}continuing from {path}", file=sys.stderr)
            return state
        if damage:
            raise CheckpointError(f"no whole checkpoint: {damage}start over in another --run-dir")
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
