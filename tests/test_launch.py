"""Every way to launch train_ddp.py, with the commands of docs/launching.md."""

import os
import signal

import pytest
import torch

from tests.launches import LAUNCHES, SHORT, finish_all, launch
from tests.processes import (
    ALTERED,
    STANDALONE,
    error_line,
    error_lines,
    finish,
    free_port,
    metrics,
    run,
    script,
    start,
    stray_processes,
    summary,
    wait_for_port,
    wait_until,
)
from utils.cluster import rank_info
from utils.cluster.launch import choose_backend
from utils.cluster.rank_info import RankInfo
from utils.errors import UsageError

# Their tests are in test_clusters.py and test_hosts.py.
ELSEWHERE = ("srun", "mpirun", "sbatch", "script, over ssh")
SLOW = ("torchrun, elastic", "torchrun, static", "script, one machine", "script, several machines")


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[pytest.mark.slow] if method in SLOW else [])
        for method in LAUNCHES
        if method not in ELSEWHERE
    ],
)
def test_every_way_reaches_the_same_weights(method, synthetic_dir, tmp_path, expected):
    """A shell starts the launch scripts, and the same commands in test_hosts.py.

    What a shell still has of another job does no harm, where one machine needs no address.
    """
    flags = f"{SHORT} --data-dir {synthetic_dir} --run-dir {tmp_path}/run"
    command = LAUNCHES[method]
    stale = {"MASTER_ADDR": "192.0.2.1"} if method == "no launcher, one machine" else {}
    for ended in finish_all(launch(command, flags, "scripts/" in command, **stale), 90):
        assert ended.returncode == 0, ended.text
        assert "resource_tracker" not in ended.stderr, "a semaphore was left"
    found = summary(tmp_path / "run")
    assert (found["world_size"], found["backend"]) == (2, "gloo")
    assert found["weights_sha256"] == expected


SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1"}
SLURM |= {"SLURM_STEP_NUM_TASKS": "4", "MASTER_PORT": "7"}


@pytest.mark.slow
def test_an_elastic_job_grows_and_shrinks(synthetic_dir, tmp_path):
    """One node begins, a second joins, and the first goes on when that one is killed."""
    command = LAUNCHES["torchrun, elastic"].replace("timeout=10", "timeout=3")
    flags = (
        f"--dataset synthetic --data-dir {synthetic_dir} --model linear --epochs 100000 --threads 1"
        f" --no-progress --no-tensorboard --run-dir {tmp_path}/run"
    )
    log, run_dir = tmp_path / "log", tmp_path / "run"
    line = f"exec env {command} {flags} >> {log} 2>&1"
    variables = {"HOST0": "127.0.0.1", "PORT": str(free_port())}

    def wait_for_an_epoch():
        before = len(metrics(run_dir))
        wait_until(lambda: len(metrics(run_dir)) > before, 100)

    first = start("bash", "-c", line, **variables)
    wait_until((run_dir / "metrics.jsonl").exists, 100)
    second = start("bash", "-c", line, **variables)
    wait_until(lambda: "2 x cpu" in log.read_text(), 100)
    wait_for_an_epoch()
    os.killpg(second.pid, signal.SIGKILL)
    wait_until(lambda: log.read_text().count("device  cpu,") == 2, 100)
    wait_for_an_epoch()
    first.terminate()
    for process in (first, second):
        finish(process)


SLURM = {"SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1"}
SLURM |= {"SLURM_STEP_NUM_TASKS": "4", "MASTER_PORT": "7"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4"}  # MPICH and Intel MPI
HYDRA |= {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
MVAPICH = {f"MV2_COMM_WORLD_{name}": number for name, number in OPEN_MPI.items()}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": number for name, number in OPEN_MPI.items()}
PALS = {"PALS_RANKID": "1", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, RankInfo("alone")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, RankInfo("environment", 1, 2)),
        (
            {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
            | {"MASTER_ADDR": "h ", "MASTER_PORT": "7", "TORCHELASTIC_RUN_ID": "none"},
            RankInfo("torchrun", 1, 4, 1, 2, "h", 7),
        ),
        (
            SLURM | {"SLURM_STEP_NODELIST": "rack[1-2]node[03-05,9],other"},
            RankInfo("slurm", 3, 4, 1, None, "rack1node03", 7),
        ),
        # The batch script itself, in which no step has started.
        ({name: value for name, value in SLURM.items() if "STEP" not in name}, RankInfo("alone")),
        (OPEN_MPI, RankInfo("mpirun", 3, 4, 1, 2)),
        (MVAPICH, RankInfo("mvapich", 3, 4, 1, 2)),
        (PALS, RankInfo("pals", 1, 4, 0, 2)),
        # Started through srun, whose variables number the machines.
        (SLURM | OPEN_MPI, RankInfo("mpirun", 3, 4, 1, 2, master_port=7)),
        (SLURM | HYDRA, RankInfo("mpich", 1, 4, 0, 2, master_port=7)),
        # Both say a rank: by hand wins over Slurm.
        (SLURM | {"RANK": "0", "WORLD_SIZE": "1"}, RankInfo("environment", 0, 1, master_port=7)),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"RANK": "1"}, "RANK is set and WORLD_SIZE is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
    ],
)
def test_what_a_launcher_says(variables, expected):
    if isinstance(expected, RankInfo):
        assert rank_info.read_rank_info(variables) == expected
    else:
        with pytest.raises(UsageError, match=expected):
            rank_info.read_rank_info(variables)


def test_two_jobs_of_slurm_on_one_host_have_ports_of_their_own():
    """Each is step 0 of its job."""
    step = {name: value for name, value in SLURM.items() if name != "MASTER_PORT"}
    jobs = [step | {"SLURM_JOB_ID": str(number)} for number in range(100, 110)]
    assert len({rank_info.read_rank_info(job).master_port for job in jobs}) == 10


def test_one_line_for_all_ranks_of_torchrun(synthetic_dir):
    """Also where rank 0, which has to say it, is the last to find out."""
    data_set = ["--dataset", "synthetic", "--data-dir", synthetic_dir]
    words = [*STANDALONE, 2, ALTERED, "train_ddp.py", *data_set, "--init-weights", "nowhere.pt"]
    ended = run(*words, ALTER="late", ALTER_AT="start")
    assert ended.returncode == 1
    assert len(error_lines(ended)) == 1, ended.text


def test_a_device_that_no_backend_knows():
    with pytest.raises(UsageError, match=r"use train_single\.py, or --device cpu"):
        choose_backend("auto", torch.device("mps"))


@pytest.mark.slow
def test_torchrun_starts_all_again_after_a_crash(synthetic_dir, tmp_path, expected):
    """Ranks that start again must not meet at the addresses of the attempt before."""
    command = LAUNCHES["torchrun, static"].replace("train_ddp.py", f"{ALTERED} train_ddp.py")
    flags = f"{SHORT} --data-dir {synthetic_dir} --run-dir {tmp_path}/run"
    crash = {"ALTER": "SIGKILL", "ALTER_RANK": "1", "ALTER_AT": "1", "ALTER_ONCE": ""}
    crash |= {"ALTER_FLAG": str(tmp_path / "crashed"), "PET_MAX_RESTARTS": "1"}
    for ended in finish_all(launch(command, flags, literal=False, **crash), 120):
        assert ended.returncode == 0, ended.text
    assert (tmp_path / "crashed").exists()
    assert summary(tmp_path / "run")["weights_sha256"] == expected


def test_a_stop_signal_ends_the_waiting(synthetic_dir):
    """Of a rank whose others never come."""
    port = free_port()
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(port)}
    words = script("train_ddp.py", "--dataset", "synthetic", "--data-dir", synthetic_dir)
    process = start(*words, **variables)
    wait_for_port(port, process)
    process.send_signal(signal.SIGINT)
    ended = finish(process, 90)
    assert "stopped by SIGINT while waiting" in error_line(ended, 130)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stop_signal_to_the_parent_ends_the_ranks(number, training):
    """It passes on the first, and leaves nobody after the second."""
    process = training.start("spawn", "--model", "linear", "--epochs", 100000)
    wait_until((training.folder / "metrics.jsonl").exists)
    process.send_signal(number)
    ended = finish(process, 90)
    if number == signal.SIGKILL:
        assert stray_processes() == []
    else:
        assert ended.returncode == 128 + number
        assert training.status["state"] == "stopped"


def test_an_interface_that_is_not_there_is_one_line(synthetic_dir, tmp_path):
    words = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--run-dir", tmp_path / "r"]
    words += ["--nprocs", 2, "--rdzv-timeout", 20]
    ended = run(*script("train_ddp.py", *words), GLOO_SOCKET_IFNAME="nowhere0")
    assert "GLOO_SOCKET_IFNAME" in error_line(ended, 1)
