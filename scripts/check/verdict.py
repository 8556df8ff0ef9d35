"""What the check says of a script: the findings, what could not be judged, and what was not seen.

findings.txt lists what can be found. A rank reports some findings by itself. Others are what
several ranks do at the same time: comparisons.py finds them.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from comparisons import COMPARISONS, CONFLICTS, EXPLAINED, Facts, events_of

LEVELS = ["WRONG", "WARN", "NOTE"]
NO_GPU = re.compile("NVIDIA|CUDA|nvcc|Triton|cudnn|pretended")
# Each of these findings explains those behind it, which are not said then.
EXPLAINS = {
    "unused parameters": ("gradients differ",),
    "gradients differ": ("other weights",),
    "nothing is averaged": ("other weights",),
    "equal shares": ("equal random numbers",),
    "trains nothing": ("held by no optimizer",),
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
        see = f" (python scripts/lessons/{self.lesson}.py)" if self.lesson else ""
        what = f"{self.level:5}  {self.line}  {self.kind}: {self.what}"
        return f"{what}\n       do: {self.do}{see}"


LINES = Path(__file__).with_name("findings.txt").read_text().splitlines()[1:]
ROWS = [Finding(*map(str.strip, re.split(r"\||->", line))) for line in LINES]
TABLE = {row.kind: row for row in ROWS}


def listed() -> str:
    """Return all that can be found, as --list prints it."""
    return "\n".join(f"{row.level:5}  {row.kind}\n       do: {row.do}" for row in ROWS)


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
    is_ddp = events_of(report, "group", "device by global rank", *CONFLICTS)
    report["kinds"] = tuple(TABLE)
    found, by_kind = [], dict[str, Finding]()
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
    could_not = _could_not(report, set(by_kind))
    is_wrong = any(finding.level == "WRONG" for finding in by_kind.values())
    status = 1 if is_wrong else 3 if could_not else 0
    said = list(by_kind.values()), list(_not_seen(report)), could_not, status
    return Verdict(report["script"], report["world"], report["nodes"], report["seconds"], *said)


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
    if events_of(report, *CONFLICTS):
        return ""
    if not events_of(report, "group"):
        return "it makes no process group, and a script of a single process is not judged"
    if events_of(report, "step") and "nothing is averaged" in kinds | {""}:
        return ""
    if not events_of(report, "wrapped", "averaged by hand"):
        return "it wraps no model in DistributedDataParallel, which is what is judged here"
    if events_of(report, "step"):
        return ""
    loaded = " (it loads a file: where does it go on?)" if events_of(report, "load") else ""
    return f"no step of an optimizer was seen in the two epochs of the check{loaded}"


def _not_seen(report: Facts) -> Iterator[str]:
    yield from dict.fromkeys(event["what"] for event in events_of(report, "left out"))
    uses = {item["use"] for item in events_of(report, "pass")}
    if "evaluation" not in uses:
        yield "an evaluation: no forward without gradients had batches of a DataLoader"
    if "training" not in uses:
        yield "training data: no step had batches of a DataLoader"
    if all("level" in save for save in events_of(report, "every rank saves")):
        yield "a checkpoint: torch.save was not called"
    yield from dict.fromkeys(e["message"] for e in report["ends"].values() if e["how"] == "cut")
    if paths := list(dict.fromkeys(event["what"] for event in events_of(report, "redirected"))):
        yield f"writing to {', '.join(paths[:3])}: it went to a copy, which is removed"
    for step in events_of(report, "step"):
        for value in step["values"]:
            if value["grad"] and not math.isfinite(sum(value["grad"])):
                yield f"gradients of {value['name']} and what follows: they are not finite"
                return
