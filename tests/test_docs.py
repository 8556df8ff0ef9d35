"""The documents tell the truth about files, names and symptoms, and in both languages alike."""

import ast
import contextlib
import functools
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.documents import (
    DOCUMENTS,
    ENGLISH,
    anchors,
    blocks,
    links,
    name_of,
    prose,
    rows,
    section,
    sections,
    spans,
    translation,
    without_comments,
)
from tests.processes import ROOT
from tests.test_diff import hunks
from tests.test_lessons import LESSONS, run_lesson
from tests.test_minimal import changes

TORCH = Path(torch.__file__).parent
README = ROOT / "README.md"
CONCEPTS = ROOT / "docs" / "concepts.md"
TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"


# Links and languages


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_resolve(path: Path) -> None:
    found = links(prose(path))
    assert found
    for link in found:
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("path", ENGLISH, ids=name_of)
def test_there_is_a_translation_and_both_lead_to_each_other(path: Path) -> None:
    other = translation(path)
    assert other.exists()
    assert other.name in links(path.read_text(encoding="utf-8").partition("\n## ")[0])
    assert path.name in links(other.read_text(encoding="utf-8").partition("\n## ")[0])


@pytest.mark.parametrize("path", ENGLISH, ids=name_of)
def test_both_languages_have_the_same_sections(path: Path) -> None:
    ours, theirs = sections(path), sections(translation(path))
    titles = list(zip((s.title for s in ours), (s.title for s in theirs), strict=False))
    assert [s.level for s in ours] == [s.level for s in theirs], titles


@pytest.mark.parametrize("path", ENGLISH, ids=name_of)
def test_both_languages_have_the_same_code(path: Path) -> None:
    ours, theirs = blocks(path), blocks(translation(path))
    assert [block.language for block in ours] == [block.language for block in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert without_comments(one) == without_comments(other)


@pytest.mark.parametrize("path", ENGLISH, ids=name_of)
def test_both_languages_have_the_same_tables(path: Path) -> None:
    for ours, theirs in zip(sections(path), sections(translation(path)), strict=True):
        here, there = rows(ours.text), rows(theirs.text)
        assert len(here) == len(there), ours.title
        for row, other in zip(here, there, strict=True):
            assert len(row) == len(other), (row, other)
            for cell, translated in zip(row, other, strict=True):
                assert sorted(spans(cell)) == sorted(spans(translated)), (row, other)


@pytest.mark.parametrize("path", ENGLISH, ids=name_of)
def test_both_languages_name_and_link_the_same(path: Path) -> None:
    def names(text: str) -> set[str]:
        return {span.lower() for span in spans(text)}

    def targets(text: str) -> list[str]:
        plain = (re.sub(r"#.*", "", link.replace(".zh-CN.md", ".md")) for link in links(text))
        return sorted(link for link in plain if link)

    for ours, theirs in zip(sections(path), sections(translation(path)), strict=True):
        assert names(ours.text) == names(theirs.text), ours.title
        if ours.level > 1:  # the heads lead to each other
            assert targets(ours.text) == targets(theirs.text), ours.title


@pytest.mark.parametrize("path", ENGLISH, ids=name_of)
def test_both_languages_give_the_same_figures(path: Path) -> None:
    """Numbers with a point or of three digits and more: those that were measured."""

    def figures(text: str) -> set[str]:
        text = re.sub(r"\]\([^)]*\)|`[^`]*`", "", text)
        return set(re.findall(r"\d+\.\d+|\d{1,3}(?:,\d{3})+|\d{3,}", text))

    for ours, theirs in zip(sections(path), sections(translation(path)), strict=True):
        assert figures(ours.text) == figures(theirs.text), ours.title


WIDE = r"[\u3001-\u303f\u4e00-\u9fff\uff00-\uffef]"


@pytest.mark.parametrize("path", ENGLISH, ids=name_of)
def test_chinese_is_set_as_markdown_shows_it(path: Path) -> None:
    text = prose(translation(path))
    assert len(re.findall(WIDE, text)) > 500, "is this Chinese?"
    # A line break within a paragraph is shown as a space, which Chinese does not have.
    assert not re.search(rf"{WIDE}\n[^\S\n]*{WIDE}", text)
    # A bold is not closed behind punctuation if a character follows (CommonMark's flanking rule).
    for line in re.sub(r"`[^`]*`", "``", text).splitlines():
        for end in list(re.finditer(r"\*\*", line))[1::2]:
            before, after = line[end.start() - 1], line[end.end() : end.end() + 1]
            assert re.match(r"\w", before) or not re.match(r"\w", after), line


# Names


MODULES = (
    *("torch", "torch.nn", "torch.nn.parallel", "torch.nn.parallel._functions"),
    *("torch.distributed", "torch.utils.data", "torch.optim", "data", "models"),
    *(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in (ROOT / "utils").rglob("[a-z]*.py")
    ),
    *("torch.nn.modules._functions", "utils", "utils.cluster"),
)
# What the documents call an object of a class, or a module, as scripts usually do.
USUAL = {
    "dist": "torch.distributed",
    "mp": "torch.multiprocessing",
    "loss": "torch.Tensor",
    "optimizer": "torch.optim.Optimizer",
    "model.module": "torch.nn.Module",  # before the shorter one
    "model": "torch.nn.parallel.DistributedDataParallel",
    "raw_model": "torch.nn.Module",
    "sampler": "torch.utils.data.DistributedSampler",
    "train_sampler": "data.EpochSampler",
    "metrics": "utils.metrics.Metrics",
    "train_metrics": "utils.metrics.Metrics",
    "test_metrics": "utils.metrics.Metrics",
    "output": "torch.Tensor",
    "tensor": "torch.Tensor",
}
# Quoted because they do not exist, or because they are a reader's own.
NOT_OURS = {"torch.distributed.local_rank", "my_network.py", "my_data.py", "minimal_ddp.py"}
FILE = re.compile(r"[\w./-]+\.(?:py|sh|sbatch|hpp|md|toml|txt)")


def resolve(name: str) -> Any:
    """Import what a dotted name stands for; raise AttributeError if it stands for nothing."""
    for short, long in USUAL.items():
        if name.startswith(f"{short}."):
            name = f"{long}.{name.removeprefix(short).lstrip('.')}"
            break
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        return functools.reduce(getattr, parts[length:], found)
    for module in MODULES:
        with contextlib.suppress(AttributeError):
            return functools.reduce(getattr, parts, importlib.import_module(module))
    raise AttributeError(f"{name} stands for nothing")


def find_file(name: str) -> Path | None:
    """Find a file of this project, or of the installed torch package."""
    places = (
        ROOT / name,
        TORCH.parent / name,
        ROOT / "docs" / name,
        ROOT / "scripts" / name,
        ROOT / "scripts/tools" / name,
    )
    return next((path for path in places if path.exists()), None)


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_files_that_are_named_exist(path: Path) -> None:
    for span in spans(prose(path)):
        if FILE.fullmatch(span) and span not in NOT_OURS:
            assert find_file(span), span


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_python_names_resolve(path: Path) -> None:
    dotted = 0
    for span in spans(prose(path)):
        name = re.sub(r"\(.*\)$", "", span)
        is_name = re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", name)
        if not is_name or FILE.fullmatch(span) or name in NOT_OURS or is_output(name):
            continue
        resolve(name)
        dotted += 1
    assert dotted


def is_output(name: str) -> bool:
    """Tell a file that a run writes, or a flag, from a Python name."""
    return name.endswith((".json", ".jsonl", ".pt")) or name.startswith(("events.out", "args."))


def words_of_the_sources() -> set[str]:
    """Return every word in this project's sources and in those of torch that the documents cite."""
    ours = [p for end in ("py", "sh", "sbatch") for p in ROOT.glob(f"*.{end}")]
    for folder in ("utils", "scripts"):
        ours += [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".sh", ".sbatch")]
    folders = ("nn/parallel", "distributed", "distributed/launcher", "distributed/fsdp")
    theirs = [path for folder in folders for path in (TORCH / folder).glob("*.py")]
    theirs += [TORCH / "utils" / "data" / "dataloader.py", TORCH / "serialization.py"]
    theirs += [TORCH / "utils" / "data" / "distributed.py", TORCH / "nn" / "modules" / "module.py"]
    theirs += [TORCH / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"]
    text = "\n".join(path.read_text(errors="replace") for path in [*ours, *theirs])
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_plain_names_occur_in_the_sources(path: Path) -> None:
    """Arguments, variables and functions: a name that no source has is misspelt."""
    words = words_of_the_sources() | set(LESSONS)
    for span in spans(prose(path)):
        name = re.sub(r"\(.*\)$|=.*$", "", span)
        if re.fullmatch(r"_?[a-z]+(_[a-z]+)+|[A-Z]+(_[A-Z]+)+", name):
            assert name in words, span


CITED = re.compile(r"`([\w.:]+)`(?:\s+in\s+|\uff08)`([\w./]+\.(?:py|hpp))`")


def defines(path: Path, name: str) -> bool:
    """Tell whether a Python file defines a function, a class, a class's member or a constant."""
    body = ast.parse(path.read_text()).body
    for i, part in enumerate(name.split(".")):
        found: Any = None
        for node in body:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else []
            targets += node.targets if isinstance(node, ast.Assign) else []
            is_constant = any(isinstance(t, ast.Name) and t.id == part for t in targets)
            # A constant may be set in a try, as one that not every build has.
            if isinstance(node, ast.Try):
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                is_constant = part in names and i == 0
            if getattr(node, "name", None) == part or is_constant:
                found = node
        if found is None:
            return False
        body = getattr(found, "body", [])
    return True


@pytest.mark.parametrize("path", [CONCEPTS, translation(CONCEPTS)], ids=name_of)
def test_each_citation_names_a_definition_of_its_file(path: Path) -> None:
    cited = CITED.findall(prose(path))
    assert len(cited) > 30, "the form of a citation changed: this test finds none"
    for name, file in cited:
        source = find_file(file)
        assert source, file
        if source.suffix == ".hpp":
            kind, _, member = name.partition("::")
            text = source.read_text()
            assert re.search(rf"\bclass \w+ {kind}\b", text), name
            assert re.search(rf"\b{member}\(", text), name
        else:
            assert defines(source, name), f"{name} is not defined in {file}"


def test_both_languages_cite_the_same() -> None:
    assert CITED.findall(prose(CONCEPTS)) == CITED.findall(prose(translation(CONCEPTS)))


# The README's lists


def test_the_readme_is_read_in_five_minutes() -> None:
    for path in (README, translation(README)):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 200


TITLES = [found.title for found in sections(README)]
LESSONS_OF_DIFFS = {  # the command, with the section that explains what it prints
    **{
        f"diff scripts/minimal/single.py scripts/minimal/{technique}.py": (
            TITLES.index("The first lesson: three short scripts"),
            [lines for _, lines in changes(technique)],
        )
        for technique in ("dp", "ddp")
    },
    **{
        f"diff train_single.py train_{technique}.py": (
            TITLES.index("The second lesson: the training scripts"),
            hunks(technique)[1],
        )
        for technique in ("dp", "ddp")
    },
}


@pytest.mark.parametrize("command", LESSONS_OF_DIFFS)
@pytest.mark.parametrize("path", [README, translation(README)], ids=name_of)
def test_the_walk_through_a_diff_has_an_item_for_each_hunk(path: Path, command: str) -> None:
    number, lines_of_hunks = LESSONS_OF_DIFFS[command]
    part = sections(path)[number].text.partition(f"`{command}`")[2].partition("`diff ")[0]
    items = re.split(r"^\d+\. ", part, flags=re.MULTILINE)[1:]
    added = [" ".join(line.strip() for _, line in hunk) for hunk in lines_of_hunks]
    assert len(items) == len(added), [hunk[:60] for hunk in added]
    for item, hunk in zip(items, added, strict=True):
        code = [span for span in spans(item) if span in hunk]
        assert code, f"{item!r} quotes nothing of {hunk!r}"


def symptoms() -> list[tuple[list[str], list[str]]]:
    """Return (literal lines, lessons) of each row of the index of symptoms."""
    found = []
    for row in rows(section(TROUBLESHOOTING, "Symptoms").text)[1:]:
        is_literal = row[0].startswith("`")
        found.append((spans(row[0]) if is_literal else [], spans(row[3]) if len(row) > 3 else []))
    return found


def test_every_lesson_that_breaks_something_is_in_the_index() -> None:
    indexed = {lesson for _, lessons in symptoms() for lesson in lessons}
    assert {name for name in LESSONS if name.startswith("break_")} <= indexed
    assert indexed <= set(LESSONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", LESSONS)
def test_the_index_quotes_what_a_lesson_prints(name: str) -> None:
    """Of each row that names a lesson, the lesson prints at least one line."""
    for literals, lessons in symptoms():
        if name in lessons and literals:
            printed = run_lesson(name).text
            patterns = [re.escape(line).replace(r"\.\.\.", ".*") for line in literals]
            assert any(re.search(pattern, printed) for pattern in patterns), (literals, printed)


# Of NCCL, CUDA and of the part of PyTorch that a build without GPUs has not.
OF_CUDA = ("Watchdog", "Duplicate GPU", "Guessing", "CUDA error", "CUDA out of", "Error while")


def test_lines_that_were_not_reproduced_are_literally_in_torch() -> None:
    """As far as a build without GPUs goes."""
    names = ("cuda/__init__.py", "distributed/distributed_c10d.py", "nn/parallel/_functions.py")
    files = [*names, "distributed/elastic/multiprocessing/api.py"]
    text = "".join((TORCH / name).read_text() for name in files).encode()
    told = rows(section(TROUBLESHOOTING, "On GPUs").text)[1:]
    assert len(told) > 10
    for line in (spans(message)[0] for message, *_ in told):
        begin = re.split(r" 7\b|pid", line)[0][:40].encode()  # before the first number
        if not line.startswith(OF_CUDA) and begin not in text:
            assert any(begin in library(name) for name in ("python", "cpu")), line


def library(name: str) -> bytes:
    return next(TORCH.glob(f"lib/libtorch_{name}.*")).read_bytes()


# Of the system, of torchrun and of a general description: no string of this project.
FOREIGN = ("No route to host", "... Name or service", "... timed out", "`RendezvousTimeoutError`")


def test_launch_errors_quote_the_sources() -> None:
    """Each message holds a piece of a string of this project, as it is printed."""
    pieces = set()
    for path in (ROOT / "utils").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                pieces |= {part.strip(". ") for part in node.value.split("{") if len(part) > 11}
    told = rows(section(TROUBLESHOOTING, "Launch errors").text)[1:]
    assert len(told) > 20
    for message, *_ in told:
        if not any(words in message for words in FOREIGN):
            shown = spans(message)[0].strip(". ")  # often only its beginning
            assert any(piece in shown or shown in piece for piece in pieces), message
