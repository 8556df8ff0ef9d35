"""The drawings of a step and of the ring: from traces and real ranks, well-formed, and complete."""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, run
from tests.test_profile import REPLICAS, event, op, step

sys.path.insert(0, str(ROOT / "scripts" / "tools"))

import draw_ring
import phases
import timeline
from svg import Drawing, DrawingError

TOOLS = ROOT / "scripts" / "tools"
SVG = "{http://www.w3.org/2000/svg}"


def texts(path: Path) -> list[str]:
    return [element.text or "" for element in ET.parse(path).getroot().iter(f"{SVG}text")]


def boxes(path: Path) -> list[dict[str, float]]:
    names = ("x", "y", "width", "height")
    found = ET.parse(path).getroot().iter(f"{SVG}rect")
    return [{name: float(box.get(name, "nan")) for name in names} for box in found]


def panel(technique: str, traces: list[list[dict[str, Any]]], **flags: Any) -> timeline.Panel:
    summary = {
        "script": f"train_{technique}.py",
        "technique": technique,
        "world_size": len(traces),
        "num_devices": 1 if technique == "single" else 2,
        "threads": 1,
        "batch_size": 32,
        "model": "basic",
    }
    return timeline.Panel(summary, flags, [phases.sort_events(events) for events in traces])


def of_dp() -> list[dict[str, Any]]:
    first, second = REPLICAS
    return step(
        event("DataParallel.forward", 10, 36),
        event("DataParallel.scatter", 10, 11),
        event("DataParallel.replicate", 12, 20),
        op("aten::conv2d", 20, 32, tid=first),
        op("aten::conv2d", 24, 32, tid=second),
        event("DataParallel.gather", 34, 36),
    )


def test_a_step_of_each_is_drawn_to_one_scale(tmp_path: Path) -> None:
    of_ddp = step(event("gloo:all_reduce", 60, 78, tid=9), backward_end=61)
    panels = [
        panel("single", [step()]),
        panel("dp", [of_dp()]),
        panel("ddp", [of_ddp, of_ddp], nprocs=2, amp="off", tensorboard=False, run_dir="/secret"),
    ]
    timeline.draw(panels, tmp_path / "steps.svg")
    said = texts(tmp_path / "steps.svg")
    for name in ("single", "dp", "ddp"):
        assert sum(text.startswith(f"train_{name}.py: ") for text in said) == 1
    for word in ("scatter", "replicate", "gather", "replica 0", "replica 1", "rank 0", "rank 1"):
        assert word in said
    assert said.count("all-reduce of gradients") == 2, "once for each rank"
    assert said.count("backward") >= 4
    # Every step takes 100 us: each is as wide as the axis, and no box leaves the drawing.
    drawn = boxes(tmp_path / "steps.svg")[len(timeline.LEGEND) :]
    right = timeline.WIDTH - timeline.RIGHT
    assert all(box["x"] >= timeline.LEFT and box["width"] > 0 for box in drawn)
    assert all(box["x"] + box["width"] <= right + 1 for box in drawn)
    # The backward lasts 40 us of the 100, on the one device and in DP.
    axis = right - timeline.LEFT
    assert sum(box["width"] == pytest.approx(0.4 * axis, abs=1) for box in drawn) == 2
    content = (tmp_path / "steps.svg").read_text()
    assert "python train_ddp.py --nprocs 2 --no-tensorboard --run-dir RUN_3" in content
    assert "/secret" not in content
    assert "prefers-color-scheme: dark" in content


def test_ranks_are_drawn_by_one_clock(tmp_path: Path) -> None:
    """The second began 20 us later, and its trace counts from another moment."""
    subject = panel("ddp", [step(), step()])
    subject.traces[0].base, subject.traces[1].base = 1_000_000, 1_020_000
    lanes, microseconds = timeline.lanes_of(subject.traces)
    begins = [min(begin for begin, _, _, _ in lane.boxes) for lane in lanes]
    assert begins == [0, 20]
    assert microseconds == 100


def test_the_step_of_middle_length_is_chosen() -> None:
    trace = phases.sort_events(step())
    trace.steps = [(0, 90), (100, 300), (300, 400)]
    assert timeline.lanes_of([trace])[1] == 100


def test_a_run_without_a_summary_is_one_line(tmp_path: Path) -> None:
    for content in ("", "[]", "{}"):
        for name in ("summary.json", "args.json"):
            (tmp_path / name).write_text(content)
        with pytest.raises(phases.TraceError, match=r"no usable summary\.json") as told:
            timeline.read_panel(tmp_path, [])
        assert len(str(told.value).splitlines()) == 1


def test_a_drawing_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DrawingError, match="cannot write"):
        Drawing().save(tmp_path / "none" / "x.svg", 1, 1, "", "")


def test_text_is_escaped(tmp_path: Path) -> None:
    drawing = Drawing()
    drawing.text(0, 0, "a < b & c")
    drawing.save(tmp_path / "x.svg", 1, 1, "<", "--draw x -- <")
    assert texts(tmp_path / "x.svg") == ["a < b & c"]


def test_the_ring_that_is_shown_is_what_its_command_draws(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    command = [sys.executable, TOOLS / "draw_ring.py", "docs/ring_all_reduce.svg"]
    drawn = run(*command, cwd=tmp_path)
    assert drawn.returncode == 0, drawn.text
    shown = (ROOT / "docs" / "ring_all_reduce.svg").read_text()
    assert (tmp_path / "docs" / "ring_all_reduce.svg").read_text() == shown


def test_the_ring_has_an_arrow_for_each_chunk_that_is_sent() -> None:
    n = draw_ring.WORLD_SIZE
    start = [[10**rank] * n for rank in range(n)]
    after = [list(chunks) for chunks in start]
    after[1][0] += 1  # rank 1 took chunk 0 from rank 0
    after[0][3] += 1000  # and rank 0 chunk 3 from the last
    drawing, _, _ = draw_ring.draw([start, after])
    lines = [element for element in drawing.elements if element.startswith("<line")]
    assert sum("marker-end" in line for line in lines) == 2
    assert len(lines) == 3, "the way around leaves on the right and comes in on the left"


def test_the_steps_that_are_shown_are_those_of_the_three_scripts() -> None:
    path = ROOT / "docs" / "step_timeline.svg"
    said = texts(path)
    for script in ("train_single.py", "train_dp.py", "train_ddp.py"):
        [title] = [text for text in said if text.startswith(f"{script}: ")]
        assert re.search(r"2 x 32|1 x 64", title), "the same images in all"
    assert {"replicate", "all-reduce of gradients", "backward", "rank 1", "replica 1"} <= set(said)
    content = path.read_text()
    assert content.count("--profile") == 3
    assert "python scripts/tools/trace.py --draw docs/step_timeline.svg" in content
