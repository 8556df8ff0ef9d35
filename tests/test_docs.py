"""The documents tell the truth about flags, files and messages, and in both languages alike."""

import ast
import re

import pytest

from tests.documents import (
    DOCUMENTS,
    ENGLISH,
    anchors,
    blocks,
    links,
    name_of,
    prose,
    read,
    rows,
    section,
    sections,
    spans,
    translation,
    without_comments,
)
from tests.processes import ROOT
from utils.training import config

README, DOCS = ROOT / "README.md", ROOT / "docs"
RUNNING, TROUBLESHOOTING = DOCS / "running.md", DOCS / "troubleshooting.md"
MAX_LINES = {"README": 200, "CONTRIBUTING": 40, "concepts": 250, "hangs": 60}
LESSONS = sorted(path.stem for path in (ROOT / "scripts" / "lessons").glob("[a-z]*.py"))


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
    """The same sections, code, tables, names, links and measured figures."""
    other = translation(path)
    for one, its in ((path, other), (other, path)):
        head = read(one).partition("\n## ")[0]
        assert its.name in links(head), "both lead to each other"
    for ours, theirs in zip(sections(path), sections(other), strict=True):
        assert ours.level == theirs.level, (ours.title, theirs.title)
        assert facts(ours.text) == facts(theirs.text), ours.title
        if ours.level > 1:
            assert targets(ours.text) == targets(theirs.text), ours.title
        for row, translated in zip(rows(ours.text), rows(theirs.text), strict=True):
            cells = [[sorted(spans(cell)) for cell in line] for line in (row, translated)]
            assert cells[0] == cells[1], (row, translated)
    code, translated = ([*map(without_comments, blocks(read(p)))] for p in (path, other))
    assert code == translated


def facts(text):
    """Return the names in a text, and its numbers with a point or of three digits and more."""
    plain = re.sub(r"\]\([^)]*\)|`[^`]*`", "", text)
    figures = set(re.findall(r"\d+\.\d+|\d{1,3}(?:,\d{3})+|\d{3,}", plain))
    return {span.lower() for span in spans(text)}, figures


def targets(text):
    plain = (re.sub(r"#.*", "", link.replace(".zh-CN.md", ".md")) for link in links(text))
    return sorted(link for link in plain if link)


WIDE = r"[\u3001-\u303f\u4e00-\u9fff\uff00-\uffef]"


@pytest.mark.parametrize("path", ENGLISH, ids=name_of)
def test_chinese_is_set_as_markdown_shows_it(path):
    text = prose(translation(path))
    assert len(re.findall(WIDE, text)) > 200, "is this Chinese?"
    # A line break within a paragraph is shown as a space, which Chinese does not have.
    assert not re.search(rf"{WIDE}\n[^\S\n]*{WIDE}", text)
    # A bold is not closed behind punctuation if a character follows (CommonMark's flanking rule).
    for line in re.sub(r"`[^`]*`", "``", text).splitlines():
        for end in list(re.finditer(r"\*\*", line))[1::2]:
            before, after = line[end.start() - 1], line[end.end() : end.end() + 1]
            assert re.match(r"\w", before) or not re.match(r"\w", after), line


@pytest.mark.parametrize("name", MAX_LINES)
def test_a_document_is_short(name):
    (path,) = [path for path in DOCUMENTS if path.stem == name]
    for one in (path, translation(path)):
        assert len(read(one).splitlines()) <= MAX_LINES[name], one


# Names


def test_every_script_and_lesson_is_named():
    told = "".join(map(read, ENGLISH))
    for path in (ROOT / "scripts").rglob("[a-z]*.*"):
        is_shown = path.suffix in (".py", ".sh", ".sbatch") and path.parent.name not in (
            "tools",
            "check",
        )
        assert not is_shown or path.stem in told, f"{path} is in no document"


def parser_flags():
    found = {}
    for technique in ("single", "dp", "ddp"):
        for action in config.build_parser(technique, None)._actions:
            if action.help != "==SUPPRESS==":
                names = [name for name in action.option_strings if name.startswith("--")]
                found |= dict.fromkeys(names, action.default)
    return {name: default for name, default in found.items() if name != "--help"}


def test_the_table_of_flags_is_the_parsers():
    """The flags that people use, with their defaults; --help has the others."""
    told = {}
    for row in (row for part in sections(RUNNING) for row in rows(part.text)):
        names, defaults = re.findall(r"--[\w-]+", row[0]), row[1].replace("`", "").split(", ")
        if row[0].startswith("`--"):
            told |= zip(names, defaults if len(defaults) == len(names) else row[1:2] * len(names))  # noqa: B905
    defaults = parser_flags()
    assert len(told) > 10
    assert set(told) <= set(defaults)
    for name, default in ((name, defaults[name]) for name in told):
        if isinstance(default, bool):
            is_switch = name.startswith("--no-")  # of which the parser has the effect
            assert told[name] in ("on", "off") or is_switch, name
            assert is_switch or told[name] == ("on" if default else "off"), name
        elif isinstance(default, int | float):
            assert float(told[name]) == default, name
        elif isinstance(default, str):
            assert told[name] == default, name


# Messages


def symptoms():
    """Return (literal lines, lessons) of each row of the index of symptoms."""
    table = rows(section(TROUBLESHOOTING, "Symptoms").text)[1:]
    return [
        (spans(row[0]) if row[0].startswith("`") else [], {*spans(row[-1])} & {*LESSONS})
        for row in table
    ]


def test_every_lesson_that_breaks_something_is_in_the_index():
    indexed = {lesson for _, lessons in symptoms() for lesson in lessons}
    assert {name for name in LESSONS if name.startswith("break_")} <= indexed


# Of the system, of torchrun and of a general description: no string of this project.
FOREIGN = ("No route to host", "... Name or service", "... timed out", "`RendezvousTimeoutError`")


def test_launch_errors_quote_the_sources():
    """Each message holds a piece of a string of this project, as it is printed."""
    pieces = set()
    for path in [ROOT / "data.py", *(ROOT / "utils").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces |= {part.strip(". ") for part in node.value.split("{") if len(part) > 11}
    told = rows(section(TROUBLESHOOTING, "Launch errors").text)[1:]
    assert len(told) > 10
    for message, *_ in told:
        if not any(words in message for words in FOREIGN):
            shown = spans(message)[0].strip(". ")  # often only its beginning
            assert any(piece in shown or shown in piece for piece in pieces), message
