"""The health of gold SQL: queries that fail, are too large, empty or slow, hang on ties under a LIMIT, change from run
to run, or contradict another one.

Such gold queries cost a benchmark its meaning: no prediction can be right if gold fails or gives more than a verdict
may read, any empty result is right if gold is empty, and for the last three chance decides on a right prediction.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from pipelines.core.types import Database, Example, ExecutionResult, ExecutionStatus
from pipelines.sql import analyst
from pipelines.sql.engine import Pair, SqlEngine
from pipelines.sql.schema import literal

SLOW_MS = 1000.0
MAX_EXAMPLES = 10  # examples of each reason in the report
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
    """A fault of a gold query."""

    place: int  # Place of the example among those that were examined; several may have one id.
    example_id: str
    reason: str  # Word of `REASONS`.
    detail: str  # Error class, milliseconds or tied values, in one line.
    sql: str


def examine_gold(examples: Sequence[Example], sql: SqlEngine) -> list[GoldFinding]:
    """All findings, in the order of the examples.

    Each distinct gold query is run twice. Those of its SELECTs that have a LIMIT under an ORDER BY are run once more,
    one row further and with their sort keys, to see whether the cut goes through a tie.
    """
    golds = [(example.database, example.gold_sql) for example in examples]
    unique = list(dict.fromkeys(golds))
    first_results = sql.execute_many(unique)
    second_results = sql.execute_many(unique)
    findings: dict[GoldKey, list[Finding]] = {}
    for gold, first, second in zip(unique, first_results, second_results, strict=True):
        _, text = gold
        findings[gold] = list(_run_findings(text, first, second))
    for gold, finding in _ties(unique, sql):
        findings[gold].append(finding)
    contradictions = _contradictions(examples, sql)
    by_example = []
    for place, (example, gold) in enumerate(zip(examples, golds, strict=True)):
        findings_of_example = list(findings[gold])
        if place in contradictions:
            findings_of_example.append(contradictions[place])
        for reason, detail in findings_of_example:
            finding_of_example = GoldFinding(place, example.id, reason, detail, example.gold_sql)
            by_example.append(finding_of_example)
    return by_example


GoldKey = tuple[Database, str]  # a database, and a gold query
Finding = tuple[str, str]  # reason, detail


def _run_findings(gold_sql: str, first: ExecutionResult, second: ExecutionResult) -> Iterator[Finding]:
    """The findings of two runs of a gold query."""
    if not first.ok:
        yield "failing", f"{first.error_class}: {first.error}"
        return
    if first.truncated:
        yield "too_large", f"more than {len(first.rows):,} rows or too many bytes: no verdict can be given"
    if not first.rows:
        yield "empty", "no rows"
    elapsed_ms = min(first.elapsed_ms, second.elapsed_ms)
    if elapsed_ms > SLOW_MS:
        yield "slow", f"{elapsed_ms:.0f} ms"
    sql_without_texts = _TEXT.sub("''", gold_sql)
    changing_word = _CHANGING.search(sql_without_texts)
    if first.rows != second.rows:
        yield "nondeterministic", "two runs gave two results"
    elif changing_word is not None:
        yield "nondeterministic", f"it asks for {changing_word[0].lower()}"


def _ties(golds: Sequence[GoldKey], sql: SqlEngine) -> Iterator[tuple[GoldKey, Finding]]:
    """The gold queries in which a LIMIT cuts through a tie: the last row that is kept and the first that is not have
    the same sort keys and look different.
    """
    queries = [(text, analyst.reading(database)) for database, text in golds]
    probes_of_golds = analyst.tie_probes(queries)
    probed: list[tuple[GoldKey, int, int]] = []  # gold, rows before the cut, sort keys
    jobs: list[tuple[Database, str]] = []
    for gold, probes in zip(golds, probes_of_golds, strict=True):
        database, _ = gold
        for probe, n_kept, n_keys in probes:
            probed.append((gold, n_kept, n_keys))
            jobs.append((database, probe))
    results = sql.execute_many(jobs)
    for (gold, n_kept, n_keys), result in zip(probed, results, strict=True):
        if not result.ok or len(result.rows) <= n_kept:
            continue  # a subquery that needs its outer query does not run alone
        width = len(result.columns) - n_keys
        last_kept = result.rows[n_kept - 1]
        first_left = result.rows[n_kept]
        sort_keys = last_kept[width:]
        is_tie = sort_keys == first_left[width:]
        if is_tie and last_kept[:width] != first_left[:width]:
            values = ", ".join(map(literal, sort_keys))
            detail = f"rows {n_kept} and {n_kept + 1} tie on {values}"
            yield gold, ("order_ambiguous", detail)


def _contradictions(examples: Sequence[Example], sql: SqlEngine) -> dict[int, Finding]:
    """The examples, by place, whose question was asked of the same database before with a gold SQL whose result differs
    under some equalities: a prediction can be right for one of them only.
    """
    earliest: dict[tuple[Database, str], Example] = {}
    repeated: list[tuple[int, Example]] = []  # place, earlier example
    pairs: list[Pair] = []
    for place, example in enumerate(examples):
        words = example.in_context().lower().split()
        question = " ".join(words)
        earlier = earliest.setdefault((example.database, question), example)
        if earlier.gold_sql != example.gold_sql:
            repeated.append((place, earlier))
            pairs.append(Pair(earlier.database, earlier.gold_sql, example.gold_sql))
    verdicts = sql.verdicts(pairs, JUDGED)
    contradictions: dict[int, Finding] = {}
    for (place, earlier), verdict in zip(repeated, verdicts, strict=True):
        refusing = ", ".join(name for name, score in verdict.scores.items() if not score)
        both_ran = verdict.gold is verdict.predicted is ExecutionStatus.OK
        if refusing and both_ran:
            detail = f"another result than {earlier.id} has, under {refusing}"
            contradictions[place] = ("contradictory", detail)
    return contradictions


def count_reasons(findings: Sequence[GoldFinding]) -> dict[str, int]:
    """The number of examples that each reason concerns."""
    places: dict[str, set[int]] = {reason: set() for reason in REASONS}
    for finding in findings:
        places[finding.reason].add(finding.place)
    counts: dict[str, int] = {}
    for reason, places_of_reason in places.items():
        counts[reason] = len(places_of_reason)
    return counts


def report_lines(findings: Sequence[GoldFinding]) -> Iterator[str]:
    """The report for a person: each reason with its first examples."""
    for reason in REASONS:
        group = [finding for finding in findings if finding.reason == reason]
        title = reason.replace("_", " ")
        yield f"{title}: {len(group)} gold queries"
        for finding in group[:MAX_EXAMPLES]:
            one_line = " ".join(finding.sql.split())
            yield f"  {finding.example_id}: {finding.detail}: {one_line}"
        n_more = len(group) - MAX_EXAMPLES
        if n_more > 0:
            yield f"  ... and {n_more} more"
