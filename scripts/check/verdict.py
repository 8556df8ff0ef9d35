"""Compare what the ranks told, and say what is wrong, what to do, and what was not seen.

findings.txt lists what can be found. Some findings a rank tells itself, and some are told by
ranks that do the same at the same time. The functions here find the others.
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
        self.report, self.ends, self.count = report, report["ends"], report["ranks"]
        self.events: list[list[Event]] = [
            [event for event in report["events"] if event["rank"] == rank]
            for rank in range(self.count)
        ]
        # Passes over the loader of the same lines, of the ranks that made them.
        self.passes: defaultdict[Any, list[Event]] = defaultdict(list)
        for event in self.all("pass"):
            self.passes[event["key"], event["number"]].append(event)

    def all(self, *kinds: str) -> list[Event]:
        return [event for event in self.report["events"] if event["kind"] in kinds]

    def columns(self, kind: str) -> Iterator[tuple[Event, ...]]:
        """Yield the first event of a kind of all ranks, then the second, and so on."""
        yield from zip(*([e for e in own if e["kind"] == kind] for own in self.events))  # noqa: B905


def judge(report: dict[str, Any]) -> Verdict:
    """Return the verdict on what the ranks of a run told."""
    facts, found = Facts(report), dict[str, Finding]()
    is_ddp = facts.all("group", "device by global rank") or report["conflict"]
    for look in LOOKS if is_ddp else ():
        for kind, seen in look(facts):
            level, lesson, what, do = TABLE[kind]
            what = what.format_map(seen)
            found.setdefault(kind, Finding(level, kind, lesson, seen["line"], what, do))
    for kind, cause in (
        ("gradients differ", "unused parameters"),
        ("equal samples", "equal shares"),
    ):
        if cause in found:
            found.pop(kind, None)
    verdict = Verdict(report["script"], report["ranks"], report["nodes"], report["seconds"])
    verdict.findings = sorted(found.values(), key=lambda finding: LEVELS.index(finding.level))
    verdict.could_not = _could_not(facts, set(found))
    verdict.not_seen = list(_not_seen(facts))
    return verdict


def _told(facts: Facts) -> Iterator[Found]:
    """Find what a rank told itself, and what ranks did at the same time with the same key."""
    alike = defaultdict(list)
    for event in facts.report["events"]:
        if event["kind"] in TABLE and "same" in event:
            alike[event["kind"], event["same"], event["clock"]].append(event)
        elif event["kind"] in TABLE:
            yield event["kind"], event
    for (kind, *_), events in alike.items():
        ranks = sorted({event["rank"] for event in events})
        if len(ranks) > 1:
            yield kind, {**events[0], "ranks": " and ".join(map(str, ranks))}


def _errors(facts: Facts) -> Iterator[Found]:
    """Find errors of DDP itself. Any other exception is no finding."""
    saved = {event["path"] for event in facts.all("every rank saves", "renamed")}
    for end in facts.ends.values():
        message, names = end.get("message", ""), end.get("names", [])
        letters = "".join(letter for own in end.get("events", []) for letter, _ in own)
        if UNUSED in message:
            end["explained"] = "unused parameters"
            listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
            numbers = [int(number) for number in listed[1].split()] if listed else []
            named = [names[0][n] for n in numbers if n < len(names[0])] if len(names) == 1 else []
            yield "unused parameters", {**end, "what": _few(named or ["some"])}
        if (INPLACE in message and "FF" in letters) or TWICE in message:
            end["explained"] = "two forwards"
            what = f"DDP cannot follow: {message.splitlines()[0][:120]}"
            yield "two forwards", {**end, "what": what}
        if "FileNotFoundError" in message and any(path in message for path in saved):
            end["explained"] = "loaded before saved"
        if "invalid device ordinal" in message:
            end["explained"] = "device by global rank"


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


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
    elif kind == "other collectives" and names in ({"gradients"}, {"DistributedDataParallel"}):
        kind, what = "other models", str([own["elements"] for own in signatures])
    elif len(names) == 1:
        what += f" with {signatures}"
    yield kind, {"line": calls[0][1][3], "what": what}


def _differ(values: list[Any], tolerance: float) -> bool:
    if None in values:
        return any(value is not None for value in values)
    pairs = [(value[part], values[0][part]) for value in values[1:] for part in (0, 1)]
    return any(a != b and not abs(a - b) <= tolerance * max(abs(a), abs(b)) for a, b in pairs)


def _divergence(facts: Facts) -> Iterator[Found]:
    """Find the first step at which ranks differ, and its cause in what came before it."""
    has_wrapper, told = bool(facts.all("wrapped")), set()
    if not has_wrapper and not facts.all("averaged by hand"):
        return
    for steps in facts.columns("step"):
        line, rates = steps[0]["line"], [step["rates"] for step in steps]
        for values in zip(*(step["values"] for step in steps), strict=False):
            name, kind, *_ = values[0]
            before, grads, after = ([value[part] for value in values] for part in (2, 3, 4))
            if kind in told or any(value[0] != name for value in values):
                continue
            shown = [None if value is None else float(f"{value[0]:.6g}") for value in grads]
            what = f"the gradients of {name} add up to {shown} on the ranks"
            if kind != "averaged" and _differ(grads, 1e-6):
                yield kind if has_wrapper else "not averaged", {"line": line, "what": what}
            elif kind == "averaged" and _differ(before, 1e-9):
                sums = [value[0] for value in before]
                what = f"before a step the weights of {name} add up to {sums} on the ranks"
                loads = [at for s in steps for own in s["events"] for c, at in own if c == "L"]
                cause = "loaded" if loads else "changed"
                yield f"{cause} after wrapping", {"line": [*loads, line][0], "what": what}
            elif _differ(grads, 1e-6):
                cause, place = _cause(steps)
                unused = [v[0] for v in steps[0]["values"] if v[1] == "averaged" and v[3] is None]
                if cause == "gradients differ" and unused:
                    cause, what = "unused parameters", _few(unused)
                yield cause, {"line": place, "what": what}
            elif _differ(after, 1e-9) and not _differ(before, 1e-9):
                cause = "steps differ" if rates[1:] == rates[:-1] else "other learning rates"
                what = f"{name} differs after a step with equal gradients: {rates}"
                yield cause, {"line": line, "what": what}
            else:
                continue
            told.add(kind)
        if "averaged" in told:
            return


def _cause(steps: Any) -> tuple[str, str]:
    """Tell by the forwards (F, under no_sync f, past the wrapper P) and backwards (B) of a step."""
    for events in (own for step in steps for own in step["events"]):
        letters = "".join(letter for letter, _ in events if letter in "FfPB")
        places = dict(reversed(events))
        two = re.search("[Ff]P*[Ff]P*B", letters)
        if "P" in letters and not two:
            return "past the wrapper", places["P"]
        if letters.rstrip("B")[-1:] == "f":
            return "no_sync at the step", places["f"]
        if two:
            return "two forwards", places.get("F") or places["f"]
        if "BB" in letters:
            return "two backwards", places["B"]
    return "gradients differ", steps[0]["line"]


def _shares(facts: Facts) -> Iterator[Found]:
    for (_, number), items in facts.passes.items():
        if number or len(items) < facts.count or not all(item["trained"] for item in items):
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
        if len(items) == 1 and first["through"]:
            yield "evaluates through the wrapper", first
        sets = [set(item["base"]) for item in items]  # a Subset may be the share of its rank
        if len(items) < facts.count or not all(sets) or all(own == sets[0] for own in sets):
            continue
        if _combined(facts, first) is False:
            counts = " + ".join(str(len(item["base"])) for item in items)
            yield "evaluates a share", {**first, "counts": counts}
        seen, union = sum(len(item["base"]) for item in items), set().union(*sets)
        if first["drop_last"]:
            if missing := first["length"] - len(union):
                yield "leaves samples out", {**first, "missing": missing}
        elif seen > len(union) or first["sampler"] == "DistributedSampler":
            yield "padded evaluation", first


def _combined(facts: Facts, item: Event) -> bool | None:
    """Whether a collective combined results after an evaluation began, before training went on."""
    is_over = False
    for event in facts.events[item["rank"]]:
        is_over = is_over or event is item
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
            if end["how"] != how or end.get("explained") in kinds:
                continue
            if how == "again":
                return (
                    f"it starts {end['ranks']} processes: give it arguments with which it starts"
                    f" {facts.count}, or give --ranks"
                )
            message = end["message"].strip().splitlines()[0][:300]
            if how == "not judged" or message.startswith("it needs the package"):
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


LOOKS = (_errors, _conflict, _divergence, _told, _shares, _evaluation, _loads)
