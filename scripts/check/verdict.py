"""Compare what the ranks told, and say what is wrong, what to do, and what was not seen.

findings.txt lists what can be found. A rank reports some findings by itself. Others are what
several ranks do at the same time. The functions here find the rest.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Facts = dict[str, Any]  # of an event, or of all that was told in a run
Found = Iterator[tuple[str, Facts]]  # a kind, and the facts of its line in findings.txt
LEVELS = ["WRONG", "WARN", "NOTE"]
TWO = "two forwards or backwards"
EXPLAINED = {  # what an error says, and the finding that explains it
    "Expected to have finished reduction in the prior iteration": "unused parameters",
    "Expected to mark a variable ready only once": TWO,
    "has been modified by an inplace operation": TWO,
    "FileNotFoundError": "loaded before saved",
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
NO_GPU = re.compile("NVIDIA|CUDA|nvcc|Triton|cudnn|pretended")


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
        see = f" (python scripts/lessons/{self.lesson}.py)" if self.lesson else ""
        what = f"{self.level:5}  {self.line}  {self.kind}: {self.what}"
        return f"{what}\n       do: {self.do}{see}"


LINES = Path(__file__).with_name("findings.txt").read_text().splitlines()[1:]
ROWS = [Finding(*map(str.strip, re.split(r"\||->", line))) for line in LINES]
TABLE = {row.kind: row for row in ROWS}


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
    is_ddp = _told(report, "group", "device by global rank", *CONFLICTS)
    found, by_kind = [], dict[str, Finding]()
    for look in LOOKS if is_ddp else ():
        for kind, facts in look(report):
            row = TABLE[kind]
            level, what = facts.get("level", row.level), row.what.format_map(facts)
            found.append(replace(row, level=level, what=what, line=facts["line"]))
    for finding in sorted(found, key=lambda finding: LEVELS.index(finding.level)):
        by_kind.setdefault(finding.kind, finding)
    if "unused parameters" in by_kind:  # which is why they differ
        by_kind.pop("gradients differ", None)
    could_not = _could_not(report, set(by_kind))
    status = 1 if any(own.level == "WRONG" for own in found) else 3 if could_not else 0
    said = list(by_kind.values()), list(_not_seen(report)), could_not, status
    return Verdict(report["script"], report["world"], report["nodes"], report["seconds"], *said)


def _told(report: Facts, *kinds: str) -> list[Facts]:
    return [event for event in report["events"] if event["kind"] in kinds]


def _by_ranks(report: Facts) -> Found:
    """Find what a rank told itself, and what ranks did at the same time that only one may do."""
    alike = defaultdict(list)
    for event in _told(report, *TABLE):
        if "same" in event:
            alike[event["kind"], event["same"], event["clock"]].append(event)
        else:
            yield event["kind"], event
    for (kind, *_), events in alike.items():
        ranks = sorted({event["rank"] for event in events})
        if len(ranks) > 1:
            yield kind, {**events[0], "ranks": " and ".join(map(str, ranks))}


def _errors(report: Facts) -> Found:
    """Find errors of DDP itself. Others are no finding."""
    for end in report["ends"].values():
        message, calls = end.get("message", ""), end.get("calls", [])
        kind = next((EXPLAINED[text] for text in EXPLAINED if text in message), "")
        if kind == "unused parameters":
            names = re.search(r"Parameters which did not receive grad for rank \d+: (.*)", message)
            yield kind, {**end, "unused": names[1][:200] if names else "some"}
        elif kind == TWO and any(re.search("F[^B]*F|B[^Ff]*B", own) for own in calls):
            yield kind, {**end, "what": f"DDP says {message.splitlines()[0][:120]}"}


def _learning(report: Facts) -> Found:
    by_optimizer = defaultdict(list)
    for step in _told(report, "step"):
        by_optimizer[step["rank"], step["optimizer"]].append(step)
    for steps in by_optimizer.values():
        grads = [own["grad"] for step in steps for own in step["values"]]
        if len(steps) > 1 and not any(grads):
            yield "trains nothing", {**steps[0], "parameters": len(steps[0]["values"])}
    values = [own for step in _told(report, "step") for own in step["values"]]
    grads = [own["grad"] for own in values if own["belongs"] == "averaged"]
    for event in _told(report, "wrapped"):
        if event["searches"] and grads and all(grad and any(grad) for grad in grads):
            yield "needless find_unused_parameters", event


def _divergence(report: Facts) -> Found:
    """Find the first step at which ranks differ, for each way to belong to a wrapper."""
    told = _told(report, "step") if _told(report, "wrapped", "averaged by hand") else []
    by_rank = [[step for step in told if step["rank"] == rank] for rank in range(report["world"])]
    for steps in zip(*by_rank, strict=False):
        averaged = [own for own in steps[0]["values"] if own["belongs"] == "averaged"]
        unused = [own["name"] for own in averaged if own["grad"] is None]
        for values in zip(*(step["values"] for step in steps), strict=False):
            kind, line, sums = _cause(steps, values)
            if not kind or len({own["name"] for own in values}) > 1:
                continue
            kind = "unused parameters" if kind == "gradients differ" and unused else kind
            facts = {"line": line, "name": values[0]["name"], "unused": ", ".join(unused[:4])}
            facts["sums"] = [own and float(f"{own[0]:.6g}") for own in sums]
            facts["what"] = "the gradients of {name} add up to {sums} on the ranks".format(**facts)
            yield kind, {**facts, "rates": [step["rates"] for step in steps]}
            if values[0]["belongs"] == "averaged":
                return


def _cause(steps: Any, values: Any) -> tuple[str, str, list[Any]]:
    """Tell why a parameter differs at a step, where, and what differs."""
    belongs, line = values[0]["belongs"], steps[0]["line"]
    before, grads, after = ([own[at] for own in values] for at in ("before", "grad", "after"))
    logs = [log for step in steps for log in step["logs"]]
    if _differ(before, 1e-9) and belongs == "averaged":
        loads = [lines[calls.index("L")] for calls, lines in logs if "L" in calls]
        return "loaded or changed after wrapping", [*loads, line][0], before
    if _differ(grads, 1e-6):
        for calls, lines in logs if belongs == "averaged" else ():
            for pattern, cause in CAUSES.items():
                if found := re.search(pattern, calls):
                    return cause, lines[found.start()], grads
        return "gradients differ" if belongs == "averaged" else belongs, line, grads
    is_new = _differ(after, 1e-9) and not _differ(before, 1e-9)
    return "other learning rates or settings" if is_new else "", line, after


def _differ(values: list[Any], tolerance: float) -> bool:
    if None in values:
        return any(value is not None for value in values)
    pairs = [(value[part], values[0][part]) for value in values[1:] for part in (0, 1)]
    return any(a != b and not abs(a - b) <= tolerance * max(abs(a), abs(b)) for a, b in pairs)


def _passes(report: Facts, use: str) -> Iterator[list[Facts]]:
    """Yield the passes over the loader of the same lines that all ranks made for the same use."""
    by_loader = defaultdict(list)
    for event in _told(report, "pass"):
        by_loader[event["key"], event["number"]].append(event)
    for items in by_loader.values():
        if len(items) == report["world"] and all(item["use"] == use for item in items):
            yield items


def _shares(report: Facts) -> Found:
    for items in _passes(report, "training"):
        first, batches = items[0], [item["batches"] for item in items]
        if first["number"] and len({item["begun"] for item in items}) > 1:  # not the same epoch
            continue
        if None not in batches and len(set(batches)) > 1:
            yield "unequal batches", {**first, "batches": batches}
        # Only where a permutation is shared out: no sampler that draws with replacement.
        lists = [item[of] for item in items for of in ("indices", "samples")]
        permuted = all(own and len(set(own)) == len(own) for own in lists)
        contents = [item["content"] for item in items]
        if not permuted or len({item["length"] for item in items}) > 1 or not all(contents):
            continue
        indices, samples = (set(lists[at]).intersection(*lists[at::2]) for at in (0, 1))
        equal = sum(len(set(column)) == 1 for column in zip(*contents, strict=True))
        if equal < len(contents[0]) and len(indices) <= report["world"]:
            yield "other data", {**first, "equal": equal, "count": len(contents[0])}
        elif len(samples) > max(report["world"], len(lists[0]) / 4):
            what = f"all ranks draw {len(samples)} of rank 0's {len(lists[0])} samples"
            yield "equal shares", {**first, "what": what}


def _evaluation(report: Facts) -> Found:
    for items in _passes(report, "evaluation"):
        first, counts = items[0], [len(item["samples"]) for item in items]
        sets = {frozenset(item["samples"]) for item in items}
        is_shared = first["complete"] and 0 not in counts and len(sets) > 1
        if is_shared and _is_left_alone(report, first):
            yield "evaluates a share", {**first, "counts": " + ".join(map(str, counts))}


def _is_left_alone(report: Facts, item: Facts) -> bool:
    """Whether training went on, or ended, before a collective combined an evaluation's results."""
    own = [event for event in report["events"] if event["rank"] == item["rank"]]
    steps = [event["clock"] for event in own[own.index(item) :] if event["kind"] == "step"]
    combined = [event["clock"] for event in own if event["kind"] == "combined"]
    is_over = steps or report["ends"][item["rank"]]["how"] == "ended"
    until = min(steps, default=math.inf)
    return bool(is_over) and not any(item["begun"] < clock <= until for clock in combined)


def _through(report: Facts) -> Found:
    """Find lines at which one rank alone calls the wrapper without gradients."""
    ranks = defaultdict(set)
    for event in _told(report, "through"):
        ranks[event["line"]].add(event["rank"])
    for event in _told(report, "through"):
        if len(ranks[event["line"]]) == 1:
            yield "evaluates through the wrapper", event


def _loads(report: Facts) -> Found:
    for load in _told(report, "load"):
        saves = _told(report, "every rank saves", "renamed")
        saves = [save for save in saves if save["path"] == load["path"]]
        for save in saves if all(save["rank"] != load["rank"] for save in saves) else ():
            if save["clock"] == load["clock"]:
                sure = "level" not in load | save and not report["polls"]
                facts = {**load, "other": save["rank"], "at": save["line"]}
                yield "loaded before saved", {**facts, "level": "WRONG" if sure else "WARN"}


def _could_not(report: Facts, kinds: set[str]) -> str:
    for how in ("error", "not judged", "again"):
        for rank, end in report["ends"].items():
            message = end.get("message", "")
            explained = any(text in message and EXPLAINED[text] in kinds for text in EXPLAINED)
            if end["how"] == how and not explained:
                said = message.strip().splitlines()[0][:300]
                if how != "error":
                    return said
                real = " (it needs a real GPU)" if NO_GPU.search(message) else ""
                last = f", whose last line was: {end['output']}"
                at = f" at {end['line']}" if end["line"] else last
                return f"{said}{real}, on rank {rank}{at}"
    late = {rank: end for rank, end in sorted(report["ends"].items()) if end["how"] == "time"}
    if late:
        places = ", ".join(f"rank {rank} at {end['line']}" for rank, end in late.items())
        return f"not done after {report['limit']:.0f} s (--limit): {places}"
    if _told(report, *CONFLICTS):
        return ""
    if not _told(report, "group"):
        return "it makes no process group, and a script of a single process is not judged"
    if not _told(report, "wrapped", "averaged by hand"):
        return "it wraps no model in DistributedDataParallel, which is what is judged here"
    return "" if _told(report, "step") else "no step of an optimizer was seen"


def _not_seen(report: Facts) -> Iterator[str]:
    yield from dict.fromkeys(event["what"] for event in _told(report, "left out"))
    uses = {item["use"] for item in _told(report, "pass")}
    if "evaluation" not in uses:
        yield "an evaluation: no forward without gradients had batches of a DataLoader"
    if "training" not in uses:
        yield "training data: no step had batches of a DataLoader"
    if all("level" in save for save in _told(report, "every rank saves")):
        yield "a checkpoint: torch.save was not called"
    yield from dict.fromkeys(e["message"] for e in report["ends"].values() if e["how"] == "cut")
    if paths := list(dict.fromkeys(event["what"] for event in _told(report, "redirected"))):
        yield f"writing to {', '.join(paths[:3])}: it went to a copy, which is removed"


LOOKS = (_by_ranks, _errors, _divergence, _learning, _shares, _evaluation, _through, _loads)
