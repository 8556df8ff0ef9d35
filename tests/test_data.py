"""Data: what is damaged is refused, what is missing is said, and every sample counts once."""

import contextlib
import gzip
import hashlib
import http.server
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

import data
import models
from tests.processes import ROOT, environment, finish, script, start
from tests.processes import run as run_command
from utils import data_parallel
from utils.datasets import fetch, idx, prepare, sources
from utils.datasets.digits import draw_digits
from utils.files import FileLock
from utils.signals import Stopped

CPU = torch.device("cpu")
PREPARE = (sys.executable, ROOT / "scripts/tools/prepare_data.py")


def idx_files(folder: Path) -> Path:
    """Write four raw files of the right form."""
    folder.mkdir(parents=True)
    for name, count in zip(sources.RAW_FILES, (60_000, 60_000, 10_000, 10_000), strict=True):
        if "images" in name:
            header, size = [0x803, count, 28, 28], count * 784
            content = torch.arange(size, dtype=torch.int64).remainder(251).byte()
        else:
            header = [0x801, count]
            content = torch.arange(count).remainder(10).byte()
        raw = b"".join(n.to_bytes(4, "big") for n in header) + content.numpy().tobytes()
        (folder / name).write_bytes(raw)
    return folder


@pytest.fixture(scope="module")
def raw_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return idx_files(tmp_path_factory.mktemp("raw") / "raw")


@pytest.fixture(scope="module")
def checksums(raw_template: Path) -> dict[str, str]:
    """The checksums of the files below, as SHA256SUMS has those of the published ones."""
    return {
        f"FashionMNIST/raw/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in raw_template.iterdir()
    }


@pytest.fixture
def raw(
    raw_template: Path,
    checksums: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """The raw files below a folder for ``--data-dir``, in the place of Fashion-MNIST."""
    for path, checksum in checksums.items():
        monkeypatch.setitem(sources.CHECKSUMS, path, checksum)
    shutil.copytree(raw_template, tmp_path / "FashionMNIST" / "raw")
    return tmp_path / "FashionMNIST" / "raw"


def load(raw: Path) -> tuple[data.ImageSet, data.ImageSet]:
    return data.load_dataset("fashion-mnist", str(raw.parent.parent))


def change(path: Path, position: int, value: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] = value
    path.write_bytes(content)


def pack(path: Path, spoil: Callable[[bytes], bytes] = bytes) -> None:
    path.with_name(f"{path.name}.gz").write_bytes(spoil(gzip.compress(path.read_bytes(), 1)))
    path.unlink()


DAMAGE = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-1]), "47040015 bytes .* SHA-256"),
    "empty": (lambda p: p.write_bytes(b""), "0 bytes"),
    "longer": (lambda p: p.write_bytes(p.read_bytes() + b"x"), "47040017 bytes"),
    "without an end": (lambda p: os.truncate(p, 10**13), "67108864 bytes"),
    "other shape": (lambda p: change(p, 11, 14), "wrong SHA-256"),
    "fewer images": (lambda p: change(p, 6, 0), "wrong SHA-256"),
    "a pixel": (lambda p: change(p, 5000, 99), "wrong SHA-256"),
    "not gzip": (lambda p: pack(p, lambda packed: b"nonsense"), "gz is damaged .*gzip"),
    "half a gzip": (lambda p: pack(p, lambda packed: packed[: len(packed) // 2]), "ended"),
    "corrupt deflate": (lambda p: pack(p, lambda g: g[:50] + b"\xff" * 50 + g[100:]), "Error -3"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_raw_files_are_refused(damage: str, raw: Path) -> None:
    spoil, message = DAMAGE[damage]
    spoil(raw / "train-images-idx3-ubyte")
    with pytest.raises(data.DataError, match=message) as caught:
        load(raw)
    assert "train-images-idx3-ubyte" in str(caught.value)
    assert "delete it to download it again" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (raw.parent / prepare.PREPARED_NAME).exists()


@pytest.mark.parametrize(("position", "value"), [(6, 0), (500, 200), (500, 1)])
def test_damaged_labels_are_refused(position: int, value: int, raw: Path) -> None:
    """Fewer labels than images, label 200, a wrong label."""
    change(raw / "t10k-labels-idx1-ubyte", position, value)
    with pytest.raises(data.DataError, match="wrong SHA-256"):
        load(raw)


def test_another_set_in_the_folder_of_mnist_is_refused(raw: Path, tmp_path: Path) -> None:
    shutil.copytree(raw, tmp_path / "MNIST" / "raw")  # well-formed, but not MNIST
    with pytest.raises(data.DataError, match="wrong SHA-256"):
        data.load_dataset("mnist", str(tmp_path))


def test_compressed_raw_files_are_taken(raw: Path) -> None:
    for path in list(raw.iterdir()):
        pack(path)
    train_set, test_set = load(raw)
    assert (len(train_set), len(test_set)) == (60_000, 10_000)


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=200))
def test_any_prepared_file_is_recognised_or_made_anew(content: bytes) -> None:
    """Whatever lies in its place, opening the prepared file ends in a yes or a no."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prepared.pt"
        path.write_bytes(content)
        assert not prepare._is_sound(path, "mnist")


def rewrite(spoil: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return what changes the content of a prepared file and leaves its checksum."""

    def apply(path: Path) -> None:
        content = torch.load(path)
        spoil(content)
        torch.save(content, path)

    return apply


def flip_a_bit(path: Path) -> None:
    content = path.read_bytes()
    change(path, len(content) // 2, content[len(content) // 2] ^ 1)


PREPARED_DAMAGE = {
    "flipped bit": flip_a_bit,
    "flipped pixels": rewrite(lambda c: c["train_images"][5].bitwise_not_()),
    "shuffled labels": rewrite(lambda c: c.update(train_labels=c["train_labels"].flip(0))),
    "zeroed test set": rewrite(lambda c: c["test_images"].zero_()),
    "label 200": rewrite(lambda c: c["train_labels"][7].fill_(200)),
    "missing tensor": rewrite(lambda c: c.pop("test_labels")),
    "missing checksum": rewrite(lambda c: c.pop("crc32")),
    "another shape": rewrite(lambda c: c.update(test_images=c["test_images"].view(-1, 14, 56))),
    "truncated": lambda p: os.truncate(p, 1000),
    "empty": lambda p: os.truncate(p, 0),
    "list": lambda p: torch.save([1, 2], p),
    "pipe": lambda p: (p.unlink(), os.mkfifo(p)),
    "device": lambda p: (p.unlink(), p.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("damage", PREPARED_DAMAGE)
def test_a_damaged_prepared_file_is_made_anew(
    damage: str, raw: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prepare.prepare("fashion-mnist", str(raw.parent.parent))
    before = path.stat()
    PREPARED_DAMAGE[damage](path)
    if path.is_file():
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    train_set, test_set = load(raw)
    assert capsys.readouterr().err == f"{path} is damaged: making it anew\n"
    assert train_set.images.flatten()[:251].tolist() == list(range(251))
    assert test_set.labels.tolist() == list(range(10)) * 1000
    load(raw)
    assert capsys.readouterr().err == ""


def test_the_prepared_file_of_another_set_is_not_taken(
    raw: Path, capsys: pytest.CaptureFixture[str], synthetic_dir: Path
) -> None:
    path = raw.parent / prepare.PREPARED_NAME
    shutil.copy(synthetic_dir / "Synthetic" / prepare.PREPARED_NAME, path)
    assert int(load(raw)[0].images[0, 0, 1]) == 1
    assert "making it anew" in capsys.readouterr().err


def test_a_read_only_folder_is_left_alone(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    raw.parent.chmod(0o555)
    try:
        path = prepare.prepare("fashion-mnist", str(raw.parent.parent))
        assert path.is_relative_to(tmp_path / "cache")
        assert [p.name for p in raw.parent.iterdir()] == ["raw"]
    finally:
        raw.parent.chmod(0o755)


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_a_lock_that_cannot_be_taken_leads_to_the_cache(
    kind: str, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that belongs to somebody else, which this test may not be able to make."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lock = raw.parent / ".lock"
    {
        "folder": lock.mkdir,
        "link": lambda: lock.symlink_to(tmp_path / "elsewhere"),
        "pipe": lambda: os.mkfifo(lock),
    }[kind]()
    path = prepare.prepare("fashion-mnist", str(raw.parent.parent))
    assert path.is_relative_to(tmp_path / "cache")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_lock_of_another_user_leads_to_the_cache(tmp_path: Path) -> None:
    """And a container's user, whom nobody knows, has a cache if XDG_CACHE_HOME names one."""
    folder, cache = Path("/tmp") / f"mnist-test-{os.getpid()}", Path("/tmp") / f"c-{os.getpid()}"
    (folder / "Synthetic").mkdir(parents=True)
    cache.mkdir()
    cache.chmod(0o777)
    for path in (folder, folder / "Synthetic"):
        path.chmod(0o777)
    (folder / "Synthetic" / ".lock").touch(0o644)
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import torch\n"
        "from utils.datasets.prepare import prepare\n"
        "from utils.errors import guard\n"
        "os.setgid(54321); os.setuid(54321); os.environ.pop('HOME', None)\n"
        "def run():\n    print(prepare('synthetic', sys.argv[2])); return 0\n"
        "sys.exit(guard(run))"
    )
    command = (sys.executable, "-B", "-c", code, ROOT, folder)
    try:
        result = run_command(*command, cwd=Path("/tmp"), timeout=120, XDG_CACHE_HOME=str(cache))
        assert result.returncode == 0, result.text
        assert result.stdout.startswith(str(cache))
        result = run_command(*command, cwd=Path("/tmp"), timeout=120, XDG_CACHE_HOME="")
        assert result.returncode == 2, result.text
        assert result.stderr == (
            f"-c: error: no folder to prepare the data in: {folder}/Synthetic/.lock (Permission"
            " denied); pass --data-dir\n"
        )
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(cache)


def test_without_a_home_the_cache_is_not_asked_for(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (raw.parent / ".lock").mkdir()
    assert prepare.prepare("fashion-mnist", str(tmp_path)).is_relative_to(tmp_path / "cache")
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(data.DataError, match=r"\.lock \(Is a directory\); pass --data-dir"):
        prepare.prepare("fashion-mnist", str(tmp_path))


def one_line(result: Any) -> str:
    assert result.returncode == 2, result.text
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


@pytest.mark.slow
def test_a_full_disk_ends_in_one_line(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk; nothing half-written is left."""
    command = ["bash", "-c", 'ulimit -f 1000; exec "$@"', "-", *PREPARE, "synthetic"]
    result = run_command(
        *command, "--data-dir", tmp_path / "data", XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    assert one_line(result).count("(File too large)") == 2
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} <= {".lock"}


@pytest.mark.slow
def test_a_folder_whose_name_is_not_text_ends_in_one_line(tmp_path: Path) -> None:
    """PyTorch opens no such file; the user's cache stands in, if its name is better."""
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    result = run_command(*PREPARE, "synthetic", "--data-dir", folder, XDG_CACHE_HOME=str(folder))
    assert "not in UTF-8" in one_line(result)
    result = run_command(*PREPARE, "synthetic", "--data-dir", folder, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.text


@pytest.mark.slow
def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "données"
    result = run_command(*PREPARE, "synthetic", "--data-dir", folder, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.text
    assert "donn\\xe9es" in result.stdout


def test_pipes_and_devices_in_the_place_of_raw_files_are_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name in sources.RAW_FILES[:2]:
        os.mkfifo(folder / name)
        (folder / f"{name}.gz").symlink_to("/dev/zero")
    dead = "http://127.0.0.1:9"
    result = run_command(
        *PREPARE, "mnist", "--data-dir", tmp_path, http_proxy=dead, https_proxy=dead, timeout=60
    )
    assert "no MNIST in" in one_line(result)


def test_processes_that_race_prepare_once(raw: Path, checksums: dict[str, str]) -> None:
    """Eight processes of a node at once: one writes, all read the same."""
    code = (
        "import data, json, sys; from utils.datasets import prepare, sources\n"
        "sources.CHECKSUMS.update(json.loads(sys.argv[2])); made = prepare._make\n"
        "def make(*a): print('made'); return made(*a)\n"
        "prepare._make = make\n"
        "print(int(data.load_dataset('fashion-mnist', sys.argv[1])[0].images[:9].sum()))"
    )
    command = [sys.executable, "-c", code, str(raw.parent.parent), json.dumps(checksums)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)
        for _ in range(8)
    ]
    printed = [process.communicate(timeout=120)[0].split() for process in processes]
    assert sum("made" in lines for lines in printed) == 1
    assert len({lines[-1] for lines in printed}) == 1
    assert {p.name for p in raw.parent.iterdir()} == {".lock", prepare.PREPARED_NAME, "raw"}


HOLDER = """
import os, sys, time
from pathlib import Path
from utils.files import FileLock
FileLock(Path(sys.argv[1])).acquire()
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def holding(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lock, and perhaps has a loader worker, which is a fork."""
    process = start(sys.executable, "-c", HOLDER, path, how)
    try:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_waiting_for_the_lock_is_bounded_and_names_its_holder(
    raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "LOCK_TIMEOUT", 0.2)
    with holding(raw.parent / ".lock", "alone") as holder:
        with pytest.raises(data.DataError, match=f"process {holder.pid} on "):
            load(raw)


def test_who_waits_for_the_data_says_for_whom_and_hears_a_stop(tmp_path: Path) -> None:
    lock = tmp_path / "Synthetic" / ".lock"
    lock.parent.mkdir()
    with holding(lock, "alone") as holder:
        arguments = ["--dataset", "synthetic", "--data-dir", tmp_path]
        process = start(*script("train_single.py", *arguments))
        assert process.stderr is not None
        waiting = process.stderr.readline()
        assert waiting.startswith(f"waiting for process {holder.pid} on "), waiting
        assert str(lock) in waiting
        process.send_signal(signal.SIGTERM)
        ended = finish(process, 20)
    assert ended.returncode == 143
    assert ended.stderr == "train_single.py: error: stopped by SIGTERM while waiting\n"


def test_a_download_hears_a_stop() -> None:
    def stop(seconds: float) -> None:
        raise Stopped(signal.SIGINT)

    mirrors, begin, end = ("nowhere",), time.monotonic(), threading.Event()
    with pytest.raises(Stopped, match="stopped by SIGINT"):
        fetch._try_each(mirrors, lambda mirror: bool(end.wait(60)) and None, 60.0, stop)
    end.set()
    assert time.monotonic() - begin < 30


def test_a_lock_ends_with_its_holder_although_a_fork_lives_on(tmp_path: Path) -> None:
    """Loader workers notice only after seconds that the training process was killed."""
    path = tmp_path / "lock"
    with holding(path, "fork") as holder:
        holder.kill()
        holder.wait()
        os.killpg(holder.pid, 0)  # the fork is still there
        with FileLock(path):
            pass


def test_offline_the_start_ends_soon_with_one_line(tmp_path: Path) -> None:
    """A proxy on a closed port stands in for a machine without a network."""
    dead = "http://127.0.0.1:9"
    result = run_command(
        *script("train_single.py", "--data-dir", tmp_path / "data", "--run-dir", tmp_path / "run"),
        http_proxy=dead,
        https_proxy=dead,
        timeout=30,
    )
    assert result.returncode == 2
    assert result.seconds < 10
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    mirrors = data.SOURCES["mnist"].mirrors
    for part in (*mirrors, "train-images-idx3-ubyte", "--dataset synthetic"):
        assert part in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_name_server_that_never_answers_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **options: object) -> None:
        time.sleep(60)
        raise TimeoutError

    monkeypatch.setattr(fetch.urllib.request, "urlopen", never)
    monkeypatch.setattr(fetch, "PROBE_TIMEOUT", 0.5)
    begin = time.monotonic()
    with pytest.raises(data.DataError, match="nothing in"):
        fetch.download("mnist", tmp_path / "raw")
    assert time.monotonic() - begin < 5


class Mirror(http.server.SimpleHTTPRequestHandler):
    """Serves files, and below /slow/ one byte now and then."""

    def log_message(self, *args: object) -> None: ...

    def do_GET(self) -> None:
        if not self.path.startswith("/slow/"):
            return super().do_GET()
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(gzip.compress(b"")[:10])  # the header of a file that may follow
            while True:
                self.wfile.write(b"x")
                time.sleep(0.1)


@pytest.fixture
def mirror(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., None]]:
    """A server of the raw files below /good/, corrupt ones below /bad/; returns what names them."""
    for folder in ("good", "bad", "slow"):
        (tmp_path / folder).mkdir()
        for name in sources.RAW_FILES:
            packed = gzip.compress((raw / name).read_bytes(), 1)
            if folder == "bad":
                packed = packed[:50] + b"\xff" * 50 + packed[100:]
            (tmp_path / folder / f"{name}.gz").write_bytes(packed)
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *a: Mirror(*a, directory=str(tmp_path))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = f"http://127.0.0.1:{server.server_port}"

    def use(*folders: str) -> None:
        mirrors = tuple(f"{here}/{folder}/" for folder in folders)
        source = sources.SOURCES["fashion-mnist"]._replace(mirrors=mirrors)
        monkeypatch.setitem(sources.SOURCES, "fashion-mnist", source)

    yield use
    server.shutdown()
    server.server_close()


def test_download_goes_on_to_the_next_mirror(mirror: Callable[..., None], tmp_path: Path) -> None:
    """One mirror answers with an error page, one with corrupt files, the next with files."""
    mirror("nothing", "bad", "good")
    train_set, _ = data.load_dataset("fashion-mnist", str(tmp_path / "fresh"))
    assert int(train_set.images[0, 0, 1]) == 1
    found = sorted(p.name for p in (tmp_path / "fresh/FashionMNIST/raw").iterdir())
    assert found == sorted(sources.RAW_FILES)


def test_mirrors_that_send_no_good_file_are_named(
    mirror: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "DOWNLOAD_TIMEOUT", 4.0)
    mirror("bad", "slow")
    with pytest.raises(data.DataError) as caught:
        data.load_dataset("fashion-mnist", str(tmp_path / "fresh"))
    assert "/bad/ (Error -3 while decompressing" in str(caught.value)
    assert "/slow/ (nothing in 4 s)" in str(caught.value)
    assert list((tmp_path / "fresh/FashionMNIST/raw").iterdir()) == []


def test_the_checksums_are_for_sha256sum(mnist_dir: Path) -> None:
    """As one checks a folder by hand."""
    sums = ROOT / "utils" / "datasets" / "SHA256SUMS"
    command = ("sha256sum", "--check", "--ignore-missing", "--quiet", sums)
    assert finish(start(*command, cwd=mnist_dir), 60).returncode == 0


def test_real_mnist_is_recognised(mnist_dir: Path) -> None:
    parts = idx.read_raw("mnist", mnist_dir / "MNIST" / "raw")
    assert parts[1][:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    mean = parts[0].double().mean() / 255
    assert abs(mean - sources.SOURCES["mnist"].mean) < 1e-4


def test_synthetic_digits_have_the_form_of_mnist(synthetic_dir: Path) -> None:
    train_set, test_set = data.load_dataset("synthetic", str(synthetic_dir))
    for dataset, count in ((train_set, 60_000), (test_set, 10_000)):
        assert dataset.images.shape == (count, 28, 28)
        assert dataset.images.dtype == torch.uint8
        assert dataset.labels.dtype == torch.int64
        assert dataset.labels.bincount().min() > 0.09 * count
    pixels = train_set.images.double() / 255
    source = sources.SOURCES["synthetic"]
    assert abs(pixels.mean() - source.mean) < 1e-4
    assert abs(pixels.std() - source.std) < 1e-4


def test_synthetic_digits_are_the_same_everywhere() -> None:
    images, labels = draw_digits(1000, seed=0)
    assert len(labels) == 1000
    digest = hashlib.sha256(images.numpy().tobytes()).hexdigest()
    assert digest == "77546c4c0333d5a5618063d2c0ed223809d0aa1ce60a9057c3aa9d7b68568f81"


class Set(data.ImageSet):
    def __init__(self, count: int) -> None:
        super().__init__(torch.zeros(count, 1, 1, dtype=torch.uint8), torch.arange(count))


def seen(count: int, size: int, world: int, start: int = 0, epoch: int = 0) -> list[list[int]]:
    """Return the global batches of an epoch, put together from all ranks' loaders."""
    dataset, per_rank = Set(count), []
    for rank in range(world):
        sampler = data.EpochSampler(dataset, size * world, world, rank, seed=3)
        sampler.set_epoch(epoch, start)
        loader = DataLoader(dataset, size, sampler=sampler, collate_fn=data.keep_batch)
        batches = [labels.tolist() for _, labels in loader]
        assert len(batches) * size == len(sampler)
        assert all(len(batch) == size for batch in batches)
        per_rank.append(batches)
    assert len({len(batches) for batches in per_rank}) == 1, "unequal numbers of batches"
    return [sorted(itertools.chain(*ranks)) for ranks in zip(*per_rank, strict=True)]


@pytest.mark.parametrize(("count", "size"), [(100, 8), (97, 4), (64, 64), (65, 64), (7, 1)])
def test_global_batches_do_not_depend_on_the_world_size(count: int, size: int) -> None:
    alone = seen(count, size, 1)
    assert len(alone) == count // size
    assert len(set(itertools.chain(*alone))) == count // size * size
    for world in (2, 4):
        if size % world == 0:
            assert seen(count, size // world, world) == alone


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(30, 200),
    worlds=st.tuples(st.sampled_from([1, 2, 3, 6, 7]), st.sampled_from([1, 2, 3, 6, 7])),
    size=st.integers(1, 4),
    steps=st.integers(0, 3),
)
def test_another_world_size_goes_on_without_skip_or_repeat(
    count: int, worlds: tuple[int, int], size: int, steps: int
) -> None:
    before = seen(count, size, worlds[0])[:steps]
    start = len(before) * size * worlds[0]
    after = seen(count, size, worlds[1], start)
    indices = list(itertools.chain(*before, *after))
    whole = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
    assert sorted(indices) == sorted(whole[: len(indices)])
    assert count - len(indices) < size * worlds[1], "more dropped than the tail"


def test_epochs_are_shuffled_differently() -> None:
    assert seen(64, 4, 2, epoch=0) != seen(64, 4, 2, epoch=1)
    assert list(itertools.chain(*seen(64, 4, 2, epoch=0))) != list(range(64))


def test_fewer_samples_than_a_global_batch_is_an_error() -> None:
    with pytest.raises(data.DataError, match="larger than the training set"):
        data.EpochSampler(Set(5), 6)


def test_loader_workers_give_the_same_batches() -> None:
    dataset = Set(50)
    options = data.loader_options(dataset, 2, CPU)
    alone = data.loader_options(dataset, 0, CPU)
    with_workers = [labels.tolist() for _, labels in DataLoader(dataset, 7, **options)]
    assert with_workers == [labels.tolist() for _, labels in DataLoader(dataset, 7, **alone)]
    assert len(with_workers[-1]) == 1, "a last batch of one"


def test_an_empty_share_is_no_batch() -> None:
    dataset = Set(2)
    options = data.loader_options(dataset, 0, CPU)
    assert list(DataLoader(dataset, 7, sampler=range(2, 2, 3), **options)) == []


def test_transform_normalises() -> None:
    transform = data.Transform(CPU, "mnist")
    images = torch.tensor([[[0, 255]]], dtype=torch.uint8)
    pixels, labels = transform(images, torch.tensor([3]), train=True)
    source = sources.SOURCES["mnist"]
    expected = [(0 - source.mean) / source.std, (1 - source.mean) / source.std]
    assert pixels.shape == (1, 1, 1, 2)
    assert pixels.flatten().tolist() == pytest.approx(expected, rel=1e-5)
    assert labels.tolist() == [3]


def test_random_shift_moves_whole_images() -> None:
    images = torch.zeros(400, 5, 5, dtype=torch.uint8)
    images[:, 2, 2] = 9
    shifted = data.RandomShift(1)(images)
    assert shifted.shape == images.shape
    assert (shifted.sum((1, 2)) == 9).all()
    places = {tuple(p) for p in shifted.nonzero()[:, 1:].tolist()}
    assert places == set(itertools.product((1, 2, 3), repeat=2))
    edge = torch.full((50, 3, 3), 7, dtype=torch.uint8)
    assert set(data.RandomShift(1)(edge).unique().tolist()) == {0, 7}, "filled with black"


def test_random_shift_is_a_crop_of_the_padded_image() -> None:
    shift = data.RandomShift(2)
    for seed, count in enumerate((20, 20, 7)):  # it keeps memory for the next batch
        images = torch.randint(256, (count, 4, 6), dtype=torch.uint8)
        torch.manual_seed(seed)
        moved = shift(images)
        torch.manual_seed(seed)
        padded, places = F.pad(images, (2,) * 4), torch.randint(5, (2, count)).T.tolist()
        for i, (y, x) in enumerate(places):
            assert torch.equal(moved[i], padded[i, y : y + 4, x : x + 6])


def test_augmentation_is_for_training_only() -> None:
    transform = data.Transform(CPU, "mnist", augment=True)
    images = torch.randint(256, (8, 28, 28), dtype=torch.uint8)
    labels = torch.zeros(8, dtype=torch.int64)
    assert torch.equal(transform(images, labels)[0], transform(images, labels)[0])
    assert not torch.equal(transform(images, labels, train=True)[0], transform(images, labels)[0])


@pytest.mark.parametrize("channels", [1, 3])
def test_random_shift_moves_all_channels_alike(channels: int) -> None:
    shift = data.RandomShift(2)
    for seed, count in enumerate((20, 20, 7)):
        images = torch.randint(256, (count, channels, 4, 6), dtype=torch.uint8)
        torch.manual_seed(seed)
        moved = shift(images)
        for channel in range(channels):
            torch.manual_seed(seed)
            assert torch.equal(moved[:, channel], data.RandomShift(2)(images[:, channel]))
        torch.manual_seed(seed)
        assert torch.equal(shift(images.to(memory_format=torch.channels_last)), moved)


def test_transform_normalises_each_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    mean, std = (0.5, 0.25, 0.1), (0.2, 0.3, 0.4)
    monkeypatch.setitem(sources.SOURCES, "mine", sources.Source("Mine", mean, std))
    transform = data.Transform(CPU, "mine", augment=True)
    images = torch.randint(256, (6, 3, 32, 40), dtype=torch.uint8)
    pixels, _ = transform(images, torch.zeros(6).long())
    for channel in range(3):
        expected = (images[:, channel] / 255 - mean[channel]) / std[channel]
        torch.testing.assert_close(pixels[:, channel], expected)
    assert transform(images, torch.zeros(6).long(), train=True)[0].shape == images.shape
    with pytest.raises(data.DataError, match="1 channels, but mean and std of 3"):
        transform(images[:, 0], torch.zeros(6).long())


def test_tensors_for_a_loop_without_a_transform(synthetic_dir: Path) -> None:
    train_set, test_set = data.load_tensors("synthetic", str(synthetic_dir))
    assert (len(train_set), len(test_set)) == (60_000, 10_000)
    images, labels = next(iter(DataLoader(train_set, batch_size=32)))
    assert (images.dtype, list(images.shape)) == (torch.float32, [32, 1, 28, 28])
    assert (labels.dtype, list(labels.shape)) == (torch.int64, [32])
    pixels = train_set.tensors[0].double()
    assert abs(pixels.mean()) < 1e-3
    assert abs(pixels.std() - 1) < 1e-3


@pytest.mark.parametrize("shape", [(40,), (40, 2)])
def test_the_numbers_of_a_regression_pass_untouched(shape: tuple[int, ...]) -> None:
    targets = torch.rand(shape)
    dataset = data.ImageSet(torch.zeros(40, 9, 7).byte(), targets)
    loader = DataLoader(dataset, 8, **data.loader_options(dataset, 0, CPU))
    transform = data.Transform(CPU, "mnist", augment=True)
    seen = [transform(*batch, train=True)[1] for batch in loader]
    assert torch.equal(torch.cat(seen), targets)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """On a busy machine the barriers between small operations take a second thread minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train_a_little(model: nn.Module, dataset: data.ImageSet, name: str) -> float:
    """Train for three epochs as the scripts do, and return the accuracy on the same images."""
    transform = data.Transform(CPU, name, augment=True)
    sampler = data.EpochSampler(dataset, 20)
    loader = DataLoader(dataset, 20, sampler=sampler, **data.loader_options(dataset, 0, CPU))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader:
            images, labels = transform(*batch, train=True)
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
    images, labels = transform(dataset.images, dataset.labels)
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "technique",
    [
        pytest.param("single", marks=pytest.mark.slow),
        pytest.param("dp", marks=pytest.mark.slow),
        "ddp",
    ],
)
def test_a_colour_set_of_a_hundred_classes(technique: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user adds is a line in SOURCES, one in MODELS, and the set itself."""
    labels = torch.arange(2000) % 100
    images = torch.randint(60, (2000, 3, 32, 32), dtype=torch.uint8)
    for image, label in zip(images, labels.tolist(), strict=True):
        top, left = label // 10 * 3, label % 10 * 3
        image[label % 3, top : top + 4, left : left + 4] = 255  # a spot in one of three colours

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8192, 100)
        )

    mine = sources.Source("Mine", (0.12, 0.12, 0.12), (0.08, 0.08, 0.08))
    monkeypatch.setitem(sources.SOURCES, "mine", mine)
    monkeypatch.setitem(models.MODELS, "mine", build)
    dataset = data.ImageSet(images, labels)
    torch.manual_seed(0)
    model = models.build_model("mine")
    if technique == "dp":
        model = data_parallel.CPUDataParallel(model, 2)
    if technique == "ddp":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(model)
    try:
        assert train_a_little(model, dataset, "mine") > 0.9
    finally:
        if technique == "ddp":
            dist.destroy_process_group()


def bytes_of(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (torch.zeros(3, 28, 28), torch.zeros(3).long(), "images are torch.float32 [3, 28, 28]"),
        (bytes_of(3, 784), torch.zeros(3).long(), "be torch.uint8 [N, H, W] or [N, C, H, W]"),
        (bytes_of(3, 32, 32, 3), torch.zeros(3).long(), "images.permute(0, 3, 1, 2)"),
        (bytes_of(3, 28, 28), torch.zeros(3).int(), "labels are torch.int32 [3]"),
        (bytes_of(3, 28, 28), torch.zeros(3, 1).long(), "labels are torch.int64 [3, 1]"),
        (bytes_of(3, 28, 28), torch.zeros(2).long(), "labels are torch.int64 [2] for 3"),
        ([[1]], torch.zeros(1).long(), "images are a list: make them a tensor"),
        (bytes_of(3, 28, 28), [0, 1, 2], "labels are a list: make them a tensor"),
    ],
)
def test_own_data_of_another_kind_is_told(images: Any, labels: Any, words: str) -> None:
    """Floats of 0 to 1 would train, and learn nothing: they are divided by 255 once more."""
    with pytest.raises(data.DataError) as caught:
        data.ImageSet(images, labels)
    assert words in str(caught.value)
