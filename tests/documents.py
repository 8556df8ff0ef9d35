"""Read the documents: their headings, code blocks, tables, links and commands."""

import re
from collections import namedtuple

from tests.processes import ROOT

CHINESE = ".zh-CN.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
ENGLISH = [path for path in DOCUMENTS if not path.name.endswith(CHINESE)]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIABLE = r"[A-Z_0-9]+=(?:\"[^\"]*\"|\S*)"
# What makes an inline code span a command: what runs, and what it runs.
RUNS = re.compile(rf"(?:{VARIABLE} )*(?:\S*/)?(?:python|torchrun|srun|sbatch|mpirun) ")


Block = namedtuple("Block", "language text")  # a fenced code block
# What stands under a heading, up to the next one of any level; the code blocks taken out.
Section = namedtuple("Section", "level title text")


def translation(path):
    return path.with_name(path.name.removesuffix(".md") + CHINESE)


def name_of(path):
    return str(path.relative_to(ROOT))


def blocks(path):
    return [Block(*found) for found in FENCE.findall(path.read_text(encoding="utf-8"))]


def prose(path):
    """Return a document without its code blocks."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


def sections(path):
    parts = re.split(r"^(#+) (.*)$", prose(path), flags=re.MULTILINE)[1:]
    return [
        Section(len(marks), title, text)
        for marks, title, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]


def section(path, title):
    return next(found for found in sections(path) if found.title.startswith(title))


def anchors(path):
    """Return the anchors that GitHub gives the headings."""
    found = []
    for part in sections(path):
        slug = re.sub(r"[^\w\- ]", "", part.title.lower()).replace(" ", "-")
        count = sum(other.rpartition("-")[0] == slug or other == slug for other in found)
        found.append(slug if slug not in found else f"{slug}-{count}")
    return set(found)


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", text)


def spans(text):
    """Return the inline code of a text."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def rows(text):
    """Return the cells of each table row; a table's ruler is left out."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in cells if not re.fullmatch(r"[-|: ]+", "".join(row))]


def without_comments(block):
    """Return what a program reads of a block, and of a picture its form: no words."""
    if block.language == "mermaid":
        return re.sub(r'"[^"]*"', '""', block.text)
    if block.language in ("bash", "python", "diff"):
        return re.sub(r"(^|\s+)# .*$", "", block.text, flags=re.MULTILINE).strip()
    if not block.language:  # files or figures with a word on each
        words = re.findall(r"[\w./]+\.(?:py|sh|sbatch)\b|[\w./]+/(?=\s)|\d[\d.,%]*", block.text)
        return " ".join(words)
    return block.text


def commands_of(block):
    """Return the commands of a bash block, one a line."""
    if block.language != "bash":
        return []
    lines = (re.sub(r"\s+# .*$", "", line).strip() for line in block.text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def inline_commands(text):
    """Return the code spans that are whole commands, not mere names of files or flags."""
    return [
        span
        for span in spans(text)
        if (RUNS.match(span) and re.search(r"\.(py|sh|sbatch)\b", span))
        or re.match(r"(tensorboard|diff) ", span)
        or re.match(rf"({VARIABLE} )+(\./)?scripts/\S+\.sh|(\./)?scripts/\S+\.sh ", span)
    ]


def docstring_commands(path):
    """Return the commands in the docstring at the head of a script."""
    docstring = path.read_text(encoding="utf-8").partition('"""')[2].partition('"""')[0]
    lines = (re.sub(r"\s+# .*$", "", line).strip() for line in docstring.splitlines())
    return [line for line in lines if re.match(r"(python|torchrun|\./scripts/|scripts/)\b", line)]
