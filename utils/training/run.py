"""A run: everything about training that is not the training itself."""

import argparse
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader

import data
from utils import distributed, signals
from utils.datasets.loader import batches as loader_batches
from utils.device import peak_memory, seed_step, synchronize
from utils.errors import Diverged, UsageError, describe, end_workers, explain
from utils.files import write_json
from utils.metrics import Metrics
from utils.training.checkpoint import Checkpointer
from utils.training.logger import Logger
from utils.training.progress import Progress
from utils.training.run_dir import Status, compare, identify_launch, open_run
from utils.training.timing import (
    LAST_STEP,
    WARMUP_STEPS,
    StepProfiler,
    Throughput,
    seconds_since_start,
)
from utils.weights import weights_sha256

RECORDED = ("technique", "dataset", "model", "batch_size", "seed", "amp")  # flags in summary.json
CHECK_STEPS = 50  # between looks at the loss on a GPU, each of which waits for it


class Complete(UsageError):
    """The run that should be resumed has nothing left to do."""

    exit_status = 0


class Job(Protocol):
    """All ranks of a launch. It names the ones that are lost, see utils/cluster."""

    def explain(self, error: Exception, step: int | None = None) -> Exception: ...


@dataclass
class Run:
    """Folder, checkpoints, position, reports and stop of a run: a context manager.

    On the way in it opens and locks the folder and resumes. On the way out it writes whether the
    run is complete, stopped or failed, and raises the error that names the cause.

    Under DDP every rank makes the same calls. Rank 0 alone writes: the folder, checkpoints and logs
    (and each rank a profile). All ranks load what rank 0 reads.

    Args:
        args: as ``config.parse_args`` returns them. They are the run's record.
        device: of this process.
        sampler: of the training set.
        model: never wrapped.
        optimizer: its learning rate is taken as the peak.
        scaler: the gradient scaler.
        rank: of this process. Each rank seeds its generators for each step, by this number.
        job: names lost ranks. None without other ranks.
        extra: what else belongs into the checkpoint, such as an average of the weights: objects
            with ``state_dict`` and ``load_state_dict``, by name.

    Attributes:
        progress: the position of the run.
        metrics: the sums of this rank in the current epoch. Once ``train_ddp.py`` has added up
            those of all ranks, they are the epoch's.
        signal: the stop signal that all ranks agreed on, or 0.
        exit_status: of the script.
    """

    args: argparse.Namespace
    device: torch.device
    sampler: data.EpochSampler
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    rank: int = 0
    job: Job | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_main, self.signal = self.rank == 0, 0
        self.metrics, self._agree = Metrics(self.device), distributed.AgreedMax()
        args, sampler = self.args, self.sampler
        size: int = len(sampler.dataset)  # type: ignore[arg-type]
        self.progress = Progress(size, sampler.global_batch_size, args.epochs, args.max_steps)

    @property
    def exit_status(self) -> int:
        return 128 + self.signal if self.signal else 0

    @property
    def test_averages(self) -> dict[str, float]:
        """Loss, accuracy and so on of the latest evaluation, the same on all ranks, or nothing."""
        sums = self.progress.test_sums
        return Metrics(torch.device("cpu"), sums).averages if sums else {}

    def __enter__(self) -> "Run":
        args, progress = self.args, self.progress
        flags = {name: value for name, value in vars(args).items() if name != "technique"}
        launch = identify_launch(args.technique)
        self.folder, before = distributed.call_on_rank_0(
            open_run, args.run_dir, args.resume, launch, flags
        )
        identity = {"model": args.model, "dataset": args.dataset, "seed": args.seed}
        parts = self.model, self.optimizer, self.scaler
        self._checkpointer = Checkpointer(self.folder / "checkpoints", *parts, identity, self.extra)
        moved = self._checkpointer.restore(progress) if before else []
        self.facts = self._collect_facts()
        launch["global_batch_size"] = progress.global_batch_size
        notes = [compare(before, flags | launch)]
        if moved and distributed.world_size() > 1:
            notes.append(f"all ranks have rank 0's {', '.join(moved)}, which each had of its own")
        note = "; ".join(filter(None, notes))
        if before.get("state") == "complete" and progress.is_finished:
            advice = "raise --epochs or --max-steps" + f"; {note}" * bool(note)
            raise Complete(f"{self.folder} is complete: nothing to resume ({advice})")
        # The profiled steps take longer, so images/s leaves them out.
        untimed_steps = LAST_STEP if args.profile else WARMUP_STEPS
        self._throughput = Throughput(self.device, progress.global_batch_size, untimed_steps)
        self._profiler: StepProfiler | None = None
        if args.profile:
            self._profiler = StepProfiler(self.folder, self.device, self.rank)
        self._logger = Logger(self.folder, progress, self.is_main, args.tensorboard, args.progress)
        self._status = Status(self.folder, launch, progress)
        if self.is_main:
            write_json(self.folder / "args.json", flags)
            signals.before_end(self._write_failed)
        # Last of what may fail here, where ``__exit__`` would not say that it did.
        self._status.saved()
        self._logger.header(self.facts, note)
        return self

    def _collect_facts(self) -> dict[str, Any]:
        """Return what ``summary.json`` says of a run before its first step."""
        args, batch = self.args, self.progress.global_batch_size
        return {
            "script": f"train_{args.technique}.py",
            **{name: getattr(args, name) for name in RECORDED},
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "world_size": distributed.world_size(),
            "num_devices": batch // (args.batch_size * args.grad_accum_steps),
            "device": self.device.type,
            "backend": distributed.backend(self.device),
            "threads": torch.get_num_threads(),
            "global_batch_size": batch,
            "lr": self.optimizer.param_groups[0]["lr"],
            "torch_version": str(torch.__version__),
            "resumed_from": self.progress.global_step or None,
        }

    def batches(self, loader: DataLoader) -> Iterator[Any]:
        """Yield the loader's batches from the run's position to the end of the epoch.

        The epoch also ends at a stop signal and at ``--max-steps``. Each optimizer step begins with
        freshly seeded generators of this rank.
        """
        # What was seen before a resume counts once, not once on each rank.
        sums = {name: self.is_main * value for name, value in self.progress.train_sums.items()}
        self.metrics = Metrics(self.device, sums)
        self._throughput.start_epoch()
        accum_steps = self.args.grad_accum_steps
        self._logger.start_epoch(len(loader) // accum_steps)
        try:
            batches = loader_batches(loader) if self.progress.has_step_left else ()
            for micro_step, batch in enumerate(batches):
                if micro_step % accum_steps == 0:
                    if self.signal or not self.progress.has_step_left:
                        break
                    seed_step(self.device, self.args.seed, self.rank, self.progress.samples_seen)
                yield batch
            if not self.signal:  # one that came in the last step stops before the evaluation
                self._agree_and_save(False)
            synchronize(self.device)
            if self._profiler is not None:
                self._logger.say(self._profiler.finish())
                self._profiler = None
        except signals.Stopped:  # the loader gives no batch
            if distributed.world_size() > 1:  # the other ranks wait for this one in a backward
                raise
            self._agree_and_save(False)
        finally:
            # After an error too, so nothing here waits for the device, which may wait in vain for
            # a rank that is lost.
            self._throughput.end_epoch()
            self._logger.bar.close()

    def end_step(self) -> None:
        """Count an optimizer step, log it, agree on a stop, and save if it is time. Collective.

        Raises:
            Diverged: the loss is not finite.
        """
        progress, args = self.progress, self.args
        progress.step()
        step = progress.global_step
        self._throughput.step()
        if self._profiler is not None:
            self._profiler.step()
        self._logger.bar.update()
        if self.device.type == "cpu" or step % CHECK_STEPS == 0:
            self._check_finite(self.metrics, f"on rank {self.rank}")
        if self.is_main and step % args.log_every == 0:
            self._logger.step(self.metrics.averages, self.optimizer.param_groups[0]["lr"])
        is_due = bool(args.save_every_steps) and step % args.save_every_steps == 0
        self._agree_and_save(is_due)

    def _agree_and_save(self, is_due: bool) -> None:
        self.signal = self._agree(signals.received())
        if self.signal or is_due:
            with self._throughput.paused():
                # The epoch goes on, so the sums of this rank stay what they are.
                sums = distributed.sum_over_ranks(self.metrics.sums).tolist()
                self.progress.train_sums = dict(zip(self.metrics.names, sums, strict=False))
                self._save()

    def end_epoch(self, test: Metrics) -> None:
        """Divide the epoch's sums by their counts, report them, and save. Collective.

        Args:
            test: the sums of the whole test set, as ``metrics`` are those of all ranks.
        """
        progress, train = self.progress, self.metrics
        # A rank with an empty share of the test set has not met the names.
        train.names, test.names = distributed.broadcast((train.names, test.names))
        self._check_finite(train, "in training")
        self._check_finite(test, "on the test set")
        row = {
            "epoch": progress.epoch + 1,
            "images": progress.samples_seen,
            "global_step": progress.global_step,
            **train.report("train"),
            **test.report("test"),
            "images_per_second": self._throughput.images_per_second(),
            "seconds": time.perf_counter() - self._throughput.epoch_start,
        }
        self._logger.evaluated(row)
        progress.end_epoch(train.totals, test.totals)
        self._save()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is not None:
                raise error
            self._finish()
        except Exception as raised:
            end_workers()  # or the death of another worker interrupts the rest
            explained = explain(raised)
            if self.job is not None:
                explained = self.job.explain(explained, self.progress.global_step)
            self._write_failed(explained)
            if explained is raised:
                raise
            raise explained from raised
        finally:
            signals.before_end(None)
            self._logger.close()

    def _save(self) -> None:
        self._checkpointer.save(self.progress)
        self._status.saved()

    def _finish(self) -> None:
        """Write that the run was stopped, or its summary. Collective."""
        if self.signal:
            name = signal.Signals(self.signal).name
            self._status.write("stopped", signal=name)
            self._logger.say(
                f"stopped by {name} at step {self.progress.global_step}; continue with:"
                f" {self._status.how_to_continue()}"
            )
        else:
            self._summarise(distributed.gather(peak_memory(self.device)))
        # Rank 0 writes results, and its store ends with it. Without this sum nobody would notice
        # that rank 0 fails there.
        distributed.gather(0)

    def _summarise(self, memory: list[int]) -> None:
        """Write ``summary.json`` on rank 0.

        Args:
            memory: peak bytes of each rank.
        """
        if not self.is_main:
            return
        progress, test = self.progress, Metrics(self.device, self.progress.test_sums)
        summary = self.facts | {
            "epochs": progress.epoch,
            "global_step": progress.global_step,
            **test.report("test"),
            "train_images_per_second": self._throughput.images_per_second(),
            "startup_seconds": self._throughput.startup_seconds,
            "train_seconds": self._throughput.train_seconds,
            "total_seconds": seconds_since_start(),
            "peak_memory_bytes": memory,
            "weights_sha256": weights_sha256(self.model),
        }
        path = self.folder / "summary.json"
        # If an early stop is resumed, nothing is trained, and the summary stands.
        if progress.global_step != self.facts["resumed_from"] or not path.exists():
            write_json(path, summary)
        self._status.write("complete", epochs=progress.epochs, max_steps=progress.max_steps)
        correct, count, seconds = summary["test_correct"], test.count, summary["total_seconds"]
        result = f"loss {test.loss:.4f}"
        if correct is not None:
            result = f"accuracy {correct / count:.2%}, {correct:,} of {count:,}"
        self._logger.say(f"test {result}, after {seconds:.1f} s\nsummary in {path}")

    def _check_finite(self, metrics: Metrics, where: str) -> None:
        if not metrics.is_finite:
            problem = f"the loss is {metrics.loss} at step {self.progress.global_step} {where}"
            raise Diverged(problem, self.is_main)

    def _write_failed(self, error: BaseException) -> None:
        concerned = {"ranks": error.ranks} if hasattr(error, "ranks") else {}
        with suppress(OSError):  # a full disk, the likeliest failure, leaves no room
            self._status.write("failed", reason=describe(error), **concerned)
