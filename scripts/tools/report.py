"""How the results of benchmark.py are shown: as text, Markdown, a chart, and side by side. Not a
command of its own.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from utils.errors import UsageError

Results = dict[str, Any]
Rows = list[dict[str, Any]]

HEADINGS = ("", "devices", "threads", "images/s", "min-max", "ratio", "effic.", "comm.", "MB")
READING = """\
How to read it:
  strong, weak  the global batch stays the same, or that of each device does
  devices       GPUs; on a CPU, replicas of DP and processes of DDP
  threads       processes x CPU threads: equally many in all rows but "1 x 1".
                DP's replicas share them out in the forward; on a CPU its
                backward takes all of them, one replica after the other
  images/s      of training, over all devices: median and range of the rounds
  ratio         to the first row; median of the rounds
  effic.        images/s by the number of devices times the images/s of one; on
                a CPU, of threads times those of one thread
  comm.         share of a step that waits for others (profiler; DDP: rank 0)
  MB            the most that a process held: on a CPU all that was resident,
                also what it shares; on a GPU what torch allocated (DP: on the
                first, which holds the most)"""
CHART_HINT = "no chart: pip install matplotlib (requirements-dev.txt has the version)"
COLOURS = {"single": "#888888", "dp": "#d95f02", "ddp": "#1b9e77"}


def size_of(row: dict[str, Any]) -> int:
    """Return the batch size that a table holds equal."""
    return row["global_batch_size"] if row["scaling"] == "strong" else row["batch_size"]


def tables(results: Results) -> Iterator[tuple[str, Rows]]:
    """Yield each table's title and rows."""

    def key(row: dict[str, Any]) -> tuple[str, str, int]:
        return row["scaling"], row["model"], size_of(row)

    for (scaling, model, size), rows in groupby(results["rows"], key):
        share = "in all" if scaling == "strong" else "on each device"
        yield f"{scaling} scaling: {model}, {size} images a step {share}", list(rows)


def threads_of(row: dict[str, Any]) -> str:
    return f"{row['processes']} x {row['threads'] // row['processes']}"


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row of a table as text, in the order of HEADINGS."""
    own = [row["technique"], str(row["devices"]), threads_of(row)]
    speed = row["images_per_second"]
    if not speed:
        return [*own, "failed" if row["failure"] else "-", *["-"] * 5]
    share = row["shares"].get("communication")
    memory = max(row["peak_memory_bytes"], default=0) / 2**20
    return [
        *own,
        f"{speed['median']:,.0f}",
        f"{speed['min']:,.0f}-{speed['max']:,.0f}" if len(speed["rounds"]) > 1 else "-",
        *(f"{row[name]['median']:.2f}" if row[name] else "-" for name in ("ratio", "efficiency")),
        "-" if share is None else f"{share:.0%}",
        f"{memory:,.0f}",
    ]


def verdicts(results: Results, rows: Rows) -> Iterator[str]:
    """Yield a sentence for each number of devices: DDP against DP, and both against one device."""
    for verdict in results["verdicts"]:
        where = (verdict["scaling"], verdict["model"], verdict["size"])
        if where != (rows[0]["scaling"], rows[0]["model"], size_of(rows[0])):
            continue
        count, found = verdict["devices"], verdict["ddp_to_dp"]
        if not found:
            continue
        once = len(found["rounds"]) == 1
        ends = "(one round)" if once else f"({found['min']:.2f}-{found['max']:.2f})"
        if found["min"] <= 1 <= found["max"] and not once:
            sentence = f"DP and DDP are equally fast within the spread {ends}"
        else:
            sentence = f"DDP is {found['median']:.2f} x as fast as DP {ends}"
        both = [row for row in rows if row["devices"] == count and row["technique"] != "single"]
        if all(row["ratio"] and row["ratio"]["median"] < 1 for row in both):
            sentence += "; one device is faster"
        yield f"{count} devices: {sentence}"


def text(results: Results) -> str:
    """Return all tables for a terminal of 80 columns."""
    blocks = []
    for title, rows in tables(results):
        lines = [list(HEADINGS), *map(cells, rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
        shown = [
            "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
            for line in lines
        ]
        blocks.append("\n".join([title, *shown, *verdicts(results, rows)]))
    return "\n\n".join([*blocks, READING])


def markdown(results: Results) -> str:
    """Return all tables and the machine as a Markdown page."""
    machine = results["machine"]
    lines = ["# DP against DDP", "", f"`{results['command']}`, {results['begin']}"]
    if not results["complete"]:
        lines += ["", "Interrupted: these are the runs that were complete."]
    for title, rows in tables(results):
        lines += ["", f"## {title.capitalize()}", ""]
        lines += [f"| {' | '.join(HEADINGS)} |", "| --- |" + " ---: |" * (len(HEADINGS) - 1)]
        lines += [f"| {' | '.join(cells(row))} |" for row in rows]
        lines += [line for sentence in verdicts(results, rows) for line in ("", f"{sentence}.")]
        failures = [f"{row['technique']}: {row['failure']}" for row in rows if row["failure"]]
        lines += [line for failure in failures for line in ("", f"Failed: {failure}")]
    others = f"other programs took {results['others_share']:.0%} of the CPU time"
    lines += ["", f"{results['rounds']} rounds, data: {results['dataset']}; {others}."]
    lines += ["", "```", READING, "```", "", "## Machine", "", "| | |", "| --- | --- |"]
    shown = {name: value for name, value in machine.items() if name != "topology" and value}
    lines += [f"| {name} | {describe(value)} |" for name, value in shown.items()]
    if machine.get("topology"):
        lines += ["", "```", machine["topology"], "```"]
    return "\n".join(lines) + "\n"


def describe(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={content}" for name, content in value.items())
    if isinstance(value, list):
        return ", ".join(f"{value.count(v)} x {v}" for v in dict.fromkeys(value))
    return str(value)


def draw(results: Results, path: Path) -> str:
    """Draw throughput and efficiency of each table into a PNG; return a line that says so."""
    shown = [(title, [row for row in rows if row["efficiency"]]) for title, rows in tables(results)]
    shown = [(title, rows) for title, rows in shown if rows]
    if not shown:
        return "no chart: nothing was measured"
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return CHART_HINT
    figure = Figure(figsize=(10, 2.8 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(shown), 2, squeeze=False)
    for (title, rows), (left, right) in zip(shown, axes, strict=True):
        names = [f"{r['technique']} {r['devices']}\n{threads_of(r)} thr." for r in rows]
        for axis, key, label in (
            (left, "images_per_second", "images/s"),
            (right, "efficiency", "efficiency"),
        ):
            middle = [row[key]["median"] for row in rows]
            below = [row[key]["median"] - row[key]["min"] for row in rows]
            above = [row[key]["max"] - row[key]["median"] for row in rows]
            colours = [COLOURS[row["technique"]] for row in rows]
            axis.bar(names, middle, yerr=[below, above], capsize=3, color=colours)
            axis.set_ylabel(label)
            axis.tick_params(labelsize=7)
            axis.spines[["top", "right"]].set_visible(False)
        left.set_title(title, fontsize=9, loc="left")
        right.axhline(1, color="black", linewidth=0.8, linestyle=":")
    gpus, machine = results["machine"]["gpus"], results["machine"]
    where = describe(gpus) if gpus else f"{machine['cpu']}, {machine['cores']} cores"
    figure.suptitle(f"{where}; torch {machine['torch']}", fontsize=10)
    figure.savefig(path, dpi=120)
    return f"chart in {path}"


def load(path: Path) -> Results:
    """Read the JSON file of a benchmark.

    Raises:
        UsageError: it is not one.
    """
    try:
        results = json.loads(path.read_text())
        if results["version"] == 1 and isinstance(results["rows"], list):
            return results
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a benchmark.json ({error})") from error
    raise UsageError(f"{path} was written by another version of benchmark.py")


def compare(args: argparse.Namespace) -> int:
    """Print two results side by side, where both have a row, and what else differs."""
    first, second = map(load, args.compare)
    for name, value in first["machine"].items():
        other = second["machine"].get(name)
        if value != other and name != "topology":
            print(f"{name}: {describe(value)} -> {describe(other)}")
    names = ("scaling", "technique", "model", "devices", "threads", "batch_size")
    others = {tuple(row[name] for name in names): row for row in second["rows"]}
    lines = [["", "batch", "devices", "threads", "A", "B", "B / A", ""]]
    for row in first["rows"]:
        other_row = others.get(tuple(row[name] for name in names))
        if other_row is None or not (row["images_per_second"] and other_row["images_per_second"]):
            continue
        a, b = row["images_per_second"], other_row["images_per_second"]
        overlap = a["min"] <= b["max"] and b["min"] <= a["max"]
        label = f"{row['scaling']} {row['model']} {row['technique']}"
        numbers = [str(size_of(row)), str(row["devices"]), threads_of(row)]
        speeds = [f"{a['median']:,.0f}", f"{b['median']:,.0f}"]
        ratio = f"{b['median'] / a['median']:.2f}"
        lines.append([label, *numbers, *speeds, ratio, "ranges overlap" if overlap else ""])
    if len(lines) == 1:
        raise UsageError(f"{args.compare[0]} and {args.compare[1]} have no measured row in common")
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    print(f"A = {args.compare[0]}, B = {args.compare[1]}, in images/s")
    for line in lines:
        print("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip())
    return 0
