"""The README and what it was relieved of tell the truth about flags, files and names."""

import re
from pathlib import Path

import pytest

from tests.documents import rows, section
from tests.test_launch import LAUNCH_TABLE, Row
from tests.test_scripts import CONTRACT
from utils import config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RUNNING = (ROOT / "docs" / "running.md").read_text()
LAUNCHING = (ROOT / "docs" / "launching.md").read_text()
TOOLS = (ROOT / "docs" / "tools.md").read_text()


def table_flags() -> dict[str, str]:
    """Return each flag of the tables with its default."""
    flags = {}
    for line in RUNNING.partition("\n## Flags")[2].partition("\n## ")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `--"):
            names, defaults = re.findall(r"--[\w-]+", cells[0]), cells[1].split(",")
            if len(defaults) != len(names):
                defaults = [cells[1]] * len(names)
            for name, default in zip(names, defaults, strict=True):
                flags[name] = default.strip().strip("`")
    return flags


def parser_flags() -> dict[str, object]:
    flags: dict[str, object] = {}
    for technique in ("single", "dp", "ddp"):
        for action in config.build_parser(technique, None)._actions:
            if action.help != "==SUPPRESS==":
                flags |= {
                    name: action.default for name in action.option_strings if name[:2] == "--"
                }
    del flags["--help"]
    return flags


def test_every_flag_is_in_a_table_and_none_besides() -> None:
    assert set(table_flags()) == set(parser_flags())


@pytest.mark.parametrize("flag", table_flags())
def test_defaults_are_those_of_the_parser(flag: str) -> None:
    default, told = parser_flags()[flag], table_flags()[flag]
    if isinstance(default, int | float) and not isinstance(default, bool):
        assert float(told) == default
    elif isinstance(default, str):
        assert told == default
    elif default is True and not flag.startswith("--no-"):
        assert told == "on"
    elif default is False and flag != "--no-augment":
        assert told == "off"


def test_every_key_of_the_summary_is_listed() -> None:
    for key in CONTRACT:
        assert f"`{key}`" in RUNNING


def test_every_lesson_and_script_is_named() -> None:
    for path in [*(ROOT / "scripts").iterdir(), *(ROOT / "scripts").glob("*/[a-z]*.py")]:
        name = path.stem if path.parent.name == "lessons" else path.name
        told = README if path.parent.name == "lessons" else README + LAUNCHING + TOOLS
        assert path.name.startswith("__") or name in told, f"{path} is in no document"


@pytest.mark.parametrize("row", LAUNCH_TABLE, ids=lambda row: row.method)
def test_the_launch_table_has_the_commands_that_are_tested(row: Row) -> None:
    assert f"| {row.method} | `{row.command}` |" in LAUNCHING


def test_the_readme_launches_as_the_table_does() -> None:
    shown = rows(section(ROOT / "README.md", "Launching").text)[1:]
    assert len(shown) == 5
    assert {command.strip("`") for _, command in shown} <= {row.command for row in LAUNCH_TABLE}


def test_the_contact_sheet_is_what_its_script_draws(tmp_path: Path) -> None:
    from scripts.tools.contact_sheet import sheet

    assert (ROOT / "docs" / "synthetic_digits.svg").read_text() == sheet()
