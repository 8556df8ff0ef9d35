"""The notebook: without outputs, and its cells run, on a machine without GPUs too."""

import json
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.processes import ROOT, run

NOTEBOOK = json.loads((ROOT / "docs" / "two_gpus.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_no_outputs_are_stored() -> None:
    assert NOTEBOOK["nbformat"] == 4
    assert len(CODE) > 4
    assert [cell["outputs"] for cell in CODE] == [[]] * len(CODE)
    assert [cell["execution_count"] for cell in CODE] == [None] * len(CODE)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of the project as it stands, to be cloned."""
    folder = tmp_path / "origin"
    leave = shutil.ignore_patterns(".*", "runs", "data", "__pycache__", "tests")
    shutil.copytree(ROOT, folder, ignore=leave)
    commit = "git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm all"
    made = run("bash", "-c", commit, cwd=folder)
    assert made.returncode == 0, made.text
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)  # three trainings, and a benchmark of as many
def test_all_cells_run(
    repository: Path, synthetic_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Jupyter runs them: shell cells by bash, the others in one name space."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    where = f"--dataset synthetic --data-dir {shlex.quote(str(synthetic_dir))}"
    monkeypatch.setenv("REPOSITORY", str(repository))
    monkeypatch.setenv("TRAIN_FLAGS", f"{where} --model linear --max-steps 20 --threads 1")
    monkeypatch.setenv("BENCHMARK_FLAGS", f"--quick {where} --models linear --steps 3 --threads 2")
    shown: list[str] = []
    display = ModuleType("IPython.display")
    display.Image = shown.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    printed, names = "", {}  # type: ignore[var-annotated]
    for cell in CODE:
        first, _, rest = "".join(cell["source"]).partition("\n")
        if first == "%%bash":
            ended = run("bash", "-c", rest, cwd=work, timeout=400)
            assert ended.returncode == 0, ended.text
            printed += ended.text
        else:
            exec("".join(cell["source"]), names)
    for words in ("How to read it", "single", "dp", "ddp", "chart in"):
        assert words in printed
    assert all(Path(path).stat().st_size > 10_000 for path in shown)
    assert len(shown) == 1
