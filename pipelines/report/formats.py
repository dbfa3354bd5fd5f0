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
    if share is None:
        return NONE
    return f"{100 * share:.1f}"


def interval(estimate: Estimate | None) -> str:
    """The bounds of an interval in percent: "[76.4, 83.9]"."""
    if estimate is None:
        return NONE
    low = percent(estimate.low)
    high = percent(estimate.high)
    return f"[{low}, {high}]"


def points(difference: float | None) -> str:
    """A difference of shares in points, with its sign (a true minus): "+3.1"."""
    if difference is None:
        return NONE
    return f"{100 * difference:+.1f}".replace("-", "−")


def signed_number(difference: float, unit: float) -> str:
    """A difference with its sign: of shares in points (a unit of 0.01), else as it is, to two decimals."""
    decimals = 1 if unit == 0.01 else 2
    return f"{difference / unit:+.{decimals}f}".replace("-", "−")


def p_value(p: float | None) -> str:
    """A p-value to three decimals; below that only that it is."""
    if p is None:
        return NONE
    if p < 0.001:
        return "< 0.001"
    return f"{p:.3f}"


def count(number: float | None) -> str:
    """A whole number with thin spaces between thousands."""
    if number is None:
        return NONE
    return f"{number:,.0f}".replace(",", "\u202f")


def mean(number: float | None) -> str:
    """A mean, to three digits."""
    if number is None:
        return NONE
    if abs(number) < 10:
        return f"{number:.2f}"
    if abs(number) < 100:
        return f"{number:.1f}"
    return count(number)


def compact(number: float) -> str:
    """A number on an axis or at the end of a line: three significant digits, 0.0004 as "4e-4"."""
    if number == 0:
        return "0"
    if abs(number) >= 10_000 or abs(number) < 0.01:
        mantissa, _, exponent = f"{number:.1e}".partition("e")
        mantissa = mantissa.removesuffix(".0")
        words = f"{mantissa}e{int(exponent)}"
    elif abs(number) >= 100:
        words = f"{number:.0f}"
    else:
        words = f"{number:.3g}"
    return words.replace("-", "−")


Kind = Literal["text", "percent", "estimate", "difference", "count", "mean", "p"]
WITH_INTERVAL = ("estimate", "difference")  # kinds whose cells have bounds and n in CSV
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
    styles: tuple[int, ...] = ()  # the palette's number of each row's system; () for rows without a system.


def show(cell: Cell, kind: Kind) -> str:
    """A cell as readers see it."""
    if isinstance(cell, Estimate):
        return f"{percent(cell.value)} {interval(cell)}"
    if isinstance(cell, Paired):
        low = points(cell.low)
        high = points(cell.high)
        return f"{points(cell.difference)} [{low}, {high}]"
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
    mean = signed_number(difference.difference, unit)
    low = signed_number(difference.low, unit)
    high = signed_number(difference.high, unit)
    return f"{mean} [{low}, {high}]"


def markdown(table: ReportTable) -> str:
    """A GitHub table under its title."""
    heads = [column.name.translate(_MARKDOWN) for column in table.columns]
    rules = [" :--- " if column.kind == "text" else " ---: " for column in table.columns]
    rule_row = "|".join(rules)
    lines = [f"### {table.title}", ""]
    lines.append(markdown_row(heads))
    lines.append(f"|{rule_row}|")
    for row in table.rows:
        escaped = []
        for cell, words in zip(row, row_texts(table, row), strict=True):
            if isinstance(cell, str):
                escaped.append(words.translate(_MARKDOWN))  # no link, image or tag
            else:
                escaped.append(words.replace("<", "&lt;"))  # our own figure, whose interval keeps its brackets
        lines.append(markdown_row(escaped))
    if table.note:
        lines += ["", table.note]
    return "\n".join(lines) + "\n"


def markdown_row(cells: Iterable[str]) -> str:
    """A row of a GitHub table; each cell is on one line."""
    one_line_cells = [" ".join(cell.split()) for cell in cells]
    row = " | ".join(one_line_cells)
    return f"| {row} |"


def row_texts(table: ReportTable, row: Iterable[Cell]) -> list[str]:
    """The cells of a row as readers see them."""
    pairs = zip(row, table.columns, strict=True)
    return [show(cell, column.kind) for cell, column in pairs]


def latex(table: ReportTable) -> str:
    """A booktabs table with its caption and label."""
    layout = "".join("l" if column.kind == "text" else "r" for column in table.columns)
    head = _latex_row(column.name for column in table.columns)
    rows = [_latex_row(row_texts(table, row)) for row in table.rows]
    body = "\n".join(rows)
    caption = table.title
    if table.note:
        caption += f". {table.note}"
    caption = _latex_text(caption)
    return (
        f"\\begin{{table}}\n\\centering\n\\begin{{tabular}}{{{layout}}}\n\\toprule\n{head}\n\\midrule\n{body}\n"
        f"\\bottomrule\n\\end{{tabular}}\n\\caption{{{caption}}}\n\\label{{tab:{table.slug}}}\n"
        "\\end{table}\n"
    )


def _latex_row(cells: Iterable[str]) -> str:
    row = " & ".join(map(_latex_text, cells)) + r" \\"
    if row.lstrip().startswith(("[", "*")):  # an argument of the command that ends the line before
        return "{}" + row
    return row


def _latex_text(words: str) -> str:
    """Words on one line, for a blank one ends a paragraph; the narrow space stands in numbers."""
    letters = [letter if letter.isprintable() or letter == "\u202f" else " " for letter in words]
    return "".join(letters).translate(_LATEX)


def to_csv(table: ReportTable) -> str:
    """Raw values, an interval's bounds in columns of their own, and n; absent ones are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    headings: list[str] = []
    for column in table.columns:
        headings.append(_harmless(column.name))
        if column.kind in WITH_INTERVAL:
            headings += [_harmless(f"{column.name} {bound}") for bound in ("low", "high", "n")]
    writer.writerow(headings)
    for row in table.rows:
        values: list[str | float | None] = []
        for cell, column in zip(row, table.columns, strict=True):
            if isinstance(cell, Estimate):
                values += [cell.value, cell.low, cell.high, cell.n]
            elif isinstance(cell, Paired):
                values += [cell.difference, cell.low, cell.high, cell.n]
            elif column.kind in WITH_INTERVAL:
                values += [cell, None, None, None]
            elif isinstance(cell, str):
                values.append(_harmless(cell))
            else:
                values.append(cell)
        writer.writerow(values)
    return out.getvalue()


def _harmless(text: str) -> str:
    """Text that a spreadsheet will not run as a formula: database and model text can begin with "="."""
    if text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return "'" + text
    return text
