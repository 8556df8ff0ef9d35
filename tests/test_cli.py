"""The command line: each flag is parsed, and what cannot be used is one line and status 2."""

import os
import re

import pytest

from tests.helpers import parse

COMMON = """--dataset my:load --data-dir=~/d --num-workers 2 --no-augment --eval-batch-size 7
    --model my:net --epochs 0.5 --max-steps 3 --batch-size 32 --lr 0.3 --lr-scaling sqrt
    --momentum 0 --weight-decay 0.25 --label-smoothing 0.1 --warmup-epochs 0 --grad-accum-steps 4
    --max-grad-norm 0 --device cpu --devices 3 --threads 2 --amp bf16 --compile --seed 4294967295
    --deterministic --run-dir=~/r --init-weights=~/w --save-every-steps 5 --log-every 1
    --no-tensorboard --no-progress"""
PARSED = {
    "dataset": "my:load",
    "data_dir": os.path.expanduser("~/d"),
    "num_workers": 2,
    "augment": False,
    "eval_batch_size": 7,
    "model": "my:net",
    "epochs": 0.5,
    "max_steps": 3,
    "batch_size": 32,
    "lr": 0.3,
    "lr_scaling": "sqrt",
    "momentum": 0.0,
    "weight_decay": 0.25,
    "label_smoothing": 0.1,
    "warmup_epochs": 0.0,
    "grad_accum_steps": 4,
    "max_grad_norm": 0.0,
    "device": "cpu",
    "devices": [3],
    "threads": 2,
    "amp": "bf16",
    "compile": True,
    "seed": 2**32 - 1,
    "deterministic": True,
    "run_dir": os.path.expanduser("~/r"),
    "init_weights": os.path.expanduser("~/w"),
    "save_every_steps": 5,
    "log_every": 1,
    "tensorboard": False,
    "progress": False,
}
OWN = {
    "single": ("", {}),
    "dp": ("--output-device 1", {"output_device": 1}),
    "ddp": (
        "--backend gloo --timeout 2.5 --sync-bn --bucket-cap-mb 1 --find-unused-parameters"
        " --local-rank 1",
        {
            "backend": "gloo",
            "timeout": 2.5,
            "sync_bn": True,
            "bucket_cap_mb": 1.0,
            "find_unused_parameters": True,
            "local_rank": "1",
        },
    ),
}


@pytest.mark.parametrize("technique", OWN)
def test_every_flag_sets_its_variable(technique, capsys):
    flags, parsed = OWN[technique]
    args = vars(parse(*COMMON.split(), *flags.split(), technique=technique))
    assert args == PARSED | parsed | {"resume": False, "technique": technique}
    defaults = vars(parse(technique=technique))
    assert not [name for name in PARSED | parsed if args[name] == defaults[name]]
    assert parse("--resume").resume
    with pytest.raises(SystemExit, match="0"):
        parse("--help", technique=technique)
    listed = re.findall(r"^  (--[\w-]+)", capsys.readouterr().out, re.MULTILINE)
    assert len(listed) == len(args.keys() - {"technique", "local_rank"})


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
        ("--epochs 0", "--epochs: '0' is not a number from 1e-12"),
        ("--epochs nan", "--epochs: 'nan' is not a number"),
        ("--lr inf", "--lr: 'inf' is not a number"),
        ("--momentum 1", "--momentum: '1' is not a number from 0 to 0.9999"),
        ("--batch-size 0", "--batch-size: '0' is not a whole number from 1"),
        ("--num-workers 1.5", "--num-workers: '1.5' is not a whole number from 0"),
        ("--seed 4294967296", "--seed: '4294967296' is not a whole number from 0 to 4294967295"),
        ("--devices 0,0", "--devices: '0,0' is not a list of different device ids"),
        ("--devices 0,x", "--devices: '0,x' is not a list of different device ids"),
        ("--amp fp8", "invalid choice: 'fp8'"),
        ("--epo 2", "unrecognized arguments: --epo 2"),  # no abbreviations
        ("--sync-bn", "unrecognized arguments: --sync-bn"),  # a flag of train_ddp.py
        ("--devices 0,1", "train_single.py uses one device"),
        ("--resume --init-weights x.pt", "drop one of them"),
    ],
)
def test_flags_that_cannot_be_used_are_one_line(flags, message, capsys):
    assert message in refusal(capsys, flags)


def test_a_script_says_how_it_has_to_be_started(capsys):
    assert "use train_ddp.py" in refusal(capsys, "", WORLD_SIZE="2")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        line = refusal(capsys, "", technique="ddp", without=[name])
        assert "torchrun --standalone --nproc_per_node 2 train_ddp.py" in line


def test_restarts_need_a_folder_and_a_store_of_their_own(capsys):
    restarts = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ddp = {"technique": "ddp"} | restarts
    assert "needs --run-dir" in refusal(capsys, "", **ddp)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in refusal(capsys, "--run-dir r", **ddp)
    parse("--run-dir", "r", **ddp | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    parse(**ddp | {"TORCHELASTIC_MAX_RESTARTS": "0"})


def test_some_flags_of_ddp_have_two_spellings():
    """With NCCL the script needs gloo too, for its tensors on the CPU."""
    args = parse("--local_rank=1", "--backend", "nccl-legacy", technique="ddp")
    assert (args.local_rank, args.backend) == ("1", "cpu:gloo,cuda:nccl-legacy")
