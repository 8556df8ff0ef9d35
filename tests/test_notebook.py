"""The notebook: without outputs, and its cells run, on a machine without GPUs too."""

import json
from pathlib import Path

import pytest

from tests.processes import ROOT, copy_project, run, succeed

NOTEBOOK = json.loads((ROOT / "docs" / "two_gpus.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def run_cells(cells):
    """Run them as Jupyter does: shell cells by bash, the others in one name space."""
    printed, names = "", {}
    for cell in cells:
        first, _, rest = "".join(cell["source"]).partition("\n")
        if first == "%%bash":
            printed += succeed(run("bash", "-c", rest, cwd=Path.cwd())).text
        else:
            exec("".join(cell["source"]), names)
    return printed


def test_no_outputs_are_stored_and_an_address_is_asked_for(tmp_path, monkeypatch):
    assert [(cell["outputs"], cell["execution_count"]) for cell in CODE] == [([], None)] * len(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPOSITORY", raising=False)
    with pytest.raises(SystemExit, match="Set REPOSITORY above"):
        run_cells(CODE)


@pytest.mark.slow
def test_all_cells_run(tmp_path, monkeypatch):
    """In a clone of the project as it stands. Its programs run in tests of their own."""
    origin = copy_project(tmp_path / "origin")
    commit = "git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm all"
    succeed(run("bash", "-c", commit, cwd=origin))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("REPOSITORY", str(origin))
    monkeypatch.setenv("TRAIN_FLAGS", "--help")
    monkeypatch.setenv("BENCHMARK_FLAGS", "--quick --help")
    told = run_cells(CODE)
    assert "./scripts/quickstart.sh [--data-dir DIR]" in told
    assert "usage: benchmark.py" in told
    assert "--output OUTPUT" in told
