"""What a trace of --profile says: when a process was in which phase of a step, and when something
travelled between devices or ranks. Not a command of its own.
"""

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from utils.errors import UserError

# What PyTorch names by itself, by the beginnings of the names; "forward" is utils/engine.py's.
PHASES = {
    "data": ("enumerate(DataLoader)",),
    "forward": (
        *("forward", "DataParallel.forward", "DistributedDataParallel.forward"),
        *("TorchDynamo Cache Lookup", "Torch-Compiled Region"),
    ),
    "backward": ("autograd::engine::evaluate_function",),
    "optimizer": ("Optimizer.",),
}
# What an optimizer's step begins with, where gradients are unscaled or clipped.
CLIPPING = ("aten::_amp_foreach_non_finite", "aten::_foreach_norm", "aten::linalg_vector_norm")
# Of DP: on GPUs autograd functions, on a CPU the names that utils/data_parallel.py gives.
PARTS = {
    "scatter": ("Scatter", "DataParallel.scatter"),
    "replicate": ("Broadcast", "DataParallel.replicate"),
    "gather": ("Gather", "DataParallel.gather"),
}
UNNAMED = {("data", "forward"), ("forward", "backward")}  # between them lies more of the first
COLLECTIVES = ("c10d::", "gloo:", "nccl:")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Event = dict[str, Any]  # of a Chrome trace; times are microseconds
Spans = list[tuple[float, float]]  # begin and end; sorted and disjoint after ``union``


class TraceError(UserError):
    """A trace that is not there or cannot be used; the message says why."""

    exit_status = 2


@dataclass
class Trace:
    """When one process did what in its profiled steps; microseconds since ``base``.

    Attributes:
        steps: the whole optimizer steps, each from its begin to its end.
        clock: of what the times are: ``main thread``, or ``device`` where kernels ran.
        phases: when the main thread was in which phase; its gaps are in none.
        busy: when something was computed for a phase, and no part of DP's or collective waited for.
        parts: when something travelled between devices or ranks, by the part it was of.
        dp_forwards: when DataParallel's forward ran, of which the replicas are a part.
        replicas: when each thread of DP's replicas ran an operation.
        reductions: when this rank came to each of the gradients' reductions.
        base: when the clock began, nanoseconds since 1970; ranks of one ``host`` share it.
    """

    steps: Spans
    clock: str
    phases: dict[str, Spans]
    busy: dict[str, Spans]
    parts: dict[str, Spans]
    dp_forwards: Spans = field(default_factory=list)
    replicas: dict[Any, Spans] = field(default_factory=dict)
    reductions: list[float] = field(default_factory=list)
    base: int = 0
    host: str = ""

    @property
    def applying(self) -> Spans:
        """When DP's forward does nothing but wait for its replicas, or for their threads."""
        return subtract(self.dp_forwards, joined(self.parts))

    @property
    def exposed(self) -> Spans:
        """When something travelled while nothing was computed."""
        return subtract(joined(self.parts), joined(self.busy))


def union(spans: Spans) -> Spans:
    """Return the moments that are in any of the spans."""
    result: Spans = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((begin, end))
    return result


def joined(named: dict[Any, Spans]) -> Spans:
    return union([span for spans in named.values() for span in spans])


def subtract(spans: Spans, others: Spans) -> Spans:
    """Return the moments of ``spans`` that are not in ``others``; both as from ``union``."""
    left: Spans = []
    for begin, end in spans:
        first = max(0, bisect_right(others, (begin, begin)) - 1)
        for their_begin, their_end in others[first:]:
            if their_begin >= end:
                break
            if their_begin > begin:
                left.append((begin, their_begin))
            begin = max(begin, their_end)
        if begin < end:
            left.append((begin, end))
    return left


def intersect(spans: Spans, others: Spans) -> Spans:
    """Return the moments that are in both."""
    return subtract(spans, subtract(spans, others))


def disjoint(named: dict[str, Spans], taken: Spans) -> dict[str, Spans]:
    """Return the spans without ``taken`` and what an earlier name has: no moment counts twice."""
    result = {}
    for name, spans in named.items():
        result[name] = subtract(union(spans), taken)
        taken = union(taken + result[name])
    return result


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def span_of(event: Event) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def is_within(moment: float, spans: Spans) -> bool:
    index = bisect_right(spans, (moment, float("inf"))) - 1
    return index >= 0 and moment < spans[index][1]


def name_at(moment: float, named: dict[str, Spans]) -> str | None:
    return next((name for name, spans in named.items() if is_within(moment, spans)), None)


def find_phases(events: list[Event], main: Any) -> dict[str, Spans]:
    """Return when the main thread was in which phase.

    What has no name of its own is told by its place: from the loader to the forward the batch is
    moved and transformed, from the forward to the first operation of autograd comes the loss.
    """
    named: list[tuple[float, float, str]] = []
    for event in sorted(events, key=span_of):
        before = named[-1][2] if named else ""
        if phase := _phase(event["name"], event["tid"] == main, before):
            named.append((*span_of(event), phase))
    phases: dict[str, Spans] = {phase: [] for phase in PHASES}
    for (begin, end, phase), (next_begin, _, following) in pairwise([*named, (0.0, 0.0, "")]):
        if phase == following or (phase, following) in UNNAMED:
            end = max(end, next_begin)
        phases[phase].append((begin, end))
    return {phase: union(spans) for phase, spans in phases.items()}


def _phase(name: str, is_main: bool, before: str) -> str | None:
    """Return the phase that an event begins or continues, after one of the phase ``before``."""
    for phase, names in PHASES.items():
        # A GPU's autograd has a thread of its own.
        if name.startswith(names) and (is_main or phase == "backward"):
            return phase
    if before == "backward" and name.startswith(COLLECTIVES):
        return "backward"  # which is not over before the gradients are there
    return "optimizer" if before == "backward" and is_main and name.startswith(CLIPPING) else None


def sort_events(events: list[Event], device_index: int = 0) -> Trace:
    """Sort the events of a trace into what the main thread, or the device, did.

    Where a device ran kernels, the time is that of device ``device_index``: a kernel belongs to the
    phase in which the host launched it, from whatever thread, and communication is what NCCL and
    DP's copies do. Elsewhere the time is that of the main thread.

    Raises:
        TraceError: the events hold no whole step.
    """
    events = [e for e in events if e.get("ph") == "X" and e.get("cat") != "gpu_user_annotation"]
    numbered = [e for e in events if e["name"].startswith("ProfilerStep#")]
    if not numbered:
        raise TraceError("the trace holds no step")
    main = numbered[0]["tid"]
    on_main = [e for e in events if e["tid"] == main and e.get("cat") not in ON_DEVICE]
    ends = [e["ts"] for e in on_main if e["name"].startswith("Optimizer.step")]
    # After an epoch's last batch a step begins that gets no update.
    steps = [
        (begin, end)
        for begin, end in sorted(map(span_of, numbered))
        if any(begin <= moment < end for moment in ends)
    ]
    if not steps:
        raise TraceError("the trace holds no whole step")
    phases = find_phases([e for e in events if e.get("cat") not in ON_DEVICE], main)
    kernels = [
        e
        for e in events
        if e.get("cat") in ON_DEVICE and e["args"].get("device", 0) == device_index
    ]
    if kernels:
        trace = Trace(steps, "device", phases, *_sort_kernels(kernels, events, phases))
        trace.reductions = sorted(begin for begin, _ in trace.parts.get("in_backward", []))
        return trace
    trace = Trace(steps, "main thread", phases, *_sort_operations(on_main, events, phases))
    trace.dp_forwards = union([span_of(e) for e in on_main if e["name"] == "DataParallel.forward"])
    # From a hook of the last gradient of a bucket; the agreement to stop is begun by no gradient.
    hooks = union([span_of(e) for e in on_main if e["name"].startswith(PHASES["backward"])])
    launches = sorted(e["ts"] for e in on_main if e["name"] == "c10d::allreduce_")
    trace.reductions = [moment for moment in launches if is_within(moment, hooks)]
    replicas: dict[Any, Spans] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and event["tid"] != main:
            replicas[event["tid"]].append(span_of(event))
    for thread, spans in replicas.items():
        if running := intersect(union(spans), trace.applying):
            trace.replicas[thread] = running
    return trace


def _part(name: str) -> str | None:
    """Return the part of DP's traffic that an event of this name is, or belongs to."""
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    if name.startswith(tuple(f"{n}Backward" for n in ("Scatter", "Broadcast", "Gather"))):
        return "reduce"
    return next((part for part, names in PARTS.items() if name in names), None)


def _sort_operations(
    on_main: list[Event], events: list[Event], phases: dict[str, Spans]
) -> tuple[dict[str, Spans], dict[str, Spans]]:
    """Return when the main thread computes, by phase, and when something travels, by part.

    It waits where it is in a collective or in DP's copying, or where it runs no operation while
    a thread of gloo's is in a collective.
    """
    parts: dict[str, Spans] = {}
    blocking, operations = [], []
    for event in on_main:
        part = _part(event["name"])
        if part:
            parts.setdefault(part, []).append(span_of(event))
        if part or event["name"].startswith(COLLECTIVES):
            blocking.append(span_of(event))
        elif event.get("cat") == "cpu_op":
            operations.append(span_of(event))
    for event in events:
        if event["name"].startswith(COLLECTIVES):
            inside = is_within(event["ts"], phases["backward"])
            parts.setdefault("in_backward" if inside else "elsewhere", []).append(span_of(event))
    waiting = union(blocking + subtract(joined(parts), union(operations)))
    return {phase: subtract(spans, waiting) for phase, spans in phases.items()}, parts


def _sort_kernels(
    kernels: list[Event], events: list[Event], phases: dict[str, Spans]
) -> tuple[dict[str, Spans], dict[str, Spans]]:
    """Do the same for a device; a launch tells to which phase and part a kernel belongs."""
    launches = {
        e["args"]["correlation"]: e
        for e in events
        if e.get("cat") not in ON_DEVICE and "correlation" in e.get("args", {})
    }
    copying: dict[Any, dict[str, Spans]] = defaultdict(dict)  # when a thread was in a part of DP
    for event in events:
        part = _part(event["name"])
        if part and event.get("cat") not in ON_DEVICE:
            spans = copying[event["tid"]].get(part, [])
            copying[event["tid"]][part] = union([*spans, span_of(event)])
    busy: dict[str, Spans] = {phase: [] for phase in phases}
    parts: dict[str, Spans] = {}
    for kernel in kernels:
        launch = launches.get(kernel["args"].get("correlation"), kernel)
        phase = name_at(launch["ts"], phases)
        part = name_at(launch["ts"], copying[launch["tid"]])
        if part is None and "nccl" in kernel["name"].lower():
            part = "in_backward" if phase == "backward" else "elsewhere"
        if part:
            parts.setdefault(part, []).append(span_of(kernel))
        elif phase:
            busy[phase].append(span_of(kernel))
    return disjoint(busy, []), parts  # streams may compute for two phases at once


def share_out(trace: Trace) -> dict[str, Any]:
    """Return the shares of the phases in the profiled steps; they add up to 1.

    Communication is what is waited for: what runs beside other operations is hidden, and in
    ``communication_total`` only. The wait for a slower rank is part of it. ``gaps`` is the rest:
    Python, logging and metrics, and an idle device.
    """
    window = [(trace.steps[0][0], trace.steps[-1][1])]
    wall = length(window)
    told, exposed = (intersect(spans, window) for spans in (joined(trace.parts), trace.exposed))
    busy = disjoint(trace.busy, exposed)
    shares = {phase: length(intersect(spans, window)) / wall for phase, spans in busy.items()}
    optimizer = shares.pop("optimizer")
    shares |= {"communication": length(exposed) / wall, "optimizer": optimizer}
    shares["gaps"] = max(0.0, 1 - sum(shares.values()))
    result = {
        "steps": len(trace.steps),
        "step_seconds": wall / len(trace.steps) / 1e6,
        "timeline": trace.clock,
        "shares": {name: round(share, 4) for name, share in shares.items()},
        "communication_total": round(length(told) / wall, 4),
        "communication_parts": {
            name: round(length(intersect(union(spans), exposed)) / wall, 4)
            for name, spans in trace.parts.items()
        },
    }
    running = [intersect(spans, window) for spans in trace.replicas.values()]
    if any(running):
        # Each forward has threads of its own.
        forwards = intersect(trace.dp_forwards, window)
        result["replica_threads"] = {
            "count": round(sum(map(bool, running)) / len(forwards)),
            "at_once": round(
                sum(map(length, running)) / length(intersect(trace.applying, window)), 2
            ),
        }
    return result


def waits(traces: list[Trace]) -> list[float]:
    """Return what share of its steps each rank waited, in the backward, for the slowest.

    An all-reduce begins on a rank when that rank has come to it, and nothing is exchanged before
    the last one has. Of ranks on several hosts, each with a clock of its own, nothing is told.
    """
    if len({(trace.host, len(trace.reductions)) for trace in traces}) > 1:
        return []
    begun = [[moment + trace.base / 1e3 for moment in trace.reductions] for trace in traces]
    last, shares = list(map(max, zip(*begun, strict=True))), []
    for trace in traces:
        waited = [(b, e - trace.base / 1e3) for b, e in zip(trace.reductions, last, strict=True)]
        wall = trace.steps[-1][1] - trace.steps[0][0]
        shares.append(round(length(intersect(union(waited), trace.exposed)) / wall, 4))
    return shares


def read_trace(path: Path) -> Trace:
    """Read the trace of one rank.

    Raises:
        TraceError: it is not there, or not a trace of the profiler.
    """
    try:
        with gzip.open(path, "rt") as file:
            content = json.load(file)
        device = str(content.get("device", "cpu"))
        trace = sort_events(content["traceEvents"], int(device.partition(":")[2] or 0))
        trace.base = int(content.get("baseTimeNanoseconds", 0))
        trace.host = str(content.get("host_name", ""))
    except FileNotFoundError:
        raise TraceError(f"{path} does not exist: train with --profile") from None
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    except (
        *(OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, RecursionError),
    ) as error:
        raise TraceError(f"{path} is not a trace of --profile ({error})") from error
    return trace


def analyse(run_dir: Path) -> dict[str, Any]:
    """Return what the trace of rank 0 says of a run's steps.

    Raises:
        TraceError: there is no trace of use.
    """
    return share_out(read_trace(run_dir / "profile" / "rank0.json.gz"))


def read_ranks(run_dir: Path) -> list[Trace]:
    """Read the traces of all ranks that are there, in their order."""
    paths = (run_dir / "profile").glob("rank*.json.gz")
    return [read_trace(path) for path in sorted(paths, key=lambda path: (len(path.name), path))]
