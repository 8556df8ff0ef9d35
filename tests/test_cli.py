"""The command line: each flag is parsed, and what cannot be used is one line and status 2."""

import pytest

from tests.helpers import parse


def refusal(capsys, flags, **options):
    """Return the line in which flags are refused."""
    with pytest.raises(SystemExit) as caught:
        parse(*flags.split(), **options)
    assert caught.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lr nan", "--lr: nan is not a number from 0 on"),
        ("--batch-size 0", "--batch-size: 0 is not a number from 1 on"),
        ("--warmup-epochs 2 --epochs 2", "--warmup-epochs 2 has to be less than --epochs 2"),
        ("--epo 2", "unrecognized arguments: --epo 2"),  # no abbreviations
        ("--sync-bn", "unrecognized arguments: --sync-bn"),  # a flag of train_ddp.py
        ("--resume --init-weights x.pt", "--init-weights: not allowed with argument --resume"),
        ("--resume", "need --run-dir, the run to continue"),
    ],
)
def test_flags_that_cannot_be_used_are_one_line(flags, message, capsys):
    assert message in refusal(capsys, flags)


def test_a_script_says_how_it_has_to_be_started(capsys):
    assert "use train_ddp.py" in refusal(capsys, "", WORLD_SIZE="2")
    assert "unrecognized arguments: --compile" in refusal(capsys, "--compile", technique="dp")
    assert "invalid device_ids value: '0,x'" in refusal(capsys, "--devices 0,x", technique="dp")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        line = refusal(capsys, "", technique="ddp", without=[name])
        assert "torchrun --standalone --nproc_per_node 2 train_ddp.py" in line


def test_restarts_need_a_folder_and_a_store_of_their_own(capsys):
    restarts = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ddp = {"technique": "ddp"} | restarts
    assert "need --run-dir" in refusal(capsys, "", **ddp)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in refusal(capsys, "--run-dir r", **ddp)
    parse("--run-dir", "r", **ddp | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    parse(**ddp | {"TORCHELASTIC_MAX_RESTARTS": "0"})
