"""The figures of the house: how much code there is, room by room, and how it is cut.

    python benchmarks/house.py

Figures to look at: none of them is a bound.
"""

import argparse
import ast
import io
import statistics
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("flows", "tasks", "pipelines")
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
SMALL = 60  # lines: a file below this has its reason, or belongs into another


def file_figures(path: Path) -> dict:
    """Count one file: its lines by kind, the length of each function, and the names of its classes."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    docstring_lines: set[int] = set()
    sections = 0
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring_lines |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
            sections += sum(line.strip() in SECTIONS for line in ast.get_docstring(node).splitlines())
    token_lines: set[int] = set()
    comments = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        comments += token.type == tokenize.COMMENT and token.line.strip().startswith("#")
        if token.type not in LAYOUT:
            token_lines |= set(range(token.start[0], token.end[0] + 1))
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {
        "name": path.name,
        "lines": text.count("\n"),
        "code": len(token_lines - docstring_lines),
        "docstrings": len(docstring_lines),
        "sections": sections,
        "comments": comments,
        "functions": [n.end_lineno - n.lineno + 1 for n in functions],
        "classes": {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)},
    }


def room_figures(files: list[dict]) -> dict[str, float]:
    """Sum up the files of one room, or of the whole house, in the units of the table's head."""
    lengths = [length for file in files for length in file["functions"]]
    code, lines = (sum(file[kind] for file in files) for kind in ("code", "lines"))
    classes = Counter(name for file in files for name in file["classes"])
    names = Counter(file["name"] for file in files if file["name"] not in ("__init__.py", "base.py"))
    return {
        "lines": lines,
        "code lines": code,
        "functions per 1,000 code lines": round(1000 * len(lengths) / max(code, 1), 1),
        "function median": statistics.median(lengths or [0]),
        "function 90 %": statistics.quantiles(lengths, n=10)[8] if len(lengths) > 1 else sum(lengths),
        "docstring per code line": round(sum(file["docstrings"] for file in files) / max(code, 1), 3),
        "docstring sections": sum(file["sections"] for file in files),
        "comment %": round(100 * sum(file["comments"] for file in files) / lines, 1),
        "files": len(files),
        f"files under {SMALL} lines": sum(f["lines"] < SMALL and f["name"] != "__init__.py" for f in files),
        "class names in several files": sum(count > 1 for count in classes.values()),
        "file names used again": sum(count > 1 for count in names.values()),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="list the class and file names that are used again")
    options = parser.parse_args()
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split() if (ROOT / name).is_file()]
    rooms: dict[str, list[dict]] = {}
    tests = 0
    for path in paths:
        layer, *inner = path.relative_to(ROOT).parts
        if layer == "tests":
            tests += path.read_text(encoding="utf-8").count("\n")
        elif layer in LAYERS:
            rooms.setdefault("/".join((layer, *inner[:-1][:1])), []).append(file_figures(path))
    house = [file for files in rooms.values() for file in files]
    whole = room_figures(house) | {"test lines": tests}

    columns = {name: room_figures(files) for name, files in sorted(rooms.items())}
    table = Table("room")
    for figure in whole:
        table.add_column(figure, justify="right", min_width=max(6, *map(len, figure.split())))
    for name, figures in columns.items():
        table.add_row(name, *(f"{figures.get(figure, ''):,}" if figure in figures else "" for figure in whole))
    table.add_section()
    table.add_row("in all", *(f"{value:,}" for value in whole.values()))
    Console(width=220).print(table)
    if options.names:
        for kind in ("classes", "name"):
            values = [file[kind] if kind == "classes" else {file[kind]} for file in house]
            again = Counter(name for names in values for name in names)
            print(kind, *sorted(f"{name} ({count})" for name, count in again.items() if count > 1))


if __name__ == "__main__":
    main()
