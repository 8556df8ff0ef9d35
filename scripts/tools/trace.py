"""Show where the time of a step went, from the traces that --profile left in a run directory.

    python scripts/tools/trace.py runs/ddp-20260101-120000

The tool prints the share of each phase in the profiled steps of rank 0.
"""

import argparse
import gzip
import json
import sys
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import trial

from utils.errors import UsageError

# Phases by the beginnings of PyTorch's own names. The scripts themselves name "forward".
PHASES = {
    "data": ("enumerate(DataLoader)",),
    "forward": (
        *("forward", "DataParallel.forward", "DistributedDataParallel.forward"),
        *("TorchDynamo Cache Lookup", "Torch-Compiled Region"),
    ),
    "backward": ("autograd::engine::evaluate_function",),
    "optimizer": ("Optimizer.",),
}
# What an optimizer's step begins with, if gradients are unscaled or clipped.
CLIPPING = ("aten::_amp_foreach_non_finite", "aten::_foreach_norm", "aten::linalg_vector_norm")
# Of DP: on GPUs autograd functions, on a CPU the names that utils/data_parallel.py gives.
PARTS = {
    "scatter": ("Scatter", "DataParallel.scatter"),
    "replicate": ("Broadcast", "DataParallel.replicate"),
    "gather": ("Gather", "DataParallel.gather"),
}
REDUCING = tuple(f"{name}Backward" for name in ("Scatter", "Broadcast", "Gather"))
UNNAMED = {("data", "forward"), ("forward", "backward")}  # the first has the time between
COLLECTIVES = ("c10d::", "gloo:", "nccl:")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Event = dict[str, Any]  # of a Chrome trace; times are microseconds
Spans = list[tuple[float, float]]  # begin and end; sorted and disjoint after ``union``


@dataclass
class Trace:
    """What one process did when in its profiled steps, in microseconds since ``base``.

    Attributes:
        steps: the whole optimizer steps.
        clock: whose times these are: ``main thread``, or ``device`` if kernels ran.
        busy: when something was computed for a phase. Gaps are in no phase.
        parts: when data moved between devices or ranks, by the part of the step.
        operations: when each operation of PyTorch began, those that others call included.
        kernels: when each kernel of the device began.
    """

    steps: Spans
    clock: str
    busy: dict[str, Spans]
    parts: dict[str, Spans]
    operations: list[float]
    kernels: list[float]

    @property
    def exposed(self) -> Spans:
        """When data moved while nothing was computed."""
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
    """Return the moments of ``spans`` that are not in ``others``. Both come from ``union``."""
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
    """Return the spans without ``taken`` and earlier names, so that no moment counts twice."""
    result = {}
    for name, spans in named.items():
        result[name] = subtract(union(spans), taken)
        taken = union(taken + result[name])
    return result


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def span_of(event: Event) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def name_at(moment: float, named: dict[str, Spans]) -> str | None:
    """Return the name whose span contains the moment."""
    for name, spans in named.items():
        index = bisect_right(spans, (moment, float("inf"))) - 1
        if index >= 0 and moment < spans[index][1]:
            return name
    return None


def find_phases(events: list[Event], main: Any) -> dict[str, Spans]:
    """Return when the main thread was in which phase.

    Some phases have no name, but a place. Between the loader and the forward the batch is moved and
    transformed. Between the forward and the first operation of autograd comes the loss.
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
        return "backward"  # the backward is not over before the gradients are there
    return "optimizer" if before == "backward" and is_main and name.startswith(CLIPPING) else None


def sort_events(events: list[Event], device_index: int = 0) -> Trace:
    """Sort the events of a trace into what the main thread, or device ``device_index``, did.

    A kernel belongs to the phase in which the host launched it.
    """
    events = [e for e in events if e.get("ph") == "X" and e.get("cat") != "gpu_user_annotation"]
    on_host = [e for e in events if e.get("cat") not in ON_DEVICE]
    numbered = [e for e in events if e["name"].startswith("ProfilerStep#")]
    if not numbered:
        raise UsageError("the trace holds no step")
    main = numbered[0]["tid"]
    on_main = [e for e in on_host if e["tid"] == main]
    ends = [e["ts"] for e in on_main if e["name"].startswith("Optimizer.step")]
    # After an epoch's last batch a step begins, which gets no update.
    steps = [
        (begin, end)
        for begin, end in sorted(map(span_of, numbered))
        if any(begin <= moment < end for moment in ends)
    ]
    if not steps:
        raise UsageError("the trace holds no whole step")
    phases = find_phases(on_host, main)
    on_device = [e for e in events if e.get("cat") in ON_DEVICE]
    kernels = [e for e in on_device if e["args"].get("device", 0) == device_index]
    operations = [e["ts"] for e in on_host if e["name"].startswith("aten::")]
    if kernels:
        launched = [e["ts"] for e in kernels if e["cat"] == "kernel"]
        sorted_kernels = _sort_kernels(kernels, on_host, phases)
        return Trace(steps, "device", *sorted_kernels, operations, launched)
    return Trace(steps, "main thread", *_sort_operations(on_main, events, phases), operations, [])


def _part(name: str) -> str | None:
    """Return the part of DP's traffic that an event of this name is, or belongs to."""
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    if name.startswith(REDUCING):
        return "reduce"
    return next((part for part, names in PARTS.items() if name in names), None)


def _sort_operations(
    on_main: list[Event], events: list[Event], phases: dict[str, Spans]
) -> tuple[dict[str, Spans], dict[str, Spans]]:
    """Return when the main thread computes, by phase, and when data moves, by part.

    The main thread waits if it is in a collective or copies for DP. It also waits if it runs no
    operation while a thread of gloo is in a collective.
    """
    parts: dict[str, Spans] = defaultdict(list)
    blocking, operations = [], []
    for event in on_main:
        if part := _part(event["name"]):
            parts[part].append(span_of(event))
        if part or event["name"].startswith(COLLECTIVES):
            blocking.append(span_of(event))
        elif event.get("cat") == "cpu_op":
            operations.append(span_of(event))
    for event in events:
        if event["name"].startswith(COLLECTIVES):
            inside = name_at(event["ts"], {"backward": phases["backward"]})
            parts["in_backward" if inside else "elsewhere"].append(span_of(event))
    waiting = union(blocking + subtract(joined(parts), union(operations)))
    return {phase: subtract(spans, waiting) for phase, spans in phases.items()}, dict(parts)


def _sort_kernels(
    kernels: list[Event], on_host: list[Event], phases: dict[str, Spans]
) -> tuple[dict[str, Spans], dict[str, Spans]]:
    """Do the same for a device. A launch says to which phase and part a kernel belongs."""
    launches = {e["args"]["correlation"]: e for e in on_host if "correlation" in e.get("args", {})}
    copying: dict[Any, dict[str, Spans]] = defaultdict(dict)  # when a thread was in a part of DP
    for event in on_host:
        if part := _part(event["name"]):
            spans = copying[event["tid"]].get(part, [])
            copying[event["tid"]][part] = union([*spans, span_of(event)])
    busy: dict[str, Spans] = {phase: [] for phase in phases}
    parts: dict[str, Spans] = defaultdict(list)
    for kernel in kernels:
        launch = launches.get(kernel["args"].get("correlation"), kernel)
        phase = name_at(launch["ts"], phases)
        part = name_at(launch["ts"], copying[launch["tid"]])
        if part is None and "nccl" in kernel["name"].lower():
            part = "in_backward" if phase == "backward" else "elsewhere"
        if part:
            parts[part].append(span_of(kernel))
        elif phase:
            busy[phase].append(span_of(kernel))
    return disjoint(busy, []), dict(parts)  # streams may compute for two phases at once


def share_out(trace: Trace) -> dict[str, Any]:
    """Return the shares of the phases in the profiled steps, which add up to 1.

    Communication is the time in which the process waits for it, a slower rank included.
    Communication beside other operations is hidden, and counts in ``communication_total`` only.
    ``gaps`` is the rest: Python, logging and metrics, and an idle device.
    """
    window = [(trace.steps[0][0], trace.steps[-1][1])]
    wall = length(window)

    def share(spans: Spans) -> float:
        return length(intersect(spans, window)) / wall

    def per_step(moments: list[float]) -> int:
        begin, end = window[0]
        return round(sum(begin <= moment < end for moment in moments) / len(trace.steps))

    busy = disjoint(trace.busy, trace.exposed)
    shares = {phase: share(spans) for phase, spans in busy.items()}
    optimizer = shares.pop("optimizer")
    shares |= {"communication": share(trace.exposed), "optimizer": optimizer}
    shares["gaps"] = max(0.0, 1 - sum(shares.values()))
    parts = {
        name: round(share(intersect(union(spans), trace.exposed)), 4)
        for name, spans in trace.parts.items()
    }
    return {
        "steps": len(trace.steps),
        "step_seconds": wall / len(trace.steps) / 1e6,
        "timeline": trace.clock,
        "operations": per_step(trace.operations),
        "kernels": per_step(trace.kernels),
        "shares": {name: round(value, 4) for name, value in shares.items()},
        "communication_total": round(share(joined(trace.parts)), 4),
        "communication_parts": parts,
    }


def read_trace(path: Path) -> Trace:
    """Read the trace of one rank."""
    try:
        with gzip.open(path, "rt") as file:
            content = json.load(file)
        device = str(content.get("device", "cpu"))
        return sort_events(content["traceEvents"], int(device.partition(":")[2] or 0))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: train with --profile") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a trace of --profile ({error})") from error


def describe(result: dict[str, Any]) -> str:
    """Return the shares as a table for the console."""
    parts, shares = result["communication_parts"].items(), result["shares"]
    note = ", ".join(f"{part.replace('_', ' ')} {share:.1%}" for part, share in parts)
    hidden = result["communication_total"] - shares["communication"]
    milliseconds, clock = 1e3 * result["step_seconds"], result["timeline"]
    if hidden >= 0.0005:
        note += f"; hidden {hidden:.1%} more"
    elif clock == "device" and "in_backward" in result["communication_parts"]:
        note += "; hidden 0.0%, so the GPU computes nothing while gradients travel"
    lines = [f"profile of {result['steps']} steps, {milliseconds:.2f} ms each, on the {clock}:"]
    for name, share in shares.items():
        told = note if name == "communication" else ""
        lines.append(f"  {name:<13} {share:>6.1%}  {told}".rstrip())
    kernels = f"; {result['kernels']:,} kernels on the GPU" if clock == "device" else ""
    lines.append(f"  {result['operations']:,} operations of PyTorch in a step{kernels}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    for run_dir in args.run_dirs:
        trace = read_trace(run_dir / "profile" / "rank0.json.gz")
        print(f"{run_dir}: {describe(share_out(trace))}")
        print(f"  traces for ui.perfetto.dev: {run_dir / 'profile'}")
    return 0


def main() -> int:
    parser = trial.build_parser("trace.py", __doc__)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    return trial.start(run, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
