"""The report's tables, each made from the report's data."""

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise

from pipelines.core.registry import METRICS
from pipelines.evaluation.measures import SMOOTH, curve_points, steps_to
from pipelines.evaluation.metrics import data_efficiency, execution_accuracy, unbroken, value_of
from pipelines.evaluation.summary import Level
from pipelines.report import formats
from pipelines.report.data import ReportData
from pipelines.report.formats import Cell, ReportTable, TableColumn
from pipelines.sql import diagnoses
from pipelines.sql.diagnoses import ERROR_CLASSES

COMMON_HINTS = 14
WATCHED = {"ex": ("EX in training", SMOOTH), "ex_held_out": ("EX held out", 1)}  # curves, by what each is smoothed


def all_tables(data: ReportData) -> Iterator[ReportTable]:
    """Every table that has something to show, in the page's order."""
    makers: tuple[Callable[[ReportData], ReportTable | None], ...] = (
        *(leader, equalities, behaviour, costs, likeness, paired, samples),
        *(hardness, difficulty, errors, clues, links, predicted_links, databases, thresholds),
    )
    yield from (table for maker in makers if (table := maker(data)) is not None and table.rows)
    yield from data.tables


def leader(data: ReportData) -> ReportTable:
    """EX of each system: greedy, the mean of its samples, their vote, and the best of k."""
    k = max((point.k for summary in data.summaries for point in summary.points), default=0)
    columns = [TableColumn("system"), TableColumn("EX greedy", "estimate")]
    if k:
        columns += [TableColumn("EX sampled", "estimate", "mean of all samples")]
        columns += [TableColumn(f"majority@{k}", "estimate"), TableColumn(f"pass@{k}", "estimate")]
    rows: list[tuple[Cell, ...]] = []
    styles = []
    for style, (system, summary) in enumerate(zip(data.systems, data.summaries, strict=True)):
        row: list[Cell] = [system.name, summary.ex.get(data.equality)]
        if k:
            point = next((point for point in summary.points if point.k == k), None)
            row += [summary.sampled, point.majority_at if point else None, point.pass_at if point else None]
        rows.append(tuple(row))
        styles.append(style)
        if system.single_turn:
            single = execution_accuracy(unbroken(system.single_turn), data.equality, data.seed)
            rows.append((f"{system.name}, at once", single, *(None,) * (len(columns) - 2)))
            styles.append(style)
    notes = [f"Percent, equality {data.equality}, with 95 % intervals."]
    if any(system.single_turn for system in data.systems):
        notes.append("At once: made to answer without looking.")
    notes += left_out(data)
    return ReportTable("leader", "Execution accuracy", tuple(columns), tuple(rows), " ".join(notes), tuple(styles))


def left_out(data: ReportData) -> list[str]:
    """Which questions could not be asked, in a sentence for each system, or in one for all."""
    notes = [
        f"{sum(reasons.values()):,} questions are left out ({', '.join(f'{n:,} {why}' for why, n in reasons.items())})."
        if (reasons := system.left_out)
        else ""
        for system in data.systems
    ]
    if len(set(notes)) == 1:
        return [notes[0]] if notes[0] else []
    return [f"{system.name}: {words}" for system, words in zip(data.systems, notes, strict=True) if words]


def equalities(data: ReportData) -> ReportTable | None:
    """Greedy EX under every equality that was evaluated: the same answers, other numbers."""
    names = list(dict.fromkeys(name for summary in data.summaries for name in summary.ex))
    if len(names) < 2:
        return None
    columns = (TableColumn("system"), *(TableColumn(name, "estimate") for name in names))
    rows = tuple(
        (system.name, *(summary.ex.get(name) for name in names))
        for system, summary in zip(data.systems, data.summaries, strict=True)
    )
    note = "The same greedy answers under each named equality, in percent."
    return ReportTable("equalities", "EX under other equalities", columns, rows, note, tuple(range(len(rows))))


def behaviour(data: ReportData) -> ReportTable:
    """The behaviour of each system, and its cost."""
    columns, values = _metrics(data, "behaviour")
    about = "EX points gained over the baseline per 1,000 training examples"
    columns.append(TableColumn("points / 1,000", "mean", about))
    # Counted from the first system in one turn, as in SQL-Trail (5.1, equation 5), if it was asked so.
    first, ex = data.systems[0], data.summaries[0].headline
    single = execution_accuracy(unbroken(first.single_turn), data.equality, data.seed) if first.single_turn else None
    before = (first.name, ex.value) if ex is not None else None
    if single is not None:
        before = f"{first.name} in one turn", single.value
    rows = []
    for index, (row, system, summary) in enumerate(zip(values, data.systems, data.summaries, strict=True)):
        gained = None
        if index and system.training_examples and before is not None and summary.headline is not None:
            gained = data_efficiency(before[1], summary.headline.value, system.training_examples)
        rows.append((*row, gained))
    note = "Means over the greedy episodes; shares in percent."
    if before is not None and any(system.training_examples for system in data.systems[1:]):
        note += f" Points per 1,000 examples are counted from {before[0]} ({100 * before[1]:.1f})."
    return ReportTable("behaviour", "Behaviour and cost", tuple(columns), tuple(rows), note, tuple(range(len(rows))))


def _metrics(data: ReportData, table: str) -> tuple[list[TableColumn], list[tuple[Cell, ...]]]:
    """A column for each metric of a table that some system has a value of, and a row of values for each system."""
    names = [name for name in METRICS if METRICS[name].table == table]
    measured = [name for name in names if any(name in summary.measured for summary in data.summaries)]
    parts = [METRICS[name] for name in measured]
    columns = [TableColumn("system"), *(TableColumn(part.title, part.unit, part.about) for part in parts)]
    rows: list[tuple[Cell, ...]] = [
        (system.name, *(value_of(summary.measured.get(name)) for name in measured))
        for system, summary in zip(data.systems, data.summaries, strict=True)
    ]
    return columns, rows


def costs(data: ReportData) -> ReportTable | None:
    """The time and cost of an answer, if they were noted: wall-clock facts of one machine at one hour."""
    names = list(dict.fromkeys(name for system in data.systems for name in system.costs))
    if not names:
        return None
    columns = (TableColumn("system"), *(TableColumn(name, "mean") for name in names))
    rows = tuple((system.name, *(system.costs.get(name) for name in names)) for system in data.systems)
    note = "Means a question, as they were on the machine that answered; episodes overlap."
    return ReportTable("costs", "What an answer took", columns, rows, note, tuple(range(len(rows))))


def likeness(data: ReportData) -> ReportTable:
    """How much the answers look like gold, whatever their results."""
    columns, rows = _metrics(data, "likeness")
    note = "Schema linking against the gold schema, in percent."
    return ReportTable("likeness", "Likeness to gold", tuple(columns), tuple(rows), note, tuple(range(len(rows))))


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
    rows = tuple(
        (
            f"{comparison.before} → {comparison.after}",
            comparison.mode,
            comparison.paired.n,
            comparison.accuracy_before,
            comparison.accuracy_after,
            comparison.paired,
            *((comparison.gained, comparison.lost) if comparison.mode == "greedy" else (None, None)),
            comparison.p_mcnemar,
            comparison.paired.p_permutation,
            f"by {comparison.paired.flipped}",
            comparison.needed,
            comparison.detectable,
        )
        for comparison in data.comparisons
    )
    return ReportTable("paired", "Paired differences", columns, rows, "The same questions, before and after.")


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
    numbered = [
        (index, (system.name, point.k, point.pass_at, point.majority_at, point.average_at, point.tied))
        for index, (system, summary) in enumerate(zip(data.systems, data.summaries, strict=True))
        for point in summary.points
    ]
    note = "pass@k is the unbiased estimate over all samples; majority@k averages the votes of all k-subsets."
    styles = tuple(index for index, _ in numbered)
    return ReportTable("samples", "Several samples", columns, tuple(row for _, row in numbered), note, styles)


def _slices(data: ReportData, what: str, title: str, attribute: str) -> ReportTable:
    """EX, turns and costs by a slice of the questions."""
    columns = (
        TableColumn(what),
        TableColumn("system"),
        TableColumn("questions", "count"),
        TableColumn("EX greedy", "estimate"),
        TableColumn("EX sampled", "estimate"),
        *(
            TableColumn(METRICS[name].title, METRICS[name].unit, METRICS[name].about)
            for name in ("turns", "turns_deviation", "tokens_in", "tokens_out", "reasoning_chars")
        ),
    )

    by_system: list[dict[str, Level]] = [
        {level.name: level for level in getattr(summary, attribute)} for summary in data.summaries
    ]
    names = list(dict.fromkeys(name for levels in by_system for name in levels))
    rows: list[tuple[Cell, ...]] = []
    styles = []
    for name in names:
        for style, (system, levels) in enumerate(zip(data.systems, by_system, strict=True)):
            if (level := levels.get(name)) is not None:
                turns = (level.turns.mean, level.turns.std) if level.turns else (None, None)
                costs = (level.tokens_in, level.tokens_out, level.reasoning_chars)
                means = (cost.mean if cost else None for cost in costs)
                rows.append((name, system.name, level.n, level.ex, level.sampled, *turns, *means))
                styles.append(style)
    return ReportTable(attribute, title, columns, tuple(rows), "", tuple(styles))


hardness = functools.partial(_slices, what="hardness", title="By hardness", attribute="by_hardness")
difficulty = functools.partial(_slices, what="difficulty", title="By difficulty", attribute="by_difficulty")
links = functools.partial(_slices, what="gold columns", title="By number of schema links", attribute="by_links")
predicted_links = functools.partial(
    _slices,
    what="predicted columns",
    title="By number of schema links in the predicted SQL",
    attribute="by_predicted_links",
)
databases = functools.partial(_slices, what="database", title="By database", attribute="by_database")


def thresholds(data: ReportData) -> ReportTable:
    """After how many steps a training's accuracy first reached a tenth and its multiples (SkyRL-SQL, figure 6)."""
    levels = [tenth / 10 for tenth in range(1, 11)]
    steps_of = {
        f"{stage}: {words}": [steps_to(points, level, window) for level in levels]
        for stage, rows in data.curves.items()
        for name, (words, window) in WATCHED.items()
        if (points := curve_points(rows, name))
    }
    reached = [place for place in range(len(levels)) if any(steps[place] is not None for steps in steps_of.values())]
    columns = (TableColumn("curve"), *(TableColumn(f"{100 * levels[place]:.0f} %", "count") for place in reached))
    rows = tuple((name, *(steps[place] for place in reached)) for name, steps in steps_of.items()) if reached else ()
    note = f"The first step at which the mean of {SMOOTH} steps (of one measurement, held out) is so high."
    return ReportTable("thresholds", "Steps to an accuracy", columns, rows, note)


def errors(data: ReportData) -> ReportTable:
    """How many wrong greedy answers fall in each error class."""
    column_pairs = (
        (TableColumn(system.name, "count"), TableColumn(f"{system.name} %", "percent")) for system in data.systems
    )
    rows = []
    for name in (*ERROR_CLASSES, "all"):
        row: list[Cell] = [name.replace("_", " ")]
        for summary in data.summaries:
            wrong = sum(summary.errors.values())
            number = wrong if name == "all" else summary.errors[name]
            row += [number, number / wrong if wrong else None]
        rows.append(tuple(row))
    columns = (TableColumn("error class"), *(column for pair in column_pairs for column in pair))
    note = "TRUST-SQL, section 3.1; in percent of the system's wrong answers."
    return ReportTable("errors", "Wrong answers by error class", columns, tuple(rows), note)


def clues(data: ReportData) -> ReportTable:
    """The finer clues that come most often in any system."""
    most: dict[str, int] = {}
    for summary in data.summaries:
        for kind, number in summary.hints.items():
            most[kind] = max(most.get(kind, 0), number)
    names = sorted(most, key=lambda kind: (-most[kind], kind))[:COMMON_HINTS]
    columns = (TableColumn("the answer …"), *(TableColumn(system.name, "count") for system in data.systems))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (diagnoses.KINDS.get(name, name), *(summary.hints.get(name, 0) for summary in data.summaries)) for name in names
    )
    return ReportTable("clues", "Clues to the errors", columns, rows, "A wrong answer can give several.")


def verdicts(data: ReportData) -> Iterator[str]:
    """The result of the paired tests of each system and the one before it, one plain sentence each."""
    for old, new in pairwise(system.name for system in data.systems):
        parts = []
        for comparison in data.comparisons:
            if (comparison.before, comparison.after) == (old, new):
                result = comparison.paired
                measure = "greedy EX" if comparison.mode == "greedy" else "mean sampled EX"
                bounds = f"[{formats.points(result.low)}, {formats.points(result.high)}]"
                unsure = " (may be chance)" if result.low <= 0 <= result.high else ""
                parts.append(f"{formats.points(result.difference)} points of {measure} {bounds}{unsure}")
        if parts:
            yield f"From {old} to {new}: {'; '.join(parts)}."
