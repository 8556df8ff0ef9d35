"""The documents tell the truth about files, flags and messages, and in both languages alike."""

import ast
import errno
import os
import re
from functools import cache

import pytest

from tests.documents import (
    DOCUMENTS,
    ENGLISH,
    LESSONS,
    anchors,
    differences,
    links,
    name_of,
    problems,
    prose,
    read,
    rows,
    section,
    sections,
    spans,
    translation,
    waits_for,
)
from tests.processes import ROOT
from utils.training import config

README, RUNNING = ROOT / "README.md", ROOT / "docs" / "running.md"


# Links and languages


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


PAGE = """# A page\n\n## First\n\nIt took 120 s: `python train_ddp.py --lr 0.1`.\n
```diff\n@@ Why @@\n+x = 1  # why\n```\n"""
ALIKE = PAGE.replace("It took", "用了").replace("Why", "原因").replace("why", "原因")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("120 s", "12 s", "other numbers below 'First'"),
        ("--lr 0.1", "--lr 0.2", "other commands below 'First'"),
        ("x = 1", "x = 2", "other code blocks"),
        ("## First\n", "", "2 and 1 headings"),
    ],
)
def test_what_one_language_lacks_is_noticed(old, new, said):
    assert differences(PAGE, ALIKE) == []
    assert said in str(differences(PAGE, ALIKE.replace(old, new)))
    assert waits_for(f"{ALIKE}\n<!-- waits for: a new table -->\n") == "a new table"


# Names


def test_the_readme_lists_every_lesson():
    listed = {span for row in rows(section(README, "How to learn").text) for span in spans(row[1])}
    assert {*LESSONS} == listed & {*LESSONS}, {*LESSONS} - listed
    for name in listed - {*LESSONS}:
        pytest.fail(f"there is no lesson {name}")


def parser_flags():
    found = {}
    for technique in ("single", "dp", "ddp"):
        for action in config.build_parser(technique, None)._actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            found |= dict.fromkeys(names, action.default)
    return found


def test_the_flags_that_running_tells_are_the_parsers():
    """With their defaults, where a table gives them."""
    defaults = parser_flags()
    named = {flag for span in spans(prose(RUNNING)) for flag in re.findall(r"^--[a-z-]+", span)}
    assert named <= set(defaults), named - set(defaults)
    told = {}
    for row in (row for part in sections(RUNNING) for row in rows(part.text)):
        flags, values = re.findall(r"--[\w-]+", row[0]), row[1].replace("`", "").split(", ")
        if row[0].startswith("`--"):
            told |= zip(flags, values if len(values) == len(flags) else row[1:2] * len(flags))  # noqa: B905
    assert len(told) > 10
    for name, value in told.items():
        default = defaults[name]
        if isinstance(default, bool):
            is_switch = name.startswith("--no-")  # of which the parser has the effect
            assert is_switch or value == ("on" if default else "off"), name
        elif isinstance(default, int | float):
            assert float(value) == default, name
        elif isinstance(default, str):
            assert value == default, name


# Messages


def test_every_lesson_that_breaks_something_is_among_the_problems():
    linked = {lesson for _, _, lessons in problems() for lesson in lessons}
    assert {name for name in LESSONS if name.startswith("break_")} <= linked


@cache
def templates():
    """Return the strings of the product, each as its pieces; None is a value between them."""
    found = set()
    for path in [ROOT / "data.py", ROOT / "models.py", *(ROOT / "utils").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if all(isinstance(part, ast.Constant | ast.FormattedValue) for part in parts):
                pieces = [getattr(part, "value", None) for part in parts]
                pieces = [piece if isinstance(piece, str) else None for piece in pieces]
                if len("".join(piece or "" for piece in pieces)) > 4:
                    found.add(tuple(pieces))
    return sorted(found, key=str)


SYSTEM = {os.strerror(number).lower() for number in errno.errorcode}


@cache
def is_value(text):
    """Whether a message may hold this text as a value: a word, a list of them, a message itself."""
    words = text.split(", ")
    return bool(
        (re.fullmatch(r"\S+", text) and len(words) == 1)
        or text.lower() in SYSTEM
        or (len(words) > 1 and all(map(is_value, words)))
        or any(spells(text, pieces, True) for pieces in templates())
    )


def spells(text, pieces, is_whole):
    """Whether a template makes this text; only its beginning, unless ``is_whole``."""
    if not pieces or not text:
        return not text and not (is_whole and pieces)
    head, *rest = pieces
    if head is not None:
        if text.startswith(head):
            return spells(text[len(head) :], rest, is_whole)
        return not is_whole and head.startswith(text)
    if not rest:
        return is_value(text)
    after = rest[0] or ""
    for end in range(1, len(text)):
        is_end = text.startswith(after, end) or (not is_whole and after.startswith(text[end:]))
        if is_end and is_value(text[:end]) and spells(text[end:], rest, is_whole):
            return True
    return not is_whole and is_value(text)


def is_printed(message):
    shown = message.removesuffix("...")
    return any(spells(shown, pieces, False) for pieces in templates())


def test_the_messages_of_the_scripts_are_those_that_they_print():
    groups = [part for part in problems() if part[0] == "Messages of these scripts"]
    told = [message for _, messages, _ in groups for message in messages]
    assert told
    for message in told:
        assert is_printed(message), message


@pytest.mark.parametrize(
    ("message", "is_right"),
    [
        ("runs/first is in use by process 7 on a: take another --run-dir", True),
        ("runs/first is in use by pid 7 on a: take another --run-dir", False),
        ("runs/first is used by process 7 on a: take another --run-dir", False),
        ("rank 1 was slower than --timeout: ...", True),
        ("rank 1 was slower than --rdzv-timeout: ...", False),
    ],
)
def test_a_message_that_is_quoted_wrongly_is_noticed(message, is_right):
    assert is_printed(message) == is_right
