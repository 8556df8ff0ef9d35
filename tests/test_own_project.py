"""A data set, a network and a task of one's own, through the three scripts from start to end."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT, run, summary
from tests.test_logger import events

LAUNCHER = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2]


def train(technique: str, own: str, folder: Path, *flags: Any) -> Any:
    launcher = LAUNCHER if technique == "ddp" else []
    common = ["--model", "mine", "--dataset", "mine", "--threads", 1, "--no-progress"]
    script = [ROOT / "tests" / "own.py", f"train_{technique}.py"]
    return run(
        *[sys.executable, *launcher, *script, *common, "--run-dir", folder, *flags],
        OWN=own,
        timeout=90,
    )


TASKS: dict[str, tuple[float, list[Any]]] = {  # the least accuracy, and flags
    "grey20": (0.9, ["--epochs", 4]),
    "colour100": (0.9, ["--epochs", 6, "--no-augment"]),
    "regression": (
        0.8,
        ["--epochs", 6, "--no-augment", "--lr", 0.01, "--max-grad-norm", 0],
    ),
    "depth": (0.9, ["--epochs", 4, "--lr", 0.05]),
}
QUICK = ("grey20-single", "grey20-dp", "grey20-ddp")


@pytest.mark.parametrize(
    ("own", "technique"),
    [
        pytest.param(
            *(own, technique),
            marks=[] if f"{own}-{technique}" in QUICK else pytest.mark.slow,
        )
        for own in TASKS
        for technique in ("single", "dp", "ddp")
    ],
)
def test_it_trains_to_the_end(own: str, technique: str, tmp_path: Path) -> None:
    least, flags = TASKS[own]
    batch = 24 if technique == "single" else 12
    more = ["--find-unused-parameters"] if (own, technique) == ("depth", "ddp") else []
    ended = train(technique, own, tmp_path / "run", *flags, "--batch-size", batch, *more)
    assert ended.returncode == 0, ended.text
    facts = summary(tmp_path / "run")
    assert facts["test_count"] == 600
    assert facts["test_accuracy"] > least
    pictures = events(tmp_path / "run").Tags()["images"]
    assert len(pictures) == (0 if own == "regression" else 2)


def test_a_graph_that_differs_between_ranks_is_told_in_one_line(tmp_path: Path) -> None:
    """Rank 1's next collective meets a gradient of rank 0, and gloo aborts it with a stack."""
    ended = train("ddp", "uneven", tmp_path / "run", "--max-steps", 9)
    assert ended.returncode == 1
    lines = [line for line in ended.stderr.splitlines() if ".py: error: rank 0 lost rank 1" in line]
    assert len(lines) == 1, ended.stderr
    assert "--find-unused-parameters" in lines[0] or "took another branch" in lines[0]


def test_another_graph_in_each_step_is_told_what_helps(tmp_path: Path) -> None:
    ended = train("ddp", "depth", tmp_path / "run", "--max-steps", 5)
    assert ended.returncode == 1
    assert "--find-unused-parameters" in ended.stderr
