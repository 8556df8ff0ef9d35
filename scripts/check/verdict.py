"""Compare what the ranks told, and say what is wrong, what could not be judged, what was not seen.

findings.txt lists what can be found. A rank tells some findings by itself. Others are what several
ranks do at the same time, or a difference between them.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

Facts = dict[str, Any]  # of an event, or of all that was told in a run
Found = Iterator[tuple[str, Facts]]  # a kind, and the facts of its line in findings.txt
LEVELS = ["WRONG", "WARN", "NOTE"]
LESSONS = Path(__file__).resolve().parents[1] / "lessons"
NO_GPU = re.compile("NVIDIA|CUDA|nvcc|Triton|cudnn|pretended")
TWO = "two forwards or backwards"
# Why gradients differ, by the calls since the step before: forwards are F, under no_sync f, past
# the wrapper P, and backwards B, under no_sync b. The verdict names the line of the first match.
CAUSES = {
    "[Ff][^Bb]*F[^Bb]*B": TWO,
    "P": "past the wrapper",
    "f[^FP]*$": "no_sync at the step",
    "B[^Ff]*B": TWO,
}
ERRORS = {  # what an error says, and the finding that explains it
    "Expected to have finished reduction in the prior iteration": "unused parameters",
    "invalid device ordinal": "device by global rank",
}
# Each of these findings explains those behind it, which are not said then.
EXPLAINS = {
    "unused parameters": ("gradients differ",),
    "gradients differ": ("other weights",),
    "nothing is averaged": ("other weights",),
    "equal shares": ("equal random numbers",),
}


@dataclass
class Finding:
    """A row of findings.txt, with what was seen."""

    level: str
    kind: str
    lesson: str
    what: str
    do: str
    line: str = ""

    def __str__(self) -> str:
        lesson = LESSONS / f"{self.lesson}.py"
        see = f" (python {lesson})" if self.lesson and lesson.exists() else ""
        what = f"{self.level:5}  {self.line}  {self.kind}: {self.what}"
        return f"{what}\n       do: {self.do}{see}"


ROWS = Path(__file__).with_name("findings.txt").read_text().splitlines()[1:]
TABLE = {row.kind: row for row in (Finding(*re.split(r" *\| *| -> ", row)) for row in ROWS)}


def listed() -> str:
    """Return all that can be found, as --list prints it."""
    return "\n".join(f"{row.level:5}  {row.kind}\n       do: {row.do}" for row in TABLE.values())


@dataclass
class Verdict:
    """What the check says of a script."""

    script: str
    ranks: int
    nodes: int
    seconds: float
    findings: list[Finding]
    not_seen: list[str]
    could_not: str
    status: int

    def __str__(self) -> str:
        hosts = f" on {self.nodes} hosts" if self.nodes > 1 else ""
        lines = [f"{self.script}: {self.ranks} ranks{hosts}, {self.seconds:.0f} s"]
        lines += map(str, self.findings)
        if self.could_not:
            until = ". Until then the above was seen" if self.findings else ""
            lines.append(f"could not run your script: {self.could_not}{until}")
        elif all(finding.level == "NOTE" for finding in self.findings):
            lines.append("OK     nothing wrong was seen")
        return "\n".join(lines + [f"not seen: {item}" for item in self.not_seen])


def judge(report: Facts) -> Verdict:
    """Return the verdict on what the ranks of a run told."""
    found, by_kind = [], dict[str, Finding]()
    is_ddp = events_of(report, "group", "device by global rank")
    for compare in COMPARISONS if is_ddp else ():
        for kind, facts in compare(report):
            row = TABLE[kind]
            level, what = facts.get("level", row.level), row.what.format_map(facts)
            found.append(replace(row, level=level, what=what, line=facts["line"]))
    for finding in sorted(found, key=lambda finding: LEVELS.index(finding.level)):
        by_kind.setdefault(finding.kind, finding)
    for kind, explained in EXPLAINS.items():
        for other in explained if kind in by_kind else ():
            by_kind.pop(other, None)
    if "equal ranks" in by_kind:  # all that follows is mixed up
        by_kind = {"equal ranks": by_kind["equal ranks"]}
    could_not = _could_not(report, set(by_kind))
    is_wrong = any(finding.level == "WRONG" for finding in by_kind.values())
    status = 1 if is_wrong else 3 if could_not else 0
    said = list(by_kind.values()), list(_not_seen(report)), could_not, status
    return Verdict(report["script"], report["world"], report["nodes"], report["seconds"], *said)


def _could_not(report: Facts, kinds: set[str]) -> str:
    """Return why the script could not be run to its end, or nothing."""
    for how in ("error", "not judged", "again", "idle", "waited", "time"):
        for rank, end in report["ends"].items():
            message = end.get("message", "").strip()
            explained = how == "waited" or any(t in message and ERRORS[t] in kinds for t in ERRORS)
            if end["how"] != how or (kinds and explained):
                continue
            if how == "idle":
                return f"rank {rank} waited in vain at {end['line']}, but not for another rank"
            if how == "time":
                return f"not done after {report['limit']:.0f} s (--limit)"
            said = (message.splitlines() or [""])[0][:300]
            if how in ("not judged", "again"):
                return said
            real = " (it needs a real GPU)" if NO_GPU.search(message) else ""
            last = f", whose last line was: {end['output']}"
            return f"{said}{real}, on rank {rank}{' at ' + end['line'] if end['line'] else last}"
    if not events_of(report, "group"):
        return "it makes no process group, and a script of a single process is not judged"
    is_wrapped, has_step = events_of(report, "wrapped"), events_of(report, "step")
    if not is_wrapped and not (has_step and (kinds or _averages_by_hand(report))):
        return "it wraps no model in DistributedDataParallel, which is what is judged here"
    if has_step:
        return ""
    files = dict.fromkeys(event["path"] for event in events_of(report, "load"))
    again = f". It loads {', '.join(files)}: if that is a finished run, give it another folder"
    return f"it made no step of an optimizer in two epochs{again if files else ''}"


def _not_seen(report: Facts) -> Iterator[str]:
    yield from dict.fromkeys(event["what"] for event in events_of(report, "left out"))
    if report["left_out"]:
        yield f"a resume: {', '.join(report['left_out'])} is of a finished run, and was left out"
    uses = {item["use"] for item in events_of(report, "pass")}
    if "evaluation" not in uses:
        yield "an evaluation: no forward without gradients had batches of a DataLoader"
    if "training" not in uses:
        yield "training data: no step had batches of a DataLoader"
    if not events_of(report, "saved"):
        yield "a checkpoint: torch.save was not called"
    yield from dict.fromkeys(e["message"] for e in report["ends"].values() if e["how"] == "cut")
    if paths := list(dict.fromkeys(event["what"] for event in events_of(report, "redirected"))):
        yield f"writing to {', '.join(paths[:3])}: it went to a copy, which is removed"


def events_of(report: Facts, *kinds: str) -> list[Facts]:
    return [event for event in report["events"] if event["kind"] in kinds]


def of_each(report: Facts, kind: str) -> list[list[Facts]]:
    """Return the events of a kind that each rank told, one list for a rank."""
    events = events_of(report, kind)
    return [[e for e in events if e["rank"] == rank] for rank in range(report["world"])]


def conflicts(report: Facts) -> Found:
    """Find ranks that wait for each other for ever, and ranks of one number."""
    groups = events_of(report, "group")[: report["world"]]
    if len(groups) == report["world"] > len({event["given"] for event in groups}):
        parts = [f"rank={event['given']} at {event['line']}" for event in groups]
        yield "equal ranks", {**groups[0], "what": f"the processes give {', '.join(parts)}"}
    ends = sorted(report["ends"].items())
    waits = [f"rank {rank} waits at {end['line']}" for rank, end in ends if end["how"] == "waited"]
    gone = [f"rank {rank} has ended" for rank, end in ends if end["how"] == "ended"]
    if waits and len(waits + gone) == len(ends):
        line = next(end["line"] for _, end in ends if end["how"] == "waited")
        kind = "a rank stops alone" if gone else "other collectives"
        yield kind, {"line": line, "what": "; ".join(waits + gone)}


def by_ranks(report: Facts) -> Found:
    """Find what a rank told itself, and what ranks did at the same time that only one may do."""
    alike = defaultdict(list)
    for event in events_of(report, *TABLE):
        if "same" not in event:
            yield event["kind"], event
        else:
            alike[event["kind"], str(event["same"]), event["clock"]].append(event)
    for (kind, *_), events in alike.items():
        ranks = sorted({event["rank"] for event in events})
        facts = {**events[0], "ranks": " and ".join(map(str, ranks)), "disk": ""}
        if len({event["node"] for event in events}) == len(ranks) and kind == "every rank saves":
            # Local rank 0 of each host may write to a disk of its own.
            facts |= {"level": "WARN", "disk": ", which is one file if the hosts share a disk"}
        if len(ranks) > 1:
            yield kind, facts


def learning(report: Facts) -> Found:
    """Find no_sync that does nothing, and schedules that are longer than the training."""
    steps = events_of(report, "step")
    values = [value for step in steps for value in step["values"] if value["belongs"] == "averaged"]
    for calls, lines in (value["log"] for value in values):
        if found := re.search("F[^Bb]*(b)", calls):
            yield "no_sync around the backward", {"line": lines[found.start(1)]}
    has_ended = all(end["how"] == "ended" for end in report["ends"].values())
    trainings = [item for item in of_each(report, "pass")[0] if item["use"] == "training"]
    reads = sum(item["reads"] for item in trainings)
    for event in of_each(report, "schedule")[0] if has_ended else ():
        # It took a step after each batch, and the batches of all ranks would have ended it.
        is_of_one = abs(event["planned"] - report["world"] * event["taken"]) <= len(trainings)
        if is_of_one and event["taken"] >= reads > 2 * len(trainings):
            yield "schedule of one device", {**event, "world": report["world"]}


def _averages_by_hand(report: Facts) -> bool:
    """Whether ranks combined as much as the largest parameter: gradients or weights.

    What they send between two may be that as well, or a part of the model's computation.
    """
    values = [value for step in events_of(report, "step") for value in step["values"]]
    sizes = [event["elements"] for event in events_of(report, "combined")]
    is_large = max(sizes, default=0) >= max((value["elements"] for value in values), default=0) > 0
    return is_large or bool(events_of(report, "sent between two"))


def divergence(report: Facts) -> Found:
    """Find the first step of each optimizer at which ranks differ, and why."""
    loading = sorted({event["rank"] for event in events_of(report, "load")})
    alone = 0 < len(loading) < report["world"]
    hint = f" (only rank {loading[0]} loads a checkpoint)" if alone else ""
    sizes = {event["elements"] for event in events_of(report, "combined")}
    by_turn = defaultdict(list)
    for step in events_of(report, "step"):
        by_turn[step["optimizer"], step["turn"]].append(step)
    done = set()
    for (optimizer, _), steps in sorted(by_turn.items()):
        averaged = [value for value in steps[0]["values"] if value["belongs"] == "averaged"]
        unused = [value["name"] for value in averaged if value["grad"] is None]
        for values in zip(*(step["values"] for step in steps), strict=False):
            together = [
                (step, value)
                for step, value in zip(steps, values, strict=True)
                if step["rank"] in value["ranks"] == values[0]["ranks"]
            ]
            kind, line, sums = _cause(together)
            first = together[0][1] if together else {}
            is_same = len({value["name"] for _, value in together}) == 1
            if not kind or not is_same or optimizer in done:
                continue
            if not steps[0]["wrapped"] and kind == "gradients differ":
                if _averages_by_hand(report):
                    break
                if not sizes & {value["elements"] for value in steps[0]["values"]} - {1}:
                    kind = "nothing is averaged"
            kind = "unused parameters" if kind == "gradients differ" and unused else kind
            facts = {"line": line, "name": first["name"], "unused": ", ".join(unused[:4])}
            facts["sums"] = [pair and float(f"{pair[0]:.6g}") for pair in sums]
            what = "the gradients of {name} add up to {sums} on the ranks".format(**facts)
            rates = [step["rates"] for step, _ in together]
            yield kind, {**facts, "what": what, "rates": rates, "hint": hint}
            if first["belongs"] == "averaged" or not steps[0]["wrapped"]:
                done.add(optimizer)


def _cause(together: list[tuple[Facts, Facts]]) -> tuple[str, str, list[Any]]:
    """Return why a parameter differs at a step of several ranks, where, and what differs."""
    steps, values = [step for step, _ in together], [value for _, value in together]
    if len(values) < 2:
        return "", "", []
    belongs, line = values[0]["belongs"], steps[0]["line"]
    before, grads, after = ([value[at] for value in values] for at in ("before", "grad", "after"))
    logs = [value["log"] for value in values]
    if _differ(before, 1e-9) and belongs == "averaged":
        loads = [lines[calls.index("L")] for calls, lines in logs if "L" in calls]
        return "loaded or changed after wrapping", [*loads, line][0], before
    if _differ(grads, 1e-6):
        for calls, lines in logs if belongs == "averaged" else ():
            for pattern, cause in CAUSES.items():
                if found := re.search(pattern, calls):
                    return cause, lines[found.start()], grads
        return "gradients differ" if belongs == "averaged" else belongs, line, grads
    if _differ(before, 1e-9) and belongs == "gradients differ":
        return "other weights", line, before
    is_new = _differ(after, 1e-9) and not _differ(before, 1e-9)
    return "other learning rates or settings" if is_new else "", line, after


def _differ(values: list[Any], tolerance: float) -> bool:
    """Whether sums differ. Those that are not a number are equal to each other."""
    if None in values:
        return any(value is not None for value in values)
    pairs = [(value[part], values[0][part]) for value in values[1:] for part in (0, 1)]
    return not all(
        a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance * max(abs(a), abs(b))
        for a, b in pairs
    )


def _passes(report: Facts, use: str) -> Iterator[list[Facts]]:
    """Yield the passes over the loader of the same lines that all ranks made for the same use."""
    by_loader = defaultdict(list)
    for event in events_of(report, "pass"):
        by_loader[event["key"], event["number"]].append(event)
    for items in by_loader.values():
        if len(items) == report["world"] and all(item["use"] == use for item in items):
            yield items


def shares(report: Facts) -> Found:
    """Find ranks that train on equal samples, on other data, or on other numbers of batches."""
    for items in _passes(report, "training"):
        first, world = items[0], report["world"]
        batches = [item["batches"] for item in items]
        if first["number"] and len({item["begun"] for item in items}) > 1:  # not the same epoch
            continue
        if None not in batches and len(set(batches)) > 1:
            yield "unequal batches", {**first, "batches": batches}
        # Only where a permutation is shared out: no sampler that draws with replacement.
        drawn = [item[of] for item in items for of in ("indices", "samples")]
        permuted = all(each and len(set(map(str, each))) == len(each) for each in drawn)
        contents = [item["content"] for item in items]
        if not permuted or len({item["length"] for item in items}) > 1 or not all(contents):
            continue
        equal = sum(len(set(column)) == 1 for column in zip(*contents, strict=True))
        common = set(first["indices"]).intersection(*(item["indices"] for item in items))
        if equal < len(contents[0]) and len(common) <= world:
            # The same data, split in another way, leak from one part into the other.
            is_split = len({str(sample[0]) for item in items for sample in item["samples"]}) == 1
            facts = {"equal": equal, "count": len(contents[0])}
            yield "other data", {**first, **facts, "level": "WRONG" if is_split else "WARN"}
        elif not first["divided"]:  # a rank may use its part of a batch that all have drawn
            for one, other in combinations(items, 2):
                both = len({*map(str, one["samples"])} & {*map(str, other["samples"])})
                if both > max(world, len(one["samples"]) / 4):
                    what = f"ranks {one['rank']} and {other['rank']} draw {both} equal samples"
                    what += f" of {len(one['samples'])} each"
                    yield "equal shares", {**first, "what": what}


def inputs(report: Facts) -> Found:
    """Find ranks that train on the same batches, which do not come from a loader."""
    rows = list(zip(*of_each(report, "input"), strict=False))
    if len(rows) > 1 and all(e["digests"] == row[0]["digests"] for row in rows for e in row):
        what = f"all ranks train on the same {len(rows)} batches"
        yield "equal shares", {**rows[0][0], "level": "WARN", "what": what}


def evaluation(report: Facts) -> Found:
    """Find evaluations of which each rank makes a share, and results that are not of the whole."""
    for items in _passes(report, "evaluation"):
        counts = [len(item["samples"]) for item in items]
        is_shared = len({str(sorted(item["samples"])) for item in items}) > 1
        combined = _combined(report, items[0], items[0]["begun"])
        if items[0]["pads"]:
            level = "WARN" if combined and is_shared else "NOTE"
            yield "padded evaluation", {**items[0], "level": level}
        if not is_shared or combined is None or 0 in counts or not items[0]["complete"]:
            continue
        if not combined:
            yield "evaluates a share", {**items[0], "counts": " + ".join(map(str, counts))}
            continue
        models = zip(*(item["buffers"] or () for item in items), strict=False)
        if any(_differ(list(values), 1e-6) for values in models):
            yield "other statistics", items[0]
        # Only what was combined after the pass: in it, batches may have been combined.
        ends = [_combined(report, item, item["clock"] - 1) or [] for item in items]
        if _is_mean_of_means(ends, counts):
            yield "mean of means", {**items[0], "counts": " and ".join(map(str, counts))}


def _combined(report: Facts, item: Facts, since: int) -> list[Facts] | None:
    """Return what combined an evaluation's results, after the given number of collectives.

    None if the training neither went on nor ended after it, as in a run that was cut.
    """
    events = [event for event in report["events"] if event["rank"] == item["rank"]]
    rest = events[events.index(item) :]
    steps = [event["clock"] for event in rest if event["kind"] == "step"]
    if not steps and report["ends"][item["rank"]]["how"] != "ended":
        return None
    until = min(steps, default=math.inf)
    combined = [event for event in events if event["kind"] == "combined"]
    return [event for event in combined if since < event["clock"] <= until]


def _is_mean_of_means(ends: list[list[Facts]], counts: list[int]) -> bool:
    """Whether ranks with unequal shares average their results, and do not combine the counts."""
    values = [[value for event in end for value in event["values"]] for end in ends]
    is_mean = any(event["mean"] for end in ends for event in end)
    pairs = list(zip(counts, values, strict=True))
    are_parts = all(any(_is_part(value, count) for value in own) for count, own in pairs)
    has_counts = all(count in own for count, own in pairs)
    return len(set(counts)) > 1 and not has_counts and (is_mean or are_parts)


def _is_part(value: float, count: int) -> bool:
    """Whether a value is a share of ``count`` samples, as 5 / 17 or 29.4 percent."""
    products = value * count, value * count / 100
    is_whole = abs(value - round(value)) < 1e-4
    return not is_whole and any(abs(number - round(number)) < 1e-4 for number in products)


def through(report: Facts) -> Found:
    """Find lines at which one rank alone calls the wrapper without gradients."""
    ranks = defaultdict(set)
    for event in events_of(report, "through"):
        ranks[event["line"]].add(event["rank"])
    for event in events_of(report, "through"):
        if len(ranks[event["line"]]) == 1:
            yield "evaluates through the wrapper", event


COMPARISONS = (conflicts, by_ranks, divergence, learning, shares, inputs, evaluation, through)
