"""One list of dependencies, whoever reads it: pip, uv and continuous integration."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from tests.processes import ROOT, run

REQUIREMENTS = (ROOT / "requirements.txt").read_text().split()
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())


def test_pyproject_has_the_dependencies_of_requirements_txt(tmp_path: Path) -> None:
    """As uv asks for them, of a build backend; pip reads requirements.txt."""
    pytest.importorskip("setuptools", "77", reason="needs setuptools 77")
    for name in ("pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    code = "import setuptools.build_meta as b; b.prepare_metadata_for_build_wheel('.')"
    made = run(sys.executable, "-c", code, cwd=tmp_path)
    assert made.returncode == 0, made.text
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    told = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.MULTILINE)
    assert sorted(line.replace(" ", "") for line in told) == sorted(REQUIREMENTS)


def test_ci_checks_the_oldest_and_the_newest() -> None:
    (job,) = WORKFLOW["jobs"].values()
    oldest = next(line for line in REQUIREMENTS if line.startswith("torch>="))
    versions = {oldest, f"{oldest.replace('>=', '==')}.*"}
    assert set(job["strategy"]["matrix"]["torch"]) == versions
    python = re.findall(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert job["strategy"]["matrix"]["python"][:1] == python
    assert job["steps"][-1]["run"].endswith(".ci/run")
    assert (ROOT / ".ci" / "run").exists()
