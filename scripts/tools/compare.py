"""Print runs side by side, from the summary.json of each.

    python scripts/tools/compare.py runs/quickstart-20260101-120000/{single,dp,ddp}

The speed-up is relative to the first run. quickstart.sh also asks whether other programs kept the
machine busy meanwhile.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import output

NAMES = ("technique", "devices", "threads", "accuracy", "images/s", "speed-up", "seconds", "memory")
# Speed and accuracy are compared between runs in which these are the same.
ALIKE = ("dataset", "model", "global_batch_size", "global_step", "amp", "torch_version")
BUSY = 0.05  # share of the machine, above which other programs spoil a figure
READING = """\
How to read it:
  accuracy    after the same number of steps, of {global_batch_size} images each. Data parallelism
              changes the speed, not the result. The random shifts differ, and so do the images
              over which a batch is normalised
  images/s    training speed over all devices, without the first steps, start-up and evaluation
  speed-up    against the first row. DP copies the network for every batch, DDP averages gradients:
              with a network this small both may lose to one device, so measure your own
  seconds     from the start of a script's process to its end. torchrun adds some seconds
  memory      the most that each process held, summed. Shared memory counts in each of them.
              On GPUs it is what torch allocated for tensors, for DP on the first GPU. The
              driver's context and NCCL's buffers come on top"""


def read_usage(pid: int) -> list[float]:
    """Return the seconds of all CPUs, those in use, and those of a process and its children.

    Only children that have ended count, see proc(5). Without /proc all three values are 0.
    """
    try:
        words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
        own = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
    except OSError:
        return [0.0, 0.0, 0.0]
    tick = os.sysconf("SC_CLK_TCK")
    ticks = [int(word) / tick for word in words]
    return [sum(ticks), sum(ticks) - ticks[3] - ticks[4], sum(map(int, own)) / tick]


def describe_others(before: list[float], after: list[float]) -> str:
    """Return a line if other programs took much of the machine between two usages, or nothing."""
    total, busy, ours = (late - early for early, late in zip(before, after, strict=True))
    share = max(0.0, busy - ours) / total if total > 0 else 0.0
    if share <= BUSY:
        return ""
    return (
        f"Other programs took {share:.0%} of this machine's CPU time meanwhile, so these figures\n"
        "prove little. Try again when the machine is quiet."
    )


def describe_devices(summaries: list[dict[str, Any]]) -> str:
    """Return what a device is in the table."""
    first = summaries[0]
    if first["device"] != "cpu":
        return f"A device is a GPU ({first['device']})."
    text = "No GPU took part: a device is a core of the CPU."
    if gpu := next((s["device"] for s in summaries if s["device"] != "cpu"), None):
        text = f"A device is a core of the CPU, except in the row of {gpu}, the GPU alone."
    for cores in {s["threads"] for s in summaries if is_whole_cpu(s, first)}:
        text += f"\nsingle on {cores} cores is one process without data parallelism: each operation"
        text += "\nruns on all of these cores. Several GPUs do not work together in this way."
    return text


def is_whole_cpu(summary: dict[str, Any], baseline: dict[str, Any]) -> bool:
    """Return whether a single run has more cores than the first run, if a core is a device."""
    kind = summary["technique"], summary["device"]
    return kind == ("single", "cpu") and baseline["threads"] == 1 < summary["threads"]


def find_differences(summaries: list[dict[str, Any]]) -> list[str]:
    """Return the differences because of which the speeds of these runs cannot be compared."""
    found = {name: [str(s.get(name)) for s in summaries] for name in ALIKE}
    found["resumed_from"] = [str(s.get("resumed_from") or "the start") for s in summaries]
    return [f"{name} ({', '.join(v)})" for name, v in found.items() if len({*v}) > 1]


def find_short_runs(summaries: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each run whose speed includes steps that a longer run leaves out."""
    timed = [(s["technique"], *(s.get("timed_steps") or (0, 0))) for s in summaries]
    return [
        f"{technique} was short, so its images/s are those of steps 2 to {last}.\n"
        for technique, first, last in timed
        if first == 2  # a longer run leaves out ten steps
    ]


def read_summary(folder: str) -> dict[str, Any]:
    """Read a run's summary. If there is none, end with one line."""
    path = Path(folder) / "summary.json"
    try:
        summary = json.loads(path.read_text())
        build_row(summary, summary, is_alike=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or "something is missing in it"
        sys.exit(f"compare.py: error: {str(path)!r}: {reason}; is it the folder of a complete run?")
    return summary


def build_row(summary: dict[str, Any], baseline: dict[str, Any], is_alike: bool) -> list[str]:
    speed, reference = (s["train_images_per_second"] for s in (summary, baseline))
    processes, threads = summary["world_size"], summary["threads"]
    on_cores = f" on {threads} cores" if is_whole_cpu(summary, baseline) else ""
    return [
        summary["technique"] + on_cores,
        f"{summary['num_devices']} x {summary['device']}",
        f"{processes} x {threads}" if processes > 1 else str(threads),
        "-" if summary["test_accuracy"] is None else f"{summary['test_accuracy']:.2%}",
        f"{speed:,.0f}" if speed else "-",
        f"{speed / reference:.2f} x" if speed and reference and is_alike else "-",
        f"{summary['total_seconds']:.1f}",
        f"{sum(summary['peak_memory_bytes']) / 2**20:,.0f} MB",
    ]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align the cells of ``rows`` as text: the first column left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def main() -> int:
    output.protect()
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
    differences = find_differences(summaries)
    rows = [NAMES, *(build_row(s, summaries[0], not differences) for s in summaries)]
    print(f"\n{table(rows)}\n\n{describe_devices(summaries)}")
    print(*find_short_runs(summaries), sep="", end="")
    if args.since:
        print(describe_others(args.since, read_usage(args.usage_of)))
    if differences:
        print(f"\nThese runs are not alike, so no row has a speed-up: {'; '.join(differences)}.")
    else:
        print(f"\n{READING.format_map(summaries[0])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
