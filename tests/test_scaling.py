"""The scaling model against values worked out by hand, its limits, and the command."""

import json
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import ROOT, run

sys.path.insert(0, str(ROOT / "scripts" / "tools"))

import alpha_beta as model
from alpha_beta import Link, Work

SCALING = ROOT / "scripts" / "tools" / "scaling.py"
LINK = Link(10e-6, 1e9, "by hand")  # 10 us, a byte per nanosecond
WORK = Work(per_image=1e-3, fixed=2e-3, parameters=250_000)  # a megabyte of gradients
DEVICES = st.integers(1, 4096)


def test_a_ring_by_hand() -> None:
    # 4 devices, 1 MB: 6 steps of 10 us and 250 KB, which take 250 us.
    assert model.ring_seconds(4, 1e6, LINK) == pytest.approx(6 * 260e-6)
    # 2 devices: two steps of half a megabyte each.
    assert model.ring_seconds(2, 1e6, LINK) == pytest.approx(2 * 510e-6)


def test_a_tree_by_hand() -> None:
    # 8 devices: 3 levels up and 3 down, the megabyte up and down.
    assert model.tree_seconds(8, 1e6, LINK) == pytest.approx(6 * 10e-6 + 2e-3)


@given(DEVICES, st.floats(1, 1e9))
def test_a_ring_sends_less_than_twice_the_data(n: int, size: float) -> None:
    free = LINK._replace(latency=0.0)
    sent = model.ring_seconds(n, size, free) * LINK.bandwidth
    assert sent == pytest.approx(2 * (n - 1) / n * size)
    assert sent <= 2 * size * (1 + 1e-9)
    assert model.ring_seconds(n, 0, LINK) == pytest.approx(2 * (n - 1) * LINK.latency)


@given(DEVICES.filter(lambda n: n < 4096), st.floats(0, 1e9))
def test_more_devices_or_bytes_never_travel_faster(n: int, size: float) -> None:
    for all_reduce in (model.ring_seconds, model.tree_seconds):
        assert all_reduce(n + 1, size, LINK) >= all_reduce(n, size, LINK)
        assert all_reduce(n, size + 1, LINK) >= all_reduce(n, size, LINK)


def test_one_device_has_no_communication() -> None:
    alone = WORK.seconds(96)
    assert alone == pytest.approx(98e-3)
    assert model.ring_seconds(1, 1e6, LINK) == model.tree_seconds(1, 1e6, LINK) == 0
    assert model.ddp_seconds(WORK, LINK, 1, 96) == pytest.approx(alone)
    assert model.dp_seconds(WORK, LINK, 1, 96) == pytest.approx(alone)
    assert model.shared_cores_seconds(WORK, LINK, 1, 96, 2, 1.5) == pytest.approx(alone)


def test_one_bucket_does_not_overlap() -> None:
    ring = model.ring_seconds(4, 1e6, LINK)
    assert model.ddp_seconds(WORK, LINK, 4, 96) == pytest.approx(WORK.seconds(96) + ring)


def test_all_but_the_last_bucket_hide_behind_a_long_backward() -> None:
    large = WORK._replace(parameters=4 * model.BUCKET_BYTES // model.BYTES_EACH)  # four buckets
    last = model.ring_seconds(4, model.BUCKET_BYTES, LINK)
    step = model.ddp_seconds(large, LINK, 4, 1000)
    assert step == pytest.approx(large.seconds(1000) + last)
    # And behind a short one what does not fit shows: four go out after a quarter of it.
    short = model.ddp_seconds(large, LINK, 4, 1)
    backward = model.BACKWARD_SHARE * large.per_image
    assert short == pytest.approx(large.seconds(1) - 0.75 * backward + 4 * last)


@given(DEVICES, st.integers(1, 1000))
def test_a_step_lies_between_full_overlap_and_none(n: int, images: int) -> None:
    large = WORK._replace(parameters=8 * model.BUCKET_BYTES // model.BYTES_EACH)
    step, alone = model.ddp_seconds(large, LINK, n, images), large.seconds(images)
    buckets = 8 * model.ring_seconds(n, model.BUCKET_BYTES, LINK)
    assert max(alone, buckets) <= step * (1 + 1e-9)
    assert step <= (alone + buckets) * (1 + 1e-9)


def test_dp_by_hand() -> None:
    """Three devices, ten images each; nothing overlaps."""
    images = 2 * (10e-6 + 10 * 3136e-9)  # scattered to two others
    outputs = 2 * 2 * (10e-6 + 10 * 40e-9)  # gathered from two, and their gradients back
    weights = 2 * (2 * 10e-6 + 1e-3)  # broadcast and reduced
    python = 2 * 2e-3 / 3  # two more forwards' worth of issuing operations
    expected = WORK.seconds(10) + images + outputs + weights + python
    assert model.dp_seconds(WORK, LINK, 3, 10) == pytest.approx(expected)


@pytest.mark.parametrize("devices", [2, 4, 16])
def test_at_the_break_even_both_are_as_fast(devices: int) -> None:
    """Splitting a batch takes as long as one device does, without a fixed part and overlap."""
    each = 2e-10 * 96  # seconds that a batch of 96 takes for a parameter
    work = Work(2e-10 * 1_000_000, 0.0, 1_000_000)
    least = model.break_even(work, LINK, devices, 96)
    assert least == pytest.approx(2 * devices * 10e-6 / (each - 8e-9))
    at = Work(2e-10 * least, 0.0, round(least))
    split = at.seconds(96 / devices) + model.ring_seconds(devices, 4 * least, LINK)
    assert split == pytest.approx(at.seconds(96))


def test_it_never_pays_where_gradients_travel_for_longer() -> None:
    assert model.break_even(Work(1e-12 * 1000, 0.0, 1000), LINK, 2, 96) == math.inf


def test_cores_are_shared() -> None:
    ring = model.ring_seconds(8, 1e6, LINK)
    step = model.shared_cores_seconds(WORK, LINK, 8, 96, cores=2, crowding=1.5)
    assert step == pytest.approx(4 * (1.5 * WORK.seconds(96) + ring))
    # With cores to spare it is DDP on devices, slowed by half of the crowding.
    step = model.shared_cores_seconds(WORK, LINK, 2, 96, cores=3, crowding=1.5)
    assert step == pytest.approx(1.25 * WORK.seconds(96) + model.ring_seconds(2, 1e6, LINK))


def test_every_link_says_where_its_figures_are_from() -> None:
    for name, link in model.LINKS.items():
        assert 0 < link.latency < 1e-3, name
        assert 1e9 < link.bandwidth < 1e12, name
        assert len(link.source) > 20, name


FIGURES = ["--link", "infiniband100", "--compute", 120, "--parameters", "25.6e6"]


def test_the_command_on_given_figures(tmp_path: Path) -> None:
    files = ["--json", tmp_path / "figures.json", "--chart", tmp_path / "chart.svg"]
    ended = run(sys.executable, SCALING, *FIGURES, "--fixed", 5, *files)
    assert ended.returncode == 0, ended.text
    lines = [line for line in ended.stdout.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) <= 80
    facts = json.loads((tmp_path / "figures.json").read_text())
    rows = {row["devices"]: row for row in facts["curve"]}
    assert list(rows) == [2**i for i in range(13)]
    assert rows[1]["ddp_efficiency"] == rows[1]["strong_efficiency"] == 1
    assert rows[4096]["dp"] is None, "DP ends where the machine does"
    assert rows[4096]["ddp"] > rows[2]["ddp"]
    work, link = Work(*facts["work"].values()), Link(*facts["link"].values())
    assert rows[64]["ddp"] == model.ddp_seconds(work, link, 64, 96)
    assert rows[64]["strong"] == model.ddp_seconds(work, link, 64, 64)
    assert work.seconds(96) == pytest.approx(0.12)
    chart = (tmp_path / "chart.svg").read_text()
    assert chart.startswith("<?xml")
    assert ended.stdout.count("\n  4,096  ") == 1


def test_a_chart_without_matplotlib_is_text(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    command = [sys.executable, SCALING, *FIGURES, "--tree", "--chart", tmp_path / "chart.png"]
    ended = run(*command, PYTHONPATH=str(tmp_path))
    assert ended.returncode == 0, ended.text
    assert "matplotlib is not installed" in ended.stdout
    assert f"      1 |{'#' * 50}|" in ended.stdout
    assert not (tmp_path / "chart.png").exists()


@pytest.mark.slow
def test_the_command_measures_and_checks(tmp_path: Path) -> None:
    flags = ["--model", "linear", "--batch-size", 16, "--check", "--json", tmp_path / "figures"]
    ended = run(sys.executable, SCALING, *flags, timeout=240)
    assert ended.returncode == 0, ended.text
    assert "measured: gloo, two processes" in ended.stdout
    facts: dict[str, Any] = json.loads((tmp_path / "figures").read_text())
    assert [row["processes"] for row in facts["check"]] == [1, 2, 4, 8]
    assert all(row["measured"] > 0 and row["predicted"] > 0 for row in facts["check"])
    assert len(re.findall(r"^ +[1248] +\d+\.\d\d +\d+\.\d\d +[+-]\d+%$", ended.stdout, re.M)) == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "lenet"], "invalid choice: 'lenet'"),
        (["--link", "string"], "invalid choice: 'string'"),
        (["--bandwidth", 0], "0 is not greater than 0"),
        (["--latency", -1], "-1 is less than 0"),
        (["--parameters", 0.5], "0.5 is less than 1"),
        (["--fixed", 1], "--fixed is a part of --compute"),
        (["--compute", 1, "--fixed", 2], "--fixed is a part of --compute"),
        (["--check", "--link", "pcie4"], "--check compares what it measures"),
        (["--chart", "a.gif"], "neither .svg nor .png"),
    ],
)
def test_wrong_arguments_are_one_line(
    flags: list[Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling: ModuleType = __import__("scaling")
    with pytest.raises(SystemExit) as caught:
        scaling.parse_args([str(flag) for flag in flags])
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("scaling.py: error: ")
    assert len(printed.splitlines()) == 1
    assert message in printed


@pytest.mark.parametrize(
    ("flag", "name"),
    [("--json", "a.json"), pytest.param("--chart", "a.svg", marks=pytest.mark.slow)],
)
def test_a_file_that_cannot_be_written_is_one_line(flag: str, name: str, tmp_path: Path) -> None:
    ended = run(sys.executable, SCALING, *FIGURES, flag, tmp_path / "nowhere" / name)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert f"error: {flag} " in ended.stderr
