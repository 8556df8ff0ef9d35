"""The house: three rooms of bounded size, with arrows that point one way."""

import pytest

from tests.sources import CLUSTER, CORE, DATASETS, LESSONS, MINIMAL, ROOT, SCRIPTS, count, imports

TOP = [ROOT / "models.py", ROOT / "data.py"]
PROJECT = [*SCRIPTS, *TOP, *CORE, *DATASETS, *CLUSTER]
COMPLETE = ROOT / "scripts/minimal/ddp_complete.py"


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def room_of(module):
    rooms = ("scripts", "train_", "utils.cluster", "utils.datasets", "utils")
    return next((room for room in rooms if module.startswith(room)), "top")


ARROWS = {name_of(path): {module for module, _ in imports(path)} for path in PROJECT}


@pytest.mark.parametrize(
    ("room", "limit"),
    [
        *zip(([path] for path in SCRIPTS), (65, 75, 95), strict=True),
        ([*SCRIPTS, *TOP, *CORE], 1860),
        (DATASETS, 220),
        (CLUSTER, 523),
        *(([path], 100) for path in LESSONS),
        *(([path], 55) for path in MINIMAL if path != COMPLETE),
        ([COMPLETE], 115),
    ],
    ids=lambda value: str(len(value)) + name_of(value[0]) if isinstance(value, list) else "",
)
def test_a_room_stays_within_its_lines(room, limit):
    sizes = {name_of(path): count([path]) for path in room}
    assert sum(sizes.values()) <= limit, sizes


def test_the_arrows_point_one_way():
    """Scripts use the core and the cluster room, which uses the core, which uses the data sets."""
    allowed = {
        "train_": {"top", "utils", "utils.cluster"},
        "utils.cluster": {"utils.cluster", "utils"},
        "utils": {"utils", "top", "utils.datasets"},
        "top": {"top", "utils", "utils.datasets"},
        "utils.datasets": {"utils.datasets", "utils"},
    }
    for module, used in ARROWS.items():
        rooms = {room_of(name) for name in used}
        assert rooms <= allowed[room_of(module)], (module, used)


def test_there_is_no_circle():
    left = {module: set(used) & set(ARROWS) for module, used in ARROWS.items()}
    while left:
        ends = [module for module, used in left.items() if not used & set(left)]
        assert ends, f"a circle among {sorted(left)}"
        for module in ends:
            del left[module]


def test_no_import_hides_in_a_function():
    """Of this project's own modules: there it could only dodge a circle."""
    for path in PROJECT:
        hidden = [module for module, is_inside in imports(path) if is_inside]
        assert not hidden, f"{path}: {hidden}"


def test_the_calls_that_are_the_technique_stand_in_the_scripts():
    """Spelled as PyTorch spells them, since they are what a reader carries away."""
    loop = [".backward()", "optimizer.step", "model(images)", "clip_grad_norm_(", "with Run("]
    shown = {
        "single": ["scaler.step(optimizer)", *loop[:1], *loop[2:]],
        "dp": ["nn.DataParallel(", *loop[:1], *loop[2:]],
        "ddp": [
            *('os.environ["RANK"]', 'os.environ["LOCAL_RANK"]', 'os.environ["WORLD_SIZE"]'),
            *("dist.init_process_group(", "store=", "rank=", "world_size=", "timeout="),
            *("DistributedDataParallel(", "device_ids=", "gradient_as_bucket_view=True"),
            *("nn.SyncBatchNorm.convert_sync_batchnorm(", "DistributedSampler", "set_epoch("),
            *("dist.broadcast(buffer", "model.require_backward_grad_sync = is_last"),
            *("model.no_sync()", *loop),
        ],
    }
    for technique, words in shown.items():
        text = (ROOT / f"train_{technique}.py").read_text()
        assert [word for word in words if word not in text] == []
