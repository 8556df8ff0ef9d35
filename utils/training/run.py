"""A run: everything about training that is not the training itself."""

import argparse
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import data
from utils import distributed, errors, optim, signals
from utils.datasets.loader import LONGEST_WAIT
from utils.datasets.loader import batches as loader_batches
from utils.device import peak_memory, seed_step, synchronize
from utils.errors import Diverged, UsageError, describe, end_workers
from utils.files import write_json
from utils.metrics import Metrics
from utils.training.checkpoint import Checkpointer
from utils.training.logger import Logger
from utils.training.progress import Progress
from utils.training.run_dir import Status, compare, identify_launch, open_run
from utils.training.summary import collect_facts, collect_results
from utils.training.timing import LAST_STEP, WARMUP_STEPS, StepProfiler, Throughput

CHECK_STEPS = 50  # between looks at the loss on a GPU, each of which waits for it


class Complete(UsageError):
    """The run that should be resumed has nothing left to do."""

    exit_status = 0


class Stopping(Exception):
    """All ranks have agreed to stop, and the run is saved. ``Run`` swallows it."""


class Run:
    """Folder, checkpoints, position, reports and stop of a run: a context manager.

    On the way in it opens and locks the folder and resumes. On the way out it writes whether the
    run is complete, stopped or failed.

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
        extra: what else belongs into the checkpoint, such as an average of the weights: objects
            with ``state_dict`` and ``load_state_dict``, by name.

    Attributes:
        folder: of the run.
        metrics: the sums of this rank in the current epoch. Once ``train_ddp.py`` has added up
            those of all ranks, they are the epoch's.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        device: torch.device,
        sampler: data.EpochSampler,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        *,
        rank: int = 0,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.args, self.device, self.sampler = args, device, sampler
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.rank, self.is_main, self.extra = rank, rank == 0, extra or {}
        self.metrics = Metrics(device)
        size: int = len(sampler.dataset)  # type: ignore[arg-type]
        self._progress = Progress(size, sampler.global_batch_size, args.epochs, args.max_steps)
        self._agreement = distributed.StopAgreement()
        self._signal = 0  # on which all ranks agreed
        self._saved_step = 0
        self._profiler: StepProfiler | None = None

    @property
    def exit_status(self) -> int:
        """Of the script: 0, or 128 and the number of the signal that stopped the run."""
        return 128 + self._signal if self._signal else 0

    @property
    def samples_seen(self) -> int:
        """Training samples that all ranks together have seen since the first epoch began."""
        return self._progress.samples_seen

    @property
    def evaluated(self) -> dict[str, dict[str, float]]:
        """Loss, accuracy and so on of the latest evaluation, by part, the same on all ranks."""
        cpu = torch.device("cpu")
        return {part: Metrics(cpu, x).averages for part, x in self._progress.evaluated.items()}

    def __enter__(self) -> "Run":
        args, progress = self.args, self._progress
        given = getattr(args, "given", vars(args))  # before ``launch`` has chosen the backend
        flags = {name: value for name, value in given.items() if name != "technique"}
        launch = identify_launch(args.technique)
        self.folder, before = distributed.call_on_rank_0(
            open_run, args.run_dir, args.resume, launch, flags
        )
        identity = {"model": args.model, "dataset": args.dataset, "seed": args.seed}
        parts = self.model, self.optimizer, self.scaler
        optim.fill_momentum(self.optimizer)
        self._checkpointer = Checkpointer(self.folder / "checkpoints", *parts, identity, self.extra)
        moved = self._checkpointer.restore(progress) if before else []
        self._saved_step = progress.global_step
        self._facts = collect_facts(args, self.device, self.model, self.optimizer, progress)
        launch["global_batch_size"] = progress.global_batch_size
        notes = [compare(before, flags | launch)]
        if moved and distributed.world_size() > 1:
            notes.append(f"all ranks have rank 0's {', '.join(moved)}, which each had of its own")
        note = "; ".join(filter(None, notes))
        if before.get("state") == "complete" and progress.is_finished:
            advice = "; ".join(filter(None, ["raise --epochs or --max-steps", note]))
            raise Complete(f"{self.folder} is complete: nothing to resume ({advice})")
        # The profiled steps take longer, so images/s leaves them out.
        untimed_steps = LAST_STEP if args.profile else WARMUP_STEPS
        self._throughput = Throughput(self.device, progress.global_batch_size, untimed_steps)
        if args.profile:
            # PyTorch names the forwards of DP and DDP, and of a compiled model.
            has_no_name = args.technique == "single" and not args.compile
            named = self.model if has_no_name else None
            self._profiler = StepProfiler(self.folder, self.device, self.rank, named)
        self._logger = Logger(self.folder, progress, self.is_main, args.tensorboard, args.progress)
        self._status = Status(self.folder, launch, progress)
        if self.is_main:
            write_json(self.folder / "args.json", flags)
            errors.before_end(self._write_failed)
        # Last of what may fail here, where ``__exit__`` would not say that it did.
        self._status.saved()
        self._logger.header(self._facts, note)
        return self

    def epochs(self) -> Iterator[int]:
        """Yield the number of each epoch that is left, and let the sampler go on in mid-epoch."""
        while not self._progress.is_finished:
            self.sampler.start = self._progress.epoch_samples
            yield self._progress.epoch

    def batches(self, loader: DataLoader) -> Iterator[Any]:
        """Yield the loader's batches from the run's position to the end of the epoch.

        ``--max-steps`` ends the epoch, and a stop leaves the ``with``. Each optimizer step begins
        with freshly seeded generators of this rank. The epoch's training is saved at its end, since
        an evaluation may fail or take long.
        """
        self._start_epoch(len(loader))
        try:
            for micro_step, batch in enumerate(self._read(loader)):
                if micro_step % self.args.grad_accum_steps == 0:
                    if self._signal:
                        raise Stopping
                    if not self._progress.has_step_left:
                        break
                    if self.args.grad_accum_steps > 1:
                        self.metrics.begin_step()
                    seed_step(self.device, self.args.seed, self.rank, self.samples_seen)
                yield batch
            self._end_training()
        finally:
            # After an error too, so nothing here waits for the device, which may wait in vain for
            # a rank that is lost.
            self._throughput.end_epoch()
            self._logger.bar.close()

    def _start_epoch(self, batches: int) -> None:
        # What was seen before a resume counts once, not once on each rank.
        sums = {name: self.is_main * value for name, value in self._progress.train_sums.items()}
        self.metrics = Metrics(self.device, sums)
        self._throughput.start_epoch()
        self._logger.start_epoch(batches // self.args.grad_accum_steps)

    def _read(self, loader: DataLoader) -> Iterator[Any]:
        """Yield the loader's batches. A stop may come while it gives none."""
        if not self._progress.has_step_left:
            return
        try:
            # Of a job of several ranks: the others wait for this one as long in a collective.
            limit = getattr(self.args, "timeout", LONGEST_WAIT)
            yield from loader_batches(loader, limit)
        except signals.Stopped:
            if distributed.world_size() > 1:  # the other ranks wait for this one in a backward
                raise
            # The micro-batches of a step that is not complete are trained again after a resume.
            self.metrics.discard_step()
            self._signal = signals.received()
            self._save_training()
            raise Stopping from None

    def _end_training(self) -> None:
        """Agree on a stop once more, and save the epoch before it is evaluated. Collective."""
        synchronize(self.device)
        self._signal = self._signal or self._agreement.now(signals.received())
        self._save_training()
        if self._profiler is not None:
            self._logger.say(self._profiler.finish())
            self._profiler = None
        if self._signal:
            raise Stopping

    def end_step(self) -> None:
        """Count an optimizer step, log it, agree on a stop, and save if it is time. Collective.

        Raises:
            Diverged: the loss is not finite.
        """
        progress, args = self._progress, self.args
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
        self._signal = self._agreement.after_step(signals.received())
        is_due = bool(args.save_every_steps) and step % args.save_every_steps == 0
        if self._signal or is_due:
            self._save_training()

    def _save_training(self) -> None:
        """Save where the epoch's training is, unless that has been saved. Collective."""
        if self._saved_step == self._progress.global_step:
            return
        with self._throughput.paused():
            # The epoch may go on, so the sums of this rank stay what they are.
            sums = distributed.sum_over_ranks(self.metrics.sums).tolist()
            totals = dict(zip(self.metrics.names, sums, strict=False))
            self._check_finite(Metrics(torch.device("cpu"), totals), "in training")
            self._progress.train_sums = totals
            self._save(keep_previous=True)

    def end_epoch(self, test: Metrics | None = None, **others: Metrics) -> None:
        """Divide the epoch's sums by their counts, report them, and save. Collective.

        Args:
            test: the sums of the whole test set, as ``metrics`` are those of all ranks.
            others: the sums of other sets by their name, such as ``val=``. In the files their
                averages begin with this name.
        """
        progress, train = self._progress, self.metrics
        evaluated = others if test is None else {"test": test, **others}
        if any(metrics.interrupted for metrics in evaluated.values()):
            # A rank got a stop signal. The evaluation is repeated after a resume.
            self._signal = self._agreement.now(signals.received())
            raise Stopping
        self._check_finite(train, "in training")
        for part, metrics in evaluated.items():
            # A rank with an empty share has not met the names.
            metrics.names = distributed.broadcast(metrics.names)
            self._check_finite(metrics, f"on the {part} set")
        row = {
            "epoch": progress.epoch + 1,
            "images": progress.samples_seen,
            "global_step": progress.global_step,
            **train.report("train"),
        }
        for part, metrics in evaluated.items():
            row |= metrics.report(part)
        row["images_per_second"] = self._throughput.images_per_second()
        row["seconds"] = time.perf_counter() - self._throughput.epoch_start
        self._logger.evaluated(row, [*evaluated])
        progress.end_epoch(train.totals, {part: x.totals for part, x in evaluated.items()})
        self._save(keep_previous=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        is_agreed_stop = isinstance(error, Stopping)
        try:
            if error is not None and not is_agreed_stop:
                raise error
            self._finish()
            errors.before_end(None)
        except BaseException as raised:  # which ``guard`` or ``launch`` explains, and writes
            end_workers()  # or the death of another worker interrupts the rest
            raised.add_note(f"at step {self._progress.global_step}")
            raise
        finally:
            self._logger.close()
        return is_agreed_stop

    def _save(self, keep_previous: bool) -> None:
        self._checkpointer.save(self._progress, keep_previous)
        self._saved_step = self._progress.global_step
        self._status.saved()

    def _finish(self) -> None:
        """Write that the run was stopped, or its summary. Collective."""
        if self._signal:
            name = signal.Signals(self._signal).name
            self._status.write("stopped", signal=name)
            self._logger.say(
                f"stopped by {name} at step {self._progress.global_step}; continue with:"
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
        progress = self._progress
        results = collect_results(progress, self._throughput, memory, self.model)
        path = self.folder / "summary.json"
        # If an early stop is resumed, nothing is trained, and the summary stands.
        if progress.global_step != self._facts["resumed_from"] or not path.exists():
            write_json(path, self._facts | results)
        self._status.write("complete", epochs=progress.epochs, max_steps=progress.max_steps)
        for part, averages in self.evaluated.items():
            result = f"loss {averages['loss']:.4f}"
            if "accuracy" in averages:
                correct, count = results[f"{part}_correct"], results[f"{part}_count"]
                result = f"accuracy {averages['accuracy']:.2%}, {correct:,} of {count:,}"
            self._logger.say(f"{part} {result}, after {results['total_seconds']:.1f} s")
        self._logger.say(f"summary in {path}")

    def _check_finite(self, metrics: Metrics, where: str) -> None:
        if not metrics.is_finite:
            problem = f"the loss is {metrics.loss} at step {self._progress.global_step} {where}"
            raise Diverged(problem, self.is_main)

    def _write_failed(self, error: BaseException) -> None:
        concerned = {"ranks": error.ranks} if hasattr(error, "ranks") else {}
        with suppress(OSError):  # a full disk, the likeliest failure, leaves no room
            self._status.write("failed", reason=describe(error), **concerned)
