"""Draw one step of several profiled runs, one above the other to one scale. Not a command of its
own: trace.py --draw.
"""

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from phases import Spans, Trace, TraceError, intersect, joined, length, subtract, union
from svg import Drawing

from utils import config

WIDTH, LEFT, RIGHT = 900, 128, 14  # pixels: of all, of the lanes' names, of the margin
LANE, GAP = 20, 6  # height of a lane, and between two
SHORTEST = 0.005  # of a step, that a wait or a collective takes at least to be drawn
LETTER = 6.2  # width of a small letter, about
COLOURS = {
    "data": "grey",
    "forward": "blue",
    "backward": "orange",
    "optimizer": "green",
    "communication": "red",
    "waiting": "red",
}
LEGEND = {
    "data": "load and transform",
    "forward": "forward and loss",
    "backward": "backward",
    "optimizer": "optimizer",
    "communication": "copies, collectives, waiting for them",
}
COLLECTIVES = {"in_backward": "all-reduce of gradients", "elsewhere": "agreement to stop"}


class Panel(NamedTuple):
    """A run to draw: its ``summary.json``, its flags, and the traces of its ranks."""

    summary: dict[str, Any]
    flags: dict[str, Any]
    traces: list[Trace]


class Lane(NamedTuple):
    """A row of boxes: spans in microseconds, by the phase that colours them or as a frame."""

    name: str
    boxes: list[tuple[float, float, str, str]]  # begin, end, phase or "", text


def read_panel(run_dir: Path, traces: list[Trace]) -> Panel:
    """Read what the picture says of a run.

    Raises:
        TraceError: the run left no summary.
    """
    try:
        found = [json.loads((run_dir / name).read_text()) for name in ("summary.json", "args.json")]
        title_of(found[0])
        return Panel(found[0], dict(found[1]), traces)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{run_dir} has no usable summary.json ({error})") from error


def title_of(summary: dict[str, Any]) -> str:
    processes, threads = summary["world_size"], summary["threads"]
    each = " each" if processes > 1 else ""
    return (
        f"{summary['script']}: {processes} process{'es' if processes > 1 else ''},"
        f" {threads} thread{'s' if threads > 1 else ''}{each};"
        f" {summary['num_devices']} x {summary['batch_size']} images"
    )


def command_of(panel: Panel) -> str:
    """Return the command of a run, from those of its flags that are not the default."""
    technique = panel.summary["technique"]
    defaults = vars(config.build_parser(technique, None).parse_args([]))
    words = ["python", panel.summary["script"]]
    for name, value in panel.flags.items():
        if value != defaults.get(name) and name not in ("run_dir", "data_dir", "resume"):
            flag = name.replace("_", "-")
            words += [f"--{flag}" if value else f"--no-{flag}"]
            words += [] if isinstance(value, bool) else [str(value).strip("[]").replace(" ", "")]
    return " ".join(words)


def lanes_of(traces: list[Trace]) -> tuple[list[Lane], float]:
    """Return the lanes of a run's step of middle length, and how long that is, microseconds.

    Times begin with the step of the rank that began it first.
    """
    lengths = [end - begin for begin, end in traces[0].steps]
    number = lengths.index(statistics.median_low(lengths))
    zero = min(t.base / 1e3 + t.steps[number][0] for t in traces if number < len(t.steps))
    lanes: list[Lane] = []
    for rank, trace in enumerate(traces):
        if number < len(trace.steps):
            name = f"rank {rank}" if len(traces) > 1 else trace.clock
            shift = trace.base / 1e3 - zero
            for lane in _lanes_of_rank(name, trace, [trace.steps[number]]):
                boxes = [(b + shift, e + shift, phase, text) for b, e, phase, text in lane.boxes]
                lanes.append(Lane(lane.name, boxes))
    return lanes, lengths[number]


def _lanes_of_rank(name: str, trace: Trace, window: Spans) -> list[Lane]:
    inside = [intersect(spans, window) for spans in trace.replicas.values()]
    replicas = sorted((spans[0][0], spans[-1][1]) for spans in inside if spans)
    parts = {part: intersect(union(spans), window) for part, spans in trace.parts.items()}
    copies = {part: spans for part, spans in parts.items() if part not in COLLECTIVES}

    least = SHORTEST * length(window)
    waiting = subtract(intersect(trace.exposed, window), joined(copies))
    waiting = [(begin, end) for begin, end in waiting if end - begin >= least]
    elsewhere = union([*replicas, *joined(copies), *waiting])
    own = [
        (begin, end, phase, phase)
        for phase, spans in (trace.busy if trace.clock == "device" else trace.phases).items()
        for begin, end in subtract(intersect(spans, window), elsewhere)
    ]
    own += [(begin, end, "", "waits for the replicas") for begin, end in union(replicas)]
    own += [(b, e, "communication", part) for part, spans in copies.items() for b, e in spans]
    own += [(begin, end, "waiting", "waits") for begin, end in waiting]
    lanes = [Lane(name, own)]
    for number, (begin, end) in enumerate(replicas):
        lanes.append(Lane(f"replica {number}", [(begin, end, "forward", "forward")]))
    collectives = [
        (begin, end, "communication", text)
        for part, text in COLLECTIVES.items()
        for begin, end in parts.get(part, [])
        if end - begin >= least
    ]
    return [*lanes, Lane("its collectives", collectives)] if collectives else lanes


def draw(panels: list[Panel], path: Path, note: str = "") -> None:
    """Draw the runs into an SVG file, which holds the commands that made it, and a note.

    Raises:
        svg.DrawingError: it cannot be written.
    """
    found = [lanes_of(panel.traces) for panel in panels]
    ends = [end for lanes, _ in found for lane in lanes for _, end, _, _ in lane.boxes]
    longest = max(ends + [microseconds for _, microseconds in found])
    scale = (WIDTH - LEFT - RIGHT) / longest
    drawing = Drawing()
    x = float(LEFT)
    for phase, text in LEGEND.items():
        drawing.box(x, 6, 12, 12, COLOURS[phase])
        drawing.text(x + 17, 16, text, "note")
        x += 17 + 6.6 * len(text) + 16
    top = 44.0
    for panel, (lanes, microseconds) in zip(panels, found, strict=True):
        title = f"{title_of(panel.summary)}; {microseconds / 1e3:.1f} ms"
        drawing.text(LEFT, top, title, "title")
        top += 8
        for lane in lanes:
            drawing.text(LEFT - 8, top + 14, lane.name, "note", "end")
            top += LANE + (14 if _draw_lane(drawing, lane, top, scale) else 0) + GAP
        top += 22
    _draw_axis(drawing, top - 14, scale, longest)
    runs = [f"RUN_{number}" for number in range(1, len(panels) + 1)]
    origin = [
        *(f"{command_of(panel)} --run-dir {run}" for panel, run in zip(panels, runs, strict=True)),
        f"python scripts/tools/trace.py --draw {path} {' '.join(runs)}",
        *([note] if note else []),
    ]
    title = f"One optimizer step of {len(panels)} runs, to one scale"
    drawing.save(path, WIDTH, top + 22, title, "\n".join(origin))


def _draw_lane(drawing: Drawing, lane: Lane, top: float, scale: float) -> bool:
    """Draw the boxes of a lane; tell whether some are named below it, being too narrow.

    There each name stands once.
    """
    free, named = float(LEFT), set()  # where the line below ends, and what stands there or in a box
    for begin, end, phase, text in sorted(lane.boxes):
        x, width = LEFT + begin * scale, max(1.0, (end - begin) * scale)
        drawing.box(x, top, width, LANE, COLOURS.get(phase, ""))
        middle, wide = x + width / 2, LETTER * len(text)
        if wide + 6 <= width:
            drawing.text(middle, top + 14, text, "inside" if phase else "note", "middle")
            named.add(text)
        elif phase == "communication" and text not in named:
            named.add(text)
            left = min(max(free, middle - wide / 2), WIDTH - RIGHT - wide)
            if left >= free:
                drawing.line(middle, top + LANE, left + wide / 2, top + LANE + 5)
                drawing.text(left + wide / 2, top + LANE + 15, text, "note", "middle")
                free = left + wide + 8
    return free > LEFT


def _draw_axis(drawing: Drawing, y: float, scale: float, longest: float) -> None:
    """Draw milliseconds, in steps of 1, 2 or 5 times a power of ten."""
    rough = longest / 1e3 / 8
    power = 10.0 ** len(str(int(rough))) / 10
    tick = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    drawing.line(LEFT, y, WIDTH - RIGHT, y)
    for number in range(int(longest / 1e3 / tick) + 1):
        x = LEFT + number * tick * 1e3 * scale
        drawing.line(x, y, x, y + 4)
        unit = " ms" if number == 0 else ""
        drawing.text(x, y + 17, f"{number * tick:g}{unit}", "note", "middle")
