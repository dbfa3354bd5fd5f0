"""The health of gold SQL: queries that fail, are too large, empty or slow, hang on ties under a LIMIT, change from run
to run, or contradict another one.

Such gold queries cost a benchmark its meaning: no prediction can be right if gold fails or gives more than a verdict
may read, any empty result is right if gold is empty, and for the last three chance decides on a right prediction.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from pipelines.core.types import Database, Example, ExecutionStatus
from pipelines.sql import analyst
from pipelines.sql.engine import Pair, SqlEngine
from pipelines.sql.schema import literal

SLOW_MS = 1000.0
SHOWN = 10
REASONS = ("failing", "too_large", "empty", "slow", "order_ambiguous", "nondeterministic", "contradictory")
JUDGED = ("strict", "bird", "test_suite")
_CHANGING = re.compile(
    r"\b(random|randomblob|rand|gen_random_uuid|uuid|now|clock_timestamp)(?=\s*\()"  # a column may have that name
    r"|\b(current_(date|time|timestamp)|localtime(stamp)?|tablesample)\b|'now'",
    re.IGNORECASE,
)
_TEXT = re.compile(r"'(?!now')(?:[^']|'')*'", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class GoldFinding:
    """One thing that is wrong with one gold query."""

    place: int  # of the example among those that were looked at; several may have one id.
    example_id: str
    reason: str  # one of `REASONS`.
    detail: str  # the error class, the milliseconds, the tied values: one line.
    sql: str


def examine(examples: Sequence[Example], sql: SqlEngine) -> list[GoldFinding]:
    """All findings, in the order of the examples.

    Each distinct gold query is run twice. Those of its SELECTs that have a LIMIT under an ORDER BY are run once more,
    one row further and with their sort keys, to see whether the cut goes through a tie.
    """
    unique = list(dict.fromkeys((example.database, example.gold_sql) for example in examples))
    first, second = sql.execute_many(unique), sql.execute_many(unique)
    probes_of = analyst.tie_probes([(text, analyst.reading(database)) for database, text in unique])
    probes = [(key, probe) for key, tie_probes in zip(unique, probes_of, strict=True) for probe in tie_probes]
    ties = sql.execute_many([(key[0], probe) for key, (probe, *_) in probes])
    findings: dict[tuple[Database, str], list[tuple[str, str]]] = {}
    for key, one, two in zip(unique, first, second, strict=True):
        found = findings[key] = []
        if not one.ok:
            found.append(("failing", f"{one.error_class}: {one.error}"))
            continue
        if one.truncated:
            found.append(("too_large", f"more than {len(one.rows):,} rows or too many bytes: no verdict can be given"))
        if not one.rows:
            found.append(("empty", "no rows"))
        if min(one.elapsed_ms, two.elapsed_ms) > SLOW_MS:
            found.append(("slow", f"{min(one.elapsed_ms, two.elapsed_ms):.0f} ms"))
        word = _CHANGING.search(_TEXT.sub("''", key[1]))
        if one.rows != two.rows:
            found.append(("nondeterministic", "two runs gave two results"))
        elif word is not None:
            found.append(("nondeterministic", f"it asks for {word[0].lower()}"))
    for (key, (_, at, keys)), result in zip(probes, ties, strict=True):
        width = len(result.columns) - keys
        if not result.ok or len(result.rows) <= at:
            continue  # a subquery that needs its outer query does not run alone
        # The last row that is kept and the first that is not have the same sort keys and look different.
        last_kept, first_left = result.rows[at - 1], result.rows[at]
        if last_kept[width:] == first_left[width:] and last_kept[:width] != first_left[:width]:
            tied = ", ".join(map(literal, last_kept[width:]))
            findings[key].append(("order_ambiguous", f"rows {at} and {at + 1} tie on {tied}"))
    # The same question is asked of the same database before, with a gold SQL whose result differs under some
    # equalities: a prediction can be right for one of them only.
    earliest: dict[tuple[Database, str], Example] = {}
    pairs: list[tuple[int, Example, Example]] = []
    for place, example in enumerate(examples):
        earlier = earliest.setdefault((example.database, " ".join(example.in_context().lower().split())), example)
        if earlier.gold_sql != example.gold_sql:
            pairs.append((place, earlier, example))
    verdicts = sql.verdicts([Pair(old.database, old.gold_sql, new.gold_sql) for _, old, new in pairs], JUDGED)
    against: dict[int, list[tuple[str, str]]] = {}
    for (place, old, _), verdict in zip(pairs, verdicts, strict=True):
        no = [name for name, score in verdict.scores.items() if not score]
        if no and verdict.gold is verdict.predicted is ExecutionStatus.OK:
            against[place] = [("contradictory", f"another result than {old.id} has, under {', '.join(no)}")]
    return [
        GoldFinding(place, example.id, reason, detail, example.gold_sql)
        for place, example in enumerate(examples)
        for reason, detail in [*findings[example.database, example.gold_sql], *against.get(place, ())]
    ]


def count_reasons(findings: Sequence[GoldFinding]) -> dict[str, int]:
    return {reason: len({f.place for f in findings if f.reason == reason}) for reason in REASONS}


def report_lines(findings: Sequence[GoldFinding]) -> Iterator[str]:
    """The report for a person: each reason with its first examples."""
    for reason in REASONS:
        group = [finding for finding in findings if finding.reason == reason]
        yield f"{reason.replace('_', ' ')}: {len(group)} gold queries"
        for finding in group[:SHOWN]:
            yield f"  {finding.example_id}: {finding.detail}: {' '.join(finding.sql.split())}"
        if len(group) > SHOWN:
            yield f"  ... and {len(group) - SHOWN} more"
