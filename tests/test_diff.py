"""The lesson of this collection is the diff of its scripts: it has to stay small and explained."""

import difflib
import re

import pytest

from tests.sources import ROOT, code_lines

LIMITS = {"dp": (6, 10), "ddp": (12, 42)}  # code lines removed, added
MINIMAL = "scripts/minimal/"
ADDED = "ACCUMULATE AMP CLIP LOG RESTART RESUME SEED STOP"
DIFFS = [  # the old and the new script, the limits, and the words that begin the hunks' comments
    *(("train_single", f"train_{name}", *LIMITS[name], name.upper()) for name in LIMITS),
    (f"{MINIMAL}single", f"{MINIMAL}dp", 3, 3, "DP"),
    (f"{MINIMAL}single", f"{MINIMAL}ddp", 6, 20, "DDP"),
    (f"{MINIMAL}ddp", f"{MINIMAL}ddp_complete", 12, 75, ADDED),
]


@pytest.mark.parametrize(("old", "new", "max_removed", "max_added", "words"), DIFFS)
def test_a_script_changes_few_lines_and_says_why(old, new, max_removed, max_added, words):
    text = (ROOT / f"{new}.py").read_text()
    before, after = code_lines((ROOT / f"{old}.py").read_text()), code_lines(text)
    sides = [[line for _, line in side] for side in (before, after)]
    opcodes = difflib.SequenceMatcher(None, *sides, autojunk=False).get_opcodes()
    hunks = [change[1:] for change in opcodes if change[0] != "equal"]
    assert 0 < sum(end - begin for _, _, begin, end in hunks) <= max_added
    assert sum(end - begin for begin, end, _, _ in hunks) <= max_removed
    seen = set()
    for i, j, begin, end in hunks:
        assert begin < end, f"only removes {before[i:j]}: nothing is left to carry the reason"
        comment = []
        for line in reversed(text.splitlines()[: after[begin][0] - 1]):
            if not line.strip().startswith("#"):
                break
            comment.append(line.strip())
        found = re.findall(r"^# ([A-Z, ]+): ", "\n".join(comment), re.MULTILINE)
        marks = {*", ".join(found).split(", ")} & {*words.split()}
        assert marks, f"no reason above {after[begin:end]}"
        seen |= marks
    assert seen == {*words.split()}


@pytest.mark.parametrize("technique", LIMITS)
def test_no_comment_of_the_baseline_is_lost(technique):
    text = (ROOT / f"train_{technique}.py").read_text()
    for line in (ROOT / "train_single.py").read_text().splitlines():
        if line.strip().startswith("#"):
            assert line in text


def test_the_baseline_knows_nothing_of_the_others():
    assert "# D" not in (ROOT / "train_single.py").read_text()


def explanations(technique):
    """Yield the comment of each hunk, and the line below it."""
    lines = (ROOT / f"train_{technique}.py").read_text().splitlines()
    marker, comment = f"# {technique.upper()}: ", ""
    for line in map(str.strip, lines):
        if line.startswith(marker):
            comment = line.removeprefix(marker)
        elif comment and line.startswith("# "):
            comment += line[1:]
        elif comment:
            yield comment, line
            comment = ""


@pytest.mark.parametrize("technique", LIMITS)
def test_the_document_says_of_each_hunk_what_its_comment_says(technique):
    text = " ".join((ROOT / "docs" / "diffs.md").read_text().split())
    told = [f"`{line}`: {said[0].upper()}{said[1:]}" for said, line in explanations(technique)]
    assert [said for said in told if said not in text] == []
    assert len(told) >= 6


def test_the_change_in_the_readme_is_cut_from_the_minimal_scripts():
    for name in ("README.md", "README.zh-CN.md"):
        cuts = re.findall(r"```diff\n([-+][^-].*?)```", (ROOT / name).read_text(), re.DOTALL)
        assert len(cuts) == 2
        for cut, other in zip(cuts, ("dp", "ddp"), strict=True):
            scripts = {"-": "single", "+": other}
            for line in cut.splitlines():
                text = (ROOT / f"scripts/minimal/{scripts[line[0]]}.py").read_text()
                assert f"\n{line[1:]}\n" in text, line
