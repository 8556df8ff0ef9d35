"""One list of dependencies, whoever reads it: pip, uv and continuous integration."""

import re
import shutil
import sys

import pytest

from tests.processes import ROOT, run, succeed

REQUIREMENTS = (ROOT / "requirements.txt").read_text().split()


def test_pyproject_has_the_dependencies_of_requirements_txt(tmp_path):
    """As uv asks a build backend for them; pip reads requirements.txt."""
    pytest.importorskip("setuptools", "77", reason="needs setuptools 77")
    for name in ("pyproject.toml", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path)
    code = "import setuptools.build_meta as b; b.prepare_metadata_for_build_wheel('.')"
    succeed(run(sys.executable, "-c", code, cwd=tmp_path))
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    told = re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.MULTILINE)
    assert sorted(line.replace(" ", "") for line in told) == sorted(REQUIREMENTS)


def test_ci_runs_the_command_of_the_readme_on_the_oldest_and_the_newest():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (oldest,) = re.findall(r"^ +torch: (.*)$", workflow, re.MULTILINE)
    line = next(line for line in REQUIREMENTS if line.startswith("torch>="))
    assert oldest == f'["{line.replace(">=", "==")}.*", "{line}"]'
    python = re.findall(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[0]
    assert f'python: ["{python}", ' in workflow
    assert workflow.rstrip().endswith(" scripts/test.sh --all")
    assert (ROOT / ".ci" / "run").read_text().endswith("\n./scripts/test.sh --all\n")
