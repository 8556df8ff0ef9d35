"""Read the documents: their headings, code blocks, tables, links, commands and messages."""

import ast
import re
from collections import namedtuple
from itertools import pairwise
from urllib.parse import unquote

from markdown_it import MarkdownIt

from tests.processes import ROOT

CHINESE = ".zh-CN.md"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
ENGLISH = [path for path in DOCUMENTS if not path.name.endswith(CHINESE)]
LESSONS = sorted(path.stem for path in (ROOT / "scripts" / "lessons").glob("[a-z]*.py"))
VARIABLE = r"[A-Z_0-9]+=(?:\"[^\"]*\"|\S*)"
# What makes an inline code span a command: what runs, and what it runs.
RUNS = re.compile(rf"(?:{VARIABLE} )*(?:\S*/)?(?:python|torchrun|srun|sbatch|mpirun) ")


Block = namedtuple("Block", "language text")  # a fenced code block
# What stands under a heading, up to the next one of any level; the code blocks taken out.
Section = namedtuple("Section", "level title text")
MARKDOWN = MarkdownIt("commonmark").enable("table")


def translation(path):
    return path.with_name(path.name.removesuffix(".md") + CHINESE)


def name_of(path):
    return str(path.relative_to(ROOT))


def read(path):
    return path.read_text(encoding="utf-8")


def fences(text):
    return [token for token in MARKDOWN.parse(text) if token.type == "fence"]


def blocks(text):
    return [Block(token.info, token.content) for token in fences(text)]


def without_blocks(text):
    lines = text.splitlines(keepends=True)
    for token in reversed(fences(text)):
        del lines[slice(*token.map)]
    return "".join(lines)


def prose(path):
    """Return a document without its code blocks."""
    return without_blocks(read(path))


def sections_of(text):
    text = without_blocks(text)
    lines, tokens = text.splitlines(keepends=True), MARKDOWN.parse(text)
    heads = [i for i, token in enumerate(tokens) if token.type == "heading_open"]
    ends = [*(tokens[i].map[0] for i in heads[1:]), len(lines)]
    return [
        Section(
            len(tokens[i].markup), tokens[i + 1].content, "".join(lines[tokens[i].map[1] : end])
        )
        for i, end in zip(heads, ends, strict=True)
    ]


def sections(path):
    return sections_of(read(path))


def anchors(path):
    """Return the anchors that GitHub gives the headings."""
    plain = (re.sub(r"[^\w\- ]", "", part.title.lower()) for part in sections(path))
    return {title.replace(" ", "-") for title in plain}


def inline(text, kind):
    """Return the parts of one kind, of those that a line of text is made of."""
    children = (child for token in MARKDOWN.parse(text) for child in token.children or ())
    return [child for child in children if child.type == kind]


def links(text):
    found = [link.attrs["href"] for link in inline(text, "link_open")]
    return [unquote(href) for href in found + [i.attrs["src"] for i in inline(text, "image")]]


def spans(text):
    """Return the inline code of a text."""
    return [code.content.strip() for code in inline(text, "code_inline")]


def rows(text):
    """Return the cells of each table row."""
    found = []
    for token, content in pairwise(MARKDOWN.parse(text)):
        if token.type == "tr_open":
            found.append([])
        elif token.type in ("th_open", "td_open"):
            found[-1].append(content.content)
    return found


def lessons_in(text):
    """Return the lessons that a text links."""
    found = re.findall(r"scripts/lessons/(\w+)\.py\)", text)
    return [name for name in found if name in LESSONS]


def figures(text):
    """Return the numbers of a text that have a point, or three digits and more."""
    plain = re.sub(r"\]\([^)]*\)|`[^`]*`", "", text)
    return set(re.findall(r"\d+\.\d+|\d{1,3}(?:,\d{3})+|\d{3,}", plain))


# Both languages


def waits_for(text):
    """Return for which change in the English page this Chinese one waits, or nothing."""
    found = re.search(r"<!-- waits for: (.+?) -->", without_blocks(text))
    return found[1] if found else ""


def differences(english, chinese):
    """Return what two pages do not have in common: headings, commands and other code, numbers."""
    ours, theirs = sections_of(english), sections_of(chinese)
    levels = [[part.level for part in side] for side in (ours, theirs)]
    if levels[0] != levels[1]:
        return [f"{len(levels[0])} and {len(levels[1])} headings, or of other levels"]
    found = []
    for one, other in zip(ours, theirs, strict=True):
        sides = [(spans(part.title), {*inline_commands(part.text)}) for part in (one, other)]
        if sides[0] != sides[1]:
            found.append(f"other commands below '{one.title}'")
        if missing := figures(one.text) ^ figures(other.text):
            found.append(f"other numbers below '{one.title}': {sorted(missing)}")
    code = [[*map(without_comments, blocks(text))] for text in (english, chinese)]
    if code[0] != code[1]:
        found.append("other code blocks")
    return found


def without_comments(block):
    """Return what a program reads of a block; of a block for readers its numbers."""
    if block.language == "diff":  # @@ begins a sentence about what follows
        lines = [line for line in block.text.splitlines() if not line.startswith("@@ ")]
        return re.sub(r"(^|\s+)# .*$", "", "\n".join(lines), flags=re.MULTILINE).strip()
    if block.language in ("bash", "python"):
        return re.sub(r"(^|\s+)# .*$", "", block.text, flags=re.MULTILINE).strip()
    return figures(block.text)


# Messages


def problems():
    """Return (group, quoted messages, lessons) of each heading of docs/problems.md."""
    found, group = [], ""
    for part in sections(ROOT / "docs" / "problems.md"):
        group = part.title if part.level == 2 else group
        if part.level == 3:
            found.append((group, spans(part.title), lessons_in(part.text)))
    return found


def quoted(lesson):
    """Return the numbers and the printed words that pages quote from a lesson, before its link."""
    numbers, words = [], []
    for name in ("convert", "myths"):
        for paragraph in re.split(r"\n\s*\n", prose(ROOT / "docs" / f"{name}.md")):
            *parts, _ = re.split(r"\]\([^)]*lessons/(\w+)\.py\)", paragraph)
            for text, link in zip(parts[::2], parts[1::2], strict=True):
                if link == lesson:
                    numbers += re.findall(r"\d+\.\d+", re.sub(r"`[^`]*`", "", text))
                    printed = re.findall(r"`(\[[-\d, ]+\]|[A-Z]\w+ \w+ [^`]*)`", text)
                    words += [" ".join(span.split()) for span in printed]
    return numbers, words


# Commands


def lines_of(text):
    """Return what a shell reads of each line; one that ends with a backslash goes on."""
    joined = re.sub(r"\\\n\s*", "", text)
    return [re.sub(r"(^|\s+)# .*$", "", line).strip() for line in joined.splitlines()]


def commands_of(blocks):
    """Return the commands of the bash blocks, one a line."""
    shown = [block.text for block in blocks if block.language == "bash"]
    return [line for text in shown for line in lines_of(text) if line]


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
    docstring = read(path).partition('"""')[2].partition('"""')[0]
    return [
        line
        for line in lines_of(docstring)
        if re.match(r"(python|torchrun|\./scripts/|scripts/)\b", line)
    ]


def follow(blocks, folder):
    """Write the files and make the changes that a document shows, to the letter."""
    for block in blocks:
        if block.language == "python":
            ast.parse(block.text)
        if name := re.match(r"# (my_\w+\.py)\n", block.text):
            (folder / name[1]).write_text(block.text)
        if block.language == "diff" and block.text.startswith("--- "):
            apply(block.text, folder)


def apply(diff, folder):
    """Apply a diff without line numbers: each hunk's old lines occur in the file exactly once."""
    head, *hunks = re.split(r"^@@\n", diff, flags=re.MULTILINE)
    path = folder / head.removeprefix("--- ").strip()
    text = path.read_text()
    for hunk in hunks:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert text.count(old) == 1, f"{path.name} has not exactly one\n{old}"
        text = text.replace(old, new)
    path.write_text(text)
