"""Accuracy against the global batch: the tool's runs, its table and its chart; DDP's defaults."""

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.processes import ROOT, run, script, summary

sys.path.insert(0, str(ROOT / "scripts" / "tools"))

import large_batch as subject

from utils.errors import UsageError

TOOL = ROOT / "scripts" / "tools" / "large_batch.py"
SVG = "{http://www.w3.org/2000/svg}"
FOUND: subject.Found = {
    ("capped-linear", 96, 1, 0): 0.990,
    ("capped-linear", 96, 1, 1): 0.994,
    ("capped-linear", 6144, 1, 0): 0.93,
    ("linear", 6144, 5, 0): 0.1,
}


def test_the_table_by_hand() -> None:
    assert subject.table(FOUND).splitlines() == [
        "global batch                   96    6,144",
        "capped-linear, 1 epoch     99.20%   93.00%",
        "                          +-0.20%",
        "linear, 5 epochs                -   10.00%",
    ]


def test_the_chart_has_a_panel_for_each_length(tmp_path: Path) -> None:
    drawing, width, height = subject.draw(FOUND)
    drawing.save(tmp_path / "chart.svg", width, height, "title", "origin")
    root = ET.parse(tmp_path / "chart.svg").getroot()
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"1 epoch", "5 epochs", "capped-linear", "linear", "6,144", "99.5 %"} <= set(texts)
    assert "sqrt" not in texts
    assert subject.height_of(0.0) == subject.TOP + subject.HEIGHT
    assert subject.height_of(1.0) == pytest.approx(subject.TOP)
    assert subject.height_of(0.9) < subject.height_of(0.5)


def test_a_run_is_kept_and_not_repeated(
    synthetic_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.json"
    once = ["--batch-sizes", "6144", "--epochs", "0.25", "--seeds", "0", "--output", str(path)]
    where = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--chart", tmp_path / "a.svg"]
    flags = ["--", "--model", "linear"]
    ended = run(sys.executable, TOOL, *where, *once, *flags)
    assert ended.returncode == 0, ended.text
    [row] = json.loads(path.read_text())["runs"]
    assert row[:4] == ["capped-linear", 6144, 0.25, 0]
    assert 0 < row[4] < 1
    assert (tmp_path / "a.svg").is_file()
    subject.run(subject.parse_args([*once, "--data-dir", "/nowhere", *flags]))
    assert capsys.readouterr().out == ended.stdout, "had it trained, it had found no data"
    with pytest.raises(UsageError, match=r"holds runs with other flags \(--model linear\)"):
        subject.run(subject.parse_args(once))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rules", "cubic"], "'cubic' is none of capped-linear, linear, sqrt, none, all"),
        (["--batch-sizes", "0"], "0 is less than 1"),
    ],
)
def test_wrong_arguments_are_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        subject.parse_args(flags)
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("large_batch.py: error: ")
    assert len(printed.splitlines()) == 1
    assert message in printed


@pytest.mark.slow
def test_the_defaults_learn_at_a_large_batch_through_ddp(mnist_dir: Path, tmp_path: Path) -> None:
    """16 devices' worth, on two processes that accumulate: an epoch of 39 steps."""
    flags = ["--nprocs", 2, "--grad-accum-steps", 8, "--data-dir", mnist_dir]
    ended = run(*script("train_ddp.py", *flags, "--run-dir", tmp_path / "run"), timeout=280)
    assert ended.returncode == 0, ended.text
    facts = summary(tmp_path / "run")
    assert (facts["world_size"], facts["global_batch_size"], facts["global_step"]) == (2, 1536, 39)
    assert facts["test_accuracy"] >= 0.984
    assert "steps   39 in all, which is few" in ended.stdout
    assert "warning: the loss" not in ended.stderr
