"""The house: three rooms, of bounded size, with arrows that point one way."""

from pathlib import Path

import pytest

from tests.sources import (
    CLUSTER,
    CORE,
    DATASETS,
    LESSONS,
    MINIMAL,
    ROOT,
    SCRIPTS,
    TOOLS,
    count,
    imports,
)

TOP = [ROOT / "models.py", ROOT / "data.py"]
PROJECT = [*SCRIPTS, *TOP, *CORE, *DATASETS, *CLUSTER]
# What the cluster room may use of the core: its smallest; the launch, what a rank consists of.
SMALLEST = {"utils.errors", "utils.files", "utils.signals"}
OF_LAUNCH = SMALLEST | {"utils.config", "utils.device", "utils.distributed", "utils.metrics"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


ARROWS = {name_of(path): {module for module, _ in imports(path)} for path in PROJECT}


@pytest.mark.parametrize(
    ("room", "limit"),
    [
        # What stands, rounded up. The aims are 1,500, 250 and 650: what shrinks lowers its bound.
        ([*SCRIPTS, *TOP, *CORE], 2313),
        (DATASETS, 277),
        (CLUSTER, 711),
        *(([path], 250) for path in TOOLS),
        *(([path], 100) for path in LESSONS),
        *(([path], 55) for path in MINIMAL),
    ],
    ids=lambda value: str(len(value)) + name_of(value[0]) if isinstance(value, list) else "",
)
def test_a_room_stays_within_its_lines(room: list[Path], limit: int) -> None:
    sizes = {name_of(path): count([path]) for path in room}
    assert sum(sizes.values()) <= limit, sizes


@pytest.mark.parametrize(
    "module", ["utils.engine", "utils.metrics", "utils.optim", "data", "models"]
)
def test_the_lesson_does_not_know_the_cluster(module: str) -> None:
    """Nor does what it imports, however far."""
    seen, left = set(), [module]
    while left:
        name = left.pop()
        seen.add(name)
        left += ARROWS.get(name, set()) - seen
    assert not {name for name in seen if name.startswith("utils.cluster")}


def test_the_cluster_uses_the_smallest_of_the_core() -> None:
    for path in CLUSTER:
        allowed = OF_LAUNCH if path.stem in ("launch", "launchers") else SMALLEST
        used = {name for name in ARROWS[name_of(path)] if not name.startswith("utils.cluster")}
        assert used <= allowed, path


def test_the_data_sets_know_nothing_of_what_uses_them() -> None:
    for path in DATASETS:
        used = {name for name in ARROWS[name_of(path)] if not name.startswith("utils.datasets")}
        assert used <= SMALLEST, path


def test_nothing_imports_a_tool_or_a_script() -> None:
    for module, used in ARROWS.items():
        assert not {name for name in used if name.startswith(("scripts", "train_"))}, module


def test_there_is_no_circle() -> None:
    left = {module: set(used) & set(ARROWS) for module, used in ARROWS.items()}
    while left:
        ends = [module for module, used in left.items() if not used & set(left)]
        assert ends, f"a circle among {sorted(left)}"
        for module in ends:
            del left[module]


def test_no_import_hides_in_a_function() -> None:
    """Of this project's own modules: there it could only dodge a circle."""
    for path in PROJECT:
        hidden = [module for module, is_inside in imports(path) if is_inside]
        assert not hidden, f"{path}: {hidden}"


def test_the_calls_that_are_the_technique_stand_in_the_scripts() -> None:
    """Spelled as PyTorch spells them, since they are what a reader carries away."""
    shown = {
        "dp": ["nn.DataParallel("],
        "ddp": [
            *('os.environ["RANK"]', 'os.environ["LOCAL_RANK"]', 'os.environ["WORLD_SIZE"]'),
            *("dist.init_process_group(", "store=", "rank=", "world_size=", "timeout="),
            *("DistributedDataParallel(", "device_ids=", "gradient_as_bucket_view=True"),
            *("nn.SyncBatchNorm.convert_sync_batchnorm(", "DistributedSampler", "set_epoch("),
            *("rank == 0", "no_sync=model.no_sync"),
        ],
    }
    for technique, words in shown.items():
        text = (ROOT / f"train_{technique}.py").read_text()
        assert [word for word in words if word not in text] == []
