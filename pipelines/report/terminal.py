"""Evaluation tables for a terminal: the figures at a run's end, where to look, and a comparison of two systems."""

import sys
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence

from rich.cells import cell_len
from rich.console import Console, Group, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

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
    rows = [
        [plain(formats.show(cell, column.kind)) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    sides: list[JustifyMethod] = ["left" if column.kind == "text" else "right" for column in table.columns]
    rights: list[JustifyMethod] = ["right" for _ in rows]
    turned = [list(row) for row in zip(heads, *rows, strict=True)]
    below = [pair for row in rows for pair in (("", ""), *zip(heads, row, strict=True))][1:]
    layouts: tuple[tuple[Sequence[str], Sequence[Sequence[str]], list[JustifyMethod]], ...] = (
        (heads, rows, sides),
        (turned[0], turned[1:], ["left", *rights]),
        (("", ""), below, ["left", "left"]),
    )
    for head, lines, justified in layouts:
        rich_table = RichTable(box=None, pad_edge=False)
        for name, side in zip(head, justified, strict=True):
            rich_table.add_column(Text(name), justify=side)
        for line in lines:
            rich_table.add_row(*map(Text, line))
        if sum(max(cell_len(line[place]) for line in (head, *lines)) + 2 for place in range(len(head))) - 2 <= width:
            break
    rich_table.show_header = any(head)
    return Group(Text(plain(table.title), "bold"), rich_table)


def plain(words: str, lines: bool = False) -> str:
    r"""Words that a terminal shows as they are, whoever wrote them: a user, a model, a database.

    What does not print (escape sequences, control and bidirectional characters, half characters) is shown by its escape
    (`\x1b`); narrow and unbroken spaces are plain ones.

    Args:
        lines: keep line breaks; without it they are shown too, so that one line stays one.
    """
    if words.isprintable():
        return words
    shown = []
    for character in words:
        if character.isprintable() or (lines and character == "\n"):
            shown.append(character)
        elif unicodedata.category(character) == "Zs":  # such as the narrow space between thousands
            shown.append(" ")
        else:
            shown.append(character.encode("unicode_escape").decode("ascii"))
    return "".join(shown)


def figures(summaries: Mapping[str, Summary], benchmark: str = "") -> ReportTable:
    """The few figures of a run's end, a system a row, by the systems' names; `benchmark` is what a recipe calls its
    questions, "" where none names them.
    """
    of_all = summaries.values()
    columns: list[tuple[TableColumn, list[Cell]]] = [
        (TableColumn("system"), [*summaries]),
        (TableColumn("EX greedy", "estimate"), [each.ex.get(each.equality) for each in of_all]),
        (TableColumn("EX sampled", "estimate"), [each.sampled for each in of_all]),
        (
            TableColumn("majority@k", "estimate"),
            [each.points[-1].majority_at if each.points else None for each in of_all],
        ),
        (TableColumn("turns", "mean"), [value_of(each.measured.get("turns")) for each in of_all]),
        (TableColumn("questions", "count"), [each.n_questions for each in of_all]),
    ]
    # Of an incomplete benchmark or evaluation.
    extras: tuple[tuple[TableColumn, list[float | None]], ...] = (
        (TableColumn("left out", "count"), [sum(each.left_out.values()) for each in of_all]),
        (TableColumn("broken", "count"), [each.n_broken for each in of_all]),
        (TableColumn("not asked", "count"), [each.n_unasked for each in of_all]),
    )
    columns += [(column, [*numbers]) for column, numbers in extras if any(numbers)]
    if any(each.n_broken for each in of_all):
        columns.append((TableColumn("EX, broken as wrong", "percent"), [each.ex_with_broken for each in of_all]))
    equality = next((summary.equality for summary in summaries.values()), "")
    where = f" on {benchmark}" if benchmark else ""
    title = f"Held-out execution accuracy{where}, equality {equality}, 95 % intervals"
    rows = tuple(zip(*(cells for _, cells in columns), strict=True))
    return ReportTable("figures", title, tuple(column for column, _ in columns), rows)


def across(judged: Mapping[str, Mapping[str, Summary]]) -> ReportTable:
    """Each system's headline figure on several benchmarks, one a column, with the equality by which it is reported."""
    equalities = [next((summary.equality for summary in summaries.values()), "") for summaries in judged.values()]
    headings = zip(judged, equalities, strict=True)
    columns = (
        TableColumn("system"),
        *(TableColumn(f"{benchmark} ({equality})", "percent") for benchmark, equality in headings),
    )
    systems = dict.fromkeys(system for summaries in judged.values() for system in summaries)
    estimates = [
        [value_of(summaries[system].headline) if system in summaries else None for summaries in judged.values()]
        for system in systems
    ]
    rows = tuple((system, *row) for system, row in zip(systems, estimates, strict=True))
    return ReportTable("across", "EX greedy, benchmark by benchmark", columns, rows)


def show_end(console: Console, by_benchmark: Mapping[str, Mapping[str, Summary]], look: Mapping[str, str]) -> None:
    """Print the end of a run: its figures by benchmark and system, and its files by name ("report" -> a path, ...)."""
    for benchmark, summaries in by_benchmark.items():
        console.print(render(figures(summaries, benchmark), console.width))
    if len(by_benchmark) > 1:
        console.print(render(across(by_benchmark), console.width))
    width = max(map(len, look), default=0)
    for label, place in look.items():
        console.print(Text(plain(f"{label:<{width}}  {place}")), soft_wrap=True)


def show_comparison(console: Console, comparison: Comparison, shown: int = SHOWN_FLIPS) -> None:
    """Print one comparison: the difference and its tests, then the first `shown` questions that flipped."""
    paired = comparison.paired
    difference = (
        f"{comparison.before} → {comparison.after} ({comparison.mode}, {comparison.equality}, {paired.n} questions): "
        f"{formats.percent(comparison.accuracy_before)} → {formats.percent(comparison.accuracy_after)} %, "
        f"{formats.points(paired.difference)} points [{formats.points(paired.low)},\xa0{formats.points(paired.high)}]"
    )
    tests = f"sign-flip by {paired.flipped} p {formats.p_value(paired.p_permutation)}"
    if comparison.p_mcnemar is not None:
        mcnemar = f"McNemar p {formats.p_value(comparison.p_mcnemar)}"
        tests = f"gained {comparison.gained}, lost {comparison.lost}; {mcnemar}; {tests}"
    if comparison.needed is not None:
        tests += f"; {formats.count(comparison.needed)} questions would show a difference of this size"
    if comparison.detectable is not None:
        tests += f", and {formats.count(paired.n)} show one of {formats.percent(comparison.detectable)} points"
    width = console.width if console.is_terminal else sys.maxsize
    for words in (difference, tests):
        folded = textwrap.fill(words, width, break_on_hyphens=False)
        console.print(Text(plain(folded, lines=True)), soft_wrap=True)
    for flip in comparison.flips[:shown]:
        sign = "+" if flip.gained else "−"
        console.print(Text(plain(f"  {sign} {flip.example_id}  {flip.after_sql or 'no final SQL'}")), soft_wrap=True)
    if len(comparison.flips) > shown:
        console.print(Text(plain(f"  and {len(comparison.flips) - shown} more that flipped")))


def stage_figures(stage: str, metrics: Mapping[str, float], between: str = "  ") -> str:
    """The most telling metrics of a stage, for one line: a whole number with all its digits, any other with four. A
    no-break space keeps a figure beside its name.
    """
    kind = stage.partition(".")[0]
    names = STAGE_FIGURES.get(kind.partition("_")[0]) or STAGE_FIGURES.get(kind) or tuple(metrics)[:4]
    found = [(name, metrics[name]) for name in names if name in metrics]
    return between.join(
        f"{name}\xa0{value:,.0f}" if float(value).is_integer() else f"{name}\xa0{value:,.4g}" for name, value in found
    )
