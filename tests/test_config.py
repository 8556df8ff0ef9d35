"""Bad input: one line, exit status 2, nothing written."""

import shlex
import sys

import pytest

from tests.processes import error_line, run, script
from utils.training import config

# technique, flags, a part of the message: each answer of the parser once
BAD = """
single | --dataset cifar              | synthetic (in utils/datasets/sources.py)
single | --model my_network:          | callable in it, such as my_network:MyNetwork
single | --num-workers -1             | '-1' is not a whole number
single | --lr nan                     | 'nan' is not a number
single | --devices 0,1                | uses one device
single | --init-weights ''            | is a variable not set?
single | --resume --init-weights x.pt | drop one of them
single | --data-on-device --num-workers 2 | drop --num-workers
single | --batch 96                   | unrecognized arguments
dp     | --compile                    | no effect on DataParallel
"""
ROWS = [tuple(cell.strip() for cell in line.split("|")) for line in BAD.strip().splitlines()]


@pytest.fixture(autouse=True)
def _only_parse(monkeypatch):
    """The command line alone: signals and output of the tests themselves stay as they are."""
    monkeypatch.setattr(config.signals, "install_handlers", lambda: None)
    monkeypatch.setattr(config.output, "protect", lambda: None)


@pytest.mark.parametrize(("technique", "flags", "message"), ROWS)
def test_bad_flags_are_one_line_and_status_2(technique, flags, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"train_{technique}.py"])
    with pytest.raises(SystemExit) as caught:
        config.parse_args(technique, None, shlex.split(flags))
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"train_{technique}.py: error: ")
    assert len(printed.err.splitlines()) == 1
    assert message in printed.err


def test_ranks_have_to_agree_on_what_they_train():
    """Ranks of which one has another rate, or takes other steps, would train on without a word."""
    own = "--epochs 2 --lr 0.2 --grad-accum-steps 2 --batch-size 8 --momentum 0 --seed 1 --amp bf16"
    mine, theirs = (config.shared(config.parse_args("ddp", None, w.split())) for w in ("", own))
    differing = {f"--{name.replace('_', '-')}" for name in mine if mine[name] != theirs[name]}
    assert differing == {word for word in own.split() if word.startswith("--")}


def test_torchrun_is_refused_by_scripts_that_are_one_process(capsys, monkeypatch):
    """Or each of them would train the whole, into one folder."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for technique in ("single", "dp"):
        with pytest.raises(SystemExit, match="2"):
            config.parse_args(technique, None, [])
        assert "one process, and torchrun started 2" in capsys.readouterr().err


STARTS = [
    ("train_single.py", "--init-weights nowhere.pt", 1, "nowhere.pt: No such file"),
    ("train_single.py", "--batch-size 60001", 2, "larger than the training set"),
    ("train_single.py", "--run-dir /proc/run", 2, "cannot be written"),
    ("train_ddp.py", "--sync-bn", 2, "SyncBatchNorm works on GPUs only"),
]


@pytest.mark.parametrize(("name", "flags", "status", "message"), STARTS)
def test_bad_starts(name, flags, status, message, synthetic_dir, tmp_path):
    common = ["--dataset", "synthetic", "--data-dir", synthetic_dir]
    ended = run(*script(name, *common, *shlex.split(flags)), cwd=tmp_path)
    assert message in error_line(ended, status)
    assert list(tmp_path.iterdir()) == [], "something was written"
