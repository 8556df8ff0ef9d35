"""What a run tells: console, TensorBoard, metrics.jsonl, summary.json, status.json."""

import contextlib
import json
import math
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from data import ImageSet
from utils import pictures, signals
from utils.device import peak_memory
from utils.errors import UserError, describe, end_workers
from utils.errors import explain as explain_framework
from utils.files import append_line, replace_file, to_json, write_json
from utils.metrics import Metrics
from utils.profiler import LAST_STEP, StepProfiler
from utils.progress import Progress
from utils.run_dir import RunDir
from utils.status import Status
from utils.throughput import WARMUP_STEPS, Throughput, seconds_since_start
from utils.weights import WeightReport, weights_sha256

# tqdm's own lock is shared between processes, whose semaphore a rank that ends at once leaves.
tqdm.set_lock(threading.RLock())

HPARAMS = "technique model num_devices global_batch_size lr dataset world_size batch_size epochs"
HPARAMS += " seed amp"
FEW_STEPS = 100  # fewer are worth a word: large batches need as many as small ones to get far
NO_BETTER = 0.95  # of the loss of guessing; what learns is far below it when the warm-up ends


class Logger:
    """Report a run from the process that writes; the others make the same calls, and say nothing.

    A context manager: when the training fails, ``status.json`` says so.

    Args:
        run_dir: where the files go.
        model: the unwrapped model.
        device: where it computes.
        progress: where the run starts; what an earlier attempt logged beyond it is cut.
        facts: what ``summary.json`` tells of the command: technique, model, data set ...
        flags: all of them, for ``args.json`` and TensorBoard.
        lr: the peak learning rate, scaled.
        num_devices: over all processes; None for one each.
        init_report: of the weights that the model started from, if it did.
        log_every: steps between entries of the step curves.
        profile: whether to record some steps.
        show_bar: whether to show the progress of an epoch on a terminal.
        tensorboard: whether to write its files.
        rank: of this process; rank 0 reports.
        world_size: number of processes.
        backend: of the process group, or None.
        explain: given an error and the global step, returns the error to report in its place.
        gather: given a number of this process, returns those of all. Collective in DDP.
    """

    def __init__(
        self,
        run_dir: RunDir,
        model: nn.Module,
        device: torch.device,
        progress: Progress,
        facts: dict[str, Any],
        flags: dict[str, Any],
        *,
        lr: float,
        num_devices: int | None = None,
        init_report: WeightReport | None = None,
        log_every: int = 50,
        profile: bool = False,
        show_bar: bool = True,
        tensorboard: bool = True,
        rank: int = 0,
        world_size: int = 1,
        backend: str | None = None,
        explain: Callable[[Exception, int], Exception] = lambda error, step: error,
        gather: Callable[[int], list[int]] = lambda number: [number],
    ) -> None:
        self.path, self.model, self.device, self.progress = run_dir.path, model, device, progress
        self.status = Status(run_dir.path, facts["technique"], run_dir.launch_id)
        self.flags, self.lr, self.init_report = flags, lr, init_report
        self.write = rank == 0
        self.log_every, self.show_bar, self.use_tensorboard = log_every, show_bar, tensorboard
        self.explain, self.gather = explain, gather
        self.first_step, self.first_samples = progress.global_step, progress.samples_seen
        self.facts = facts | {
            "parameters": sum(p.numel() for p in model.parameters()),
            "world_size": world_size,
            "num_devices": num_devices or world_size,
            "device": device.type,
            "backend": backend,
            "threads": torch.get_num_threads(),
            "global_batch_size": progress.global_batch_size,
            "torch_version": str(torch.__version__),
            "resumed_from": self.first_step if run_dir.resume and self.first_samples else None,
        }
        self.profiler = StepProfiler(self.path, device, rank) if profile else None
        # Not in images/s: the profiled steps take longer.
        untimed_steps = LAST_STEP if profile else WARMUP_STEPS
        self.throughput = Throughput(device, progress.global_batch_size, untimed_steps)
        self.bar: tqdm | None = None
        self.writer: Any = None
        self.predictions: Tensor | None = None
        self.guessing = math.inf  # the loss of it
        # Of the latest step; it falls once the warm-up is over.
        self.rate, self.rate_falls, self.has_warned = 0.0, False, False

    def __enter__(self) -> "Logger":
        if self.write:
            write_json(self.path / "args.json", self.flags)
            self._write_status("running")
            signals.before_interrupt(self._interrupted)
            self._cut_metrics()
            self._print_header()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        signals.before_interrupt(None)
        if error is not None:
            end_workers()  # or the death of another one interrupts what follows
        explained = error
        if isinstance(error, Exception):
            explained = self.explain(explain_framework(error), self.progress.global_step)
        if self.write and explained is not None:
            concerned = {"ranks": explained.ranks} if hasattr(explained, "ranks") else {}
            # A full disk, the likeliest failure, leaves no room for a word about it either.
            with contextlib.suppress(OSError):
                self._write_status("failed", reason=describe(explained), **concerned)
        if self.writer is not None:
            self.writer.close()
        if explained is not error and explained is not None:
            raise explained from error

    def track(self, loader: DataLoader) -> Iterator[Any]:
        """Yield the loader's batches, with a progress bar, timing the steps in between."""
        self.throughput.start_epoch()
        labels = loader.dataset.labels  # type: ignore[attr-defined]
        if not labels.is_floating_point():  # those of a regression are no classes
            self.guessing = math.log(len(labels.unique()))
        # tqdm's None: no bar where stderr is a file, which would fill up with its frames.
        hidden = None if self.write and self.show_bar else True
        title = f"epoch {self.progress.epoch + 1}/{self.progress.epochs:g}"
        layout = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}, {remaining} left{postfix}"
        with tqdm(
            loader, title, leave=False, dynamic_ncols=True, bar_format=layout, disable=hidden
        ) as self.bar:
            try:
                for batch in self.bar:
                    yield batch
                    steps = self.progress.global_step - self.first_step
                    if self.profiler is not None:
                        self.profiler.step(steps)
                    self.throughput.step(steps)
            finally:
                self.throughput.end_epoch()
                if self.profiler is not None:
                    self.profiler.finish(self.progress.global_step - self.first_step)

    def log_step(self, metrics: Metrics, lr: float) -> None:
        """Show the epoch so far every ``log_every`` steps: only then is the device waited for."""
        self.rate, self.rate_falls = lr, lr < self.rate
        if self.write and self.progress.global_step % self.log_every == 0:
            loss, accuracy = metrics.loss, metrics.accuracy
            self._watch(loss)
            if self.bar is not None:
                self.bar.set_postfix_str(f"loss {loss:.3f}, {accuracy:.1%}", refresh=False)
            self._scalars({"step/loss": loss, "step/accuracy": accuracy, "step/learning_rate": lr})

    def log_epoch(self, train: Metrics, test: Metrics, predictions: Tensor, lr: float) -> None:
        """Report an evaluation from the metrics of all ranks, before ``Progress.end_epoch``.

        Args:
            train: of the epoch.
            test: of the test set.
            predictions: class and probability [N, 2] for each sample of the test set.
            lr: of the latest step.
        """
        if not self.write:
            return
        self.predictions = predictions
        self._watch(train.loss)
        speed = self.throughput.images_per_second()
        seconds = time.perf_counter() - self.throughput.epoch_start
        row = {
            "epoch": self.progress.epoch + 1,
            "images": self.progress.samples_seen,
            "global_step": self.progress.global_step,
            "learning_rate": lr,
            "train_loss": train.loss,
            "train_accuracy": train.accuracy,
            "test_loss": test.loss,
            "test_accuracy": test.accuracy,
            "test_correct": test.correct,
            "test_count": test.count,
            "images_per_second": speed,
            "seconds": seconds,
        }
        append_line(self.path / "metrics.jsonl", to_json(row))
        print(
            f"{row['epoch']:>5} {train.loss:>6.4f} {train.accuracy:>6.2%} {test.loss:>6.4f}"
            f" {test.accuracy:>6.2%} {f'{speed:,.0f}' if speed else '-':>8} {seconds:>5.1f}s",
            flush=True,
        )
        if self.profiler is not None:
            print(self.profiler.report, flush=True)
            self.profiler = None
        curves = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
        self._scalars({name.replace("_", "/"): row[name] for name in curves})
        self._scalars({"train/images_per_second": speed})

    def stopped(self, signal_name: str) -> None:
        """Record that the run was asked to stop and how to continue it."""
        if self.write:
            self._write_status("stopped", signal=signal_name)
            print(
                f"stopped by {signal_name} at step {self.progress.global_step}; continue with:"
                f" {self.status.continue_command()}",
                flush=True,
            )

    def complete(self, test_set: ImageSet) -> None:
        """Show what the model predicts, write ``summary.json`` and say where it is.

        Collective where ``gather`` is.
        """
        memory = self.gather(peak_memory(self.device))
        if not self.write:
            return
        if self.use_tensorboard and self.predictions is not None:
            classes, confidences = self.predictions.unbind(1)
            drawn = pictures.draw(test_set.images, test_set.labels, classes.long(), confidences)
            for name, picture in drawn.items():
                pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
                pixels = pixels.view(picture.height, picture.width, 3)
                # A group of its own, which leaves the curves of test/ side by side.
                self._tensorboard().add_image(
                    f"test_images/{name}", pixels, self.progress.samples_seen, dataformats="HWC"
                )
        test = Metrics(self.device, self.progress.test_sums)
        summary = self.facts | {
            "epochs": self.progress.epoch,
            "global_step": self.progress.global_step,
            "test_correct": test.correct,
            "test_count": test.count,
            "test_accuracy": test.accuracy,
            "test_loss": test.loss,
            "train_images_per_second": self.throughput.images_per_second(),
            "startup_seconds": self.throughput.startup_seconds,
            "train_seconds": self.throughput.train_seconds,
            "total_seconds": seconds_since_start(),
            "peak_memory_bytes": memory,
            "weights_sha256": weights_sha256(self.model),
        }
        write_json(self.path / "summary.json", summary)
        self._hparams()
        goal = {"epochs": self.progress.epochs, "max_steps": self.progress.max_steps}
        self._write_status("complete", **goal)
        print(
            f"test accuracy {test.accuracy:.2%}, {test.correct:,} of {test.count:,}, after"
            f" {summary['total_seconds']:.1f} s\nsummary in {self.path}/summary.json",
            flush=True,
        )

    def _watch(self, loss: float) -> None:
        """Say once, after the warm-up, that the loss of the epoch so far is that of guessing."""
        if self.rate_falls and loss > NO_BETTER * self.guessing and not self.has_warned:
            self.has_warned = True
            text = f"warning: the loss is {loss:.2f}, and that of guessing {self.guessing:.2f}: the"
            text += f" learning rate, {self.lr:.4g} at its peak, may be too high: lower --lr"
            tqdm.write(text, file=sys.stderr)

    def _write_status(self, state: str, **details: Any) -> None:
        self.status.write(state, self.progress.epoch, self.progress.global_step, **details)

    def _interrupted(self) -> None:
        self._write_status("failed", reason="interrupted by a second Ctrl-C")

    def _print_header(self) -> None:
        facts = self.facts
        devices = f"{facts['num_devices']} x " if facts["num_devices"] > 1 else ""
        each = " each" if facts["world_size"] > 1 else ""
        threads = f"{facts['threads']} thread{'s' if facts['threads'] > 1 else ''}{each}"
        lines = {
            facts["technique"]: f"{facts['model']}, {facts['parameters']:,} parameters",
            "data": facts["dataset"],
            "device": f"{devices}{facts['device']}, {threads}",
            "batch": f"{facts['batch_size']} per device, {facts['global_batch_size']} in all",
            "rate": f"{self.lr:.4g} at the peak",
            "seed": facts["seed"],
            "run": self.path,
        }
        if (steps := self.progress.total_steps) < FEW_STEPS:
            lines["steps"] = f"{steps} in all, which is few: raise --epochs or lower --batch-size"
        if self.init_report is not None:
            lines["weights"] = self.init_report
        if facts["resumed_from"] is not None:
            lines["resumed"] = f"at step {facts['resumed_from']}"
        for name, value in lines.items():
            print(f"{name:<8}{value}")
        # Narrow enough for half a screen.
        print(
            f"{'':5} {'--- train ---':>13} {'---- test ---':>13}\n"
            f"epoch {'loss':>6} {'acc':>6} {'loss':>6} {'acc':>6} {'images/s':>8} {'time':>6}",
            flush=True,
        )

    def _cut_metrics(self) -> None:
        """Drop what an earlier attempt logged beyond the checkpoint that this one starts from."""
        path = self.path / "metrics.jsonl"
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UserError(f"{path} is not a file of its own: move it away")
        if not path.exists():
            return
        kept, damaged, step = [], 0, self.progress.global_step
        for line in path.read_bytes().splitlines():
            try:
                row = json.loads(line)
                # That of the end may be of an epoch which --max-steps cut short.
                is_last = self.progress.is_finished and row["global_step"] == step
                if row["epoch"] <= self.progress.epoch or is_last:
                    kept.append(line)
            except (ValueError, KeyError, TypeError, RecursionError):
                damaged += bool(line.strip())
        if damaged:
            print(f"warning: {path} had {damaged} damaged lines, now dropped", file=sys.stderr)
        replace_file(path, b"".join(line + b"\n" for line in kept))

    def _tensorboard(self) -> Any:
        """Open TensorBoard when there is something to write: its import can wait until then."""
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Events beyond the checkpoint that the run starts from are to be forgotten.
            self.writer = SummaryWriter(str(self.path), purge_step=self.first_samples + 1)
            self.writer.add_text("run", self._describe(), self.first_samples)
        return self.writer

    def _describe(self) -> str:
        """Return the command, what it came to on this machine, and the other flags, in Markdown."""
        others = {key: value for key, value in self.flags.items() if key not in self.facts}
        rows = [f"| {key} | {value} |" for key, value in (self.facts | others).items()]
        command = shlex.join([self.facts["script"], *sys.argv[1:]])
        return "\n".join([f"    {command}", "", "| setting | value |", "|---|---|", *rows])

    def _scalars(self, values: dict[str, float | None]) -> None:
        if self.use_tensorboard:
            for tag, value in values.items():
                if value is not None:
                    self._tensorboard().add_scalar(tag, value, self.progress.samples_seen)

    def _hparams(self) -> None:
        if self.use_tensorboard:
            from torch.utils.tensorboard.summary import hparams

            chosen = {key: self.facts.get(key, self.flags.get(key)) for key in HPARAMS.split()}
            # Not add_hparams: it makes a second run below this one. Nor the columns, which come
            # first here: TensorBoard takes those of one run for all. Left to itself it finds them
            # in all runs, and shows those that differ.
            for part in hparams(chosen, {})[1:]:
                self._tensorboard().file_writer.add_summary(part)
