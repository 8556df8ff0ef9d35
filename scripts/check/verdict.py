"""Compare what the ranks told, and say what is wrong, what to do, and what was not seen.

findings.txt lists what can be found. A rank reports some findings by itself. Others are what
several ranks do at the same time. The functions here find the rest.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LINES = Path(__file__).with_name("findings.txt").read_text().splitlines()[1:]
ROWS = [[part.strip() for part in re.split(r"\||->", line)] for line in LINES]
TABLE = {kind: (level, lesson, what, do) for level, kind, lesson, what, do in ROWS}
UNUSED = "Expected to have finished reduction in the prior iteration"
INPLACE = "has been modified by an inplace operation"
TWICE = "Expected to mark a variable ready only once"
NO_GPU = re.compile("NVIDIA|CUDA|nvcc|Triton|cudnn|pretended")
LEVELS = ["WRONG", "WARN", "NOTE"]
Event = dict[str, Any]
Found = tuple[str, Event]  # kind, and the facts of its line in findings.txt


@dataclass
class Finding:
    """A row of findings.txt, with what was seen."""

    level: str
    kind: str
    lesson: str
    line: str
    what: str
    do: str


@dataclass
class Verdict:
    """What the check says of a script."""

    script: str
    ranks: int
    nodes: int
    seconds: float
    findings: list[Finding] = field(default_factory=list)
    not_seen: list[str] = field(default_factory=list)
    could_not: str = ""

    @property
    def status(self) -> int:
        if any(finding.level == "WRONG" for finding in self.findings):
            return 1
        return 3 if self.could_not else 0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "status": self.status}

    def __str__(self) -> str:
        hosts = f" on {self.nodes} hosts" if self.nodes > 1 else ""
        lines = [f"{self.script}: {self.ranks} ranks{hosts}, {self.seconds:.0f} s"]
        for found in self.findings:
            lines.append(f"{found.level:5}  {found.line}  {found.kind}: {found.what}")
            see = f" (python scripts/lessons/{found.lesson}.py)" if found.lesson else ""
            lines.append(f"       do: {found.do}{see}")
        if self.could_not:
            until = ". Until then the above was seen" if self.findings else ""
            lines.append(f"could not run your script: {self.could_not}{until}")
        elif all(finding.level == "NOTE" for finding in self.findings):
            lines.append("OK     nothing wrong was seen")
        return "\n".join(lines + [f"not seen: {item}" for item in self.not_seen])


class Facts:
    """What all ranks told, by kind and rank."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.report, self.ends, self.count = report, report["ends"], report["world"]
        # Passes over the loader of the same lines, of the ranks that made them.
        self.passes: defaultdict[Any, list[Event]] = defaultdict(list)
        for event in self.all("pass"):
            self.passes[event["key"], event["number"]].append(event)

    def all(self, *kinds: str) -> list[Event]:
        return [event for event in self.report["events"] if event["kind"] in kinds]


def judge(report: dict[str, Any]) -> Verdict:
    """Return the verdict on what the ranks of a run told."""
    facts, found = Facts(report), dict[str, Finding]()
    is_ddp = facts.all("group", "device by global rank") or report["conflict"]
    for look in LOOKS if is_ddp else ():
        for kind, seen in look(facts):
            level, lesson, what, do = TABLE[kind]
            what = what.format_map(seen)
            found.setdefault(kind, Finding(level, kind, lesson, seen["line"], what, do))
    if "equal shares" in found:
        found.pop("equal samples", None)
    if "unused parameters" in found:  # which is why they differ
        found.pop("gradients differ", None)
    verdict = Verdict(report["script"], report["world"], report["nodes"], report["seconds"])
    verdict.findings = sorted(found.values(), key=lambda finding: LEVELS.index(finding.level))
    verdict.could_not = _could_not(facts, set(found))
    verdict.not_seen = list(_not_seen(facts))
    return verdict


def _told(facts: Facts) -> Iterator[Found]:
    """Find what a rank told itself, and what ranks did at the same time that only one may do."""
    alike = defaultdict(list)
    for event in facts.all(*TABLE):
        if "same" in event:
            alike[event["kind"], event["same"], event["clock"]].append(event)
        else:
            yield event["kind"], event
    for (kind, *_), events in alike.items():
        ranks = sorted({event["rank"] for event in events})
        if len(ranks) > 1:
            yield kind, {**events[0], "ranks": " and ".join(map(str, ranks))}


def _errors(facts: Facts) -> Iterator[Found]:
    """Find errors of DDP itself, and explain some by other findings. Others are no finding."""
    saved = {event["path"] for event in facts.all("every rank saves", "renamed")}
    for end in facts.ends.values():
        message = end.get("message", "")
        letters = "".join(letter for own in end.get("events", []) for letter, _ in own)
        if UNUSED in message:
            end["explained"] = "unused parameters"
            names = re.search(r"Parameters which did not receive grad for rank \d+: (.*)", message)
            yield "unused parameters", {**end, "unused": names[1][:200] if names else "some"}
        elif (INPLACE in message and "FF" in letters) or TWICE in message:
            end["explained"] = "two forwards"
            yield "two forwards", {**end, "what": f"DDP says {message.splitlines()[0][:120]}"}
        elif "FileNotFoundError" in message and any(path in message for path in saved):
            end["explained"] = "loaded before saved"
        elif "invalid device ordinal" in message:
            end["explained"] = "device by global rank"


def _learning(facts: Facts) -> Iterator[Found]:
    by_optimizer: defaultdict[Any, list[Event]] = defaultdict(list)
    for step in facts.all("step"):
        by_optimizer[step["rank"], step["optimizer"]].append(step)
    for steps in by_optimizer.values():
        if len(steps) > 1 and all(value[3] is None for step in steps for value in step["values"]):
            yield "trains nothing", {**steps[0], "parameters": len(steps[0]["values"])}
    grads = [v[3] for step in facts.all("step") for v in step["values"] if v[1] == "averaged"]
    for event in facts.all("wrapped"):
        if event["searches"] and grads and all(grad and any(grad) for grad in grads):
            yield "needless find_unused_parameters", event


def _conflict(facts: Facts) -> Iterator[Found]:
    if not (conflict := facts.report["conflict"]):
        return
    calls = sorted(conflict["calls"].items())
    names, signatures = {call[0] for _, call in calls}, [call[2] for _, call in calls]
    told = [f"rank {rank} calls {call[0]} at {call[3]}" for rank, call in calls]
    told += [f"rank {rank} has ended" for rank in sorted(conflict["ended"])]
    kind, what = conflict["kind"], "; ".join(told)
    if kind == "equal ranks":
        what = str([own["rank"] for own in signatures])
    elif len(names) == 1:
        what += f" with {signatures}"
    yield kind, {"line": calls[0][1][3], "what": what}


def _differ(values: list[Any], tolerance: float) -> bool:
    if None in values:
        return any(value is not None for value in values)
    pairs = [(value[part], values[0][part]) for value in values[1:] for part in (0, 1)]
    return any(a != b and not abs(a - b) <= tolerance * max(abs(a), abs(b)) for a, b in pairs)


def _divergence(facts: Facts) -> Iterator[Found]:
    """Find the first step at which ranks differ, for each way to belong to a wrapper."""
    told: set[str] = set()
    has_wrapper = bool(facts.all("wrapped"))
    ranks = range(facts.count) if has_wrapper or facts.all("averaged by hand") else ()
    by_rank = [[step for step in facts.all("step") if step["rank"] == rank] for rank in ranks]
    for steps in zip(*by_rank):  # noqa: B905
        for values in zip(*(step["values"] for step in steps), strict=False):
            name, kind, *_ = values[0]
            if not {kind, "averaged"} & told and len({value[0] for value in values}) == 1:
                cause, line, sums = _cause(steps, values)
                cause = cause if has_wrapper or cause != kind else "not averaged"
                shown = [own and float(f"{own[0]:.6g}") for own in sums]
                unused = [v[0] for v in steps[0]["values"] if v[1] == "averaged" and v[3] is None]
                if cause == "gradients differ" and unused:
                    cause = "unused parameters"
                seen = {"line": line, "name": name, "sums": shown, "unused": ", ".join(unused[:4])}
                seen["what"] = f"the gradients of {name} add up to {shown} on the ranks"
                if cause:
                    told.add(kind)
                    yield cause, {**seen, "rates": [step["rates"] for step in steps]}


def _cause(steps: Any, values: Any) -> tuple[str, str, list[Any]]:
    """Tell why a parameter differs, by the forwards and backwards since the step before.

    They are F, under no_sync f, past the wrapper P, and B. L is load_state_dict.
    """
    kind, line = values[0][1], steps[0]["line"]
    before, grads, after = ([value[part] for value in values] for part in (2, 3, 4))
    apart, logs = _differ(grads, 1e-6), [own for step in steps for own in step["events"]]
    if kind != "averaged" and apart:
        return kind, line, grads
    if _differ(before, 1e-9):
        loads = [place for own in logs for letter, place in own if letter == "L"]
        cause = f"{'loaded' if loads else 'changed'} after wrapping"
        return cause if kind == "averaged" else "", [*loads, line][0], before
    if not apart:
        same = all(step["rates"] == steps[0]["rates"] for step in steps)
        cause = "steps differ" if same else "other learning rates"
        return cause if _differ(after, 1e-9) else "", line, after
    for own in logs:
        letters = "".join(letter for letter, _ in own if letter in "FfPB")
        places = dict(reversed(own))
        two = re.search("[Ff]P*[Ff]P*B", letters)
        if "P" in letters and not two:
            return "past the wrapper", places["P"], grads
        if letters.rstrip("B")[-1:] == "f":
            return "no_sync at the step", places["f"], grads
        if two:
            return "two forwards", places.get("F") or places["f"], grads
        if "BB" in letters:
            return "two backwards", places["B"], grads
    return "gradients differ", line, grads


def _shares(facts: Facts) -> Iterator[Found]:
    for (_, number), items in facts.passes.items():
        if len(items) < facts.count or not all(item["trained"] for item in items):
            continue
        if number and len({item["begun"] for item in items}) > 1:  # not the same epoch
            continue
        first, lists = items[0], [item["indices"] for item in items]
        lengths = [item["whole"] for item in items]
        known = all(own and own[1] for own in lengths)
        if known and len({-(-length // size) for length, size in lengths}) > 1:
            yield "unequal batches", {**first, "shares": [length for length, _ in lengths]}
        # Only where a permutation is shared out: no sampler that draws with replacement.
        permuted = all(own and len(set(own)) == len(own) for own in lists)
        contents = [item["content"] for item in items]
        if not permuted or len({item["length"] for item in items}) > 1 or not all(contents):
            continue
        both = set(lists[0]).intersection(*lists[1:])
        if any(own != contents[0] for own in contents):
            equal = sum(len(set(column)) == 1 for column in zip(*contents, strict=True))
            if len(both) <= facts.count:
                yield "other data", {**first, "equal": equal, "count": len(contents[0])}
                continue
            # Each rank has samples of its own, unless they come from one larger set.
            bases = [item["base"] for item in items]
            both = set(bases[0]).intersection(*bases[1:]) if bases != lists else set()
        if len(both) > max(facts.count, len(lists[0]) / 4):
            yield "equal shares", {**first, "both": len(both), "count": len(lists[0])}


def _evaluation(facts: Facts) -> Iterator[Found]:
    for items in facts.passes.values():
        first = items[0]
        if not first["evaluates"] or not first["complete"]:
            continue
        # A Subset may be the share of its rank, and so may a data set of its own content.
        sets, contents = [set(item["base"]) for item in items], [item["content"] for item in items]
        same = all(own == sets[0] for own in sets)
        if len(items) < facts.count or not all(sets):
            continue
        if same and all(own == contents[0] for own in contents):
            continue
        counts = [len(item["base"]) for item in items]
        if _combined(facts, first) is False:
            yield "evaluates a share", {**first, "counts": " + ".join(map(str, counts))}
        union = len(set().union(*sets))
        if same:
            continue
        if first["drop_last"] and union < first["length"]:
            yield "leaves samples out", {**first, "missing": first["length"] - union}
        elif sum(counts) > union or first["sampler"] == "DistributedSampler":
            yield "padded evaluation", first


def _alone(facts: Facts) -> Iterator[Found]:
    """Find lines at which one rank alone calls the wrapper without gradients."""
    events = {(event["line"], event["rank"]): event for event in facts.all("through")}
    for (line, rank), event in events.items():
        if not any(other != rank for place, other in events if place == line):
            yield "evaluates through the wrapper", event


def _combined(facts: Facts, item: Event) -> bool | None:
    """Whether a collective combined results after an evaluation began, before training went on."""
    is_over = False
    for event in facts.report["events"]:
        is_over = is_over or event is item
        if event["rank"] == item["rank"]:
            if is_over and event["kind"] == "step":
                return False
            if event["kind"] == "combined" and event["clock"] > item["begun"]:
                return True
    return False if facts.ends[item["rank"]]["how"] == "ended" else None


def _loads(facts: Facts) -> Iterator[Found]:
    saves = facts.all("every rank saves", "every rank writes", "renamed")
    for load in facts.all("load"):
        own = [save for save in saves if save["path"] == load["path"]]
        for save in own if all(save["rank"] != load["rank"] for save in own) else ():
            if save["clock"] == load["clock"]:
                sure = load["sure"] and save["kind"] != "every rank writes"
                kind = "loaded" if sure and not facts.report["polls"] else "perhaps loaded"
                yield f"{kind} before saved", {**load, "other": save["rank"], "at": save["line"]}


def _could_not(facts: Facts, kinds: set[str]) -> str:
    for how in ("error", "not judged", "again"):
        for rank, end in facts.ends.items():
            if end["how"] == how and end.get("explained") not in kinds:
                message = end["message"].strip().splitlines()[0][:300]
                if how != "error" or "needs the package" in message:
                    return message
                real = " (it needs a real GPU)" if NO_GPU.search(end["message"]) else ""
                tail = (facts.report["outputs"][rank].strip().splitlines() or [""])[-1][:200]
                at = f" at {end['line']}" if end["line"] else f", whose last line was: {tail}"
                return f"{message}{real}, on rank {rank}{at}"
    if stands := facts.report["stands"]:
        places = ", ".join(f"rank {rank} at {place}" for rank, place in stands.items())
        return f"not done after {facts.report['limit']:.0f} s (--limit): {places}"
    if facts.report["conflict"]:
        return ""
    if not facts.all("group"):
        return "it makes no process group, and a script of a single process is not judged"
    if not facts.all("wrapped", "averaged by hand"):
        return "it wraps no model in DistributedDataParallel, which is what is judged here"
    return "" if facts.all("step") else "no step of an optimizer was seen"


def _not_seen(facts: Facts) -> Iterator[str]:
    yield from dict.fromkeys(event["what"] for event in facts.all("left out"))
    if not any(item["evaluates"] for item in facts.all("pass")):
        yield "an evaluation: no forward without gradients had batches of a DataLoader"
    if not any(item["trained"] for item in facts.all("pass")):
        yield "training data: no step had batches of a DataLoader"
    if not facts.all("every rank saves"):
        yield "a checkpoint: torch.save was not called"
    yield from dict.fromkeys(e["message"] for e in facts.ends.values() if e["how"] == "cut")
    if paths := list(dict.fromkeys(event["what"] for event in facts.all("redirected"))):
        yield f"writing to {', '.join(paths[:3])}: it went to a copy, which is removed"


LOOKS = (_errors, _conflict, _divergence, _told, _learning, _shares, _evaluation, _alone, _loads)
