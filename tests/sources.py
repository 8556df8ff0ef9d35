"""Read the sources: what counts as a line of code, and who imports whom."""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = [ROOT / f"train_{technique}.py" for technique in ("single", "dp", "ddp")]
GROUND = sorted((ROOT / "utils").glob("[a-z]*.py"))
TRAINING = sorted((ROOT / "utils" / "training").glob("[a-z]*.py"))
DATASETS = sorted((ROOT / "utils" / "datasets").glob("[a-z]*.py"))
CLUSTER = sorted((ROOT / "utils" / "cluster").glob("[a-z]*.py"))
MINIMAL = sorted((ROOT / "scripts" / "minimal").glob("*.py"))
# What a person reads whose change does not fit.
FULL = (
    "The scripts and their diffs are the lesson, and this one has grown too long to read: say it"
    " more plainly, or take away what is worth less."
)
WITH_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(source):
    """Return (line number, line) of what is neither import, docstring, comment nor blank."""
    skipped = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node):
            node = node.body[0]
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        skipped.update(range(node.lineno, node.end_lineno + 1))
    kept = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            kept.update(range(token.start[0], token.end[0] + 1))
    lines = source.splitlines()
    return [(number, lines[number - 1]) for number in sorted(kept - skipped)]


def count(paths):
    return sum(len(code_lines(path.read_text())) for path in paths)


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {name_of(path) for path in (*ROOT.glob("*.py"), *ROOT.glob("[stu]*/**/*.py"))}


def imported(path):
    """Yield the full name of all that a file imports, and whether inside a function."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            yield name, node not in tree.body


def imports(path):
    """Yield each module of this project that a file imports, and whether inside a function."""
    for name, is_inside in imported(path):
        # ``from utils import errors`` names a module, ``from utils.errors import x`` does, too.
        module = name if name in MODULES else name.rpartition(".")[0]
        if module in MODULES:
            yield module, is_inside
