"""Evaluation tables for a terminal: the figures at a run's end, where to look, and a comparison of two systems."""

import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, Group, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from pipelines.core.types import plain
from pipelines.evaluation.metrics import value_of
from pipelines.evaluation.paired_comparison import Comparison
from pipelines.evaluation.summary import Summary
from pipelines.report import formats
from pipelines.report.formats import Cell, ReportTable, TableColumn

SHOWN_FLIPS = 10
STAGE_FIGURES = {  # the most telling metrics, by the kind of stage
    "synthesize": ("trajectories", "turns_mean", "broken"),
    "filter": ("kept", "acceptance"),
    "gold_schema": ("examples", "agreement", "disagreements"),
    "sft": ("steps", "loss", "accuracy"),
    "difficulty": ("questions", "pass_rate", "zero_variance_share", "balanced", "explore"),
    "grpo": ("steps", "reward", "ex", "turns", "zero_variance"),
    "evaluate": ("ex", "ex_sampled", "majority", "turns", "tokens"),
}


def render(table: ReportTable, width: int) -> Group:
    """Any of the report's tables in at most `width` columns, if its texts allow; text from outside holds no markup.

    A table that is too wide is turned on its side, and if that is too wide, its rows are printed one below another.
    """
    heads = [plain(column.name) for column in table.columns]
    rows = []
    for row in table.rows:
        texts = formats.row_texts(table, row)
        rows.append(list(map(plain, texts)))
    layout = _upright(table, heads, rows)
    if layout.width() > width:
        layout = _on_its_side(heads, rows)
    if layout.width() > width:
        layout = _one_below_another(heads, rows)
    rich_table = RichTable(box=None, pad_edge=False, show_header=any(layout.heads))
    for head, side in zip(layout.heads, layout.sides, strict=True):
        rich_table.add_column(Text(head), justify=side)
    for line in layout.lines:
        rich_table.add_row(*map(Text, line))
    title = Text(plain(table.title), "bold")
    return Group(title, rich_table)


class _Layout(NamedTuple):
    """The texts of a printed table."""

    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    sides: Sequence[JustifyMethod]  # where each column's texts are aligned

    def width(self) -> int:
        """The widest cell of each column, with two blanks between columns."""
        columns = zip(self.heads, *self.lines, strict=True)
        widths = [max(map(cell_len, column)) for column in columns]
        return sum(widths) + 2 * (len(widths) - 1)


def _upright(table: ReportTable, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> _Layout:
    sides: list[JustifyMethod] = []
    for column in table.columns:
        sides.append("left" if column.kind == "text" else "right")
    return _Layout(heads, rows, sides)


def _on_its_side(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> _Layout:
    """A line for each column."""
    first, *lines = zip(heads, *rows, strict=True)
    sides: list[JustifyMethod] = ["left"]
    sides += ["right"] * len(rows)
    return _Layout(first, lines, sides)


def _one_below_another(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> _Layout:
    """A line for each cell, and an empty one between rows."""
    lines: list[tuple[str, str]] = []
    for row in rows:
        if lines:
            lines.append(("", ""))
        lines += zip(heads, row, strict=True)
    return _Layout(("", ""), lines, ["left", "left"])


def figures_table(summaries: Mapping[str, Summary], benchmark: str = "") -> ReportTable:
    """The few figures of a run's end, a system a row.

    Args:
        summaries: by the systems' names.
        benchmark: the recipe's name for its questions; "" without a name.
    """
    columns = [
        TableColumn("system"),
        TableColumn("EX greedy", "estimate"),
        TableColumn("EX sampled", "estimate"),
        TableColumn("majority@k", "estimate"),
        TableColumn("turns", "mean"),
        TableColumn("questions", "count"),
    ]
    # Columns of an incomplete benchmark or evaluation.
    n_left_out = {name: sum(summary.left_out.values()) for name, summary in summaries.items()}
    has_left_out = any(n_left_out.values())
    has_broken = any(summary.n_broken for summary in summaries.values())
    has_unasked = any(summary.n_unasked for summary in summaries.values())
    if has_left_out:
        columns.append(TableColumn("left out", "count"))
    if has_broken:
        columns.append(TableColumn("broken", "count"))
    if has_unasked:
        columns.append(TableColumn("not asked", "count"))
    if has_broken:
        columns.append(TableColumn("EX, broken as wrong", "percent"))
    rows = []
    for name, summary in summaries.items():
        greedy = summary.ex.get(summary.equality)
        majority: Cell = None
        if summary.points:
            majority = summary.points[-1].majority_at
        turns = value_of(summary.measured.get("turns"))
        row: list[Cell] = [name, greedy, summary.sampled, majority, turns, summary.n_questions]
        if has_left_out:
            row.append(n_left_out[name])
        if has_broken:
            row.append(summary.n_broken)
        if has_unasked:
            row.append(summary.n_unasked)
        if has_broken:
            row.append(summary.ex_with_broken)
        rows.append(tuple(row))
    on_benchmark = f" on {benchmark}" if benchmark else ""
    equality = _equality(summaries)
    title = f"Held-out execution accuracy{on_benchmark}, equality {equality}, 95 % intervals"
    return ReportTable("figures", title, tuple(columns), tuple(rows))


def _equality(summaries: Mapping[str, Summary]) -> str:
    """The equality of a benchmark's headline; "" without a system."""
    return next((summary.equality for summary in summaries.values()), "")


def across(by_benchmark: Mapping[str, Mapping[str, Summary]]) -> ReportTable:
    """Each system's headline figure on several benchmarks, one a column, with the equality by which it is reported."""
    columns = [TableColumn("system")]
    systems: dict[str, None] = {}
    for benchmark, summaries in by_benchmark.items():
        equality = _equality(summaries)
        columns.append(TableColumn(f"{benchmark} ({equality})", "percent"))
        systems |= dict.fromkeys(summaries)
    rows = []
    for system in systems:
        row: list[Cell] = [system]
        for summaries in by_benchmark.values():
            headline: Cell = None
            if system in summaries:
                headline = value_of(summaries[system].headline)
            row.append(headline)
        rows.append(tuple(row))
    return ReportTable("across", "EX greedy, benchmark by benchmark", tuple(columns), tuple(rows))


def show_end(console: Console, by_benchmark: Mapping[str, Mapping[str, Summary]], files: Mapping[str, str]) -> None:
    """Print the end of a run: its figures by benchmark and system, and its files by name ("report" -> a path, ...)."""
    tables = [figures_table(summaries, benchmark) for benchmark, summaries in by_benchmark.items()]
    if len(by_benchmark) > 1:
        tables.append(across(by_benchmark))
    for table in tables:
        console.print(render(table, console.width))
    width = max(map(len, files), default=0)
    for name, path in files.items():
        _print_line(console, f"{name:<{width}}  {path}")


def _print_line(console: Console, words: str) -> None:
    """Print words on one line, however long."""
    console.print(Text(plain(words)), soft_wrap=True)


def show_comparison(console: Console, comparison: Comparison, shown: int = SHOWN_FLIPS) -> None:
    """Print one comparison: the difference and its tests, then the first `shown` questions that flipped."""
    width = sys.maxsize
    if console.is_terminal:
        width = console.width
    difference = _comparison_in_words(comparison)
    tests = _tests_in_words(comparison)
    for words in (difference, tests):
        folded = textwrap.fill(words, width, break_on_hyphens=False)
        text = Text(plain(folded, lines=True))
        console.print(text, soft_wrap=True)
    for flip in comparison.flips[:shown]:
        sign = "+" if flip.gained else "−"
        sql = flip.after_sql or "no final SQL"
        _print_line(console, f"  {sign} {flip.example_id}  {sql}")
    n_more = len(comparison.flips) - shown
    if n_more > 0:
        console.print(Text(plain(f"  and {n_more} more that flipped")))


def _comparison_in_words(comparison: Comparison) -> str:
    paired = comparison.paired
    systems = f"{comparison.before} → {comparison.after}"
    questions = f"{comparison.mode}, {comparison.equality}, {paired.n} questions"
    before = formats.percent(comparison.accuracy_before)
    after = formats.percent(comparison.accuracy_after)
    difference = formats.points(paired.difference)
    low = formats.points(paired.low)
    high = formats.points(paired.high)
    return f"{systems} ({questions}): {before} → {after} %, {difference} points [{low},\xa0{high}]"


def _tests_in_words(comparison: Comparison) -> str:
    paired = comparison.paired
    p_sign_flip = formats.p_value(paired.p_permutation)
    tests = f"sign-flip by {paired.flipped} p {p_sign_flip}"
    if comparison.p_mcnemar is not None:
        p_mcnemar = formats.p_value(comparison.p_mcnemar)
        flips = f"gained {comparison.gained}, lost {comparison.lost}"
        tests = f"{flips}; McNemar p {p_mcnemar}; {tests}"
    if comparison.needed is not None:
        needed = formats.count(comparison.needed)
        tests += f"; {needed} questions would show a difference of this size"
    if comparison.detectable is not None:
        questions = formats.count(paired.n)
        detectable = formats.percent(comparison.detectable)
        tests += f", and {questions} show one of {detectable} points"
    return tests


def stage_figures(stage: str, metrics: Mapping[str, float], between: str = "  ") -> str:
    """The most telling metrics of a stage, for one line: a whole number with all its digits, any other with four.

    A no-break space keeps a figure beside its name.
    """
    kind = stage.partition(".")[0]
    first_word = kind.partition("_")[0]
    names = STAGE_FIGURES.get(first_word) or STAGE_FIGURES.get(kind) or tuple(metrics)[:4]
    figures_in_words = []
    for name in names:
        if name not in metrics:
            continue
        value = metrics[name]
        digits = f"{value:,.4g}"
        if float(value).is_integer():
            digits = f"{value:,.0f}"
        figures_in_words.append(f"{name}\xa0{digits}")
    return between.join(figures_in_words)
