"""The figures of the house: what a reader of the code feels, room by room.

    python benchmarks/house.py             # the table
    python benchmarks/house.py --names     # and the function names that several modules define

Figures to look at: none of them is a bound, and none is worth a trick.
"""

import argparse
import ast
import io
import statistics
import subprocess
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("flows", "tasks", "pipelines")
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
LONG_LINE = 100  # columns
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DANGLING = {"of", "as", "by", "and", "one", "those", "none"}  # first words of comments that lack their subject


@dataclass
class Figures:
    """The counts of one file, or of several added up."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    tokens: int = 0
    long_lines: int = 0
    comprehensions: int = 0
    nested_comprehensions: int = 0
    conditional_expressions: int = 0
    tuple_assignments: int = 0
    imports: int = 0  # modules of the house that files import
    comments: int = 0
    dangling_comments: int = 0
    function_lengths: list[int] = field(default_factory=list)  # in lines
    functions: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # name -> modules that define it

    def add(self, other: "Figures") -> None:
        """Add another's counts."""
        for name, value in vars(other).items():
            if name == "functions":
                for function, count in value.items():
                    self.functions[function] += count
            else:
                setattr(self, name, getattr(self, name) + value)

    def columns(self) -> dict[str, str]:
        """The figures that are shown, by the heads of their columns."""
        lengths = self.function_lengths or [0]

        def in_thousand(count: int) -> str:
            return f"{1000 * count / max(1, self.code_lines):.0f}"

        repeated = sum(count > 1 for count in self.functions.values())
        return {
            "tokens a code line": f"{self.tokens / max(1, self.code_lines):.1f}",
            f"lines over {LONG_LINE}": in_thousand(self.long_lines),
            "comprehensions": in_thousand(self.comprehensions),
            "nested": in_thousand(self.nested_comprehensions),
            "a if b else c": in_thousand(self.conditional_expressions),
            "a, b = x, y": in_thousand(self.tuple_assignments),
            "names in several modules": f"{repeated}",
            "imports a file": f"{self.imports / max(1, self.files):.1f}",
            "function median": f"{statistics.median(lengths):.0f}",
            "longest": f"{max(lengths)}",
            "dangling comments": f"{self.dangling_comments} of {self.comments:,}",
            "lines": f"{self.lines:,}",
            "files": f"{self.files}",
        }


def figures_of(path: Path) -> Figures:
    """The counts of one file. Per-thousand figures are of code lines: docstrings and comments are none."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    figures = Figures(files=1, lines=text.count("\n"))
    count_tokens(figures, text, docstring_lines(tree))
    imported: set[str] = set()
    for node in ast.walk(tree):
        count_node(figures, node)
        imported |= {module for module in modules_of(node) if module.partition(".")[0] in LAYERS}
    figures.imports = len(imported)
    for node in tree.body:
        if isinstance(node, FUNCTIONS):
            figures.functions[node.name] = 1
    return figures


def count_tokens(figures: Figures, text: str, docstrings: set[int]) -> None:
    """Count tokens and the lines that hold them, comments, and long lines of code."""
    rows: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            figures.comments += 1
            first_word = token.string.lstrip("# ").partition(" ")[0].lower()
            figures.dangling_comments += first_word in DANGLING
        elif token.type not in LAYOUT and token.start[0] not in docstrings:
            figures.tokens += 1
            rows |= set(range(token.start[0], token.end[0] + 1))
    lines = text.splitlines()
    figures.code_lines = len(rows)
    figures.long_lines = sum(len(lines[row - 1]) > LONG_LINE for row in rows)


def count_node(figures: Figures, node: ast.AST) -> None:
    """Count one node of the syntax tree."""
    if isinstance(node, COMPREHENSIONS):
        inner = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS)]
        figures.comprehensions += 1
        figures.nested_comprehensions += len(node.generators) > 1 or len(inner) > 1
    elif isinstance(node, ast.IfExp):
        figures.conditional_expressions += 1
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        figures.tuple_assignments += any(isinstance(target, ast.Tuple) for target in node.targets)
    elif isinstance(node, FUNCTIONS) and node.end_lineno is not None:
        figures.function_lengths.append(node.end_lineno - node.lineno + 1)


def modules_of(node: ast.AST) -> Iterator[str]:
    """The modules that an import names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module is not None:
        yield node.module


def docstring_lines(tree: ast.Module) -> set[int]:
    """The numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def total(many: Iterable[Figures]) -> Figures:
    """Several files' counts added up."""
    whole = Figures()
    for figures in many:
        whole.add(figures)
    return whole


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", action="store_true", help="list the function names that several modules define")
    options = parser.parse_args()
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    rooms: dict[str, list[Figures]] = defaultdict(list)
    for name in listed.split():
        layer, *inner = name.split("/")
        if layer in LAYERS and (ROOT / name).is_file():
            rooms["/".join([layer, *inner[:-1][:1]])].append(figures_of(ROOT / name))
    whole = total(figures for files in rooms.values() for figures in files)

    table = Table(Column("room", no_wrap=True), caption="comprehensions to a, b = x, y: in 1,000 code lines")
    for head in whole.columns():
        table.add_column(head, justify="right", min_width=max(map(len, head.split())))
    for room, files in sorted(rooms.items()):
        table.add_row(room, *total(files).columns().values())
    table.add_section()
    table.add_row("in all", *whole.columns().values())
    Console(width=240).print(table)
    if options.names:
        repeated = Counter({name: count for name, count in whole.functions.items() if count > 1})
        print(", ".join(f"{name} ({count})" for name, count in repeated.most_common()))


if __name__ == "__main__":
    main()
