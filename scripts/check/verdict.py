"""Compare what the ranks did, and say what is wrong, what to look at, and what was not seen.

findings.txt lists what can be found. The functions here tell when it is, where, and by which
numbers.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LINES = Path(__file__).with_name("findings.txt").read_text().splitlines()
ROWS = [[part.strip() for part in line.split("|")] for line in LINES if line[0] != "#"]
TABLE = {kind: (level, lesson, do) for level, kind, lesson, do in ROWS}
COMBINES = re.compile("reduce|gather")
UNUSED = "Expected to have finished reduction in the prior iteration"
INPLACE = "has been modified by an inplace operation"
TWICE = "Expected to mark a variable ready only once"
NO_GPU = re.compile("NVIDIA|CUDA|nvcc|Triton|cudnn|pretended")
Found = tuple[str, str, str]  # kind, line of the script, what was seen


@dataclass
class Finding:
    level: str  # WRONG, WARN or NOTE
    kind: str
    line: str
    what: str
    do: str
    lesson: str


@dataclass
class Verdict:
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
    """What all ranks told, sorted by kind and rank."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.report, self.count, self.ends = report, report["ranks"], report["ends"]
        self.each = self.count // report["nodes"]
        self.events = [[e for e in report["events"] if e["rank"] == r] for r in range(self.count)]
        passes = [[e for e in own if e["kind"] == "pass"] for own in self.events]
        self.passes = [{(item["key"], item["number"]): item for item in own} for own in passes]
        # Passes that all ranks made, over the loader of the same lines.
        keys = [key for key in self.passes[0] if all(key in own for own in self.passes)]
        self.shared = [(key, [own[key] for own in self.passes]) for key in keys]
        first = [items for (_, number), items in self.shared if number == 0]
        self.training = [items for items in first if all(item["trained"] for item in items)]

    def all(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.report["events"] if event["kind"] in kinds]

    def columns(self, kind: str) -> Iterator[tuple[dict[str, Any], ...]]:
        """Yield the first event of a kind of all ranks, then the second, and so on."""
        yield from zip(*([e for e in own if e["kind"] == kind] for own in self.events))  # noqa: B905


def judge(report: dict[str, Any]) -> Verdict:
    facts = Facts(report)
    found: dict[str, Finding] = {}
    if facts.all("group", "ordinal") or report["conflict"]:
        for look in LOOKS:
            for kind, line, what in look(facts):
                level, lesson, do = TABLE[kind]
                # Of one kind the first is enough.
                found.setdefault(kind, Finding(level, kind, line, what, do, lesson))
    if "unused parameters" in found:  # which is why they differ
        found.pop("gradients differ", None)
    verdict = Verdict(report["script"], report["ranks"], report["nodes"], report["seconds"])
    order = ["WRONG", "WARN", "NOTE"]
    verdict.findings = sorted(found.values(), key=lambda finding: order.index(finding.level))
    verdict.could_not = _could_not(facts, list(found))
    verdict.not_seen = list(_not_seen(facts))
    return verdict


def _could_not(facts: Facts, kinds: list[str]) -> str:
    tails = [(text.strip().splitlines() or [""])[-1][:200] for text in facts.report["outputs"]]
    for how in ("error", "not judged", "ranks", "died"):
        for rank, end in facts.ends.items():
            if end["how"] != how or end.get("explained") in kinds:
                continue
            if how == "not judged":
                return end["reason"]
            if how == "ranks":
                told = (
                    f"it starts {end['wanted']} processes: give it arguments with which it starts"
                )
                return f"{told} {facts.count}, or give --ranks"
            if end.get("missing"):
                return f"it needs the package {end['missing']}, which is not installed here"
            message = end.get("message", "the process died")
            real = " (it needs a real GPU)" if NO_GPU.search(message) else ""
            at = f" at {end['line']}" if end["line"] else f", whose last line was: {tails[rank]}"
            return f"{message.strip().splitlines()[0][:300]}{real}, on rank {rank}{at}"
    if any(end["how"] == "time" for end in facts.ends.values()):
        places = [
            f"rank {rank} at {place}" for rank, place in sorted(facts.report["stands"].items())
        ]
        return f"not done after {facts.report['limit']:.0f} s (--limit): {', '.join(places)}"
    if facts.report["conflict"]:
        return ""
    if not facts.all("group"):
        return "it makes no process group, and a script of a single process is not judged"
    if not facts.all("wrapped", "averaged by hand"):
        return "it wraps no model in DistributedDataParallel, which is what is judged here"
    return "" if facts.all("step") else "no step of an optimizer was seen"


def _not_seen(facts: Facts) -> Iterator[str]:
    yield from dict.fromkeys(event["what"] for event in facts.all("left out"))
    passes = facts.all("pass")
    if not any(_evaluates(item) for item in passes):
        yield "an evaluation: no forward without gradients had batches of a DataLoader"
    if not any(item["trained"] for item in passes):
        yield "training data: no step had batches of a DataLoader"
    if not facts.all("save"):
        yield "a checkpoint: torch.save was not called"
    if any(item["capped"] for item in passes):
        yield "the end of an epoch: a loader was stopped after some batches"
    yield from dict.fromkeys(e["reason"] for e in facts.ends.values() if e["how"] == "cut")
    if paths := list(dict.fromkeys(event["path"] for event in facts.all("redirected"))):
        yield f"writing to {', '.join(paths[:3])}: it went to a copy, which is removed"


def _evaluates(item: dict[str, Any]) -> bool:
    return not item["trained"] and bool(item["evaluated"] or item["mode"] is False)


def _errors(facts: Facts) -> Iterator[Found]:
    """Errors of DDP itself. Any other exception is no finding."""
    saved = {event["path"] for event in facts.all("save")}
    for end in facts.ends.values():
        message, line = end.get("message", ""), end["line"]
        letters = "".join(letter for own in end.get("wrappers", []) for letter, _ in own["events"])
        if UNUSED in message:
            end["explained"] = "unused parameters"
            numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
            names = end["wrappers"][0]["names"] if len(end["wrappers"]) == 1 else []
            listed = [int(number) for number in numbers[1].split()] if numbers else []
            yield _unused([names[n] for n in listed if n < len(names)] or ["some"], line)
        if (INPLACE in message and "FF" in letters) or TWICE in message:
            end["explained"] = "two forwards"
            yield "two forwards", line, f"DDP cannot follow: {message.splitlines()[0][:120]}"
        if end.get("kind_of") == "FileNotFoundError" and end.get("path") in saved:
            end["explained"] = "loaded before saved"
        if facts.report["nodes"] > 1 and "invalid device ordinal" in message:
            end["explained"] = "device by global rank"


def _unused(names: list[str], line: str) -> Found:
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return "unused parameters", line, f"no gradient for {shown}, so DDP did not average that step"


def _conflict(facts: Facts) -> Iterator[Found]:
    if not (conflict := facts.report["conflict"]):
        return
    calls = sorted(conflict["calls"].items())
    told = [f"rank {rank} calls {call[0]} at {call[3] or '?'}" for rank, call in calls]
    told += [f"rank {rank} has ended" for rank in sorted(conflict["ended"])]
    line, names, seen = calls[0][1][3], {call[0] for _, call in calls}, "; ".join(told)
    signatures = [call[2] for _, call in calls]
    if conflict["kind"] == "ranks":
        given = [own["given"] for own in signatures]
        yield "equal ranks", line, f"the processes call themselves ranks {given}"
    elif conflict["kind"] == "alone":
        yield "a rank stops alone", line, f"{seen}: the others wait for ever"
    elif names in ({"gradients"}, {"DistributedDataParallel"}):
        yield "other models", line, f"they have {[own['elements'] for own in signatures]} elements"
    else:
        yield "other collectives", line, seen + (f" with {signatures}" if len(names) == 1 else "")


def _differ(values: list[Any], tolerance: float) -> bool:
    if any(value is None for value in values):
        return any(value is not None for value in values)
    pairs = [(value[part], values[0][part]) for value in values[1:] for part in (0, 1)]
    return any(a != b and not abs(a - b) <= tolerance * max(abs(a), abs(b)) for a, b in pairs)


def _divergence(facts: Facts) -> Iterator[Found]:
    """Find the first step at which ranks differ, and its cause in what came before it."""
    has_wrapper, told = bool(facts.all("wrapped")), set()
    if not has_wrapper and not facts.all("averaged by hand"):
        return
    for steps in facts.columns("step"):
        if len({len(step["values"]) for step in steps}) > 1 or "averaged" in told:
            return
        for values in zip(*(step["values"] for step in steps), strict=True):
            name, kind, *_ = values[0]
            before, grads, after = ([value[part] for value in values] for part in (2, 3, 4))
            if kind in told or any(value[0] != name for value in values):
                continue
            apart = _differ(grads, 1e-6)
            shown = [None if value is None else float(f"{value[0]:.6g}") for value in grads]
            what = f"the gradients of {name} add up to {shown} on the ranks"
            line, changed = steps[0]["line"], _differ(before, 1e-9)
            if kind != "averaged" and apart:
                yield (kind if has_wrapper else "not averaged"), line, what
            elif kind == "averaged" and changed:
                loads = [at for s in steps for own in s["events"] for c, at in own if c == "L"]
                cause = "loaded" if loads else "changed"
                shown = [value[0] for value in before]
                told_sums = f"before a step the weights of {name} add up to {shown} on the ranks"
                yield f"{cause} after wrapping", (loads or [line])[0], told_sums
            elif apart:
                yield _cause(steps, what)
            elif not changed and _differ(after, 1e-9):
                rates = [step["rates"] for step in steps]
                same = all(own == rates[0] for own in rates)
                what = f"{name} differs after a step with equal gradients"
                yield ("steps differ" if same else "other learning rates"), line, f"{what}: {rates}"
            else:
                continue
            told.add(kind)


def _cause(steps: Any, what: str) -> Found:
    """Tell by the forwards (F, under no_sync f, past the wrapper P) and backwards (B) of a step."""
    for events in (own for step in steps for own in step["events"]):
        told = "".join(letter for letter, _ in events if letter != "L")
        places: dict[str, str] = dict(reversed(events))
        two = re.search("[Ff]P*[Ff]P*B", told)
        if "P" in told and not two:
            return "past the wrapper", places["P"], f"{what}, since a forward went past the wrapper"
        if told.rstrip("B")[-1:] == "f":
            return "no_sync at the step", places["f"], f"{what}: the last forward was under no_sync"
        if two:
            return "two forwards", places.get("F", places.get("f", "")), f"{what} ({told})"
        if re.search("BB", told):
            return "two backwards", places["B"], f"{what}: only the first backward averages"
    unused = [v[0] for v in steps[0]["values"] if v[1] == "averaged" and v[3] is None]
    if unused:
        return _unused(unused, steps[0]["line"])
    return "gradients differ", steps[0]["line"], f"{what}. The forwards and backwards look right"


def _shares(facts: Facts) -> Iterator[Found]:
    for items in facts.training:
        line, whole = items[0]["line"], [item["whole"] for item in items]
        known = all(own and own[1] for own in whole)
        if known and len({-(-length // size) for length, size in whole}) > 1:
            yield "unequal batches", line, f"in full, the shares are {[n for n, _ in whole]}"
        digests, lists = [item["digests"] for item in items], [item["indices"] for item in items]
        alike = len(digests[0]) > 1 and all(own == digests[0] != [0] * len(own) for own in digests)
        if not all(lists):
            if alike:
                yield "equal shares", line, "the first batches are equal on all ranks"
            continue
        permuted = all(len(set(own)) == len(own) for own in lists)
        if not permuted or len({item["length"] for item in items}) > 1:
            if all(own == lists[0] for own in lists):
                yield "equal samples", line, "all ranks draw the same samples"
            continue
        contents = [item["content"] for item in items]
        same = not all(contents) or all(own == contents[0] for own in contents)
        both = set(lists[0]).intersection(*lists[1:])
        if not same and len(both) <= facts.count:
            equal = sum(len(set(column)) == 1 for column in zip(*contents, strict=True))
            told = f"{equal} of {len(contents[0])} samples looked at are equal"
            yield "other data", line, f"the ranks' data sets have equal lengths, but only {told}"
            continue
        if not same:  # each rank has samples of its own, unless they come from one larger set
            bases = [item["base"] for item in items]
            both = set(bases[0]).intersection(*bases[1:]) if bases != lists else set()
        if all(contents) and len(both) > max(facts.count, len(lists[0]) / 4):
            order = ", in the same order" if all(own == lists[0] for own in lists) else ""
            told = f"all ranks draw {len(both)} of rank 0's {len(lists[0])} samples{order}"
            yield "equal shares", line, told


def _order(facts: Facts) -> Iterator[Found]:
    calls = facts.all("set_epoch")
    why = "too late, or with the same number" if calls else "not called"
    for (key, number), (item, *_) in facts.shared:
        following, order = facts.passes[0].get((key, number + 1)), item["indices"]
        if not following or not (item["trained"] and following["trained"]):
            continue
        if len(order) > 3 and order == following["indices"] != sorted(order):
            told = f"epochs {number + 1} and {number + 2} had the same order"
            yield "no set_epoch", item["line"], f"{told}: set_epoch was {why}"


def _random(facts: Facts) -> Iterator[Found]:
    looks = [
        ([e["draws"] for e in own], own[0]["line"], "in a forward, as for dropout")
        for own in facts.columns("forward")
    ]
    for items in facts.training:
        columns = zip(*(item["draws"] for item in items), strict=False)
        looks += [(list(own), items[0]["line"], "for their samples") for own in columns]
    for draws, line, where in looks:
        names = [n for n, mark in draws[0].items() if all(o.get(n) == mark for o in draws)]
        if names:
            told = f"all ranks draw the same random numbers {where} ({', '.join(names)})"
            yield "equal random numbers", line, told


def _evaluation(facts: Facts) -> Iterator[Found]:
    every = [(key, item) for own in facts.passes for key, item in own.items()]
    for key, item in every:
        if not _evaluates(item) or not (item["complete"] or item["capped"]):
            continue
        others, line = [own[key] for own in facts.passes if key in own], item["line"]
        if item["mode"]:
            yield "evaluates in training mode", line, "dropout and batch statistics were active"
        if len(others) == 1 and item["through"]:
            told = f"only rank {item['rank']} evaluates, and calls the wrapped model"
            yield "evaluates through the wrapper", line, told
        sets = [set(own["base"]) for own in others]  # a Subset may be the share of its rank
        if len(others) < facts.count or not all(sets) or all(own == sets[0] for own in sets):
            continue
        if _combined(facts, item) is False:
            counts = " + ".join(str(len(own["base"])) for own in others)
            told = (
                f"each rank evaluates its own share ({counts} samples), and nothing combines them"
            )
            yield "evaluates a share", line, told
        seen, union = sum(len(own["base"]) for own in others), set().union(*sets)
        if item["drop_last"]:
            if len(union) < item["length"] and item["complete"]:
                told = f"{item['length'] - len(union)} of {item['length']} samples (drop_last)"
                yield "leaves samples out", line, told
        elif seen > len(union) or item["sampler"] == "DistributedSampler":
            told = "DistributedSampler repeats samples where the ranks do not divide the test set"
            yield "padded evaluation", line, told


def _combined(facts: Facts, item: dict[str, Any]) -> bool | None:
    """Whether a collective combined results after an evaluation began, before training went on."""
    is_over = False
    for event in facts.events[item["rank"]]:
        is_over = is_over or event is item
        if is_over and event["kind"] == "step":
            return False
        late = event["kind"] == "collective" and event["clock"] > item["begun"]
        if late and COMBINES.search(event["name"]):
            return True
    return False if facts.ends[item["rank"]]["how"] == "ended" else None


def _files(facts: Facts) -> Iterator[Found]:
    by_path = defaultdict(list)
    for event in facts.all("save", "write"):
        if event["kind"] == "save" or re.search("[wx]", event["mode"]):
            by_path[event["path"]].append(event)
    for path, events in by_path.items():
        pairs = [(a, b) for a in events for b in events if a["rank"] < b["rank"]]
        for one, other in pairs:
            on_one_host = one["rank"] // facts.each == other["rank"] // facts.each
            renamed = one.get("renamed") or other.get("renamed")
            if on_one_host and one["clock"] == other["clock"] and not renamed:
                kind = "saves" if "save" in (one["kind"], other["kind"]) else "writes"
                told = f"ranks {one['rank']} and {other['rank']} write {path} at the same time"
                yield f"every rank {kind}", one["line"], told
    for read in facts.all("read"):
        saves = by_path.get(read["path"], [])
        if any(save["rank"] == read["rank"] for save in saves):
            continue
        for save in saves:
            if save["clock"] == read["clock"]:
                told = f"rank {read['rank']} reads {read['path']} without waiting for rank"
                sure = save["kind"] == "save" and not facts.report["polls"]
                kind = "loaded before saved" if sure else "perhaps loaded before saved"
                yield kind, read["line"], f"{told} {save['rank']}, which saves it at {save['line']}"
    for save in facts.all("save"):
        if save["wrapped"]:
            yield "module. in keys", save["line"], "the saved names begin with module."


def _devices(facts: Facts) -> Iterator[Found]:
    for events in facts.columns("wrapped"):
        placed = [(e["rank"] // facts.each, e["device"]) for e in events if e["device"] is not None]
        if len(set(placed)) < len(placed):
            told = f"the ranks' models are on GPUs {[event['device'] for event in events]}"
            yield "two ranks on one device", events[0]["line"], told
    for event in facts.all("ordinal") if facts.report["nodes"] > 1 else ():
        told = f"rank {event['rank']} asks for GPU {event['index']} of a host with"
        yield "device by global rank", event["line"], f"{told} {event['devices']}"


def _single(facts: Facts) -> Iterator[Found]:
    """Findings that an event of one kind shows."""
    for event in facts.all("clipped before unscaling"):
        yield event["kind"], event["line"], "GradScaler's factor is still in the gradients"
    for event in facts.all("half no_sync"):
        told = "no_sync encloses the backward without its forward, and so does nothing"
        yield "no_sync around the backward", event["line"], told
    for kind, verb in (("tracker", "logs"), ("download", "downloads")):
        for events in facts.columns(kind):
            if len({event["clock"] for event in events}) == 1:
                yield f"every rank {verb}", events[0]["line"], f"all ranks open {events[0]['name']}"
    values = [v for step in facts.all("step") for v in step["values"] if v[1] == "averaged"]
    for event in facts.all("wrapped"):
        if event["unused"] and values and all(v[3] and v[3] != (0.0, 0.0) for v in values):
            yield "needless find_unused_parameters", event["line"], "every parameter got a gradient"


def _learning(facts: Facts) -> Iterator[Found]:
    steps = [event for event in facts.events[0] if event["kind"] == "step"]
    for number in {step["optimizer"] for step in steps}:
        own = [step for step in steps if step["optimizer"] == number]
        if len(own) > 1 and all(value[3] is None for step in own for value in step["values"]):
            told = f"none of the optimizer's {len(own[0]['values'])} parameters got a gradient"
            yield "trains nothing", own[0]["line"], told
    for key in {key for key, _ in facts.passes[0]}:
        items = [item for (own, _), item in facts.passes[0].items() if own == key]
        modes = [item["mode"] for item in items if item["trained"]]
        if modes and modes[-1] is False:
            kind = "trains" if True in modes else "always"
            told = f"epoch {len(modes)} trains with dropout and batch statistics switched off"
            yield f"{kind} in evaluation mode", items[0]["line"], told


LOOKS = (
    *(_errors, _conflict, _divergence, _shares, _order, _random),
    *(_evaluation, _files, _devices, _single, _learning),
)
