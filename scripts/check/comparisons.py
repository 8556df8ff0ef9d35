"""Compare what the ranks did: each function finds one sort of mistakes in what they told."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

Facts = dict[str, Any]  # of an event, or of all that was told in a run
Found = Iterator[tuple[str, Facts]]  # a kind, and the facts of its line in findings.txt
TWO = "two forwards or backwards"
EXPLAINED = {  # what an error says, and the finding that explains it
    "Expected to have finished reduction in the prior iteration": "unused parameters",
    "Expected to mark a variable ready only once": TWO,
    "has been modified by an inplace operation": TWO,
    "FileNotFoundError": "loaded before saved",
    "No such file": "every rank saves",  # one has renamed what the other has written
    "invalid device ordinal": "device by global rank",
}
# Why gradients differ, by the calls since the step before: forwards are F, under no_sync f, past
# the wrapper P, and backwards B. The verdict names the line of the first one that is matched.
CAUSES = {
    "[Ff][^B]*F[^B]*B": TWO,
    "P": "past the wrapper",
    "f[^FP]*$": "no_sync at the step",
    "B[^Ff]*B": TWO,
}
CONFLICTS = ("other collectives", "a rank stops alone", "equal ranks")


def events_of(report: Facts, *kinds: str) -> list[Facts]:
    return [event for event in report["events"] if event["kind"] in kinds]


def rank_of(event: Facts) -> int:
    return event["rank"]


def by_ranks(report: Facts) -> Found:
    """Find what a rank told itself, and what ranks did at the same time that only one may do."""
    locks = {event["path"] for event in events_of(report, "lock file")}
    alike = defaultdict(list)
    for event in events_of(report, *report["kinds"]):
        if "same" not in event:
            yield event["kind"], event
        elif event.get("path") not in locks:
            alike[event["kind"], str(event["same"]), event["clock"]].append(event)
    for (kind, *_), events in alike.items():
        ranks = sorted({event["rank"] for event in events})
        facts = {**events[0], "ranks": " and ".join(map(str, ranks)), "where_to": ""}
        if len({event["node"] for event in events}) == len(ranks) and kind == "every rank saves":
            # Local rank 0 of each host may write to a disk of its own.
            facts |= {"level": "WARN", "where_to": ", which is one file if the hosts share a disk"}
        if len(ranks) > 1:
            yield kind, facts


def saves(report: Facts) -> Found:
    """Find checkpoints that other ranks save than rank 0."""
    found = [e for e in events_of(report, "every rank saves") if e["how"] == "torch.save"]
    if found and all(event["rank"] for event in found):
        yield "rank 0 does not save", found[0]


def errors(report: Facts) -> Found:
    """Find errors of DDP itself. Others are no finding."""
    for end in report["ends"].values():
        message, calls = end.get("message", ""), end.get("calls", [])
        kind = next((EXPLAINED[text] for text in EXPLAINED if text in message), "")
        if kind == "unused parameters":
            names = re.search(r"Parameters which did not receive grad for rank \d+: (.*)", message)
            yield kind, {**end, "unused": names[1][:200] if names else "some"}
        elif kind == TWO and any(re.search("F[^B]*F|B[^Ff]*B", log) for log in calls):
            yield kind, {**end, "what": f"DDP says {message.splitlines()[0][:120]}"}


def learning(report: Facts) -> Found:
    by_optimizer = defaultdict(list)
    for step in events_of(report, "step"):
        by_optimizer[step["rank"], step["optimizer"]].append(step)
    for steps in by_optimizer.values():
        grads = [value["grad"] for step in steps for value in step["values"]]
        if len(steps) > 1 and not any(grads):
            yield "trains nothing", {**steps[0], "parameters": len(steps[0]["values"])}
        yield from _scaled_again(steps, report["world"])
    values = [value for step in events_of(report, "step") for value in step["values"]]
    grads = [value["grad"] for value in values if value["belongs"] == "averaged"]
    for event in events_of(report, "wrapped"):
        if event["searches"] and grads and all(grad and any(grad) for grad in grads):
            yield "needless find_unused_parameters", event


def _scaled_again(steps: list[Facts], world: int) -> Found:
    """Find gradients that were multiplied or divided by the number of ranks after a backward."""
    for step in steps:
        factors = set()
        for value in step["values"]:
            is_known = value["belongs"] == "averaged" and value["left"] and value["grad"]
            if is_known and value["left"][1]:
                # Of the second sum a factor is the square.
                factor = math.sqrt(abs(value["grad"][1] / value["left"][1]))
                factors.add(round(factor, 4))
        # Several backwards are often divided by their number.
        is_one = all(calls.count("B") == 1 for calls, _ in step["logs"])
        if is_one and len(factors) == 1 and factors & {round(1 / world, 4), float(world)}:
            word = "multiplied" if float(world) in factors else "divided"
            yield "averaged again", {**step, "word": word, "world": world}
            return


def divergence(report: Facts) -> Found:
    """Find the first step at which ranks differ, for each way to belong to a wrapper."""
    if events_of(report, "wrapped", "averaged by hand"):
        yield from _differences(report)
    elif not events_of(report, "sent between two"):
        values = [value for step in events_of(report, "step") for value in step["values"]]
        largest = max((value["elements"] for value in values), default=0)
        sizes = [event["elements"] for event in events_of(report, "combined")]
        # What is as large as the largest parameter may be an average of gradients or weights.
        if max(sizes, default=0) < largest:
            for kind, facts in _differences(report):
                yield "nothing is averaged" if kind == "gradients differ" else kind, facts


def _differences(report: Facts) -> Found:
    steps_of = [
        [step for step in events_of(report, "step") if step["rank"] == rank]
        for rank in range(report["world"])
    ]
    for steps in zip(*steps_of, strict=False):
        averaged = [value for value in steps[0]["values"] if value["belongs"] == "averaged"]
        unused = [value["name"] for value in averaged if value["grad"] is None]
        for all_values in zip(*(step["values"] for step in steps), strict=False):
            for ranks in {tuple(value["ranks"]) for value in all_values}:
                together = [
                    (step, value)
                    for step, value in zip(steps, all_values, strict=True)
                    if step["rank"] in ranks and tuple(value["ranks"]) == ranks
                ]
                kind, line, sums = _cause(together)
                first = together[0][1]
                if not kind or len({value["name"] for _, value in together}) > 1:
                    continue
                kind = "unused parameters" if kind == "gradients differ" and unused else kind
                facts = {"line": line, "name": first["name"], "unused": ", ".join(unused[:4])}
                facts["sums"] = [pair and float(f"{pair[0]:.6g}") for pair in sums]
                what = "the gradients of {name} add up to {sums} on the ranks".format(**facts)
                rates = [step["rates"] for step, _ in together]
                yield kind, {**facts, "what": what, "rates": rates}
                if first["belongs"] == "averaged":
                    return


def _cause(together: list[tuple[Facts, Facts]]) -> tuple[str, str, list[Any]]:
    """Return why a parameter differs at a step of several ranks, where, and what differs."""
    steps, values = [step for step, _ in together], [value for _, value in together]
    belongs, line = values[0]["belongs"], steps[0]["line"]
    before, grads, after = ([value[at] for value in values] for at in ("before", "grad", "after"))
    logs = [log for step in steps for log in step["logs"]]
    if len(values) < 2 or belongs == "ignored":
        return "", line, after
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
    return any(not _equal(a, b, tolerance) for a, b in pairs)


def _equal(a: float, b: float, tolerance: float) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or abs(a - b) <= tolerance * max(abs(a), abs(b))


def _passes(report: Facts, use: str) -> Iterator[list[Facts]]:
    """Yield the passes over the loader of the same lines that all ranks made for the same use."""
    by_loader = defaultdict(list)
    for event in events_of(report, "pass"):
        by_loader[event["key"], event["number"]].append(event)
    for items in by_loader.values():
        if len(items) == report["world"] and all(item["use"] == use for item in items):
            yield items


def shares(report: Facts) -> Found:
    for items in _passes(report, "training"):
        first, batches = items[0], [item["batches"] for item in items]
        if first["number"] and len({item["begun"] for item in items}) > 1:  # not the same epoch
            continue
        if None not in batches and len(set(batches)) > 1:
            yield "unequal batches", {**first, "batches": batches}
        # Only where a permutation is shared out: no sampler that draws with replacement.
        drawn = [item[of] for item in items for of in ("indices", "samples")]
        permuted = all(each and len(set(each)) == len(each) for each in drawn)
        contents = [item["content"] for item in items]
        if not permuted or len({item["length"] for item in items}) > 1 or not all(contents):
            continue
        equal = sum(len(set(column)) == 1 for column in zip(*contents, strict=True))
        indices = set(first["indices"]).intersection(*(item["indices"] for item in items))
        if equal < len(contents[0]) and len(indices) <= report["world"]:
            facts = {**first, "equal": equal, "count": len(contents[0]), "noise": ""}
            if first["noise"]:
                facts |= {"level": "WARN", "noise": " (they are noise, which each rank drew)"}
            yield "other data", facts
        else:
            yield from _equal_shares(items, report["world"])


def _equal_shares(items: list[Facts], world: int) -> Found:
    """Find the two ranks that drew most of the same samples, if these are many."""
    both = {
        (one["rank"], other["rank"]): len(set(one["samples"]) & set(other["samples"]))
        for one, other in combinations(sorted(items, key=rank_of), 2)
        # A rank may take its part of a batch that all have drawn.
        if not one["divided"] or one["inputs"] == other["inputs"]
    }
    pair = max(both, key=lambda ranks: both[ranks], default=())
    total = len(items[0]["samples"])
    if pair and both[pair] > max(world, total / 4):
        ranks = " and ".join(map(str, pair))
        what = f"ranks {ranks} draw {both[pair]} equal samples of {total} each"
        yield "equal shares", {**items[0], "what": what}


def inputs(report: Facts) -> Found:
    """Find ranks that train on the same batches, which do not come from a loader."""
    events = events_of(report, "input")
    by_rank = [[e for e in events if e["rank"] == rank] for rank in range(report["world"])]
    rows = [row for row in zip(*by_rank, strict=False) if all(e["digests"] for e in row)]
    if len(rows) < 2 or any(event["is_of_batch"] for row in rows for event in row):
        return
    if all(event["digests"] == row[0]["digests"] for row in rows for event in row):
        several = len({tuple(row[0]["digests"]) for row in rows}) > 1
        drawn = any(event["drew"] for row in rows for event in row)
        what = f"all ranks train on the same {len(rows)} batches"
        level = "WRONG" if several and not drawn else "WARN"
        yield "equal shares", {**rows[0][0], "level": level, "what": what}


def evaluation(report: Facts) -> Found:
    for items in _passes(report, "evaluation"):
        first, counts = items[0], [len(item["samples"]) for item in items]
        sets = {frozenset(item["samples"]) for item in items}
        if not first["complete"] or 0 in counts:
            continue
        combined = _combined_after(report, first)
        if len(sets) > 1 and combined == []:
            yield "evaluates a share", {**first, "counts": " + ".join(map(str, counts))}
        for event in combined or () if len(sets) == 1 else ():
            all_values = [value for other in combined or () for value in other["values"]]
            known = {counts[0], len(first["indices"])} & set(all_values)
            summed = [value for value in event["values"] if 0 < value <= counts[0]]
            if event["counts"] and summed and not known:
                yield "counts samples several times", {**event, "count": counts[0]}


def _combined_after(report: Facts, item: Facts) -> list[Facts] | None:
    """Return what combined an evaluation's results before training went on or ended.

    None if it did neither, as in a run that was cut.
    """
    events = [event for event in report["events"] if event["rank"] == item["rank"]]
    steps = [event["clock"] for event in events[events.index(item) :] if event["kind"] == "step"]
    if not steps and report["ends"][item["rank"]]["how"] != "ended":
        return None
    until = min(steps, default=math.inf)
    combined = [event for event in events if event["kind"] == "combined"]
    return [event for event in combined if item["begun"] < event["clock"] <= until]


def through(report: Facts) -> Found:
    """Find lines at which one rank alone calls the wrapper without gradients."""
    ranks = defaultdict(set)
    for event in events_of(report, "through"):
        ranks[event["line"]].add(event["rank"])
    for event in events_of(report, "through"):
        if len(ranks[event["line"]]) == 1:
            yield "evaluates through the wrapper", event


def loads(report: Facts) -> Found:
    for load in events_of(report, "load"):
        written = events_of(report, "every rank saves", "renamed")
        written = [event for event in written if event["path"] == load["path"]]
        for save in written if all(e["rank"] != load["rank"] for e in written) else ():
            if save["clock"] == load["clock"]:
                level = "WARN" if "level" in load | save else "WRONG"
                facts = {**load, "other": save["rank"], "at": save["line"]}
                yield "loaded before saved", {**facts, "level": level}


COMPARISONS: tuple[Callable[[Facts], Found], ...] = (
    by_ranks,
    saves,
    errors,
    divergence,
    learning,
    shares,
    inputs,
    evaluation,
    through,
    loads,
)
