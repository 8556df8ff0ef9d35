"""The lesson of this collection is the diff of its scripts: it has to stay small and explained."""

import difflib
import re

import pytest

from tests.sources import ROOT, code_lines

LIMITS = {"dp": (6, 10), "ddp": (12, 42)}  # code lines removed, added


def hunks(technique):
    """Return the removed and the added code lines of each hunk against train_single.py."""
    old = code_lines((ROOT / "train_single.py").read_text())
    new = code_lines((ROOT / f"train_{technique}.py").read_text())
    matcher = difflib.SequenceMatcher(
        None, [line for _, line in old], [line for _, line in new], autojunk=False
    )
    changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
    removed = [[line for _, line in old[i1:i2]] for _, i1, i2, _, _ in changes]
    added = [new[j1:j2] for _, _, _, j1, j2 in changes]
    return removed, added


@pytest.mark.parametrize("technique", LIMITS)
def test_a_technique_adds_few_lines(technique):
    removed, added = hunks(technique)
    counts = sum(map(len, removed)), sum(map(len, added))
    assert removed, "the scripts do not differ: is this test comparing the right files?"
    assert counts[0] <= LIMITS[technique][0], f"removed {counts[0]}: {removed}"
    assert counts[1] <= LIMITS[technique][1], f"added {counts[1]}: {added}"


@pytest.mark.parametrize("technique", LIMITS)
def test_every_hunk_says_why(technique):
    lines = (ROOT / f"train_{technique}.py").read_text().splitlines()
    marker = f"# {technique.upper()}: "
    for removed, added in zip(*hunks(technique), strict=True):
        assert added, f"only removes {removed}: nothing is left to carry the reason"
        above = added[0][0] - 2  # index of the line over the first added one
        while above >= 0 and lines[above].strip().startswith("#"):
            if lines[above].strip().startswith(marker):
                break
            above -= 1
        assert lines[above].strip().startswith(marker), f"no {marker!r} above {added[0]}"


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
