"""Print runs side by side, from the summary.json of each.

    python scripts/compare.py runs/quickstart-20260101-120000/{single,dp,ddp}

The first run is what the speed-up of the others is counted from.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

NAMES = ("technique", "devices", "threads", "accuracy", "images/s", "speed-up", "seconds", "memory")
READING = """\
How to read it:
  accuracy    the three see the same 96 images a step, so they differ by no more than two seeds
              of one would: data parallelism changes the speed, not the result
  images/s    training speed over all devices, without the first steps, start-up and evaluation
  speed-up    against the first row. DP copies the network for every batch, DDP sums gradients:
              with a network this small either may lose to one device, so measure your own
  seconds     from the start of a training process to its end; torchrun adds some of its own
  memory      the most that the processes held, added up; what they share counts in each"""


def read_summary(folder: str) -> dict[str, Any]:
    path = Path(folder) / "summary.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"compare.py: error: {path}: {error}; is this the folder of a complete run?")


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
    parser.add_argument("runs", nargs="+", help="run directories")
    summaries = [read_summary(folder) for folder in parser.parse_args().runs]
    rows = [list(NAMES), *(row(summary, summaries[0]) for summary in summaries)]
    widths = [max(len(cells[i]) for cells in rows) for i in range(len(NAMES))]
    print()
    for cells in rows:
        left = cells[0].ljust(widths[0])
        print("  ".join([left, *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]))
    print(f"\n{READING}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
