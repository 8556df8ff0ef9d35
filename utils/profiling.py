"""Where the time of a step goes: a trace of some steps, and the share of each part in them."""

import gzip
import json
import os
from bisect import bisect_right
from collections import defaultdict
from contextlib import ContextDecorator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from utils.run_dir import write_json

SKIPPED_STEPS = 5  # in which caches fill; the same that images/s leaves out
WARMUP_STEPS = 2  # in which the profiler itself settles
PROFILED_STEPS = 10  # enough to average, and a trace of some 100 KB
LAST_STEP = SKIPPED_STEPS + WARMUP_STEPS + PROFILED_STEPS

# The names of the engine's marks and of PyTorch's own, by their beginnings.
PHASES = {
    "data": ("enumerate(DataLoader)", "prepare"),
    "forward": ("forward",),
    "backward": ("backward",),
    "optimizer": ("Optimizer.", "clip_grad_norm"),
}
# Of DP: on GPUs autograd functions, on a CPU the marks of utils/data_parallel.py.
PARTS = {
    "scatter": ("Scatter", "DataParallel.scatter"),
    "replicate": ("Broadcast", "DataParallel.replicate"),
    "gather": ("Gather", "DataParallel.gather"),
}
COLLECTIVES = ("c10d::", "gloo:", "nccl:")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Event = dict[str, Any]  # of a Chrome trace; times are microseconds
Spans = list[tuple[float, float]]  # begin and end; sorted and disjoint after ``union``

_is_recording = False


class mark(ContextDecorator):
    """Name in a trace what happens inside; a context and a decorator, not to be nested in itself.

    ``record_function`` alone takes 5 to 10 us when nothing records: 6 % of the smallest steps.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.record: record_function | None = None

    def __enter__(self) -> None:
        if _is_recording:
            self.record = record_function(self.name)
            self.record.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.record is not None:
            self.record.__exit__(*error)
            self.record = None


class StepProfiler:
    """Record a few steady optimizer steps of the first epoch, and say where their time went.

    Every rank leaves a trace; rank 0 also ``profile.json``. Run on CPUs (one process, DP's threads,
    DDP over gloo). The part for GPUs was written after the format of PyTorch's traces and is tested
    on traces made by hand: no GPU was there to run it.

    Args:
        run_dir: ``profile/rank<n>.json.gz`` and ``profile.json`` go there.
        device: of this process.
        rank: of this process.
    """

    def __init__(self, run_dir: Path, device: torch.device, rank: int) -> None:
        self.run_dir, self.device, self.rank = run_dir, device, rank
        self.profile: profile | None = None
        self.steps = 0
        self.is_finished = False
        self.report = ""

    def step(self, steps: int) -> None:
        """Note that this process has now made so many optimizer steps; called after each batch."""
        global _is_recording
        if self.is_finished or steps == self.steps or steps > LAST_STEP:
            return
        self.steps = steps
        if self.profile is None:
            self.profile = _build_profile(self.device)
            self.profile.start()
            _is_recording = True
        elif steps == LAST_STEP:
            self._stop()
        else:
            if steps == LAST_STEP - PROFILED_STEPS:
                self._synchronize()  # what is recorded begins and ends with an idle device
            self.profile.step()

    def finish(self, steps: int) -> None:
        """End the recording, if the epoch did not outlast it, and write what it gave."""
        if self.is_finished:
            return
        self.is_finished = True
        least = LAST_STEP - PROFILED_STEPS + 1
        if self.steps < LAST_STEP:
            self._stop()
        if self.profile is None or steps < least:
            self.report = f"profile: {steps} steps are too few, it takes {least} or more"
            return
        path = self.run_dir / "profile" / f"rank{self.rank}.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.profile.export_chrome_trace(str(path))
            if self.rank == 0:
                count = min(steps, LAST_STEP) - LAST_STEP + PROFILED_STEPS
                with gzip.open(path, "rt") as file:
                    result = analyse(json.load(file)["traceEvents"], count, self.device.index or 0)
                write_json(self.run_dir / "profile.json", result)
                self.report = describe(result, path)
        except (OSError, ValueError) as error:
            self.report = f"profile: {path} could not be written ({error})"
        self.profile = None  # some memory

    def _stop(self) -> None:
        global _is_recording
        _is_recording = False
        if self.profile is not None:
            self._synchronize()
            self.profile.stop()

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def _build_profile(device: torch.device) -> profile:
    activities = [ProfilerActivity.CPU]
    if device.type in ("cuda", "xpu"):
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    else:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it takes a missing GPU for an error
    options: dict[str, Any] = {}
    try:
        # Without it the profiler follows this thread alone, and DP's replicas have their own.
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        options["experimental_config"] = config
    except TypeError:  # an older torch
        pass
    # Started after the first step, which is one of those that are skipped.
    steps = schedule(
        skip_first=SKIPPED_STEPS - 1, wait=0, warmup=WARMUP_STEPS, active=PROFILED_STEPS, repeat=1
    )
    return profile(activities=activities, schedule=steps, **options)


def union(spans: Spans) -> Spans:
    """Return the moments that are in any of the spans."""
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


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


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def analyse(events: list[Event], steps: int, device_index: int = 0) -> dict[str, Any]:
    """Return the shares of a trace's first ``steps`` profiled steps; they add up to 1.

    Where a device ran kernels, the time is that of device ``device_index``: a kernel belongs to the
    phase in which the host launched it, from whatever thread, and communication is what NCCL and
    DP's copies do while nothing computes. Elsewhere the time is that of the main thread, and
    communication is when it is in a collective or in DP's copying, or waits for one: what runs
    beside other operations is hidden, and in ``communication_total`` only. The wait for a slower
    rank is part of it. ``gaps`` is the rest: Python, logging and metrics, and an idle device.
    """
    events = [e for e in events if e.get("ph") == "X" and e.get("cat") != "gpu_user_annotation"]
    marks = [e for e in events if e.get("cat") == "user_annotation"]
    windows = sorted(_span(e) for e in marks if e["name"].startswith("ProfilerStep#"))[:steps]
    if not windows:
        raise ValueError("the trace holds no step")
    main = next(e["tid"] for e in marks if e["name"].startswith("ProfilerStep#"))
    window = [(windows[0][0], windows[-1][1])]
    on_main = [e for e in events if e["tid"] == main and e.get("cat") not in ON_DEVICE]
    phases = {
        phase: union([_span(e) for e in on_main if e["name"].startswith(names)])
        for phase, names in PHASES.items()
    }
    device_events = [
        e
        for e in events
        if e.get("cat") in ON_DEVICE and e["args"].get("device", 0) == device_index
    ]
    if device_events:
        busy, parts = _sort_kernels(device_events, events, phases)
    else:
        busy, parts = _sort_operations(on_main, events, phases)

    wall = length(window)
    computing = union([span for spans in busy.values() for span in spans])
    told = intersect(union([span for spans in parts.values() for span in spans]), window)
    exposed = subtract(told, computing)
    shares = {phase: length(intersect(busy[phase], window)) / wall for phase in busy}
    optimizer = shares.pop("optimizer")
    shares |= {"communication": length(exposed) / wall, "optimizer": optimizer}
    shares["gaps"] = max(0.0, 1 - sum(shares.values()))
    result = {
        "steps": len(windows),
        "step_seconds": wall / len(windows) / 1e6,
        "timeline": "device" if device_events else "main thread",
        "shares": {name: round(share, 4) for name, share in shares.items()},
        "communication_total": round(length(told) / wall, 4),
        "communication_parts": {
            name: round(length(intersect(union(spans), exposed)) / wall, 4)
            for name, spans in parts.items()
            if spans
        },
    }
    forwards = [_span(e) for e in on_main if e["name"] == "DataParallel.forward"]
    threads = _count_threads(events, main, intersect(union(forwards), window), told)
    if threads["count"]:  # an older torch records none
        result["replica_threads"] = threads
    return result


def _span(event: Event) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _is_within(moment: float, spans: Spans) -> bool:
    index = bisect_right(spans, (moment, float("inf"))) - 1
    return index >= 0 and moment < spans[index][1]


def _name_at(moment: float, named: dict[str, Spans]) -> str | None:
    return next((name for name, spans in named.items() if _is_within(moment, spans)), None)


def _part(name: str) -> str | None:
    """Return the part of DP's traffic that an event of this name is, or belongs to."""
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    if name.startswith(tuple(f"{n}Backward" for n in ("Scatter", "Broadcast", "Gather"))):
        return "reduce"
    return next((part for part, names in PARTS.items() if name in names), None)


def _sort_operations(
    on_main: list[Event], events: list[Event], phases: dict[str, Spans]
) -> tuple[dict[str, Spans], dict[str, Spans]]:
    """Return when the main thread computes, by phase, and when something travels, by part."""
    parts: dict[str, Spans] = {}
    blocking, operations = [], []
    for event in on_main:
        part = _part(event["name"])
        if part:
            parts.setdefault(part, []).append(_span(event))
        if part or event["name"].startswith(COLLECTIVES):
            blocking.append(_span(event))
        elif event.get("cat") == "cpu_op":
            operations.append(_span(event))
    for event in events:  # gloo's are on threads of their own
        if event["name"].startswith(COLLECTIVES):
            inside = _is_within(event["ts"], phases["backward"])
            parts.setdefault("in_backward" if inside else "elsewhere", []).append(_span(event))
    travelling = union([span for spans in parts.values() for span in spans])
    waiting = union(blocking + subtract(travelling, union(operations)))
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
            copying[event["tid"]][part] = union([*spans, _span(event)])
    busy: dict[str, Spans] = {phase: [] for phase in phases}
    parts: dict[str, Spans] = {}
    for kernel in kernels:
        launch = launches.get(kernel["args"].get("correlation"), kernel)
        phase = _name_at(launch["ts"], phases)
        part = _name_at(launch["ts"], copying[launch["tid"]])
        if part is None and "nccl" in kernel["name"].lower():
            part = "in_backward" if phase == "backward" else "elsewhere"
        if part:
            parts.setdefault(part, []).append(_span(kernel))
        elif phase:
            busy[phase].append(_span(kernel))
    taken: Spans = []  # streams may compute for two phases at once: no moment counts twice
    for phase in busy:
        busy[phase] = subtract(union(busy[phase]), taken)
        taken = union(taken + busy[phase])
    return busy, parts


def _count_threads(
    events: list[Event], main: Any, forwards: Spans, copies: Spans
) -> dict[str, float]:
    """Return how many threads DP's replicas have, and how many run an operation at once."""
    applying = subtract(forwards, copies)
    threads: dict[Any, Spans] = {}
    for event in events:
        if event.get("cat") == "cpu_op" and event["tid"] != main:
            threads.setdefault(event["tid"], []).append(_span(event))
    running = [length(intersect(union(spans), applying)) for spans in threads.values()]
    # Each forward has threads of its own.
    count = round(sum(map(bool, running)) / max(1, len(forwards)))
    return {"count": count, "at_once": round(sum(running) / max(1e-9, length(applying)), 2)}


def describe(result: dict[str, Any], path: Path) -> str:
    """Return the shares as a table for the console."""
    notes = {}
    if result["communication_parts"]:
        parts = result["communication_parts"].items()
        notes["communication"] = ", ".join(f"{p.replace('_', ' ')} {s:.1%}" for p, s in parts)
        hidden = result["communication_total"] - result["shares"]["communication"]
        if hidden >= 0.0005:
            notes["communication"] += f"; hidden {hidden:.1%} more"
    if "replica_threads" in result:
        count, at_once = result["replica_threads"].values()
        notes["forward"] = f"{at_once:.1f} of {count} threads at once"
    few = "" if result["steps"] == PROFILED_STEPS else f" (the run had no {PROFILED_STEPS} to give)"
    lines = [
        f"profile of {result['steps']} steps{few}, {result['step_seconds'] * 1e3:.2f} ms each,"
        f" on the {result['timeline']}:"
    ]
    for name, share in result["shares"].items():
        lines.append(f"  {name:<13} {share:>6.1%}  {notes.get(name, '')}".rstrip())
    return "\n".join([*lines, f"  trace for ui.perfetto.dev: {path}"])
