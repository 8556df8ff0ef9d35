"""Compare what the ranks told, and say what is wrong, what could not be judged, what was not seen.

findings.txt lists what can be found. A rank tells some findings by itself. Others are what several
ranks do at the same time, or a difference between them.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, product, takewhile
from pathlib import Path
from typing import Any

Facts = dict[str, Any]  # of an event, or of all that was told in a run
Found = Iterator[tuple[str, Facts]]  # a kind, and the facts of its line in findings.txt
LEVELS = ["WRONG", "WARN", "NOTE"]
LESSONS = Path(__file__).resolve().parents[1] / "lessons"
NO_GPU = re.compile("NVIDIA|CUDA|nvcc|Triton|cudnn|pretended")
NO_ATTRIBUTE = r"'DistributedDataParallel' object has no attribute '(\w+)'"
WHOLE = {"ended", "cut"}  # how a rank ends whose run was judged
METRICS = 8  # of an evaluation at most; more numbers are the results of samples
PART = {"elements": 0, "values": [], "mean": False, "reduces": False, "to_one": True, "lines": []}
TWO = "two forwards or backwards"
# Why gradients differ, by the calls since the step before: forwards are F, under no_sync f, past
# the wrapper P, and backwards B, under no_sync b. The verdict names the line of the first match.
CAUSES = {
    "[Ff][^Bb]*F[^Bb]*B": TWO,
    "P": "past the wrapper",
    "f[^FP]*$": "no_sync at the step",
    "B[^Ff]*B": TWO,
}


@dataclass
class Finding:
    """A row of findings.txt, with what was seen."""

    level: str
    kind: str
    lesson: str
    hides: str
    what: str
    do: str
    line: str = ""
    also: tuple[str, ...] = ()  # the other lines at which it was seen

    def __str__(self) -> str:
        lesson = LESSONS / f"{self.lesson}.py"
        see = f" (python {lesson})" if self.lesson and lesson.exists() else ""
        also = f"\n       also at {', '.join(self.also)}" if self.also else ""
        what = f"{self.level:5}  {self.line}  {self.kind}: {self.what}"
        return f"{what}{also}\n       do: {self.do}{see}"


ROWS = Path(__file__).with_name("findings.txt").read_text().splitlines()[1:]
CELLS: list[Any] = [re.split(r" *\| *| -> ", row) for row in ROWS]
TABLE = {row.kind: row for row in (Finding(*cells) for cells in CELLS)}


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
            lines.append(f"{self.could_not}{until}")
        elif all(finding.level == "NOTE" for finding in self.findings):
            lines.append("OK     nothing wrong was seen")
        return "\n".join(lines + [f"not seen: {item}" for item in self.not_seen])


def judge(report: Facts) -> Verdict:
    """Return the verdict on what the ranks of a run told."""
    found = []
    firsts = dict[tuple[str, str], Finding]()
    seen = set[tuple[str, str]]()
    is_ddp = events_of(report, "asks for a group", "group", "device by global rank")
    runs = (report, *report["earlier"])
    for compare, told in product(COMPARISONS, runs) if is_ddp else ():
        for kind, facts in compare(told):
            row = TABLE[kind]
            level, what = facts.get("level", row.level), row.what.format_map(facts)
            found.append(replace(row, level=level, what=what, line=facts["line"]))
    for finding in sorted(found, key=lambda finding: LEVELS.index(finding.level)):
        if (finding.kind, finding.line) in seen:  # with a higher level, or the same
            continue
        seen.add((finding.kind, finding.line))
        first = firsts.setdefault((finding.kind, finding.level), finding)
        if first is not finding:
            firsts[finding.kind, finding.level] = replace(first, also=(*first.also, finding.line))
    kinds = {kind for kind, _ in firsts}
    hidden = {TABLE[kind].hides for kind, level in firsts if level == "WRONG"}
    if "equal ranks" in kinds:  # all that follows is mixed up
        hidden = kinds - {"equal ranks"}
    kept = [finding for finding in firsts.values() if finding.kind not in hidden]
    could_not = _could_not(report, kinds - hidden)
    bad = ("WRONG", "WARN") if report["strict"] else ("WRONG",)
    status = 1 if any(finding.level in bad for finding in kept) else 3 if could_not else 0
    said = kept, list(_not_seen(report)), could_not, status
    return Verdict(report["script"], report["world"], report["nodes"], report["seconds"], *said)


def _could_not(report: Facts, kinds: set[str]) -> str:
    """Return why the script was not judged, or could not be run to its end, or nothing."""
    has_step = events_of(report, "step")
    for how in ("error", "not judged", "again", "waited", "time"):
        for end in report["ends"].values():
            if end["how"] != how or (how == "waited" and kinds) or (how == "time" and has_step):
                continue
            if how in ("error", "waited"):
                return f"could not run your script: {failed(report)}"
            late = f"not done after {report['limit']:.0f} s (--limit), but at {end['line']}"
            return f"not judged: {late if how == 'time' else end['message']}"
    if not events_of(report, "group"):
        return "not judged: it makes no process group, as a script of a single process"
    is_wrapped = events_of(report, "wrapped")
    if not is_wrapped and not (has_step and (kinds or _averages_by_hand(report))):
        return "not judged: it wraps no model in DistributedDataParallel"
    loaded = [event["path"] for event in events_of(report, "load")]
    hint = f" (after it loaded {loaded[0]})" if loaded else ""
    return "" if has_step else f"not judged: it made no step of an optimizer{hint}"


def failed(report: Facts) -> str:
    """Return what went wrong, where, and which numbers the check had made smaller, or nothing."""
    numbers = [end["changed"] for end in report["ends"].values() if end.get("changed")]
    small = f" (the check had made {numbers[0]})" if numbers else ""
    ends = sorted(report["ends"].items(), key=lambda item: item[1]["how"])  # errors first
    for rank, end in ends:
        if end["how"] in ("error", "waited"):
            said = (end["message"].strip().splitlines() or [""])[0][:300]
            real = " (it needs a real GPU)" if NO_GPU.search(end["message"]) else ""
            last = f", whose last line was: {end['output']}"
            where = f" at {end['line']}" if end["line"] else last
            return f"{said}{real}, on rank {rank}{where}{small}"
    return ""


def _not_seen(report: Facts) -> Iterator[str]:
    paths = list(dict.fromkeys(event["what"] for event in events_of(report, "redirected")))
    if paths := [path for path in paths if "/." not in path]:  # no library's own cache
        yield f"writing to {', '.join(paths[:3])}: it went to a copy, which is removed"
    if not events_of(report, "step"):  # it has hardly begun
        return
    if report["failed"] and not failed(report):
        yield f"a run with smaller numbers, which failed: {report['failed']}"
    yield from dict.fromkeys(event["what"] for event in events_of(report, "left out"))
    uses = {item["use"] for item in events_of(report, "pass")}
    if "evaluation" not in uses:
        yield "an evaluation: no forward without gradients had batches of a DataLoader"
    if "training" not in uses:
        yield "training data: no step had batches of a DataLoader"
    if not events_of(report, "saved"):
        yield "a checkpoint: torch.save was not called"
    yield from dict.fromkeys(e["message"] for e in report["ends"].values() if e["how"] == "cut")
    if any(end["how"] == "time" for end in report["ends"].values()):
        yield f"what follows after {report['limit']:.0f} s: the check ended there (--limit)"


def events_of(report: Facts, *kinds: str) -> list[Facts]:
    return [event for event in report["events"] if event["kind"] in kinds]


def of_each(report: Facts, kind: str) -> list[list[Facts]]:
    """Return the events of a kind that each rank told, one list for a rank."""
    events = events_of(report, kind)
    return [[e for e in events if e["rank"] == rank] for rank in range(report["world"])]


def conflicts(report: Facts) -> Found:
    """Find ranks that wait for each other for ever, or that fail because they are ranks."""
    groups = [events[0] for events in of_each(report, "group") if events]
    if len(groups) == report["world"] > len({event["given"] for event in groups}):
        parts = [f"rank={event['given']} at {event['line']}" for event in groups]
        yield "equal ranks", {**groups[0], "what": f"the processes give {', '.join(parts)}"}
    ends = sorted(report["ends"].items())
    unset = [end for _, end in ends if re.match("UnboundLocal|NameError", end.get("message", ""))]
    for end in unset if len(unset) < len(ends) else ():
        yield "a name of one rank", {**end, "what": end["message"]}
    for _, end in ends:
        if found := re.search(NO_ATTRIBUTE, end.get("message", "")):
            yield "asks the wrapper", {**end, "name": found[1]}
    waits = [f"rank {rank} waits at {end['line']}" for rank, end in ends if end["how"] == "waited"]
    gone = [f"rank {rank} has ended" for rank, end in ends if end["how"] == "ended"]
    if waits and len(waits + gone) == len(ends):
        lines = [end["line"] for _, end in ends if end["how"] == "waited"]
        line = lines[0]
        kind = "a rank stops alone" if gone else "other collectives"
        what = "; ".join(waits + gone)
        if gone:
            what += ": the others wait for ever"
        elif len(set(lines)) == 1:
            what += ", after a collective, or a call of the wrapper, that not all of them have made"
        facts = {"line": line, "what": what}
        alone = [event for event in events_of(report, "through") if event["line"] == line]
        if len({event["rank"] for event in alone}) == 1:
            kind = "evaluates through the wrapper"
            facts = alone[0]
        yield kind, facts


def by_ranks(report: Facts) -> Found:
    """Find what a rank told itself, and what ranks did at the same time that only one may do."""
    alike = defaultdict(list)
    loaders = {"", *(item["key"] for item in _trainings(report))}
    seen = {item["use"] for item in events_of(report, "pass") if item["epoch"] > 1}
    uses = {item["use"] for item in events_of(report, "pass")}
    has_ended = all(end["how"] == "ended" for end in report["ends"].values())
    seen |= uses if has_ended else uses - {"training"}  # it has one epoch
    if events_of(report, "step") or not failed(report):
        seen.add("step")
    lines = {event["line"] for event in report["events"] if event["clock"] >= 0}
    loaded = events_of(report, "loaded")
    with_tensors = {event["line"] for event in loaded if event["has_tensors"]}
    for event in events_of(report, *TABLE):
        if event.get("drawn_by", "") not in loaders:
            continue  # the script has only looked at the data
        has_run = event["line"] in lines
        is_seen = event.get("guessed") in seen
        if is_seen and event.get("optional") and not has_run:
            event = event | {"level": "NOTE"}
        elif is_seen or (event.get("read") and has_run):
            continue  # what was read in the code has run, and said what it is
        if event["kind"] == "loads onto one GPU" and event["line"] not in with_tensors:
            if has_run:  # it loads other things
                continue
            event = event | {"level": "NOTE"}
        if "same" not in event:
            yield event["kind"], event
        else:
            alike[event["kind"], str(event["same"]), event["clock"]].append(event)
    for (kind, *_), events in alike.items():
        ranks = sorted({event["rank"] for event in events})
        if len(ranks) > 1 and any(event.get("missing", True) for event in events):
            yield kind, {**events[0], "ranks": " and ".join(map(str, ranks))}


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
    combined = events_of(report, "combined")
    sizes = {event["elements"] for event in combined}
    is_split = any(e["elements"] > 1 and not e["evaluates"] for e in combined)  # a forward, perhaps
    by_turn = defaultdict(list)
    for step in events_of(report, "step"):
        by_turn[tuple(step["turn"])].append(step)
    done = set()
    for (optimizer, _), steps in sorted(by_turn.items()):
        averaged = [value for value in steps[0]["values"] if value["belongs"] == "averaged"]
        awaited = [value for value in averaged if value["is_awaited"]]
        unused = [value["name"] for value in awaited if value["grad"] is None]
        for values in zip(*(step["values"] for step in steps), strict=False):
            ranks = values[0]["ranks"]
            name = values[0]["name"]
            pairs = zip(steps, values, strict=True)
            together = [(s, v) for s, v in pairs if s["rank"] in v["ranks"] == ranks]
            kind, line, sums = _cause(together)
            # An EMA on rank 0 gives other names. But a rank may hold a part of the model.
            called = {value["name"] if value["log"] is None else "" for _, value in together}
            is_same = len(called) == 1
            if not kind or not is_same or optimizer in done:
                continue
            is_wrapped = bool(steps[0]["logs"])
            if not is_wrapped and kind == "gradients differ":
                if _averages_by_hand(report):
                    break
                if not sizes & {value["elements"] for value in steps[0]["values"]} - {1}:
                    kind = "nothing is averaged"
            kind = "unused parameters" if kind == "gradients differ" and unused else kind
            facts = {"line": line, "name": name, "unused": ", ".join(unused[:4]), "hint": hint}
            facts["sums"] = [pair and float(f"{pair[0]:.6g}") for pair in sums]
            facts["rates"] = [step["rates"] for step, _ in together]
            if kind == "outside the wrapper" and is_split:
                facts["level"] = "WARN"  # each rank may hold a part of the model
            what = "the gradients of {name} differ between the ranks (their sums are {sums})"
            yield kind, {**facts, "what": what.format(**facts)}
            if values[0]["belongs"] == "averaged" or not is_wrapped:
                done.add(optimizer)


def _cause(together: list[tuple[Facts, Facts]]) -> tuple[str, str, list[Any]]:
    """Return why a parameter differs at a step of several ranks, where, and what differs."""
    steps = [step for step, _ in together]
    values = [value for _, value in together]
    if len(values) < 2:
        return "", "", []
    belongs = values[0]["belongs"]
    line = steps[0]["line"]
    before, grads, after = ([value[at] for value in values] for at in ("before", "grad", "after"))
    owned = [(step, value) for step, value in together if value["log"] is not None]
    logs = [step["logs"][value["log"]] for step, value in owned]
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
        first = items[0]
        world = report["world"]
        batches = [item["batches"] for item in items]
        if first["number"] and len({item["begun"] for item in items}) > 1:  # not the same epoch
            continue
        if None not in batches and len(set(batches)) > 1:
            yield "unequal batches", {**first, "batches": batches}
        # Only where a permutation is shared out: no sampler that draws with replacement.
        drawn = [list(map(str, item["samples"])) for item in items]
        permuted = all(each and len(set(each)) == len(each) for each in drawn)
        permuted = permuted and all(item["is_known"] for item in items)
        contents = [item["content"] for item in items]
        if not permuted or len({item["length"] for item in items}) > 1:
            continue
        equal = sum(len(set(column)) == 1 for column in zip(*contents, strict=True))
        common = set(first["indices"]).intersection(*(item["indices"] for item in items))
        # Shares of one whole set have no sample in common.
        are_shares = sum(map(len, drawn)) <= first["whole_length"]
        doubled = are_shares and len({*drawn[0]} & {*drawn[1]}) > world
        if all(contents) and equal < len(contents[0]) and (doubled or len(common) <= world):
            # The same data, split in another way, leak from one part into the other.
            is_split = len({str(sample[0]) for item in items for sample in item["samples"]}) == 1
            level = "WRONG" if is_split and not doubled else "WARN"
            facts = {"equal": equal, "count": len(contents[0]), "level": level}
            yield "other data", {**first, **facts}
        # A rank may use its part of a batch that all have drawn, and train another model alike.
        elif not first["divided"] and not first["is_apart"]:
            for one, other in combinations(items, 2):
                both = len({*map(str, one["samples"])} & {*map(str, other["samples"])})
                # Shares of one whole set have only the padding of the sampler in common.
                is_whole = abs(sum(map(len, drawn)) - first["whole_length"]) <= world
                if both > (world if is_whole else max(world, len(one["samples"]) * 3 / 4)):
                    what = f"ranks {one['rank']} and {other['rank']} draw {both} equal samples"
                    what += f" of {len(one['samples'])} each"
                    yield "equal shares", {**first, "what": what}


def inputs(report: Facts) -> Found:
    """Find ranks that train on the same batches, which do not come from a loader."""
    rows = list(zip(*of_each(report, "input"), strict=False))
    if len(rows) < 2 or any(e["digests"] != row[0]["digests"] for row in rows for e in row):
        return
    first = rows[0][0]
    ranks = " and ".join(map(str, range(report["world"])))
    if first["seeded"]:
        facts = {"ranks": ranks, "where": "for their inputs", "name": "torch"}
        yield "equal random numbers", {**first, **facts, "line": first["seeded"]}
    else:
        what = f"ranks {ranks} train on equal inputs, which come from no DataLoader"
        yield "equal shares", {**first, "what": what}


def evaluation(report: Facts) -> Found:
    """Find evaluations of which each rank makes a share, and results that are not of the whole."""
    trained = {str(item[of] or 0) for item in _trainings(report) for of in ("content", "key")}
    yield from _alone(report)
    passes = list(_passes(report, "evaluation"))
    results = [_combined(report, items[0]) for items in passes]
    # What decides may go by another evaluation: all ranks have its result, or one has tested all.
    is_agreed = any(not event["to_one"] for result in results for event in result or ())
    one_tests_all = any(
        item["use"] == "evaluation" and item["complete"] and item["used"] == item["whole"]
        for item in events_of(report, "pass")
        if item not in chain(*passes)
    )
    for items, combined in zip(passes, results, strict=True):
        first = items[0]
        counts = [len(item["samples"]) for item in items]
        is_shared = len({str(sorted(item["samples"])) for item in items}) > 1
        if is_shared and combined:
            yield from _other_models(items)
        if not all(item["complete"] for item in items):
            continue
        if not trained & {str(first["content"]), first["key"]}:
            yield from _left_out(items, is_shared)
        drawn = [str(sample) for item in items for sample in item["samples"]]
        repeated = len(drawn) - len(set(drawn))  # those that fill up a batch, and not a set
        if 0 < repeated < min(len(items) * first["size"], len(set(drawn))):
            # The script may sort by sample, and cut, what it gathers or what has a row for each.
            whole = (first["length"], first["whole"])
            has_sum = any(e["reduces"] and e["rows"] not in whole for e in combined or ())
            level = "WARN" if has_sum and is_shared else "NOTE"
            yield "padded evaluation", {**first, "level": level}
        if not is_shared or 0 in counts:
            continue
        facts = {**first, "counts": " + ".join(map(str, counts))}
        if combined:
            if len(set(counts)) > 1 and _are_averaged(report, items, counts):
                yield "mean of means", facts
        elif combined is not None:
            deciding = [] if is_agreed or one_tests_all else events_of(report, "decides")
            what = f"each rank evaluates its own share ({facts['counts']} samples), and nothing "
            what += "combines them" + (": this line decides by a share" if deciding else "")
            line = (deciding or [first])[0]["line"]
            level = "NOTE" if one_tests_all else "WARN"
            yield "evaluates a share", {**facts, "what": what, "line": line, "level": level}


def _alone(report: Facts) -> Found:
    """Find a share that a rank evaluates while no other rank evaluates anything."""
    passes = [item for item in events_of(report, "pass") if item["use"] == "evaluation"]
    for item in passes if len({item["rank"] for item in passes}) == 1 else ():
        if 0 < 2 * item["used"] <= item["whole"] + 1 and item["whole"] > 1 and item["complete"]:
            count = f"{item['used']} of {item['whole']} samples"
            what = f"rank {item['rank']} alone evaluates, and its sampler gives it {count}"
            yield "evaluates a share", {**item, "what": what}


def _trainings(report: Facts) -> list[Facts]:
    return [item for item in events_of(report, "pass") if item["use"] == "training"]


def _left_out(items: list[Facts], is_shared: bool) -> Found:
    """Find samples that no rank evaluates, first in full, then among those that were drawn."""
    used = [item["used"] for item in items]
    drawn = {str(sample) for item in items for sample in item["samples"]}
    pairs = [(items[0]["whole"], sum(used) if is_shared else max(used))]
    for whole, count in (*pairs, (items[0]["length"], len(drawn))):
        if 0 < whole - count < len(items) * items[0]["size"] and count:
            yield "samples left out", {**items[0], "what": f"{count} of {whole} samples"}
            return


def _other_models(items: list[Facts]) -> Found:
    """Find models that are evaluated with other weights or statistics on each rank."""
    for models in zip(*(item["tested"] for item in items), strict=False):
        name = _first_other(models)
        if name.startswith("buffer "):  # which DDP sends before each forward of the training
            yield "buffers differ", {**items[0], "name": name[7:], "level": "NOTE"}
        elif name:
            yield "evaluates other weights", {**items[0], "name": name}


def _first_other(held: Sequence[Facts]) -> str:
    """Return the first name whose sums differ between the ranks, or nothing."""
    for name in held[0]:
        if _differ([own.get(name, held[0][name]) for own in held], 1e-6):
            return name
    return ""


def statistics(report: Facts) -> Found:
    """Find what wrapped models hold in the end, and neither gradients nor DDP make equal."""
    has_ended = all(end["how"] == "ended" for end in report["ends"].values())
    for events in zip(*of_each(report, "held"), strict=False) if has_ended else ():
        is_split = len(events[0]["ranks"]) < report["world"]
        if name := "" if is_split else _first_other([event["held"] for event in events]):
            yield "buffers differ", {**events[0], "name": name}


def _combined(report: Facts, item: Facts, is_over: bool = False) -> list[Facts] | None:
    """Return what combined an evaluation's results: in its pass, or only when that is over.

    None if the run failed before the training went on.
    """
    events = [event for event in report["events"] if event["rank"] == item["rank"]]
    at = events.index(item)
    after = list(takewhile(lambda event: event["kind"] != "step", events[at:]))
    is_last = len(after) == len(events) - at
    if is_last and not {end["how"] for end in report["ends"].values()} <= WHOLE:
        return None
    during = [event for event in events[:at] if item["begun"] < event["clock"]]
    found = after if is_over else during + after
    # Rank 0 may read what each rank has written into a file of its own.
    parts = [PART | event for event in found if event["kind"] == "writes a part"]
    kinds = ("combined", "sent to all")
    return parts + [e for e in found if e["kind"] in kinds and e["evaluates"]]


def _are_averaged(report: Facts, items: list[Facts], counts: list[int]) -> bool:
    """Whether ranks average their own results, and do not combine the counts."""
    # Only what was combined after the pass: in it, batches may have been combined.
    ends = [_combined(report, item, is_over=True) or [] for item in items]
    values = [[value for event in end for value in event["values"]] for end in ends]
    if all(count in own for count, own in zip(counts, values, strict=True)):
        return False
    averages = {event["line"] for event in events_of(report, "averages")}
    for events in zip(*ends, strict=False):
        own = [number for event in events for number in event["values"][:1]]
        is_sum = any(own) and all(number == round(number) for number in own)
        is_mean = events[0]["mean"] or bool(averages & {*events[0]["lines"]})
        if events[0]["elements"] <= METRICS and is_mean and not is_sum:
            return True
    return False


def through(report: Facts) -> Found:
    """Find lines at which one rank alone calls the wrapper without gradients."""
    ranks = defaultdict(set)
    for event in events_of(report, "through"):
        ranks[event["line"]].add(event["rank"])
    last = [max((e["at"] for e in steps), default=0) for steps in of_each(report, "step")]
    has_failed = any(end["how"] == "error" for end in report["ends"].values())  # then others ended
    for event in events_of(report, "through") if not has_failed else ():
        if len(ranks[event["line"]]) == 1:
            # What went well, and was followed by steps, was no accident.
            level = "NOTE" if event["at"] < last[event["rank"]] else "WARN"
            yield "evaluates through the wrapper", {**event, "level": level}


def schedules(report: Facts) -> Found:
    """Find lines at which some ranks alone step a schedule."""
    ranks = defaultdict(set)
    for event in events_of(report, "stepped a schedule"):
        ranks[event["line"]].add(event["rank"])
    are_whole = {end["how"] for end in report["ends"].values()} <= WHOLE
    for line, own in ranks.items() if are_whole else ():
        if len(own) < report["world"]:
            yield "schedule of one rank", {"line": line, "ranks": " and ".join(map(str, own))}


def unready(report: Facts) -> Found:
    """Find files that a rank loads although another one may not have saved them yet."""
    saves = events_of(report, "every rank saves")
    saved = {(e["path"], e["clock"], e["at"]): e["rank"] for e in saves}
    for event in events_of(report, "load"):
        by = saved.get((event["path"], event["clock"], event["at"]), event["rank"])
        if by != event["rank"]:
            yield "loads too early", {**event, "by": by}


COMPARISONS = (
    conflicts,
    by_ranks,
    divergence,
    statistics,
    shares,
    inputs,
    evaluation,
    through,
    schedules,
    unready,
)
