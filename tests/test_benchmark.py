"""The measuring tools: what they start, count and write, mostly on trainings that only pretend."""

import importlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.processes import ROOT, Finished, finish, run, start

SCRIPTS = ROOT / "scripts" / "tools"
# Ends at once with a speed that its flags determine, so that ratios are known beforehand.
PRETENDER = """
import gzip, json, os, pathlib, sys, time
sys.stderr.write("chatter\\n")
flags = dict(zip(sys.argv[1::1], sys.argv[2::1]))
name = pathlib.Path(sys.argv[0]).stem.removeprefix("train_")
folder = pathlib.Path(flags["--run-dir"])
with open(pathlib.Path(sys.argv[0]).parent / "log", "a") as log:
    log.write(json.dumps(sys.argv) + "\\n")
if (name, flags.get("--model")) == ("dp", "linear"):
    sys.exit("train_dp.py: error: no DataParallel today")
if flags.get("--batch-size") == "500":
    time.sleep(60)
speed = {"single": 1000.0, "dp": 500.0, "ddp": 1500.0}[name] / (1 + (flags.get("--threads") == "1"))
waiting = os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY")
speed *= {("10000", None): 2, (None, "PASSIVE"): 3}.get(waiting, 1)
accuracy = 0.99 if float(flags.get("--epochs", 1)) > 0.4 else 0.98
folder.mkdir(parents=True)
summary = {"train_images_per_second": speed, "test_accuracy": accuracy, "startup_seconds": 1.0}
summary |= {"total_seconds": 2.0, "peak_memory_bytes": [2**20], "train_seconds": 0.5}
(folder / "summary.json").write_text(json.dumps(summary))
if "--profile" in sys.argv:
    (folder / "profile").mkdir()
    names = {"ProfilerStep#7": (0, 100), "autograd::engine::evaluate_function: A": (0, 75)}
    names |= {"Optimizer.step#SGD.step": (75, 75), "c10d::allreduce_": (75, 100)}
    events = [
        {"ph": "X", "name": name, "ts": begin, "dur": end - begin, "tid": 1, "args": {}}
        for name, (begin, end) in names.items()
    ]
    with gzip.open(folder / "profile" / "rank0.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
"""
DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, {scripts!r})
import benchmark, trial
trial.ROOT = Path(__file__).parent
benchmark.can_profile = lambda: {profile}
sys.exit(benchmark.main())
"""


@pytest.fixture(scope="module")
def load() -> Callable[[str], ModuleType]:
    def imported(name: str) -> ModuleType:
        if str(SCRIPTS) not in sys.path:
            sys.path.append(str(SCRIPTS))
        return importlib.import_module(name)

    return imported


@pytest.fixture
def pretend(tmp_path: Path, synthetic_dir: Path) -> Callable[..., list[Any]]:
    """Return the command of a benchmark whose trainings only pretend."""

    def command(*flags: Any, profile: bool = False) -> list[Any]:
        common = ["--device", "cpu", "--threads", 2, "--output", tmp_path]
        return [*pretending("benchmark", tmp_path, synthetic_dir, profile), *common, *flags]

    return command


def pretending(tool: str, folder: Path, data_dir: Path, profile: bool = False) -> list[Any]:
    """Return the command of a tool whose trainings only pretend."""
    for technique in ("single", "dp", "ddp"):
        (folder / f"train_{technique}.py").write_text(PRETENDER)
    text = DRIVER.replace("benchmark", tool).format(scripts=str(SCRIPTS), profile=profile)
    (folder / "driver.py").write_text(text)
    where = ["--dataset", "synthetic", "--data-dir", data_dir]
    return [sys.executable, folder / "driver.py", *where]


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "benchmark.json").read_text())


def started(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def fail_in_one_line(ended: Finished, status: int, *words: str) -> None:
    assert ended.returncode == status, ended.text
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
    for word in words:
        assert word in ended.stderr


def test_the_plan_holds_equal_what_has_to_be(
    pretend: Callable[..., list[Any]], tmp_path: Path
) -> None:
    flags = ["--rounds", 2, "--num-workers", 2, "--steps", 30, "--", "--amp", "bf16"]
    ended = run(*pretend(*flags, profile=True))
    assert ended.returncode == 0, ended.text
    runs = started(tmp_path)
    # A calibration; two tables of four settings and one that shares two of its four; a profile of
    # the four settings with several devices.
    assert len(runs) == 1 + 2 * (4 + 4 + 2) + 4
    profiled = [argv for argv in runs if "--profile" in argv]
    assert profiled == runs[-4:], "profiled runs are none of the timed ones"
    for argv in runs:
        flags = dict(itertools.pairwise(argv))
        processes = int(flags.get("--nprocs", 1))
        assert flags["--amp"] == "bf16"
        assert flags["--max-steps"] == ("20" if "--profile" in argv else "35")
        assert int(flags["--num-workers"]) * processes == 2
        if "--nprocs" in flags or "--replicas" in flags:
            assert int(flags["--threads"]) * processes == 2
    found = results(tmp_path)
    assert found["complete"]
    strong = [row for row in found["rows"] if row["scaling"] == "strong"]
    assert {row["global_batch_size"] for row in strong} == {128, 512}
    weak = [row for row in found["rows"] if row["scaling"] == "weak"]
    assert {row["batch_size"] for row in weak} == {256}
    assert {row["global_batch_size"] for row in weak} == {256, 512}


def test_numbers_and_pages(pretend: Callable[..., list[Any]], tmp_path: Path) -> None:
    flags = ["--global-batch-sizes", 64, "--batch-sizes", "", "--rounds", 2]
    ended = run(*pretend(*flags, profile=True))
    assert ended.returncode == 0, ended.text
    lines = [line.split() for line in ended.stdout.splitlines()]
    assert " ".join(lines[2]) == "single 1 1 x 2 1,000 1,000-1,000 1.00 1.00 - 1"
    assert lines[3][5:9] == ["500", "500-500", "0.50", "1.00"]
    assert lines[4][:1] + lines[4][5:] == ["dp", "500", "500-500", "0.50", "0.50", "25%", "1"]
    assert lines[5][1:9] == ["2", "2", "x", "1", "750", "750-750", "0.75", "0.75"]
    sentence = "2 devices: DDP is 1.50 x as fast as DP (1.50-1.50); one device is faster"
    assert sentence in ended.stdout
    assert max(map(len, ended.stdout.partition("\nchart")[0].splitlines())) <= 80
    page = (tmp_path / "benchmark.md").read_text()
    assert "## Strong scaling: convnet, 64 images a step in all" in page
    assert "| ddp | 2 | 2 x 1 | 750 | 750-750 | 0.75 | 0.75 | 25% | 1 |" in page
    assert "| cores |" in page
    assert "2 rounds, data: synthetic; other programs took" in page
    found = results(tmp_path)
    assert found["machine"].keys() >= {"cpu", "cores", "gpus", "torch", "python"}
    ddp = found["rows"][-1]
    assert ddp["images_per_second"] == {
        **dict.fromkeys(("median", "min", "max"), 750.0),
        "rounds": {"0": 750.0, "1": 750.0},
    }
    assert ddp["shares"]["communication"] == 0.25
    # The second round goes backwards.
    names = [Path(argv[0]).stem for argv in started(tmp_path)][1:9]
    assert names[:4] == ["train_single", "train_single", "train_dp", "train_ddp"]
    assert names[4:] == names[3::-1]


def test_a_failing_setting_does_not_lose_the_others(
    pretend: Callable[..., list[Any]], tmp_path: Path
) -> None:
    sizes = ["--global-batch-sizes", "64,1000", "--batch-sizes", "", "--rounds", 2]
    ended = run(*pretend(*sizes, "--models", "linear", "--time-limit", 2), timeout=120)
    assert ended.returncode == 1
    failures = [line for line in ended.stderr.splitlines() if line.startswith("benchmark.py:")]
    assert len(failures) == 3, "once each, not in each round"
    assert "dp linear 2 x 32, 2 threads: exit status 1: train_dp.py: error: no Data" in ended.stderr
    assert "ddp linear 2 x 500, 2 threads: still running after 2 s" in ended.stderr
    rows = results(tmp_path)["rows"]
    failed = [(row["technique"], row["global_batch_size"]) for row in rows if row["failure"]]
    assert failed == [("dp", 64), ("dp", 1000), ("ddp", 1000)]
    assert all(bool(row["images_per_second"]) != bool(row["failure"]) for row in rows)
    assert "failed" in ended.stdout
    assert "no DataParallel today" in (tmp_path / "benchmark.md").read_text()


def test_interrupted_it_writes_what_it_has(
    pretend: Callable[..., list[Any]], tmp_path: Path
) -> None:
    sizes = ["--global-batch-sizes", "64,1000", "--batch-sizes", "", "--rounds", 2]
    process = start(*pretend(*sizes))
    deadline = time.monotonic() + 60
    while not ((tmp_path / "log").exists() and '"500"' in (tmp_path / "log").read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    ended = finish(process, timeout=30)
    assert ended.returncode == 130, ended.text
    assert "Traceback" not in ended.text
    found = results(tmp_path)
    assert not found["complete"]
    assert [bool(row["images_per_second"]) for row in found["rows"]] == [True] * 6 + [False] * 2
    assert "Interrupted" in (tmp_path / "benchmark.md").read_text()


def test_on_gpus_devices_are_named(load: Callable[[str], ModuleType], monkeypatch: Any) -> None:
    benchmark = load("benchmark")
    gpus = [torch.device("cuda", index) for index in range(6)]
    monkeypatch.setattr(benchmark, "select_devices", lambda kind: gpus)
    monkeypatch.setattr(benchmark, "usable_cores", lambda: 16)
    args = benchmark.parse_args(["--global-batch-sizes", "96", "--batch-sizes", ""])
    assert (args.device, args.counts, args.threads) == ("cuda", [2, 4, 6], 12)
    assert benchmark.parse_args([]).counts == [2, 4], "128 images are none to split among six"
    (table,) = benchmark.plan(args)
    commands = [[str(w) for w in benchmark.command(s, args, 20)] for s in table.settings]
    flags = [dict(itertools.pairwise(words)) for words in commands]
    counts = [len(f["--devices"].split(",")) for f in flags]
    assert counts == [1, 2, 2, 4, 4, 6, 6]
    assert flags[1]["--devices"] == "0,1"
    assert [f["--threads"] for f in flags] == ["12", "12", "6", "12", "3", "12", "2"]
    assert [f.get("--nprocs") for f in flags] == [None, None, "2", None, "4", None, "6"]
    assert not any("--replicas" in f for f in flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--counts", "3"], "--threads 2 cannot be shared out among 3 processes"),
        (["--num-workers", "3"], "--num-workers 3 cannot be shared out among 2 processes"),
        (["--global-batch-sizes", "65"], "--global-batch-sizes 65 cannot be shared out among 2"),
        (["--batch-sizes", "20000"], "too few steps"),
        (["--models", "lenet"], "'lenet' is none of convnet"),
        (["--rounds", "0"], "0 is less than 1"),
        (["--counts", "two"], "'two' is not a whole number"),
        (["--device", "cuda", "--counts", "4096"], "--"),
        (["--global-batch-sizes", "", "--batch-sizes", ""], "nothing to measure"),
    ],
)
def test_wrong_arguments_are_told_in_one_line(
    flags: list[str], words: str, load: Callable[[str], ModuleType], capsys: Any
) -> None:
    with pytest.raises(SystemExit) as ended:
        load("benchmark").parse_args(["--device", "cpu", "--threads", "2", *flags])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("benchmark.py: error: ")
    assert words in told
    assert told.count("\n") == 1


def row(technique: str, low: float, high: float, devices: int = 2) -> dict[str, Any]:
    """A row of results with two rounds."""
    speed = {"median": (low + high) / 2, "min": low, "max": high, "rounds": {"0": low, "1": high}}
    ratio = {name: value / 1000 for name, value in speed.items() if name != "rounds"}
    sizes = {"devices": devices, "threads": 2, "batch_size": 64 // devices, "global_batch_size": 64}
    texts = {"scaling": "strong", "technique": technique, "model": "mlp", "failure": ""}
    more = {"processes": 1, "shares": {}, "peak_memory_bytes": [1], "efficiency": ratio}
    return {**texts, **sizes, **more, "images_per_second": speed, "ratio": ratio}


def page(*rows: dict[str, Any], **machine: Any) -> dict[str, Any]:
    facts = {"cpu": "C", "cores": 2, "gpus": [], "torch": "2", **machine}
    verdict = {"scaling": "strong", "model": "mlp", "size": 64, "devices": 2}
    found = {"median": 1.0, "min": 0.9, "max": 1.1, "rounds": {"0": 0.9, "1": 1.1}}
    verdicts = [verdict | {"ddp_to_dp": found}]
    return {"version": 1, "machine": facts, "rows": list(rows), "verdicts": verdicts}


def test_what_lies_within_the_spread_is_no_difference(load: Callable[[str], ModuleType]) -> None:
    results = page(row("single", 900, 1100, 1), row("dp", 1100, 1300), row("ddp", 1200, 1250))
    text = load("report").text(results)
    assert "2 devices: DP and DDP are equally fast within the spread" in text
    assert "one device is faster" not in text


def test_two_files_side_by_side(tmp_path: Path) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps(page(row("dp", 100, 200), row("ddp", 100, 140), torch="2.6")))
    second.write_text(json.dumps(page(row("ddp", 200, 280), row("dp", 150, 180), torch="2.15")))
    command = [sys.executable, SCRIPTS / "benchmark.py", "--compare"]
    ended = run(*command, first, second)
    assert ended.returncode == 0, ended.text
    lines = ended.stdout.splitlines()
    assert lines[0] == "torch: 2.6 -> 2.15"
    assert lines[3].split()[-5:] == ["150", "165", "1.10", "ranges", "overlap"]
    assert lines[4].split()[-3:] == ["120", "240", "2.00"]
    fail_in_one_line(run(*command, first, tmp_path / "c.json"), 2, "c.json is not a benchmark")
    second.write_text(json.dumps(page()))
    fail_in_one_line(run(*command, first, second), 2, "no measured row in common")


def test_the_chart(load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    results = page(row("single", 900, 1100, 1), row("dp", 1100, 1300))
    path = tmp_path / "chart.png"
    assert load("report").draw(results, path) == f"chart in {path}"
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in load("report").draw(results, path)


def test_without_mnist_drawn_digits_are_measured(
    load: Callable[[str], ModuleType], synthetic_dir: Path, monkeypatch: Any
) -> None:
    name, remark = load("trial").choose_dataset(None, str(synthetic_dir))
    assert name == "synthetic"
    assert "No MNIST" in remark
    monkeypatch.setattr("data.prepare", lambda *_: None)
    (synthetic_dir / "MNIST" / "raw").mkdir(parents=True)
    (synthetic_dir / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").touch()
    assert load("trial").choose_dataset(None, str(synthetic_dir)) == ("mnist", "")
    (synthetic_dir / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").unlink()


def test_other_programs_are_noticed(
    load: Callable[[str], ModuleType], monkeypatch: Any, capsys: Any
) -> None:
    neighbours = load("trial").Neighbours
    readings = iter([(100.0, 50.0, 10.0), (200.0, 110.0, 60.0), (200.0, 130.0, 60.0)])
    monkeypatch.setattr(neighbours, "_read", lambda *_: next(readings))
    watching = neighbours()
    assert watching.share() == pytest.approx(0.1)
    assert watching.tell() == pytest.approx(0.3)
    assert "Other programs took 30%" in capsys.readouterr().err


def test_the_start_is_counted_from_the_command(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """A launcher's time comes before that of the training's own process."""
    script = tmp_path / "train_single.py"
    script.write_text(PRETENDER)
    launcher = "import runpy, sys, time; time.sleep(1); del sys.argv[0]; "
    launcher += "runpy.run_path(sys.argv[0])"
    command = [sys.executable, "-c", launcher, script, "--model", "mlp", "--batch-size", "1"]
    outcome = load("trial").train([*command, "--threads", "2"], 30)
    # The pretended training wrote its file 2 s after its start, and stepped 1 s after its start.
    assert outcome.first_step == pytest.approx(outcome.seconds - 1, abs=0.5)


def test_a_recipe_without_torchvision_is_the_same(
    load: Callable[[str], ModuleType], synthetic_dir: Path, monkeypatch: Any
) -> None:
    pytest.importorskip("torchvision", reason="needs torchvision")
    import data

    recipe = load("official_recipe")
    part = data.load_dataset("synthetic", str(synthetic_dir))[1]
    with_torchvision = recipe.PerSample(part, "synthetic")[5]
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    without = recipe.PerSample(part, "synthetic")
    assert without.transform is None
    assert torch.equal(without[5][0], with_torchvision[0])
    assert without[5][1] == with_torchvision[1]


def test_the_aims_of_ratios(load: Callable[[str], ModuleType]) -> None:
    ratios = load("ratios")
    figure = ratios.Figure("ours : theirs", "a", "b", 0.95, 1.05)
    line, result = ratios.line_of(figure, [{"a": 3.0, "b": 3.0}, {"a": 1.0}, {"a": 4.4, "b": 4.0}])
    assert result["ratios"] == [1.0, 1.1]
    assert not ratios.line_of(figure, [{"a": 4.4, "b": 4.0}])[1]["met"]
    assert "1.050  (1.000-1.100)  at least 0.95 and at most 1.05: met" in line
    assert ratios.line_of(figure, [{"b": 1.0}])[1] is None


def test_one_failure_stops_all_that_train_at_once(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """The first of them would take a minute; what is told is what failed."""
    trial = load("trial")
    (tmp_path / "train_dp.py").write_text(PRETENDER)
    script = [sys.executable, tmp_path / "train_dp.py"]
    commands = [[*script, "--batch-size", "500"], [*script, "--model", "linear"]]
    begin = time.monotonic()
    with pytest.raises(trial.TrialError, match="no DataParallel today"):
        trial.train_at_once(commands, 200)
    assert time.monotonic() - begin < 55, "it waited for the first"


def test_waiting_is_measured_alone_and_in_company(tmp_path: Path, synthetic_dir: Path) -> None:
    """Each setting is what its name says, whatever the user has set."""
    command = pretending("waiting", tmp_path, synthetic_dir)
    flags = ["--spins", "300000,10000", "--others", "0,2", "--rounds", 2, "--threads", 2]
    ended = run(*command, *flags, "--json", tmp_path / "w.json", GOMP_SPINCOUNT="1")
    assert ended.returncode == 0, ended.text
    alone, *rows = [line.split() for line in ended.stdout.splitlines()]
    assert " ".join(alone) == "alone, images/s of each median (range) ratio"
    assert rows[0][:4] == ["GOMP_SPINCOUNT=300000", "1,000", "(1,000-1,000)", "1.00"]
    default = ["the", "scripts'", "default"]
    assert rows[1] == ["GOMP_SPINCOUNT=10000", "2,000", "(2,000-2,000)", "2.00", *default]
    assert rows[2] == ["OMP_WAIT_POLICY=PASSIVE", "3,000", "(3,000-3,000)", "3.00"]
    assert rows[3][:3] == ["beside", "2", "others,"]
    assert [row[1:4] for row in rows[4:7]] == [row[1:4] for row in rows[:3]]
    assert len(started(tmp_path)) == 2 * 3 * (1 + 3)
    found = json.loads((tmp_path / "w.json").read_text())["found"]
    assert found[-1]["images_per_second"] == dict.fromkeys("01", [3000.0] * 3)


def test_interrupted_all_that_train_at_once_are_stopped(
    tmp_path: Path, synthetic_dir: Path
) -> None:
    command = pretending("waiting", tmp_path, synthetic_dir)
    process = start(*command, "--others", 1, "--batch-size", 500)  # each takes a minute
    deadline = time.monotonic() + 60
    while not (tmp_path / "log").exists() or len(started(tmp_path)) < 2:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    ended = finish(process, timeout=50)
    assert ended.returncode == 130, ended.text
    assert "Traceback" not in ended.text
    assert ended.stdout.splitlines()[1].split() == ["GOMP_SPINCOUNT=300000", "-"]


def test_the_shortest_training_is_found(tmp_path: Path, synthetic_dir: Path) -> None:
    """DP fails, and does not lose the others."""
    command = pretending("time_to_accuracy", tmp_path, synthetic_dir)
    flags = ["--device", "cpu", "--epochs", "1,0.25,0.5", "--json", tmp_path / "t.json"]
    ended = run(*command, *flags, "--", "--model", "linear")
    assert ended.returncode == 1, ended.text
    rows = [line.split() for line in ended.stdout.splitlines()[3:7]]
    assert [row[:4] for row in rows] == [
        [technique, *row]
        for technique in ("single", "ddp")
        for row in (["0.25", "98.000", "(98.00-98.00)"], ["0.5", "99.000", "(99.00-99.00)"])
    ]
    assert [row[-1] == "reached" for row in rows] == [False, True, False, True]
    assert "dp: exit status 1: train_dp.py: error: no DataParallel today" in ended.stderr
    runs = [dict(itertools.pairwise(argv)) for argv in started(tmp_path)]
    sizes = {technique: set() for technique in ("single", "dp", "ddp")}
    for argv, taken in zip(started(tmp_path), runs, strict=True):
        sizes[Path(argv[0]).stem.removeprefix("train_")].add(int(taken["--batch-size"]))
    assert sizes == {"single": {96}, "dp": {48}, "ddp": {48}}
    assert [taken["--seed"] for taken in runs] == [*"012012", "0", *"012012"]
    found = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert all(row["train"] == [0.5] * 3 for row in found)
    assert all(row["total"] > row["start"] for row in found)


def test_an_accuracy_that_is_not_reached(tmp_path: Path, synthetic_dir: Path) -> None:
    command = pretending("time_to_accuracy", tmp_path, synthetic_dir)
    flags = ["--techniques", "single", "--epochs", "0.5,1", "--seeds", "7", "--goal", "99.5"]
    ended = run(*command, "--device", "cpu", *flags)
    assert ended.returncode == 0, ended.text
    assert ended.stdout.splitlines()[-2].split() == ["single", "not", "reached"]
    assert " reached" not in ended.stdout.replace("not reached", "")
    fail_in_one_line(run(*command, "--goal", 99.5, "--recipe"), 2, "timed to 99%: leave out --goal")


@pytest.mark.slow
def test_time_to_accuracy_for_real(synthetic_dir: Path) -> None:
    tool = [sys.executable, SCRIPTS / "time_to_accuracy.py", "--device", "cpu"]
    tiny = ["--goal", 30, "--epochs", "0.002,0.1", "--seeds", 0]
    where = ["--dataset", "synthetic", "--data-dir", synthetic_dir]
    ended = run(*tool, *tiny, *where, "--", "--model", "linear", "--threads", 1, timeout=280)
    assert ended.returncode == 0, ended.text
    reached = [line.split()[:2] for line in ended.stdout.splitlines() if "  reached" in line]
    assert [technique for technique, _ in reached] == ["single", "dp", "ddp"], ended.text


@pytest.mark.slow
def test_the_time_to_99_percent_beside_the_recipe(tmp_path: Path, synthetic_dir: Path) -> None:
    command = pretending("time_to_accuracy", tmp_path, synthetic_dir)
    flags = ["--device", "cpu", "--recipe", "--recipe-steps", 5, "--techniques", "single,ddp"]
    ended = run(*command, *flags, "--json", tmp_path / "t.json", timeout=280)
    assert ended.returncode == 0, ended.text
    found = json.loads((tmp_path / "t.json").read_text())
    assert len(found["recipe"]) == 2
    (single,) = [r for r in found["rows"] if r["reached"] and r["technique"] == "single"]
    times = sum(found["recipe"]) / 2 / sorted(single["total"])[1]
    assert found["times_sooner"]["single"] == pytest.approx(times)
    assert f"single      {times:.1f} times sooner" in ended.stdout


@pytest.mark.slow
def test_everything_for_real(synthetic_dir: Path, tmp_path: Path) -> None:
    flags = ["--models", "linear", "--global-batch-sizes", 64, "--batch-sizes", 32, "--rounds", 1]
    where = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--output", tmp_path]
    command = [sys.executable, SCRIPTS / "benchmark.py", "--device", "cpu", "--threads", 2]
    ended = run(*command, *flags, *where, "--steps", 5, timeout=280)
    assert ended.returncode == 0, ended.text
    rows = results(tmp_path)["rows"]
    assert len(rows) == 8
    assert all(row["images_per_second"]["median"] > 0 for row in rows)
    assert all(len(row["peak_memory_bytes"]) == row["processes"] for row in rows)


@pytest.mark.slow
def test_the_ratios_for_real(synthetic_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("psutil", reason="needs psutil")
    where = ["--dataset", "synthetic", "--data-dir", synthetic_dir, "--json", tmp_path / "r.json"]
    figures = "engine-1,ddp-limit,start-ddp,memory"
    command = [sys.executable, SCRIPTS / "ratios.py", "--only", figures, "--rounds", 1]
    ended = run(*command, "--images", 1000, *where, timeout=280)
    assert ended.returncode == 0, ended.text
    found = json.loads((tmp_path / "r.json").read_text())
    assert all(found["figures"][name]["median"] >= 0 for name in figures.split(","))
    assert found["rounds"][0]["speed apart 1 512"] > 0
    assert found["rounds"][0]["memory data resident"] > 10 * 2**20, "the set is mapped and read"
    assert found["figures"]["memory"]["median"] < 0.2, "and shared"


@pytest.mark.slow
def test_the_recipe_for_real(synthetic_dir: Path, tmp_path: Path) -> None:
    command = pretending("official_recipe", tmp_path, synthetic_dir)
    flags = ["--rounds", 1, "--steps", 5, "--json", tmp_path / "o.json"]
    ended = run(*command, *flags, timeout=200)
    assert ended.returncode == 0, ended.text
    assert "extrapolated to 4 epochs" in ended.stdout
    assert "aim: at least 35 with 99%: met" in ended.stdout
    found = json.loads((tmp_path / "o.json").read_text())
    epoch = 938 * found["recipe"][0]["step"] + 10 * found["recipe"][0]["test_batch"]
    told = found["recipe"][0]["startup"] + 4 * epoch
    assert found["recipe"][0]["seconds"] == pytest.approx(told)
    assert found["ratio"]["median"] == pytest.approx(told / found["ours"][0]["seconds"])
