"""What a run tells: console, TensorBoard, metrics.jsonl, summary.json, status.json."""

import contextlib
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from data import ImageSet
from utils import runtime
from utils.answers import (
    Classifier,
    NoPillow,
    answer,
    confusion_matrix,
    draw_confusion,
    draw_mistakes,
)
from utils.checkpoint import Progress, weights_sha256
from utils.metrics import Metrics
from utils.profiling import LAST_STEP, StepProfiler
from utils.run_dir import RunDir, write_json
from utils.runtime import Precision, seconds_since_start

WARMUP_STEPS = 5  # left out of images/s: caches fill, cuDNN and DDP's buckets settle
MAX_SHOWN = 20_000  # test images: with more the other ranks would wait too long
MAX_MISTAKES = 48  # in a picture

# tqdm's own lock is shared between processes, whose semaphore a rank that ends at once leaves.
tqdm.set_lock(threading.RLock())

HPARAMS = (
    "technique",
    "dataset",
    "model",
    "world_size",
    "num_devices",
    "batch_size",
    "global_batch_size",
    "lr",
    "epochs",
    "seed",
    "amp",
)
COMPARED = ("technique", "model", "num_devices", "global_batch_size", "lr")
RESULTS = ("test/accuracy", "test/loss", "train/images_per_second")


class Logger:
    """Report a run from the process that writes; in the others every call does nothing.

    A context manager: when the training fails, ``status.json`` says so.

    Args:
        run_dir: where the files go.
        technique: ``single``, ``dp`` or ``ddp``.
        config: all flags, kept as ``args.json``.
        model: the unwrapped model.
        device: where it computes.
        progress: where the run starts; what an earlier attempt logged beyond it is cut.
        lr: the peak learning rate, scaled.
        rank: of this process; rank 0 reports.
        world_size: number of processes.
        backend: of the process group, or None.
    """

    def __init__(
        self,
        run_dir: RunDir,
        technique: str,
        config: dict[str, Any],
        model: nn.Module,
        device: torch.device,
        progress: Progress,
        lr: float,
        rank: int = 0,
        world_size: int = 1,
        backend: str | None = None,
    ) -> None:
        self.path = run_dir.path
        self.config = config
        self.model = model
        self.device = device
        self.progress = progress
        self.write = rank == 0
        self.launch_id = run_dir.launch_id
        self.lr = lr
        self.first_step = progress.global_step
        self.first_images = progress.images
        self.facts = {
            "script": f"train_{technique}.py",
            "technique": technique,
            "dataset": config["dataset"],
            "model": config["model"],
            "parameters": sum(p.numel() for p in model.parameters()),
            "world_size": world_size,
            # batch_size is that of one device, which DP and DDP multiply alike.
            "num_devices": progress.global_batch_size
            // (config["batch_size"] * config["grad_accum_steps"]),
            "device": device.type,
            "backend": backend,
            "threads": torch.get_num_threads(),
            "batch_size": config["batch_size"],
            "global_batch_size": progress.global_batch_size,
            "seed": config["seed"],
            "amp": config["amp"],
            "torch_version": str(torch.__version__),
            "resumed_from": progress.global_step if run_dir.resume and progress.images else None,
        }
        self.profiler = StepProfiler(self.path, device, rank) if config["profile"] else None
        # Not in images/s: the profiled steps take longer.
        self.untimed_steps = LAST_STEP if self.profiler else WARMUP_STEPS
        self.bar: tqdm | None = None
        self.tensorboard: Any = None
        self.startup_seconds: float | None = None
        self.train_seconds = self.timed_seconds = 0.0
        self.timed_steps = 0
        self.epoch_start = time.perf_counter()

    def __enter__(self) -> "Logger":
        if self.write:
            flags = {
                key: value for key, value in self.config.items() if key not in ("argv", "technique")
            }
            write_json(self.path / "args.json", flags)
            self.write_status("running")
            self._cut_metrics()
            self._print_header()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.write and error is not None:
            if isinstance(error, Exception):
                error = runtime.explain(error)
            reason = (str(error).splitlines() or [""])[0]
            concerned = {"ranks": error.ranks} if hasattr(error, "ranks") else {}
            # A full disk, the likeliest failure, leaves no room for a word about it either.
            with contextlib.suppress(OSError):
                self.write_status("failed", reason=f"{type(error).__name__}: {reason}", **concerned)
        if self.tensorboard is not None:
            self.tensorboard.close()

    def track(self, loader: DataLoader) -> Iterator[Any]:
        """Yield the loader's batches, with a progress bar, timing the steps in between."""
        self.epoch_start = clock_start = time.perf_counter()
        first_timed = self.progress.global_step if self._steps() >= self.untimed_steps else None
        # tqdm's None: no bar where stderr is a file, which would fill up with its frames.
        hidden = None if self.write and self.config["progress"] else True
        title = f"epoch {self.progress.epoch + 1}/{self.config['epochs']}"
        layout = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}, {remaining} left{postfix}"
        with tqdm(
            loader, title, leave=False, dynamic_ncols=True, bar_format=layout, disable=hidden
        ) as self.bar:
            try:
                for batch in self.bar:
                    yield batch
                    if self.profiler is not None:
                        self.profiler.step(self._steps())
                    if self.startup_seconds is None and self._steps() > 0:
                        self._synchronize()
                        self.startup_seconds = seconds_since_start()
                    if first_timed is None and self._steps() >= self.untimed_steps:
                        self._synchronize()
                        clock_start, first_timed = time.perf_counter(), self.progress.global_step
            finally:
                self._synchronize()
                now = time.perf_counter()
                self.train_seconds += now - self.epoch_start
                if first_timed is not None:
                    self.timed_seconds += now - clock_start
                    self.timed_steps += self.progress.global_step - first_timed
                if self.profiler is not None:
                    self.profiler.finish(self._steps())

    def log_step(self, metrics: Metrics, lr: float) -> None:
        """Show the epoch so far every ``--log-every`` steps: only then is the device waited for."""
        if self.write and self.progress.global_step % self.config["log_every"] == 0:
            loss, accuracy = metrics.loss, metrics.accuracy
            if self.bar is not None:
                self.bar.set_postfix_str(f"loss {loss:.3f}, {accuracy:.1%}", refresh=False)
            self._scalars({"step/loss": loss, "step/accuracy": accuracy, "step/learning_rate": lr})

    def log_epoch(self, train: Metrics, test: Metrics, lr: float) -> None:
        """Report a finished epoch from the metrics of all ranks; call it before ``next_epoch``."""
        if not self.write:
            return
        row = {
            "epoch": self.progress.epoch + 1,
            "images": self.progress.images,
            "global_step": self.progress.global_step,
            "learning_rate": lr,
            "train_loss": train.loss,
            "train_accuracy": train.accuracy,
            "test_loss": test.loss,
            "test_accuracy": test.accuracy,
            "test_correct": test.correct,
            "test_count": test.count,
            "images_per_second": self.images_per_second(),
            "seconds": time.perf_counter() - self.epoch_start,
        }
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        speed = row["images_per_second"]
        print(
            f"{row['epoch']:>5} {train.loss:>6.4f} {train.accuracy:>6.2%} {test.loss:>6.4f}"
            f" {test.accuracy:>6.2%} {f'{speed:,.0f}' if speed else '-':>8}"
            f" {row['seconds']:>5.1f}s",
            flush=True,
        )
        if self.profiler is not None:
            print(self.profiler.report, flush=True)
            self.profiler = None
        self._scalars(
            {
                "train/loss": train.loss,
                "train/accuracy": train.accuracy,
                "test/loss": test.loss,
                "test/accuracy": test.accuracy,
                "train/images_per_second": row["images_per_second"],
            }
        )

    def stopped(self, signal_name: str) -> None:
        """Record that the run was asked to stop and how to continue it."""
        if self.write:
            self.write_status("stopped", signal=signal_name)
            print(
                f"stopped by {signal_name} at step {self.progress.global_step}; continue with:"
                f" {self.continue_command()}",
                flush=True,
            )

    def show_answers(self, test_set: ImageSet) -> None:
        """Show the confusion matrix and the mistakes of the trained model in TensorBoard.

        Rank 0 asks the model about the whole test set, once at the end of a run. The shares of all
        ranks would come to the same, but every evaluation would have to gather images, of which
        each rank has another number.
        """
        if not self.write or not self.config["tensorboard"] or len(test_set) > MAX_SHOWN:
            return
        classifier = Classifier(self.model, self.config["dataset"], self.device).eval()
        precision = Precision(self.device, self.config["amp"])
        probabilities = answer(classifier, test_set.images, precision)
        images, labels = test_set.images.cpu(), test_set.labels.cpu()
        matrix = confusion_matrix(labels, probabilities.argmax(1))
        try:
            pictures = {
                "confusion_matrix": draw_confusion(matrix),
                "mistakes": draw_mistakes(images, labels, probabilities, MAX_MISTAKES),
            }
        except NoPillow as error:  # no reason for a run to fail at its end
            print(f"warning: {error}", file=sys.stderr)
            return
        for name, picture in pictures.items():
            pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
            pixels = pixels.view(picture.height, picture.width, 3)
            # A group of its own, which leaves the curves of test/ side by side.
            tag = f"test_images/{name}"
            self._writer().add_image(tag, pixels, self.progress.images, dataformats="HWC")

    def complete(self, peak_memory_bytes: list[int]) -> None:
        """Write ``summary.json`` and say where it is; one number of bytes per rank."""
        if not self.write:
            return
        test = Metrics(self.device, self.progress.test_sums)
        summary = self.facts | {
            "epochs": self.progress.epoch,
            "global_step": self.progress.global_step,
            "test_correct": test.correct,
            "test_count": test.count,
            "test_accuracy": test.accuracy,
            "test_loss": test.loss,
            "train_images_per_second": self.images_per_second(),
            "startup_seconds": self.startup_seconds,
            "train_seconds": self.train_seconds,
            "total_seconds": seconds_since_start(),
            "peak_memory_bytes": peak_memory_bytes,
            "weights_sha256": weights_sha256(self.model),
        }
        write_json(self.path / "summary.json", summary)
        self._hparams()
        self.write_status("complete")
        print(
            f"test accuracy {test.accuracy:.2%}, {test.correct:,} of {test.count:,}, after"
            f" {summary['total_seconds']:.1f} s\nsummary in {self.path}/summary.json",
            flush=True,
        )

    def images_per_second(self) -> float | None:
        """Return the speed over all devices since the warm-up steps, or None before their end."""
        if not self.timed_steps:
            return None
        return self.timed_steps * self.facts["global_batch_size"] / self.timed_seconds

    def continue_command(self) -> str:
        """Return the command that goes on with this run."""
        arguments, skip = [], False
        for argument in self.config["argv"]:
            if not skip and argument != "--resume" and not argument.startswith("--run-dir"):
                arguments.append(argument)
            skip = argument == "--run-dir"
        launcher = "python"
        if "TORCHELASTIC_RUN_ID" in os.environ:
            processes = f"--nproc_per_node {os.environ.get('LOCAL_WORLD_SIZE')}"
            nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
            where = "--standalone" if nodes == "1" else f"--nnodes {nodes} ..."
            launcher = f"torchrun {where} {processes}"
        own = ["--run-dir", str(self.path), "--resume"]
        return f"{launcher} {self.facts['script']} {shlex.join([*arguments, *own])}"

    def write_status(self, state: str, **details: Any) -> None:
        """Replace ``status.json``: ``running``, ``stopped``, ``failed`` or ``complete``."""
        status = {
            "state": state,
            **details,
            "technique": self.facts["technique"],
            "epoch": self.progress.epoch,
            "global_step": self.progress.global_step,
            "launch_id": self.launch_id,
        }
        if state != "complete":
            status["continue"] = self.continue_command()
        write_json(self.path / "status.json", status)

    def _steps(self) -> int:
        return self.progress.global_step - self.first_step

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

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
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            keep = [line for line in lines if json.loads(line)["epoch"] <= self.progress.epoch]
            path.write_text("".join(keep))

    def _writer(self) -> Any:
        """Open TensorBoard when there is something to write: its import can wait until then."""
        if self.tensorboard is None:
            from torch.utils.tensorboard import SummaryWriter

            # Events beyond the checkpoint that the run starts from are to be forgotten.
            self.tensorboard = SummaryWriter(str(self.path), purge_step=self.first_images + 1)
            self.tensorboard.add_text("run", self._describe(), self.first_images)
        return self.tensorboard

    def _describe(self) -> str:
        """Return the command, what it came to on this machine, and the other flags, in Markdown."""
        others = {key: value for key, value in self.config.items() if key not in self.facts}
        del others["argv"]
        rows = [f"| {key} | {value} |" for key, value in (self.facts | others).items()]
        command = shlex.join([self.facts["script"], *self.config["argv"]])
        return "\n".join([f"    {command}", "", "| setting | value |", "|---|---|", *rows])

    def _scalars(self, values: dict[str, float | None]) -> None:
        if self.config["tensorboard"]:
            for tag, value in values.items():
                if value is not None:
                    self._writer().add_scalar(tag, value, self.progress.images)

    def _hparams(self) -> None:
        if self.config["tensorboard"]:
            from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
            from torch.utils.tensorboard.summary import hparams

            chosen = {key: self.facts.get(key, self.config.get(key)) for key in HPARAMS}
            # The tags that the curves have already: the table needs no cards of its own.
            experiment, *rest = hparams(chosen, dict.fromkeys(RESULTS))
            # TensorBoard reads the columns of one run for all, and puts those that differ first;
            # the others have to be ticked.
            plugin = experiment.value[0].metadata.plugin_data
            content = HParamsPluginData.FromString(plugin.content)
            for column in content.experiment.hparam_infos:
                column.differs = column.name in COMPARED
            plugin.content = content.SerializeToString()
            # Not add_hparams: it makes a second run below this one.
            for part in (experiment, *rest):
                self._writer().file_writer.add_summary(part)
