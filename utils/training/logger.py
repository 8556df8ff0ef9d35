"""The reports of a run: console, TensorBoard, metrics.jsonl."""

import json
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from utils.files import replace_file
from utils.training.progress import Progress

# tqdm's own lock is a semaphore between processes. A rank that ends at once would leave it behind.
tqdm.set_lock(threading.RLock())

ROW = re.compile(rb'(?m)^\{"epoch": ([0-9]+), .*\}\n')  # a complete one: a kill can cut the last
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
        self.bar = tqdm(disable=True)  # until an epoch begins
        self.writer: Any = None
        self.has_head = False  # of the table
        if is_main:
            self._cut_metrics()

    def header(self, facts: dict[str, Any], note: str) -> None:
        """Print what the run consists of, and open TensorBoard's file."""
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
        if facts["resumed_from"]:
            lines["resumed"] = f"at step {facts['resumed_from']}"
        if note:
            lines["note"] = note
        for name, value in lines.items():
            print(f"{name:<8}{value}")
        sys.stdout.flush()
        if self.tensorboard and not self.progress.is_finished:
            # Imported where it is used, and before a step is timed: a GPU makes hundreds meanwhile.
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard discards events beyond the checkpoint that the run starts from.
            next_image = self.progress.samples_seen + 1
            self.writer = SummaryWriter(str(self.folder), purge_step=next_image)

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

    def step(self, averages: dict[str, float], learning_rate: float) -> None:
        """Log the averages of the epoch so far, those of rank 0's share."""
        accuracy = f", {averages['accuracy']:.1%}" if "accuracy" in averages else ""
        self.bar.set_postfix_str(f"loss {averages['loss']:.3f}{accuracy}", refresh=False)
        self._scalars({f"running_mean_rank_0/{name}": value for name, value in averages.items()})
        self._scalars({"step/learning_rate": learning_rate})

    def evaluated(self, row: dict[str, Any], parts: Sequence[str]) -> None:
        """Log an evaluation: a row of the table and of metrics.jsonl, and the epoch's curves.

        Args:
            row: the averages and counts of ``train`` and of each part, and others.
            parts: the names of what was evaluated. The first one stands in the table.
        """
        if not self.is_main:
            return
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(f"{json.dumps(row)}\n")
        is_average = re.compile(f"({'|'.join(['train', *parts])})_(?!correct$|count$)").match
        averages = {name: value for name, value in row.items() if is_average(name)}
        columns = ["train", *parts[:1]]
        if not self.has_head:
            self.has_head = True
            self._print_head(columns)
        self._scalars({name.replace("_", "/", 1): value for name, value in averages.items()})
        speed = row["images_per_second"]
        self._scalars({"train/images_per_second": speed})
        cells = [f"{row['epoch']:>5}"]
        for column in columns:
            loss, accuracy = averages.pop(f"{column}_loss"), averages.pop(f"{column}_accuracy")
            cells.append(f"{loss:>6.4f}")
            cells.append(f"{'-' if accuracy is None else f'{accuracy:.2%}':>6}")
        cells += [f"{f'{speed:,.0f}' if speed else '-':>8}", f"{row['seconds']:>5.1f}s"]
        # What a project of one's own counts beside these.
        cells += [f" {name} {value:.4f}" for name, value in averages.items() if value is not None]
        print(" ".join(cells), flush=True)

    def _print_head(self, columns: Sequence[str]) -> None:
        """Print the head of the table, which is narrow enough for half a screen."""
        names = [f"{f' {name} ':-^13}" for name in columns]
        print(" ".join([f"{'':5}", *names]))
        each = [f"{'loss':>6} {'acc':>6}"] * len(columns)
        print(" ".join(["epoch", *each, f"{'images/s':>8}", f"{'time':>6}"]), flush=True)

    def say(self, text: str) -> None:
        """Print a line."""
        if self.is_main:
            print(text, flush=True)

    def close(self) -> None:
        self.bar.close()
        with suppress(OSError):  # it flushes, and a full disk must not hide how the run ended
            if self.writer is not None:
                self.writer.close()

    def _cut_metrics(self) -> None:
        """Keep the complete rows up to the checkpoint that this attempt starts from."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            # The row of an epoch that --max-steps ended counts only while the run ends there.
            last = self.progress.epoch + self.progress.is_finished
            rows = ROW.finditer(path.read_bytes())
            replace_file(path, b"".join(row[0] for row in rows if int(row[1]) <= last))

    def _scalars(self, values: dict[str, float | None]) -> None:
        for tag, value in values.items():
            if value is not None and self.writer is not None:
                self.writer.add_scalar(tag, value, self.progress.samples_seen)
