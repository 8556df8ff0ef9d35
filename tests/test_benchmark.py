"""The measuring tools: what they start, count and write, on runs that only pretend to train."""

import itertools
import json
import re
import sys
from pathlib import Path

import benchmark
import pytest
import scaling
import torch
import trial

from tests.processes import ROOT, STANDALONE, Finished, run, succeed
from utils.training import config

# Ends at once with a speed that its flags determine, so that ratios are known beforehand.
PRETENDER = """
import json, os, pathlib, signal, sys, time
sys.stderr.write("chatter\\n")
flags = dict(zip(sys.argv, sys.argv[1:]))
name = pathlib.Path(sys.argv[0]).stem.removeprefix("train_")
with open(os.environ["PRETEND_LOG"], "a") as log:
    log.write(json.dumps(sys.argv) + "\\n")
if flags["--model"] == "linear" and name == "dp":
    sys.exit("train_dp.py: error: no DataParallel today")
if flags["--model"] == "mlp" and flags["--batch-size"] == "500" and name == "ddp":
    time.sleep(0.3)  # until the parent waits for this process
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)
speed = {"single": 500.0, "dp": 500.0, "ddp": 750.0}[name]
speed *= {"1": 1, "2": 1 + (name == "single")}[flags.get("--threads", "1")]
folder = pathlib.Path(flags["--run-dir"])
folder.mkdir(parents=True)
summary = {"train_images_per_second": speed, "peak_memory_bytes": [2**20]}
(folder / "summary.json").write_text(json.dumps(summary))
"""


class Pretending:
    """The benchmark, whose runs only pretend, called in this process."""

    def __init__(self, folder, data_dir, capsys):
        self.folder, self.capsys = folder, capsys
        self.where = ["--dataset", "synthetic", "--data-dir", data_dir, "--device", "cpu"]
        for name in ("single", "dp", "ddp"):
            (folder / f"train_{name}.py").write_text(PRETENDER)

    def run(self, *flags):
        words = [*self.where, "--output", self.folder, *flags]
        args = benchmark.parse_args([str(word) for word in words])
        return Finished(trial.start(benchmark.run, args), *self.capsys.readouterr())

    def started(self):
        """Return the flags of each run."""
        runs = [json.loads(line) for line in (self.folder / "log").read_text().splitlines()]
        for path, *words in runs:  # or the script would end with an error
            name = Path(path).stem.removeprefix("train_")
            config.build_parser(name, None).parse_args(words)
        return [{"script": Path(run[0]).stem, **dict(itertools.pairwise(run))} for run in runs]

    def rows(self):
        tables = json.loads((self.folder / "benchmark.json").read_text())["tables"]
        return [row for rows in tables.values() for row in rows]


@pytest.fixture
def pretend(tmp_path, synthetic_dir, monkeypatch, capsys):
    pretending = Pretending(tmp_path, synthetic_dir, capsys)
    monkeypatch.setattr(trial, "ROOT", tmp_path)
    monkeypatch.setenv("PRETEND_LOG", str(tmp_path / "log"))
    return pretending


TWO = ["--counts", 2, "--rounds", 2]
TWO_SIZES = ["--global-batch-sizes", "64,1000", "--batch-sizes", "", *TWO]


def test_a_core_is_a_device_and_the_rest_is_equal(pretend):
    flags = ["--global-batch-sizes", 64, "--batch-sizes", 256, "--num-workers", 1]
    ended = succeed(pretend.run(*flags, *TWO, "--", "--amp", "bf16"))
    for given in pretend.started():
        processes = int(given.get("--nprocs", 1))
        devices = max(processes, int(given.get("--replicas", 1)))
        assert given["--amp"] == "bf16"
        assert int(given["--num-workers"]) * processes == devices
        assert devices == 1 or int(given["--threads"]) * processes == devices
    sizes = [row["batch_size"] for row in pretend.rows()]
    assert sizes == [64, 32, 32, 64, *[256] * 3, 512]
    lines = [" ".join(line.split()) for line in ended.stdout.splitlines()]
    assert lines[2:6] == [
        "single 1 1 x 1 500 500-500 1.00 1",
        "dp 2 1 x 2 500 500-500 1.00 1",
        "ddp 2 2 x 1 750 750-750 1.50 1",
        "single 1 1 x 2 1,000 1,000-1,000 2.00 1",
    ]
    told = "2 devices: DDP is 1.50 x as fast as DP (1.50-1.50);"
    assert lines[6] == f"{told} one process on the same cores is faster"
    names = [given["script"] for given in pretend.started()][1:]
    assert names == names[::-1], "the second round goes backwards"
    assert (pretend.folder / "benchmark.txt").read_text() in ended.stdout


def test_a_failing_setting_does_not_lose_the_others(pretend):
    ended = pretend.run(*TWO_SIZES, "--models", "linear")
    assert ended.returncode == 1
    failures = [line for line in ended.stderr.splitlines() if line.startswith("benchmark.py:")]
    assert len(failures) == 2, "once each, not in each round"
    assert "dp linear 2 x 32, 2 threads: exit status 1: train_dp.py: error: no Data" in ended.stderr
    failed = [(row["technique"], row["size"]) for row in pretend.rows() if row["failure"]]
    assert failed == [("dp", 64), ("dp", 1000)]
    assert "failed" in ended.stdout


def test_interrupted_it_writes_what_it_has(pretend):
    ended = pretend.run(*TWO_SIZES, "--models", "mlp")  # of which one sends SIGTERM
    assert ended.returncode == 130, ended.text
    assert [bool(row["images_per_second"]) for row in pretend.rows()][:4] == [True] * 4


def test_on_gpus_devices_are_named(monkeypatch):
    gpus = [torch.device("cuda", index) for index in range(6)]
    monkeypatch.setattr(benchmark, "select_devices", lambda kind: gpus)
    monkeypatch.setattr(benchmark, "usable_cores", lambda: 16)
    assert benchmark.parse_args([]).counts == [4], "128 images are none to split among six"
    args = benchmark.parse_args(
        ["--global-batch-sizes", "96", "--batch-sizes", "", "--counts", "6,2"]
    )
    assert (args.device, args.counts, args.threads) == ("cuda", [2, 6], 2)
    args.dataset, args.train_size = "mnist", 60_000
    ((_, _, settings),) = benchmark.plan(args)
    found = {(s.technique, s.devices): s for s in settings}
    assert len(found) == len(settings) == 1 + 2 * 2
    for technique, named in (("single", "0"), ("ddp", "0,1")):
        setting = found[technique, 1 if technique == "single" else 2]
        words = [str(word) for word in benchmark.build_command(setting, args, 20)]
        flags = dict(itertools.pairwise(words))
        assert (flags["--devices"], flags["--threads"]) == (named, "2")
        refused = {*benchmark.OWN, "--no-tensorboard", "--no-progress"}
        assert {word for word in words if word.startswith("--")} <= refused


@pytest.mark.parametrize(
    ("tool", "flags", "words"),
    [
        (benchmark, ["--global-batch-sizes", "65"], "65 cannot be shared out among 2 devices"),
        (scaling, ["--bandwidth", "1"], "give all, or none"),
        (benchmark, ["--", "--threads=2"], "--threads=2 after -- is set by the benchmark itself"),
    ],
)
def test_wrong_arguments_are_one_line(tool, flags, words, capsys):
    with pytest.raises(SystemExit) as ended:
        tool.parse_args(["--counts", "2", *flags] if tool is benchmark else flags)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{tool.__name__}.py: error: ")
    assert words in line


def test_the_home_folder_may_be_written_as_a_shell_leaves_it(synthetic_dir, tmp_path):
    (tmp_path / "data").symlink_to(synthetic_dir)
    path = ROOT / "scripts" / "tools" / "prepare_data.py"
    words = ["synthetic", "--data-dir=~/data"]
    told = succeed(run(sys.executable, path, *words, cwd=tmp_path, HOME=str(tmp_path))).stdout
    assert told.startswith(f"{tmp_path}/data")
    args = benchmark.parse_args(["--data-dir=~/data", "--output=~/x", "--counts", "2"])
    assert [args.data_dir, args.output] == [str(Path.home() / name) for name in ("data", "x")]


def test_overlapping_ranges_are_no_difference_seen():
    ratio = {"median": 1.0, "min": 0.9, "max": 1.1, "rounds": {"0": 0.9, "1": 1.1}}
    row = {"technique": "ddp", "devices": 2, "threads": 2, "ratio": ratio, "to_dp": ratio}
    [told] = benchmark.verdicts([row])
    assert told == "2 devices: no difference between DP and DDP seen in this run (0.90-1.10)"


def test_scaling_by_hand():
    """Four devices, a megabyte, 10 us and a byte per nanosecond: six messages of 250 kB."""
    link = scaling.Link(latency=10e-6, bandwidth=1e9)
    ring = 6 * 260e-6
    assert link.ring(4, 1e6) == pytest.approx(ring)
    late = scaling.Step(0.04, 0.06, [(0.06, 1e6)])
    assert late.ddp_after(4, link) == pytest.approx(0.1 + ring)
    assert late.ddp(4, link) == pytest.approx(0.1 + ring), "one bucket does not overlap"
    assert late.ddp(1, link) == pytest.approx(0.1)
    early = scaling.Step(0.04, 0.06, [(0.01, 1e6), (0.011, 1e6), (0.02, 1e6)])
    assert early.ddp(4, link) == pytest.approx(0.1), "all hide behind the backward"
    assert early.ddp_after(4, link) == pytest.approx(0.1 + 3 * ring), "nothing hides"
    slow = scaling.Link(0.0, 2e7)
    assert early.ddp(2, slow) == pytest.approx(0.04 + 0.01 + 3 * 0.05), "they queue"
    mib = 2**20
    filled = scaling.fill_buckets([(1, mib), (2, mib), (3, 24 * mib), (4, mib)])
    assert filled == [(1, mib), (3, 25 * mib), (4, mib)]


@pytest.mark.parametrize(
    ("late", "words"),
    [(0.001, "it sends during the backward"), (0.009, "as if it sent after the backward")],
)
def test_scaling_sees_a_gpu_that_waits_for_each_bucket(late, words):
    """Two devices, three buckets of half a megabyte: 5 ms each."""
    link = scaling.Link(0.0, 1e8)
    alone, together = (
        scaling.Step(0.01, 0.02, [(when, 5e5) for when in (0.005, 0.01, 0.015 + more)])
        for more in (0.0, late)
    )
    assert words in scaling.describe_overlap(alone, together, 2, link)


def test_scaling_on_given_figures(capsys):
    figures = "--step-ms 120 --gradient-mb 102 --latency-us 10 --bandwidth 12.5"
    assert scaling.run(scaling.parse_args(figures.split())) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == [f"{2**i:,}" for i in range(11)]
    assert rows[0][1:] == ["120.00", "1.00", "100%"]
    assert float(rows[-1][1]) > float(rows[1][1]) > 120


@pytest.mark.slow
def test_scaling_measures_and_predicts():
    flags = ["--model", "mlp", "--batch-size", 16, "--device", "cpu"]
    script = ROOT / "scripts" / "tools" / "scaling.py"
    told = succeed(run(*STANDALONE, 2, script, *flags, timeout=290)).stdout
    assert re.search(r"buckets full in the backward: 0.94 MB at [\d.]+ ms\n", told)
    assert re.search(r"DDP, measured: [\d.]+ ms", told)


@pytest.mark.slow
def test_for_real(synthetic_dir, tmp_path):
    flags = ["--device", "cpu", "--dataset", "synthetic", "--data-dir", synthetic_dir]
    flags += ["--quick", "--seconds", 0.1, "--models", "linear", "--output", "results"]
    path = ROOT / "scripts" / "tools" / "benchmark.py"
    ended = run(sys.executable, path, *flags, cwd=tmp_path, timeout=290)
    assert "x as fast as DP" in succeed(ended).stdout
