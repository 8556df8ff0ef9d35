"""Read the sources: what counts as a line of code, and who imports whom."""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = [ROOT / f"train_{technique}.py" for technique in ("single", "dp", "ddp")]
CORE = sorted((ROOT / "utils").glob("[a-z]*.py"))
DATASETS = sorted((ROOT / "utils" / "datasets").glob("[a-z]*.py"))
CLUSTER = sorted((ROOT / "utils" / "cluster").glob("[a-z]*.py"))
CHECK = sorted((ROOT / "scripts" / "check").glob("*.py"))
LESSONS = sorted((ROOT / "scripts" / "lessons").glob("*.py"))
MINIMAL = sorted((ROOT / "scripts" / "minimal").glob("*.py"))
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def code_lines(source):
    """Return (line number, line) of what is neither import, docstring, comment nor blank."""
    skipped = set()
    for node in ast.walk(ast.parse(source)):
        parts = [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            parts.append(node.body[0])
        for part in parts:
            skipped.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    kept = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            kept.update(range(token.start[0], token.end[0] + 1))
    lines = source.splitlines()
    return [(number, lines[number - 1]) for number in sorted(kept - skipped)]


def count(paths):
    return sum(len(code_lines(path.read_text())) for path in paths)


def imports(path):
    """Yield each module of this project that a file imports, and whether inside a function."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module:
            # ``from utils import config`` names a module, ``from utils.config import x`` does, too.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            if module := module_of(name):
                yield module, id(node) not in top


def module_of(name):
    """Return the module of this project that a dotted name stands for or lies in."""
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1):
        path = ROOT.joinpath(*parts[:length]).with_suffix(".py") if length else ROOT / "-"
        if path.is_file():
            return ".".join(parts[:length])
    return None
