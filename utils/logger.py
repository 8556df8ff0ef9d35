"""The reports of a run: console, TensorBoard, metrics.jsonl."""

import json
import threading
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.files import replace_file
from utils.progress import Progress

# tqdm's own lock is a semaphore between processes. A rank that ends at once would leave it behind.
tqdm.set_lock(threading.RLock())

FEW_STEPS = 100  # fewer get a line, since large batches need as many steps as small ones


class Logger:
    """Report a run from rank 0. On the other ranks every call does nothing.

    Args:
        folder: the run directory.
        progress: where the run starts. What an earlier attempt logged beyond it is discarded.
        is_main: whether this is rank 0.
        tensorboard: whether to write TensorBoard's files.
        show_bar: whether to show the progress of an epoch, if stderr is a terminal.
    """

    def __init__(
        self, folder: Path, progress: Progress, is_main: bool, tensorboard: bool, show_bar: bool
    ) -> None:
        self.folder, self.progress, self.is_main = folder, progress, is_main
        self.tensorboard, self.show_bar = tensorboard and is_main, show_bar and is_main
        self.first_samples = progress.samples_seen
        self.bar = tqdm(disable=True)  # until an epoch begins
        self.writer: Any = None
        if is_main:
            self._cut_metrics()

    def header(self, facts: dict[str, Any]) -> None:
        """Print what the run consists of, and the head of its table."""
        if not self.is_main:
            return
        devices = f"{facts['num_devices']} x " if facts["num_devices"] > 1 else ""
        each = " each" if facts["world_size"] > 1 else ""
        threads = f"{facts['threads']} thread{'s' if facts['threads'] > 1 else ''}{each}"
        lines = {
            facts["technique"]: f"{facts['model']}, {facts['parameters']:,} parameters",
            "data": facts["dataset"],
            "device": f"{devices}{facts['device']}, {threads}",
            "batch": f"{facts['batch_size']} per device, {facts['global_batch_size']} in all",
            "rate": f"{facts['lr']:.4g} at the peak",
            "seed": facts["seed"],
            "run": self.folder,
        }
        if (steps := self.progress.total_steps) < FEW_STEPS:
            lines["steps"] = f"{steps} in all, which is few: raise --epochs or lower --batch-size"
        if facts["resumed_from"] is not None:
            lines["resumed"] = f"at step {facts['resumed_from']}"
        for name, value in lines.items():
            print(f"{name:<8}{value}")
        # The table is narrow enough for half a screen.
        print(
            f"{'':5} {'--- train ---':>13} {'---- test ---':>13}\n"
            f"epoch {'loss':>6} {'acc':>6} {'loss':>6} {'acc':>6} {'images/s':>8} {'time':>6}",
            flush=True,
        )

    def start_epoch(self, steps: int) -> None:
        """Show the bar of an epoch that has this many steps left."""
        self.bar = tqdm(
            desc=f"epoch {self.progress.epoch + 1}/{self.progress.epochs:g}",
            total=steps,
            leave=False,
            dynamic_ncols=True,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}, {remaining} left"
            "{postfix}",
            # None means: no bar if stderr is a file, which would fill up with the bar's frames.
            disable=None if self.show_bar else True,
        )

    def step(self, loss: float, accuracy: float) -> None:
        """Log the metrics of the epoch so far."""
        self.bar.set_postfix_str(f"loss {loss:.3f}, {accuracy:.1%}", refresh=False)
        rate = self.progress.learning_rate
        self._scalars({"step/loss": loss, "step/accuracy": accuracy, "step/learning_rate": rate})

    def evaluated(self, row: dict[str, Any]) -> None:
        """Log an evaluation: a row of the table and of metrics.jsonl, and the epoch's curves."""
        if not self.is_main:
            return
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(f"{json.dumps(row)}\n")
        speed = row["images_per_second"]
        print(
            f"{row['epoch']:>5} {row['train_loss']:>6.4f} {row['train_accuracy']:>6.2%}"
            f" {row['test_loss']:>6.4f} {row['test_accuracy']:>6.2%}"
            f" {f'{speed:,.0f}' if speed else '-':>8} {row['seconds']:>5.1f}s",
            flush=True,
        )
        curves = ("train_loss", "train_accuracy", "test_loss", "test_accuracy")
        self._scalars({name.replace("_", "/"): row[name] for name in curves})
        self._scalars({"train/images_per_second": speed})

    def say(self, text: str) -> None:
        """Print a line."""
        if self.is_main:
            print(text, flush=True)

    def close(self) -> None:
        self.bar.close()
        if self.writer is not None:
            self.writer.close()

    def _cut_metrics(self) -> None:
        """Keep the complete rows up to the checkpoint that this attempt starts from."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            # A kill can cut the last line.
            rows = [row for row in path.read_bytes().splitlines(True) if row.endswith(b"\n")]
            # The row of an epoch that --max-steps ended counts only while the run ends there.
            last = self.progress.epoch + self.progress.is_finished
            kept = [row for row in rows if json.loads(row)["epoch"] <= last]
            replace_file(path, b"".join(kept))

    def _scalars(self, values: dict[str, float | None]) -> None:
        if not self.tensorboard:
            return
        if self.writer is None:  # imported late, since this takes a while
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard discards events beyond the checkpoint that the run starts from.
            self.writer = SummaryWriter(str(self.folder), purge_step=self.first_samples + 1)
        for tag, value in values.items():
            if value is not None:
                self.writer.add_scalar(tag, value, self.progress.samples_seen)
