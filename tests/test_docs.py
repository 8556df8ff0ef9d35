"""The documents tell the truth about files, flags and messages, and in both languages alike."""

import ast
import re
from functools import cache

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
    """With their defaults, where a table gives them: one for each flag, or one for all."""
    defaults = parser_flags()
    named = {flag for span in spans(prose(RUNNING)) for flag in re.findall(r"^--[a-z-]+", span)}
    assert named <= set(defaults), named - set(defaults)
    shown = [row for part in sections(RUNNING) for row in rows(part.text) if row[0][:3] == "`--"]
    assert len(shown) > 10
    for row in shown:
        flags, values = re.findall(r"--[\w-]+", row[0]), row[1].replace("`", "").split(", ")
        values = values if len(values) == len(flags) else row[1:2] * len(flags)
        for name, told in zip(flags, values, strict=True):
            default = defaults[name]
            if isinstance(default, bool):  # a --no- switch has the effect as its default
                assert name.startswith("--no-") or told == ("on" if default else "off"), name
            elif isinstance(default, int | float):
                assert float(told) == default, name
            elif isinstance(default, str):
                assert told == default, name


# Messages


@cache
def templates():
    """Return the strings of the product, each as its pieces; None is a value between them."""
    found = set()
    minimal = ROOT / "scripts" / "minimal" / "ddp_complete.py"
    for path in [ROOT / "data.py", ROOT / "models.py", minimal, *(ROOT / "utils").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if all(isinstance(part, ast.Constant | ast.FormattedValue) for part in parts):
                pieces = [getattr(part, "value", None) for part in parts]
                pieces = [piece if isinstance(piece, str) else None for piece in pieces]
                if len("".join(piece or "" for piece in pieces)) > 4:
                    found.add(tuple(pieces))
    return sorted(found, key=str)


@cache
def is_value(text):
    """Whether a message may hold this text as a value: a word, a list of them, a message itself."""
    words = text.split(", ")
    return bool(
        (re.fullmatch(r"\S+", text) and len(words) == 1)
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
    assert not is_printed("rank 1 was slower than --rdzv-timeout: ..."), "which has another flag"
