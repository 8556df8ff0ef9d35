"""A run: everything about training that is not the training itself."""

import argparse
import math
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import DataLoader

import data
from utils import distributed, signals
from utils.checkpoint import Checkpointer
from utils.device import peak_memory, seed_step, synchronize
from utils.errors import UsageError, UserError, describe, end_workers, explain
from utils.files import write_json
from utils.logger import Logger
from utils.metrics import Metrics
from utils.profiler import LAST_STEP, StepProfiler
from utils.progress import Progress
from utils.run_dir import open_run
from utils.status import Status
from utils.throughput import WARMUP_STEPS, Throughput, seconds_since_start
from utils.weights import weights_sha256

RECORDED = ("technique", "dataset", "model", "batch_size", "seed", "amp")  # flags in summary.json
CHECK_STEPS = 50  # between looks at the loss on a GPU, each of which waits for it


class NonFiniteLoss(UserError):
    """Training diverged. The weights of this step were not saved."""


class Complete(UsageError):
    """The run that should be resumed has nothing left to do."""

    exit_status = 0


class Job(Protocol):
    """All ranks of a launch. It names the ones that are lost, see utils/cluster."""

    def explain(self, error: Exception, step: int | None = None) -> Exception: ...


class Run:
    """Folder, checkpoints, position, reports and stop of a run: a context manager.

    On the way in it opens and locks the folder and resumes. On the way out it writes whether the
    run is complete, stopped or failed, and raises the error that names the cause.

    Under DDP every rank makes the same calls. Rank 0 alone writes.

    Args:
        args: as ``config.parse_args`` returns them. They are the run's record.
        device: of this process.
        sampler: of the training set.
        model: the unwrapped model.
        optimizer: its learning rate is taken as the peak.
        scaler: the gradient scaler.
        job: names lost ranks. None without other ranks.

    Attributes:
        progress: the position of the run.
        metrics: the sums of this rank in the current epoch.
        signal: the stop signal that all ranks agreed on, or 0.
        exit_status: of the script.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        device: torch.device,
        sampler: data.EpochSampler,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        job: Job | None = None,
    ) -> None:
        self.args, self.device, self.sampler, self.model = args, device, sampler, model
        self.optimizer, self.scaler, self.job = optimizer, scaler, job
        self.rank, self.is_main = sampler.rank, sampler.rank == 0
        self.progress = Progress(
            len(sampler.dataset),  # type: ignore[arg-type]
            sampler.global_batch_size,
            args.epochs,
            args.max_steps,
        )
        self.metrics = Metrics(device)
        self.signal = 0
        self._agree = distributed.AgreedMax()

    @property
    def exit_status(self) -> int:
        return 128 + self.signal if self.signal else 0

    def __enter__(self) -> "Run":
        args, progress = self.args, self.progress
        opened = distributed.call_on_rank_0(open_run, args.run_dir, args.technique, args.resume)
        identity = {"model": args.model, "dataset": args.dataset, "seed": args.seed}
        self.folder = opened.path
        self._checkpointer = Checkpointer(
            self.folder / "checkpoints", self.model, self.optimizer, self.scaler, identity
        )
        if opened.resume:
            self._checkpointer.restore(progress)
        if opened.is_complete and progress.is_finished:
            limit = "--max-steps" if progress.is_at_max_steps else "--epochs"
            raise Complete(f"{self.folder} is complete: nothing to resume (raise {limit})")
        batch_size = args.batch_size * args.grad_accum_steps
        self.facts = {
            "script": f"train_{args.technique}.py",
            **{name: getattr(args, name) for name in RECORDED},
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "world_size": distributed.world_size(),
            "num_devices": progress.global_batch_size // batch_size,
            "device": self.device.type,
            "backend": distributed.backend(self.device),
            "threads": torch.get_num_threads(),
            "global_batch_size": progress.global_batch_size,
            "lr": self.optimizer.param_groups[0]["lr"],
            "torch_version": str(torch.__version__),
            "resumed_from": progress.global_step or None,
        }
        # The profiled steps take longer, so images/s leaves them out.
        untimed_steps = LAST_STEP if args.profile else WARMUP_STEPS
        self._throughput = Throughput(self.device, progress.global_batch_size, untimed_steps)
        self._profiler: StepProfiler | None = None
        if args.profile:
            self._profiler = StepProfiler(self.folder, self.device, self.rank)
        self._logger = Logger(self.folder, progress, self.is_main, args.tensorboard, args.progress)
        self._status = Status(self.folder, args.technique, opened.launch_id, progress)
        if self.is_main:
            flags = {name: value for name, value in vars(args).items() if name != "technique"}
            write_json(self.folder / "args.json", flags)
            # Last of what may fail here, where ``__exit__`` would not say that it did.
            self._status.write("running")
            signals.before_interrupt(self._interrupted)
        self._logger.header(self.facts)
        return self

    def batches(self, loader: DataLoader) -> Iterator[Any]:
        """Yield the loader's batches from the run's position to the end of the epoch.

        The epoch also ends at a stop signal and at ``--max-steps``. Each optimizer step begins with
        freshly seeded generators of this rank.
        """
        # Rank 0 alone counts what was seen before a resume, or a sum would count it N times.
        self.metrics = Metrics(self.device, self.progress.train_sums if self.is_main else None)
        self._throughput.start_epoch()
        accum_steps = self.args.grad_accum_steps
        self._logger.start_epoch(len(loader) // accum_steps)
        try:
            batches = data.batches(loader) if self.progress.has_step_left else ()
            for micro_step, batch in enumerate(batches):
                if micro_step % accum_steps == 0:
                    if self.signal or not self.progress.has_step_left:
                        break
                    samples = self.progress.samples_seen
                    seed_step(self.device, self.args.seed, self.rank, samples)
                yield batch
            synchronize(self.device)
            if self._profiler is not None:
                self._logger.say(self._profiler.finish())
                self._profiler = None
        finally:
            # After an error too, so nothing here waits for the device, which may wait in vain for
            # a rank that is lost.
            self._throughput.end_epoch()
            self._logger.bar.close()

    def end_step(self) -> None:
        """Count an optimizer step, log it, agree on a stop, and save if it is time. Collective.

        Raises:
            NonFiniteLoss: the training diverged.
        """
        progress, args = self.progress, self.args
        progress.step(self.optimizer.param_groups[0]["lr"])
        step = progress.global_step
        self._throughput.step()
        if self._profiler is not None:
            self._profiler.step()
        self._logger.bar.update()
        if self.device.type == "cpu" or step % CHECK_STEPS == 0:
            self._check_finite(self.metrics, f"on rank {self.rank}")
        if self.is_main and step % args.log_every == 0:
            self._logger.step(self.metrics.loss, self.metrics.accuracy)
        self.signal = self._agree(signals.received())
        if self.signal or (args.save_every_steps and step % args.save_every_steps == 0):
            progress.train_sums = self.metrics.sum_over_ranks().sums.tolist()
            self._checkpointer.save(progress)

    def end_epoch(self, test: Metrics) -> None:
        """Add up over the ranks what they trained and evaluated, report it, and save. Collective.

        Args:
            test: the sums of this rank's share of the test set.
        """
        progress, train = self.progress, self.metrics.sum_over_ranks()
        test = test.sum_over_ranks()
        self._check_finite(train, "in training")
        self._check_finite(test, "on the test set")
        row = {
            "epoch": progress.epoch + 1,
            "images": progress.samples_seen,
            "global_step": progress.global_step,
            "learning_rate": progress.learning_rate,
            "train_loss": train.loss,
            "train_accuracy": train.accuracy,
            "test_loss": test.loss,
            "test_accuracy": test.accuracy,
            "test_correct": test.correct,
            "test_count": test.count,
            "images_per_second": self._throughput.images_per_second(),
            "seconds": time.perf_counter() - self._throughput.epoch_start,
        }
        self._logger.evaluated(row)
        progress.end_epoch(train.sums.tolist(), test.sums.tolist())
        self._checkpointer.save(progress)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._finish()
            except Exception as raised:
                error = raised
        signals.before_interrupt(None)
        self._logger.close()
        if error is None:
            return
        end_workers()  # or the death of another worker interrupts the rest
        explained = error
        if isinstance(error, Exception):
            explained = explain(error)
            if self.job is not None:
                explained = self.job.explain(explained, self.progress.global_step)
        if self.is_main:
            concerned = {"ranks": explained.ranks} if hasattr(explained, "ranks") else {}
            with suppress(OSError):  # a full disk, the likeliest failure, leaves no room
                self._status.write("failed", reason=describe(explained), **concerned)
        if explained is not error:
            raise explained from error
        if kind is None:
            raise error

    def _finish(self) -> None:
        """Write that the run was stopped, or its summary. Collective."""
        if self.signal:
            name = signal.Signals(self.signal).name
            if self.is_main:
                self._status.write("stopped", signal=name)
            self._logger.say(
                f"stopped by {name} at step {self.progress.global_step}; continue with:"
                f" {self._status.continue_command()}"
            )
            return
        memory = distributed.gather(peak_memory(self.device))
        if not self.is_main:
            return
        progress, test = self.progress, Metrics(self.device, self.progress.test_sums)
        summary = self.facts | {
            "epochs": progress.epoch,
            "global_step": progress.global_step,
            "test_correct": test.correct,
            "test_count": test.count,
            "test_accuracy": test.accuracy,
            "test_loss": test.loss,
            "train_images_per_second": self._throughput.images_per_second(),
            "startup_seconds": self._throughput.startup_seconds,
            "train_seconds": self._throughput.train_seconds,
            "total_seconds": seconds_since_start(),
            "peak_memory_bytes": memory,
            "weights_sha256": weights_sha256(self.model),
        }
        write_json(self.folder / "summary.json", summary)
        self._status.write("complete", epochs=progress.epochs, max_steps=progress.max_steps)
        self._logger.say(
            f"test accuracy {test.accuracy:.2%}, {test.correct:,} of {test.count:,}, after"
            f" {summary['total_seconds']:.1f} s\nsummary in {self.folder}/summary.json"
        )

    def _check_finite(self, metrics: Metrics, where: str) -> None:
        if metrics.count and not math.isfinite(metrics.loss):
            error = NonFiniteLoss(
                f"the loss is {metrics.loss} at step {self.progress.global_step} {where}, which is"
                " not saved: choose a lower --lr, a longer --warmup-epochs or --max-grad-norm"
            )
            # If this rank alone diverged, rank 0 loses it, and names it with this reason.
            error.reported_elsewhere = not self.is_main
            raise error

    def _interrupted(self) -> None:
        self._status.write("failed", reason="interrupted by a second Ctrl-C")
