"""The report's tables, each made from the report's data."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from pipelines.core.registry import METRICS
from pipelines.evaluation.measures import SMOOTH, curve_points, steps_to
from pipelines.evaluation.metrics import data_efficiency, execution_accuracy, unbroken, value_of
from pipelines.evaluation.paired_comparison import Comparison
from pipelines.evaluation.slices import Level
from pipelines.evaluation.summary import Summary
from pipelines.report import formats
from pipelines.report.data import ReportData, System
from pipelines.report.formats import Cell, ReportTable, TableColumn
from pipelines.sql import diagnoses
from pipelines.sql.diagnoses import ERROR_CLASSES

COMMON_HINTS = 14  # rows of the table of clues
WATCHED = {"ex": ("EX in training", SMOOTH), "ex_held_out": ("EX held out", 1)}  # curve -> (title, steps smoothed over)


def all_tables(data: ReportData) -> Iterator[ReportTable]:
    """Every table that has something to show, in the page's order."""
    makers: tuple[Callable[[ReportData], ReportTable | None], ...] = (
        leader,
        equalities,
        behaviour,
        costs,
        likeness,
        paired,
        samples,
        hardness,
        difficulty,
        errors,
        clues,
        links,
        predicted_links,
        databases,
        thresholds,
    )
    for maker in makers:
        table = maker(data)
        if table is not None and table.rows:
            yield table
    yield from data.tables


def leader(data: ReportData) -> ReportTable:
    """EX of each system: greedy, the mean of its samples, their vote, and the best of k."""
    ks = [0]
    for summary in data.summaries:
        ks += [point.k for point in summary.points]
    largest_k = max(ks)
    columns = [TableColumn("system"), TableColumn("EX greedy", "estimate")]
    if largest_k:
        columns.append(TableColumn("EX sampled", "estimate", "mean of all samples"))
        columns.append(TableColumn(f"majority@{largest_k}", "estimate"))
        columns.append(TableColumn(f"pass@{largest_k}", "estimate"))
    rows: list[tuple[Cell, ...]] = []
    styles = []
    for style, (system, summary) in enumerate(data.by_system):
        row: list[Cell] = [system.name, summary.ex.get(data.equality)]
        if largest_k:
            row.append(summary.sampled)
            row += _votes_and_best(summary, largest_k)
        rows.append(tuple(row))
        styles.append(style)
        if system.single_turn:
            answered = unbroken(system.single_turn)
            single = execution_accuracy(answered, data.equality, data.seed)
            empty_cells = (None,) * (len(columns) - 2)
            rows.append((f"{system.name}, at once", single, *empty_cells))
            styles.append(style)
    notes = [f"Percent, equality {data.equality}, with 95 % intervals."]
    if any(system.single_turn for system in data.systems):
        notes.append("At once: made to answer without looking.")
    notes += left_out(data)
    note = " ".join(notes)
    return ReportTable("leader", "Execution accuracy", tuple(columns), tuple(rows), note, tuple(styles))


def _votes_and_best(summary: Summary, k: int) -> tuple[Cell, Cell]:
    """The vote of k samples and the best of them; None for a system with fewer."""
    for point in summary.points:
        if point.k == k:
            return point.majority_at, point.pass_at
    return None, None


def left_out(data: ReportData) -> list[str]:
    """Which questions could not be asked, in a sentence for each system, or in one for all."""
    notes = [_left_out_note(system) for system in data.systems]
    distinct_notes = set(notes)
    if len(distinct_notes) == 1:
        return list(filter(None, distinct_notes))
    sentences = []
    for system, note in zip(data.systems, notes, strict=True):
        if note:
            sentences.append(f"{system.name}: {note}")
    return sentences


def _left_out_note(system: System) -> str:
    if not system.left_out:
        return ""
    reasons = ", ".join(f"{number:,} {reason}" for reason, number in system.left_out.items())
    total = sum(system.left_out.values())
    return f"{total:,} questions are left out ({reasons})."


def equalities(data: ReportData) -> ReportTable | None:
    """Greedy EX under every equality that was evaluated: the same answers, other numbers."""
    names: dict[str, None] = {}
    for summary in data.summaries:
        names |= dict.fromkeys(summary.ex)
    if len(names) < 2:
        return None
    columns = [TableColumn("system")]
    columns += [TableColumn(name, "estimate") for name in names]
    rows: list[tuple[Cell, ...]] = []
    for system, summary in data.by_system:
        estimates = [summary.ex.get(name) for name in names]
        rows.append((system.name, *estimates))
    note = "The same greedy answers under each named equality, in percent."
    return _table_of_systems("equalities", "EX under other equalities", columns, rows, note)


def _table_of_systems(
    slug: str, title: str, columns: Sequence[TableColumn], rows: Sequence[tuple[Cell, ...]], note: str
) -> ReportTable:
    """A table with a row for each system, in their order."""
    styles = tuple(range(len(rows)))
    return ReportTable(slug, title, tuple(columns), tuple(rows), note, styles)


def behaviour(data: ReportData) -> ReportTable:
    """The behaviour of each system, and its cost."""
    columns, metric_rows = _metrics(data, "behaviour")
    about = "EX points gained over the baseline per 1,000 training examples"
    columns.append(TableColumn("points / 1,000", "mean", about))
    baseline = _efficiency_baseline(data)
    rows: list[tuple[Cell, ...]] = []
    for index, (system, summary) in enumerate(data.by_system):
        gained = None
        headline = summary.headline
        examples = system.training_examples if index else None
        if examples and baseline is not None and headline is not None:
            gained = data_efficiency(baseline.accuracy, headline.value, examples)
        rows.append((*metric_rows[index], gained))
    note = "Means over the greedy episodes; shares in percent."
    if baseline is not None and any(system.training_examples for system in data.systems[1:]):
        percent = f"{100 * baseline.accuracy:.1f}"
        note += f" Points per 1,000 examples are counted from {baseline.name} ({percent})."
    return _table_of_systems("behaviour", "Behaviour and cost", columns, rows, note)


class _Baseline(NamedTuple):
    name: str
    accuracy: float  # share in [0, 1]


def _efficiency_baseline(data: ReportData) -> _Baseline | None:
    """The first system in one turn, as in SQL-Trail (5.1, equation 5), or its headline if it was not asked so."""
    first = data.systems[0]
    if first.single_turn:
        single = execution_accuracy(unbroken(first.single_turn), data.equality, data.seed)
        if single is not None:
            return _Baseline(f"{first.name} in one turn", single.value)
    headline = data.summaries[0].headline
    if headline is None:
        return None
    return _Baseline(first.name, headline.value)


def _metrics(data: ReportData, table: str) -> tuple[list[TableColumn], list[tuple[Cell, ...]]]:
    """A column for each metric of a table that some system has a value of, and a row of values for each system."""
    measured: set[str] = set()
    for summary in data.summaries:
        measured |= set(summary.measured)
    names = []
    columns = [TableColumn("system")]
    for name in METRICS:
        metric = METRICS[name]
        if metric.table == table and name in measured:
            names.append(name)
            columns.append(TableColumn(metric.title, metric.unit, metric.about))
    rows: list[tuple[Cell, ...]] = []
    for system, summary in data.by_system:
        values = [value_of(summary.measured.get(name)) for name in names]
        rows.append((system.name, *values))
    return columns, rows


def costs(data: ReportData) -> ReportTable | None:
    """The time and cost of an answer, if they were noted: wall-clock facts of one machine at one hour."""
    names: dict[str, None] = {}
    for system in data.systems:
        names |= dict.fromkeys(system.costs)
    if not names:
        return None
    columns = [TableColumn("system")]
    columns += [TableColumn(name, "mean") for name in names]
    rows: list[tuple[Cell, ...]] = []
    for system in data.systems:
        values = [system.costs.get(name) for name in names]
        rows.append((system.name, *values))
    note = "Means a question, as they were on the machine that answered; episodes overlap."
    return _table_of_systems("costs", "What an answer took", columns, rows, note)


def likeness(data: ReportData) -> ReportTable:
    """How much the answers look like gold, whatever their results."""
    columns, rows = _metrics(data, "likeness")
    note = "Schema linking against the gold schema, in percent."
    return _table_of_systems("likeness", "Likeness to gold", columns, rows, note)


def paired(data: ReportData) -> ReportTable:
    """Paired tests of the systems on the questions that they share."""
    columns = (
        TableColumn("systems"),
        TableColumn("episodes"),
        TableColumn("questions", "count"),
        TableColumn("before", "percent"),
        TableColumn("after", "percent"),
        TableColumn("difference", "difference", "in points, with its 95 % interval"),
        TableColumn("gained", "count", "questions that only the later system has right"),
        TableColumn("lost", "count", "questions that only the earlier system has right"),
        TableColumn("p McNemar", "p", "exact, two-sided"),
        TableColumn("p sign-flip", "p", "sign-flip permutation test of what the next column says"),
        TableColumn(
            "flips", about="whole databases flip together; each question by itself where there are fewer than ten"
        ),
        TableColumn("needed", "count", "questions that would detect a difference of this size with 80 % power"),
        TableColumn("detectable", "percent", "points that so many questions detect with 80 % power, by the flips seen"),
    )
    rows = tuple(_comparison_row(comparison) for comparison in data.comparisons)
    return ReportTable("paired", "Paired differences", columns, rows, "The same questions, before and after.")


def _comparison_row(comparison: Comparison) -> tuple[Cell, ...]:
    is_greedy = comparison.mode == "greedy"
    return (
        f"{comparison.before} → {comparison.after}",
        comparison.mode,
        comparison.paired.n,
        comparison.accuracy_before,
        comparison.accuracy_after,
        comparison.paired,
        comparison.gained if is_greedy else None,
        comparison.lost if is_greedy else None,
        comparison.p_mcnemar,
        comparison.paired.p_permutation,
        f"by {comparison.paired.flipped}",
        comparison.needed,
        comparison.detectable,
    )


def samples(data: ReportData) -> ReportTable:
    """pass@k, average@k and majority@k against k."""
    columns = (
        TableColumn("system"),
        TableColumn("k", "count"),
        TableColumn("pass@k", "estimate"),
        TableColumn("majority@k", "estimate"),
        TableColumn("average@k", "estimate"),
        TableColumn("ties", "percent", "share of the votes that were ties"),
    )
    rows: list[tuple[Cell, ...]] = []
    styles = []
    for style, (system, summary) in enumerate(data.by_system):
        for point in summary.points:
            row = (system.name, point.k, point.pass_at, point.majority_at, point.average_at, point.tied)
            rows.append(row)
            styles.append(style)
    note = "pass@k is the unbiased estimate over all samples; majority@k averages the votes of all k-subsets."
    return ReportTable("samples", "Several samples", columns, tuple(rows), note, tuple(styles))


def _slices(data: ReportData, heading: str, title: str, attribute: str) -> ReportTable:
    """EX, turns and costs by a slice of the questions."""
    columns = [
        TableColumn(heading),
        TableColumn("system"),
        TableColumn("questions", "count"),
        TableColumn("EX greedy", "estimate"),
        TableColumn("EX sampled", "estimate"),
    ]
    for name in ("turns", "turns_deviation", "tokens_in", "tokens_out", "reasoning_chars"):
        metric = METRICS[name]
        columns.append(TableColumn(metric.title, metric.unit, metric.about))

    by_system: list[dict[str, Level]] = []
    slice_names: dict[str, None] = {}
    for summary in data.summaries:
        slices: Sequence[Level] = getattr(summary, attribute)
        levels = {level.name: level for level in slices}
        by_system.append(levels)
        slice_names |= dict.fromkeys(levels)
    rows: list[tuple[Cell, ...]] = []
    styles = []
    for slice_name in slice_names:
        for style, (system, levels) in enumerate(zip(data.systems, by_system, strict=True)):
            if slice_name in levels:
                level = levels[slice_name]
                rows.append(_slice_row(system, level))
                styles.append(style)
    return ReportTable(attribute, title, tuple(columns), tuple(rows), "", tuple(styles))


def _slice_row(system: System, level: Level) -> tuple[Cell, ...]:
    deviation = None
    if level.turns is not None:
        deviation = level.turns.std
    return (
        level.name,
        system.name,
        level.n,
        level.ex,
        level.sampled,
        value_of(level.turns),
        deviation,
        value_of(level.tokens_in),
        value_of(level.tokens_out),
        value_of(level.reasoning_chars),
    )


hardness = functools.partial(_slices, heading="hardness", title="By hardness", attribute="by_hardness")
difficulty = functools.partial(_slices, heading="difficulty", title="By difficulty", attribute="by_difficulty")
links = functools.partial(_slices, heading="gold columns", title="By number of schema links", attribute="by_links")
predicted_links = functools.partial(
    _slices,
    heading="predicted columns",
    title="By number of schema links in the predicted SQL",
    attribute="by_predicted_links",
)
databases = functools.partial(_slices, heading="database", title="By database", attribute="by_database")


def thresholds(data: ReportData) -> ReportTable:
    """After how many steps a training's accuracy first reached a tenth and its multiples (SkyRL-SQL, figure 6)."""
    levels = [tenth / 10 for tenth in range(1, 11)]
    steps_by_curve: dict[str, dict[float, float | None]] = {}
    reached: set[float] = set()
    for stage, curve_rows in data.curves.items():
        for name, (title, window) in WATCHED.items():
            points = curve_points(curve_rows, name)
            if not points:
                continue
            steps = {level: steps_to(points, level, window) for level in levels}
            steps_by_curve[f"{stage}: {title}"] = steps
            reached |= {level for level, step in steps.items() if step is not None}
    reached_levels = sorted(reached)
    columns = [TableColumn("curve")]
    for level in reached_levels:
        percent = f"{100 * level:.0f}"
        columns.append(TableColumn(f"{percent} %", "count"))
    rows: list[tuple[Cell, ...]] = []
    if reached_levels:
        for curve, steps in steps_by_curve.items():
            first_steps = [steps[level] for level in reached_levels]
            rows.append((curve, *first_steps))
    note = f"The first step at which the mean of {SMOOTH} steps (of one measurement, held out) is so high."
    return ReportTable("thresholds", "Steps to an accuracy", tuple(columns), tuple(rows), note)


def errors(data: ReportData) -> ReportTable:
    """How many wrong greedy answers fall in each error class."""
    columns = [TableColumn("error class")]
    for system in data.systems:
        columns.append(TableColumn(system.name, "count"))
        columns.append(TableColumn(f"{system.name} %", "percent"))
    rows = []
    for name in (*ERROR_CLASSES, "all"):
        row: list[Cell] = [name.replace("_", " ")]
        for summary in data.summaries:
            n_wrong = sum(summary.errors.values())
            number = n_wrong
            if name != "all":
                number = summary.errors[name]
            share: Cell = None
            if n_wrong:
                share = number / n_wrong
            row += [number, share]
        rows.append(tuple(row))
    note = "TRUST-SQL, section 3.1; in percent of the system's wrong answers."
    return ReportTable("errors", "Wrong answers by error class", tuple(columns), tuple(rows), note)


def clues(data: ReportData) -> ReportTable:
    """The finer clues that come most often in any system."""
    highest_counts: Counter[str] = Counter()
    for summary in data.summaries:
        highest_counts |= Counter(summary.hints)
    by_frequency = sorted(highest_counts, key=lambda kind: (-highest_counts[kind], kind))
    columns = [TableColumn("the answer …")]
    columns += [TableColumn(system.name, "count") for system in data.systems]
    rows: list[tuple[Cell, ...]] = []
    for kind in by_frequency[:COMMON_HINTS]:
        counts = [summary.hints.get(kind, 0) for summary in data.summaries]
        clue = diagnoses.KINDS.get(kind, kind)
        rows.append((clue, *counts))
    note = "A wrong answer can give several."
    n_rarer = len(by_frequency) - COMMON_HINTS
    if n_rarer > 0:
        note += f" {n_rarer} rarer kinds are not in this table."
    return ReportTable("clues", "Clues to the errors", tuple(columns), tuple(rows), note)


def verdicts(data: ReportData) -> Iterator[str]:
    """The result of the paired tests of each system and the one before it, one plain sentence each."""
    for old, new in pairwise(system.name for system in data.systems):
        differences = []
        for comparison in data.comparisons:
            if (comparison.before, comparison.after) == (old, new):
                differences.append(_difference_in_words(comparison))
        if differences:
            listed = "; ".join(differences)
            yield f"From {old} to {new}: {listed}."


def _difference_in_words(comparison: Comparison) -> str:
    paired = comparison.paired
    measure = "greedy EX" if comparison.mode == "greedy" else "mean sampled EX"
    difference = formats.points(paired.difference)
    low = formats.points(paired.low)
    high = formats.points(paired.high)
    words = f"{difference} points of {measure} [{low}, {high}]"
    if paired.low <= 0 <= paired.high:
        words += " (may be chance)"
    return words
