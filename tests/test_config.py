"""Bad input: one line, exit status 2, nothing written."""

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.processes import run, script
from utils import config

# script, flags, a part of the message
BAD = """
single | --dataset cifar              | invalid choice: 'cifar'
single | --num-workers -1             | -1 is less than 0
single | --num-workers two            | 'two' is not a whole number
single | --model                      | expected one argument
single | --model lenet                | invalid choice: 'lenet'
single | --epochs 0                   | 0 is not greater than 0
single | --epochs 1e300               | is greater than
single | --epochs -3                  | -3 is not greater than 0
single | --epochs ''                  | '' is not a number
single | --max-steps 0                | 0 is less than 1
single | --max-steps 1e3              | '1e3' is not a whole number
single | --batch-size 0               | 0 is less than 1
single | --batch-size -96             | -96 is less than 1
single | --batch-size 96k             | '96k' is not a whole number
single | --lr 0                       | 0 is not greater than 0
single | --lr -0.1                    | -0.1 is not greater than 0
single | --lr nan                     | 'nan' is not finite
single | --lr inf                     | 'inf' is not finite
single | --lr fast                    | 'fast' is not a number
single | --lr-scaling cubic           | invalid choice: 'cubic'
single | --momentum 1                 | is not in [0, 1)
single | --momentum -0.5              | -0.5 is less than 0
single | --momentum nan               | 'nan' is not finite
single | --weight-decay -1            | -1 is less than 0
single | --label-smoothing 1          | is not in [0, 1)
single | --label-smoothing -0.1       | -0.1 is less than 0
single | --warmup-epochs -1           | -1 is less than 0
single | --grad-accum-steps 0         | 0 is less than 1
single | --max-grad-norm -1           | -1 is less than 0
single | --max-grad-norm inf          | 'inf' is not finite
single | --device tpu                 | invalid choice: 'tpu'
single | --devices zero               | is not a list of device ids
single | --devices 0,0                | one id twice
single | --devices -1                 | negative id
single | --devices ''                 | is not a list of device ids
single | --devices 0,1                | uses one device
single | --device cpu --devices 0     | cannot go with --device cpu
single | --threads 0                  | 0 is less than 1
single | --threads 99999999999        | is greater than 4096
single | --threads 1000000            | is greater than 4096
single | --amp fp8                    | invalid choice: 'fp8'
single | --seed -1                    | -1 is less than 0
single | --seed 4294967296            | is not below 2**32
single | --seed x                     | 'x' is not a whole number
single | --save-every-steps 0         | 0 is less than 1
single | --keep 0                     | 0 is less than 1
single | --log-every 0                | 0 is less than 1
single | --resume --init-weights a.pt | drop --init-weights
single | --init-weights ''            | is a variable not set?
single | --run-dir ''                 | is a variable not set?
dp     | --replicas 9007199254740992  | is greater than 256
single | --resume yes                 | unrecognized arguments: yes
single | --data-on-device --num-workers 2 | drop --num-workers
single | --batchsize 96               | unrecognized arguments
single | --batch 96                   | unrecognized arguments
single | --nprocs 2                   | unrecognized arguments
single | --replicas 2                 | unrecognized arguments
dp     | --replicas 0                 | 0 is less than 1
dp     | --replicas two               | 'two' is not a whole number
dp     | --output-device -1           | -1 is less than 0
dp     | --compile                    | no effect on DataParallel
dp     | --sync-bn                    | unrecognized arguments
ddp    | --backend smoke              | invalid choice: 'smoke'
ddp    | --timeout 0                  | 0 is not greater than 0
ddp    | --timeout inf                | 'inf' is not finite
ddp    | --timeout 1e10               | is greater than 1e+07
ddp    | --rdzv-timeout 1e300         | is greater than 1e+07
ddp    | --bucket-cap-mb 1e300        | is greater than
ddp    | --world-size 1e12            | is not a whole number
ddp    | --rank 0 --world-size 9999999999 | is greater than
ddp    | --rdzv-timeout -1            | -1 is not greater than 0
ddp    | --bucket-cap-mb 0            | 0 is not greater than 0
ddp    | --nprocs 0                   | 0 is less than 1
ddp    | --rank 0                     | --world-size go together
ddp    | --world-size 2               | --world-size go together
ddp    | --rank 2 --world-size 2      | is not below --world-size 2
ddp    | --nprocs 2 --nnodes 3 --node-rank 5 | is not below --nnodes 3
ddp    | --nnodes 2                   | go with --nprocs
ddp    | --nprocs 2 --rank 0 --world-size 2 | drop --rank
ddp    | --init-method http://a       | is not env://
ddp    | --init-method tcp://host     | is not env://
ddp    | --init-method file://        | is not env://
"""
ROWS = [tuple(cell.strip() for cell in line.split("|")) for line in BAD.strip().splitlines()]


def test_the_table_is_long_enough() -> None:
    assert len(ROWS) >= 60
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize(("technique", "flags", "message"), ROWS)
def test_bad_flags_are_one_line_and_status_2(
    technique: str, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        config.parse_args(technique, None, shlex.split(flags))
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"train_{technique}.py: error: ")
    assert len(printed.err.splitlines()) == 1
    assert message in printed.err


STARTS = [
    ("train_single.py", "--lr nan", "not finite"),
    ("train_single.py", "--data-dir /dev/null", "no folder to prepare the data in"),
    ("train_single.py", "--dataset synthetic --init-weights nowhere.pt", "does not exist"),
    ("train_single.py", "--dataset synthetic --batch-size 60001", "larger than the training set"),
    ("train_single.py", "--dataset synthetic --run-dir /proc/run", "cannot be written"),
    ("train_dp.py", "--dataset synthetic --output-device 0", "drop it"),
    ("train_ddp.py", "--dataset synthetic --backend mpi", "was built with"),
]


@pytest.mark.parametrize(("name", "flags", "message"), STARTS)
def test_bad_starts(name, flags, message, synthetic_dir, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    if "--data-dir" not in flags:
        flags += f" --data-dir {synthetic_dir}"
    result = run(
        *script(name, *shlex.split(flags)), cwd=tmp_path, XDG_CACHE_HOME="/dev/null", timeout=60
    )
    assert result.returncode in (1, 2), result.text
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == [], "something was written"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["--lr", "--epochs", "--devices", "--resume", "--seed"])
        | st.text(max_size=8)
    )
)
def test_any_command_line_is_parsed_or_refused(words: list[str]) -> None:
    """No traceback, whatever is typed."""
    try:
        args = config.parse_args("ddp", None, words)
    except SystemExit as stop:
        assert stop.code in (0, 2)  # noqa: PT017
    else:
        assert args.lr > 0
