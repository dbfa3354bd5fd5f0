"""Tables that carry raw values and are written as Markdown, LaTeX or CSV, each figure to the digits it has."""

import csv
import dataclasses
import io
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from pipelines.evaluation.stats import Estimate, Paired

# Numbers as readers want them: aligned, with no more digits than they carry.

NONE = "–"


def percent(share: float | None) -> str:
    """A share in percent with one decimal: 0.802 is "80.2"."""
    return NONE if share is None else f"{100 * share:.1f}"


def interval(estimate: Estimate | None) -> str:
    """The bounds of an interval in percent: "[76.4, 83.9]"."""
    return NONE if estimate is None else f"[{percent(estimate.low)}, {percent(estimate.high)}]"


def points(difference: float | None) -> str:
    """A difference of shares in points, with its sign (a true minus): "+3.1"."""
    return NONE if difference is None else f"{100 * difference:+.1f}".replace("-", "−")


def signed_number(difference: float, unit: float) -> str:
    """A difference with its sign: of shares in points (a unit of 0.01), else as it is, to two decimals."""
    return f"{difference / unit:+.{1 if unit == 0.01 else 2}f}".replace("-", "−")


def p_value(p: float | None) -> str:
    """A p-value to three decimals; below that only that it is."""
    if p is None:
        return NONE
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def count(number: float | None) -> str:
    """A whole number with thin spaces between thousands."""
    return NONE if number is None else f"{number:,.0f}".replace(",", "\u202f")


def mean(number: float | None) -> str:
    """A mean, to three digits."""
    if number is None:
        return NONE
    return f"{number:.2f}" if abs(number) < 10 else f"{number:.1f}" if abs(number) < 100 else count(number)


def compact(number: float) -> str:
    """A number on an axis or at the end of a line: three significant digits, 0.0004 as "4e-4"."""
    if number == 0:
        return "0"
    if abs(number) >= 10_000 or abs(number) < 0.01:
        mantissa, _, exponent = f"{number:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}".replace("-", "−")
    return (f"{number:.0f}" if abs(number) >= 100 else f"{number:.3g}").replace("-", "−")


Kind = Literal["text", "percent", "estimate", "difference", "count", "mean", "p"]
Cell = str | float | Estimate | Paired | None
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "−": r"$-$",
        "–": "--",
        "→": r"$\rightarrow$",
        "<": r"$<$",
        ">": r"$>$",
        "\u202f": r"\,",
    }
)
_MARKDOWN = str.maketrans({"\\": r"\\", "|": r"\|", "[": r"\[", "]": r"\]", "!": r"\!", "<": "&lt;"})


@dataclasses.dataclass(frozen=True, slots=True)
class TableColumn:
    """A column: its heading, the kind of its cells, and a longer text for the heading ("" for none)."""

    name: str
    kind: Kind = "text"
    about: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ReportTable:
    """Rows of raw values."""

    slug: str  # names its CSV file and its LaTeX label.
    title: str  # its caption.
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""  # how to read it; may be empty.
    styles: tuple[int, ...] = ()  # the system that each row is about, as a number of the palette; () for none.


def show(cell: Cell, kind: Kind) -> str:
    """A cell as readers see it."""
    if isinstance(cell, Estimate):
        return f"{percent(cell.value)} {interval(cell)}"
    if isinstance(cell, Paired):
        return f"{points(cell.difference)} [{points(cell.low)}, {points(cell.high)}]"
    if cell is None or isinstance(cell, str):
        return cell or NONE
    shapes: Mapping[Kind, Callable[[float], str]] = {
        "percent": percent,
        "count": count,
        "mean": mean,
        "p": p_value,
        "difference": points,
    }
    return shapes.get(kind, str)(cell)


def signed(difference: Paired, unit: float) -> str:
    """A difference with its interval, in a measure's unit: "+3.1 [+0.4, +5.9]"."""
    low, high = signed_number(difference.low, unit), signed_number(difference.high, unit)
    return f"{signed_number(difference.difference, unit)} [{low}, {high}]"


def markdown(table: ReportTable) -> str:
    """A GitHub table under its title."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(" ".join(cell.split()) for cell in cells) + " |"

    lines = [line(column.name.translate(_MARKDOWN) for column in table.columns)]
    lines.append("|" + "|".join(" :--- " if column.kind == "text" else " ---: " for column in table.columns) + "|")
    for row in table.rows:
        # Words hold no link, image or tag; a figure is ours, and its interval keeps its brackets.
        pairs = zip(row, _shown(table, row), strict=True)
        lines.append(line(w.translate(_MARKDOWN) if isinstance(c, str) else w.replace("<", "&lt;") for c, w in pairs))
    return "\n".join([f"### {table.title}", "", *lines, *(["", table.note] if table.note else [])]) + "\n"


def _shown(table: ReportTable, row: Iterable[Cell]) -> list[str]:
    return [show(cell, column.kind) for cell, column in zip(row, table.columns, strict=True)]


def latex(table: ReportTable) -> str:
    """A booktabs table with its caption and label."""
    layout = "".join("l" if column.kind == "text" else "r" for column in table.columns)
    head = _latex_row(column.name for column in table.columns)
    body = "\n".join(_latex_row(_shown(table, row)) for row in table.rows)
    caption = table.title + (f". {table.note}" if table.note else "")
    return (
        f"\\begin{{table}}\n\\centering\n\\begin{{tabular}}{{{layout}}}\n\\toprule\n{head}\n\\midrule\n{body}\n"
        f"\\bottomrule\n\\end{{tabular}}\n\\caption{{{_latex_text(caption)}}}\n\\label{{tab:{table.slug}}}\n"
        "\\end{table}\n"
    )


def _latex_row(cells: Iterable[str]) -> str:
    row = " & ".join(map(_latex_text, cells)) + r" \\"
    # Here a bracket or a star would be an argument of the command that ends the line before.
    return "{}" + row if row.lstrip().startswith(("[", "*")) else row


def _latex_text(words: str) -> str:
    """Words on one line, for a blank one ends a paragraph; the narrow space stands in numbers."""
    return "".join(c if c.isprintable() or c == "\u202f" else " " for c in words).translate(_LATEX)


def to_csv(table: ReportTable) -> str:
    """Raw values, an interval's bounds in columns of their own, and n; absent ones are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    headings: list[str] = []
    for column in table.columns:
        bounds = ("", " low", " high", " n") if column.kind in ("estimate", "difference") else ("",)
        headings += [_harmless(f"{column.name}{bound}") for bound in bounds]
    writer.writerow(headings)
    for row in table.rows:
        values: list[str | float | None] = []
        for cell, column in zip(row, table.columns, strict=True):
            if isinstance(cell, Estimate | Paired):
                value = cell.value if isinstance(cell, Estimate) else cell.difference
                values += [value, cell.low, cell.high, cell.n]
            elif column.kind in ("estimate", "difference"):
                values += [cell, None, None, None]
            else:
                values.append(_harmless(cell) if isinstance(cell, str) else cell)
        writer.writerow(values)
    return out.getvalue()


def _harmless(text: str) -> str:
    """Text that a spreadsheet will not run as a formula: database and model text can begin with "="."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
