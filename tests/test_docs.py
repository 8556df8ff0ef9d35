"""The documents tell the truth about files, flags and messages, and in both languages alike."""

import ast
import re

import pytest

from tests.documents import (
    DOCUMENTS,
    ENGLISH,
    anchors,
    differences,
    links,
    name_of,
    problems,
    prose,
    read,
    rows,
    sections,
    spans,
    translation,
    waits_for,
)
from tests.processes import ROOT
from utils.training import config

RUNNING = ROOT / "docs" / "running.md"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_what_is_linked_or_named_exists(path):
    found = links(prose(path))
    assert found
    for link in found:
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert link.startswith("http") or target.exists(), link
        assert link.startswith("http") or not anchor or anchor in anchors(target), link
    for span in spans(prose(path)):
        if re.fullmatch(r"(train_|utils/|scripts/|docs/|tests/)[\w./-]*\.(py|sh|sbatch|md)", span):
            assert (ROOT / span).exists(), span


@pytest.mark.parametrize("path", ENGLISH, ids=name_of)
def test_both_languages_say_the_same(path):
    """The same headings, commands and numbers. A page that waits for its translation may differ."""
    other = translation(path)
    if change := waits_for(read(other)):
        pytest.skip(f"{name_of(other)} waits for: {change}")
    found = differences(read(path), read(other))
    advice = f"translate it, or write <!-- waits for: ... --> into {name_of(other)}"
    assert not found, f"{found}: {advice}"


def parser_flags():
    found = {}
    for technique in ("single", "dp", "ddp"):
        for action in config.build_parser(technique, None)._actions:
            found |= dict.fromkeys(action.option_strings, action.default)
    return found


def test_the_flags_that_running_tells_are_the_parsers():
    """With their defaults, where a table gives them."""
    defaults = parser_flags()
    named = {flag for span in spans(prose(RUNNING)) for flag in re.findall(r"^--[a-z-]+", span)}
    assert named <= set(defaults), named - set(defaults)
    shown = [row for part in sections(RUNNING) for row in rows(part.text) if row[0][:3] == "`--"]
    assert len(shown) > 10
    for flag, told, _ in shown:
        default = str(defaults[flag.strip("`")])
        assert told == {"False": "off", "None": told}.get(default, default), flag


# A value in a message: a number, a word, a rank with its process, or a list of them.
VALUE = r"(?:(?:rank |at step |training )?\w+(?: \((?:\w )?pid \d+\))?(?:, )?)+"


def is_printed(message):
    """Whether a text of the product begins like this message."""
    shown = message.removesuffix("...").rstrip(" .:")
    complete = ROOT / "scripts" / "minimal" / "ddp_complete.py"
    for path in [ROOT / "data.py", ROOT / "models.py", complete, *(ROOT / "utils").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            pattern = ""  # of a text with values, from its end: each part may be cut off
            for part in reversed(node.values if isinstance(node, ast.JoinedStr) else []):
                is_value = isinstance(part, ast.FormattedValue)
                own = VALUE if is_value else re.escape(part.value.rstrip(" .:")) + "[ .:]*"
                pattern = f"{own}(?:{pattern})?"
            if re.fullmatch(pattern, shown):
                return True
    return False


def test_the_messages_of_the_scripts_are_those_that_they_print():
    told = [
        message
        for group, messages, _ in problems()
        for message in messages
        if group == "Messages of these scripts"
    ]
    assert told
    for message in told:
        assert is_printed(message), message
    assert not is_printed("rank 1 was slower than --rdzv-timeout: ..."), "which has another flag"
