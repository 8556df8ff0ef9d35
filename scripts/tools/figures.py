"""Draw the pictures in docs/ that come from runs, as SVG. Needs matplotlib, and no GPU.

A step of DDP is a profile of the program below, which two processes run on the CPU:

    python scripts/tools/figures.py docs/step_of_ddp.svg

The same training on 1, 2 and 4 processes is read from finished runs of the training scripts. The
rate is a quarter of the default, or differences in rounding would grow from step to step:

    flags="--device cpu --model mlp --no-augment --lr 0.025 --epochs 10"
    torchrun="torchrun --standalone --nproc_per_node"
    python train_single.py $flags --batch-size 384 --run-dir runs/1
    $torchrun 2 train_ddp.py $flags --batch-size 192 --run-dir runs/2
    $torchrun 4 train_ddp.py $flags --batch-size 96 --run-dir runs/4
    python scripts/tools/figures.py docs/same_training.svg runs/1 runs/2 runs/4
"""

import argparse
import io
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints at each step

import matplotlib
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, record_function

RANKS = 2
LAYERS = 4
WIDTH = 1024  # of a layer, which has gradients of 4 MiB
BATCH = 128  # samples of each process
STEPS = 40  # the shortest one is drawn, which other programs have disturbed least
BUCKETS = {  # MiB
    "One bucket of 16 MiB is sent after the backward.": 16,
    "Of four buckets of 4 MiB, the first ones are sent during the backward.": 4,
}
BACKWARD = "autograd::engine::evaluate_function: MmBackward0"
SEND = "gloo:all_reduce"
KINDS = {  # what the profiler calls it: what the picture calls it, and its colour
    "forward": ("forward", "#6ea3f5"),
    BACKWARD: ("backward of layers 4 to 1", "#f0a35e"),
    SEND: ("all-reduce of buckets 0 to 3", "#e8716b"),
    "step": ("optimizer.step()", "#63bd7a"),
}
ROWS = {  # where they are, from top to bottom
    "rank 0: main thread": 0.0,
    "rank 0: gloo's threads": 0.8,
    "rank 1: main thread": 2.2,
    "rank 1: gloo's threads": 3.0,
}
Span = tuple[float, float, int, str]  # begin and end in microseconds, thread, one of KINDS

INK = "#010203"  # stands for the colour of text, which follows the reader's colour scheme
GREY = "#8c959f"
INSIDE = "#101418"  # of text on colours
STYLE = "svg { color: #24292f } @media (prefers-color-scheme: dark) { svg { color: #e6edf3 } }"


def profile_steps(rank: int, folder: str, bucket_cap_mb: float) -> list[list[Span]]:
    """Train on one of the ``RANKS``, and return the spans of each step in the order of time."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model = DistributedDataParallel(
        nn.Sequential(*layers), bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(BATCH, WIDTH)
    found = []
    for _ in range(STEPS):
        with profile() as profiler:
            dist.barrier()  # the forward begins at the same time on all ranks
            with record_function("forward"):
                loss = model(inputs).square().mean()
            loss.backward()
            with record_function("step"):
                optimizer.step()
        optimizer.zero_grad()
        events = [event for event in profiler.events() if event.name in KINDS]
        spans = [(e.time_range.start, e.time_range.end, e.thread, e.name) for e in events]
        found.append(sorted(spans))
    dist.destroy_process_group()
    return found


def draw_rank(axes: Axes, rank: int, spans: list[Span]) -> None:
    """Draw a step in two rows, what computes and what sends, with numbers of layers and buckets."""
    zero = spans[0][0]
    numbers = {BACKWARD: list(range(1, LAYERS + 1)), SEND: list(range(LAYERS))[::-1]}
    senders = sorted({thread for *_, thread, name in spans if name == SEND})  # gloo has two
    for start, end, thread, name in spans:
        y = ROWS[f"rank {rank}: main thread"]
        height = 0.8
        if name == SEND:
            y = ROWS[f"rank {rank}: gloo's threads"] + 0.45 * senders.index(thread)
            height = 0.4
        left = (start - zero) / 1000
        width = (end - start) / 1000
        axes.barh(y, width, height, left, color=KINDS[name][1], edgecolor=INSIDE, linewidth=0.6)
        if name in numbers:
            number = str(numbers[name].pop())
            axes.text(left + width / 2, y, number, color=INSIDE, ha="center", va="center")


def step_of_ddp(figure: Figure) -> None:
    """Profile and draw a step of DDP with one bucket, and one with several."""
    figure.set_size_inches(8.5, 4.8)
    panels = figure.subplots(len(BUCKETS), sharex=True)
    for axes, (title, bucket_cap_mb) in zip(panels, BUCKETS.items(), strict=True):
        with tempfile.TemporaryDirectory() as folder, mp.get_context("spawn").Pool(RANKS) as pool:
            tasks = [(rank, folder, bucket_cap_mb) for rank in range(RANKS)]
            steps = list(zip(*pool.starmap(profile_steps, tasks, chunksize=1), strict=True))
        del steps[0]  # DDP makes its buckets after the first step
        shortest = min(steps, key=lambda ranks: max(spans[-1][1] - spans[0][0] for spans in ranks))
        for rank, spans in enumerate(shortest):
            draw_rank(axes, rank, spans)
        axes.set_yticks(list(ROWS.values()), list(ROWS))
        axes.invert_yaxis()
        axes.set_title(title)
    axes.set_xlabel("milliseconds")
    handles = [Patch(color=colour, label=label) for label, colour in KINDS.values()]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))


def same_training(figure: Figure, folders: list[str]) -> None:
    """Draw the test accuracy and the training loss of finished runs over the images seen."""
    figure.set_size_inches(8.5, 3.4)
    left, right = figure.subplots(1, 2)
    for number, folder in enumerate(folders):
        run = json.loads(Path(folder, "summary.json").read_text())
        rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        seen = [row["global_step"] * run["global_batch_size"] / 1000 for row in rows]
        label = f"processes: {run['world_size']}, batch of each: {run['batch_size']}"
        style = {"label": label, "linewidth": 6 / 2**number}  # thin on thick: all can be seen
        left.plot(seen, [100 * row["test_accuracy"] for row in rows], **style)
        right.plot(seen, [row["train_loss"] for row in rows], **style)
    left.set(title="Test accuracy, %", xlabel="thousand images seen")
    right.set(title="Training loss", xlabel="thousand images seen")
    left.legend()


def save(figure: Figure, path: Path, title: str) -> None:
    """Write an SVG that follows the reader's colour scheme, with its text as text."""
    content = io.StringIO()
    figure.savefig(content, format="svg", metadata={"Title": title, "Date": None}, transparent=True)
    made_by = f"python scripts/tools/figures.py {' '.join(sys.argv[1:])}"
    made_with = f"torch {torch.__version__} on {os.cpu_count()} CPU cores"
    head = f"</title>\n <desc>Made by {made_by} with {made_with}</desc>\n <style>{STYLE}</style>"
    text = content.getvalue().replace(INK, "currentColor")
    path.write_text(text.replace("</title>", head, 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE.svg")
    parser.add_argument("runs", nargs="*", metavar="FOLDER", help="folders of finished runs")
    args = parser.parse_args()
    matplotlib.rc("svg", fonttype="none", hashsalt="")  # text as text, and the same ids each time
    matplotlib.rc("font", **{"sans-serif": ["DejaVu Sans"]})
    matplotlib.rc("text", color=INK)
    matplotlib.rc("axes", labelcolor=INK, edgecolor=GREY, titlesize="medium", titlelocation="left")
    matplotlib.rc("axes.spines", top=False, right=False)
    matplotlib.rc("xtick", color=GREY, labelcolor=INK)
    matplotlib.rc("ytick", color=GREY, labelcolor=INK)
    matplotlib.rc("legend", frameon=False)
    figure = Figure(layout="constrained")
    if args.runs:
        same_training(figure, args.runs)
        save(figure, args.file, "The same training of MNIST on 1, 2 and 4 processes")
    else:
        step_of_ddp(figure)
        save(figure, args.file, "A step of DDP on two processes, with one bucket and with four")


if __name__ == "__main__":
    main()
