"""Print runs side by side, from the summary.json of each.

    python scripts/tools/compare.py runs/quickstart-20260101-120000/{single,dp,ddp}

The first run is what the speed-up of the others is counted from. quickstart.sh also has it say
whether other programs kept the machine busy meanwhile.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

NAMES = ("technique", "devices", "threads", "accuracy", "images/s", "speed-up", "seconds", "memory")
READING = """\
How to read it:
  accuracy    of the same 96 images a step: what differs is random shifts and the images over which
              a batch is normalised; data parallelism changes the speed, not the result
  images/s    training speed over all devices, without the first steps, start-up and evaluation
  speed-up    against the first row. DP copies the network for every batch, DDP sums gradients:
              with a network this small either may lose to one device, so measure your own
  seconds     from the start of a training process to its end; torchrun adds some of its own
  memory      the most that the processes held, added up; what they share counts in each; of DP's
              GPUs that of the first"""

BUSY = 0.05  # of the machine; more spoils a figure


def read_usage(pid: int) -> list[float]:
    """Return seconds of all CPUs, those in use, and those that a process and its children used.

    Of children only those that have ended and were waited for. See proc(5); elsewhere than on Linux
    all are 0.
    """
    try:
        words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        own = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:
        return [0.0, 0.0, 0.0]
    ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in words]
    idle = ticks[3] + ticks[4]
    used = sum(map(int, own)) / os.sysconf("SC_CLK_TCK")
    return [sum(ticks), sum(ticks) - idle, used]


def describe_others(before: list[float], after: list[float]) -> str:
    """Return a line if other programs took much of the machine between two usages, or nothing."""
    total, busy, ours = (late - early for early, late in zip(before, after, strict=True))
    share = max(0.0, busy - ours) / total if total > 0 else 0.0
    if share <= BUSY:
        return ""
    return (
        f"\nOther programs took {share:.0%} of this machine's CPU time meanwhile: these figures are"
        " not worth\nmuch, and the order may be turned round, since threads of one process that"
        " wait for each other\nsuffer most. Try again when it is quiet."
    )


# What a summary has to hold for the table, each a number, a text or a list of numbers.
NUMBERS = ("world_size", "num_devices", "threads", "test_accuracy", "total_seconds")
TEXTS = ("technique", "device")
MAX_BYTES = 2**20  # a thousand times what it takes


def read_summary(folder: str) -> dict[str, Any]:
    """Read a run's summary; end with one line where it is none."""
    path = Path(folder) / "summary.json"
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for without an end
            raise ValueError("no file")
        with open(path, "rb") as file:
            summary = json.loads(file.read(MAX_BYTES))
        if not is_summary(summary):
            raise ValueError("something is missing, or of another kind")
        return summary
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        sys.exit(f"compare.py: error: {str(path)!r}: {reason}; is it the folder of a complete run?")


def is_summary(content: Any) -> bool:
    """Tell whether a file holds what the table shows."""
    if not isinstance(content, dict):
        return False
    speed, memory = content.get("train_images_per_second"), content.get("peak_memory_bytes")
    numbers = [content.get(name) for name in NUMBERS] + [0 if speed is None else speed]
    texts = [content.get(name) for name in TEXTS]
    return (
        isinstance(memory, list)
        and all(type(number) in (int, float) for number in numbers + memory)
        and all(isinstance(text, str) and text.isprintable() for text in texts)
    )


def row(summary: dict[str, Any], baseline: dict[str, Any]) -> list[str]:
    speed, reference = (s["train_images_per_second"] for s in (summary, baseline))
    processes = summary["world_size"]
    devices = f"{summary['num_devices']} x {summary['device']}"
    threads = f"{processes} x {summary['threads']}" if processes > 1 else str(summary["threads"])
    return [
        summary["technique"],
        devices,
        threads,
        f"{summary['test_accuracy']:.2%}",
        f"{speed:,.0f}" if speed else "-",
        f"{speed / reference:.2f} x" if speed and reference else "-",
        f"{summary['total_seconds']:.1f}",
        f"{sum(summary['peak_memory_bytes']) / 2**20:,.0f} MB",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("runs", nargs="*", help="run directories")
    parser.add_argument("--usage-of", type=int, metavar="PID", help=argparse.SUPPRESS)
    parser.add_argument("--since", nargs=3, type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.runs:
        if args.usage_of is None:
            parser.error("name the folders of complete runs, runs/NAME")
        print(*read_usage(args.usage_of))
        return 0
    summaries = [read_summary(folder) for folder in args.runs]
    rows = [list(NAMES), *(row(summary, summaries[0]) for summary in summaries)]
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(NAMES))]
    print()
    for cells in rows:
        left = cells[0].ljust(widths[0])
        print("  ".join([left, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]))
    if args.since:
        print(describe_others(args.since, read_usage(args.usage_of)))
    print(f"\n{READING}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
