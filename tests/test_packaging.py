"""What the project says of itself: its Python, its dependencies, and what the workflow runs."""

import ast
import os
import re
import sys
import tomllib

import yaml

from tests.documents import blocks, commands_of, read
from tests.processes import ROOT, run, shell_line, succeed

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIREMENTS = (ROOT / "requirements.txt").read_text().split()
CI = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
OLDEST = PROJECT["project"]["requires-python"].removeprefix(">=")


def test_what_the_code_imports_is_required():
    """``requirements.txt`` has it. ``pyproject.toml`` reads that file, for uv."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("utils/**/*.py"), *ROOT.glob("scripts/tools/*.py")]
    found = {
        name.split(".")[0]
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        for name in names_of(node)
    }
    own = {path.stem for path in files} | {"utils"}
    required = {re.split("[=>]", line)[0] for line in REQUIREMENTS}
    assert found - own - sys.stdlib_module_names - required == {"numpy"}, "which torch asks for"
    assert PROJECT["tool"]["setuptools"]["dynamic"]["dependencies"] == {
        "file": ["requirements.txt"]
    }


def names_of(node):
    """Return the modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


def test_the_oldest_python_can_read_the_code():
    oldest = tuple(map(int, OLDEST.split(".")))
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[stu]*/**/*.py")]:
        ast.parse(path.read_text(), feature_version=oldest)


def test_what_ci_starts_is_there():
    for name in ("quick", "all"):
        words = CI["jobs"][name]["steps"][-1]["run"].split()
        script = next(word for word in words if word.endswith(".sh"))
        assert os.access(ROOT / script, os.X_OK)
        assert OLDEST in CI["jobs"][name]["strategy"]["matrix"]["python"]


def test_one_test_alone_runs_as_shown():
    shown = commands_of(blocks(read(ROOT / "CONTRIBUTING.md")))
    (line,) = [command for command in shown if "-m pytest" in command]
    words, _ = shell_line(line.removeprefix(".venv/bin/"))
    assert "1 passed" in succeed(run(*words, cwd=ROOT)).stdout
