"""What the project says of itself: its Python, its dependencies, and what the workflow runs."""

import re
import tomllib

import yaml

from tests.documents import blocks, commands_of, read
from tests.processes import ROOT, run, shell_line, succeed

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIREMENTS = (ROOT / "requirements.txt").read_text().split()
CI = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
OLDEST = PROJECT["project"]["requires-python"].removeprefix(">=")


def test_there_is_one_list_of_dependencies():
    """uv reads it through pyproject.toml, and pip as it is."""
    dynamic = PROJECT["tool"]["setuptools"]["dynamic"]
    assert dynamic == {"dependencies": {"file": ["requirements.txt"]}}
    assert {"torch", "torchvision"} <= {re.split("[=>]", line)[0] for line in REQUIREMENTS}


def test_all_say_the_same_oldest_python():
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + OLDEST.replace(".", "")
    assert PROJECT["tool"]["mypy"]["python_version"] == OLDEST
    shell = (ROOT / "scripts" / "environment.sh").read_text()
    assert shell.count(f"version_info < ({OLDEST.replace('.', ', ')})") == 2
    for name in ("README.md", "README.zh-CN.md"):
        assert f"Python {OLDEST} " in (ROOT / name).read_text(encoding="utf-8")


def test_ci_runs_the_command_of_the_readme_on_the_oldest_and_the_newest():
    torch = next(line for line in REQUIREMENTS if line.startswith("torch>="))
    for name, command in (("quick", "scripts/test.sh"), ("all", "scripts/test.sh --all")):
        job = CI["jobs"][name]
        assert job["strategy"]["matrix"]["torch"] == [torch.replace(">=", "==") + ".*", torch]
        assert job["strategy"]["matrix"]["python"][0] == OLDEST
        assert job["steps"][-1]["run"].endswith(command)
    assert "sudo" not in str(CI["jobs"]["quick"]), "as most people run it"
    assert "\n./scripts/test.sh --all " in (ROOT / ".ci" / "run").read_text()


def test_one_test_alone_runs_as_shown():
    shown = commands_of(blocks(read(ROOT / "CONTRIBUTING.md")))
    (line,) = [command for command in shown if "-m pytest" in command]
    words, _ = shell_line(line.removeprefix(".venv/bin/"))
    assert "1 passed" in succeed(run(*words, cwd=ROOT)).stdout
