"""How many of the stored values that gold SQL compares are found by the question, and what the index costs.

    python benchmarks/values.py DATA

DATA holds `spider/` and `kaggledbqa/` in their own layouts. For each: the share of stored literals of gold SQL among
the first 1, 5 and 10 values that `pipelines.benchmarks.prompt_schema` finds for the question, distinct texts;
seconds to index all databases, and milliseconds a question.
"""

import argparse
import tempfile
import time
from pathlib import Path

from pipelines.benchmarks import base, prompt_schema
from pipelines.core.types import Database, Example
from pipelines.recipe.config import Source
from pipelines.rollout.policies.oracle import lookups
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import introspect

KS = (1, 5, 10)


def questions(kind: str, path: Path, root: Path) -> list[Example]:
    """All questions of a benchmark."""
    splits = ("train", "dev") if kind == "spider" else ("test",)
    made: list[Example] = []
    for split in splits:
        source = Source.model_validate({"kind": kind, "path": str(path), "split": split})
        made += base.resolve_locations(base.read(source, 0, root).examples, root)
    return made


def measure(examples: list[Example], sql: SqlEngine) -> None:
    """Print one row a way."""
    by_place: dict[Database, list[Example]] = {}
    for example in examples:
        by_place.setdefault(example.database, []).append(example)
    hits, stored, texts, indexing, asking = dict.fromkeys(KS, 0), 0, 0, 0.0, 0.0
    for database, group in by_place.items():
        schema, started = introspect(database), time.perf_counter()
        with prompt_schema.ValueIndex(database, schema, sql) as index:
            indexing += time.perf_counter() - started
            texts += len(index)
            lowered = {value.lower() for value in index._columns_by_value}
            for example in group:
                wanted = {one.stored.lower() for one in lookups(example, schema)} & lowered
                started = time.perf_counter()
                found = [value.lower() for value, _ in index.find(f"{example.question} {example.evidence}", max(KS))]
                asking += time.perf_counter() - started
                stored += len(wanted)
                for k in KS:
                    hits[k] += len(wanted & set(found[:k]))
    row = " | ".join(f"{100 * hits[k] / max(1, stored):.1f} %" for k in KS)
    cost = f"{texts:,} | {indexing:.2f} s | {1000 * asking / len(examples):.1f} ms"
    print(f"| {examples[0].source} | {len(by_place)} | {len(examples)} | {stored} | {row} | {cost} |")


def main() -> None:
    """Measure both benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    data = parser.parse_args().data
    print(
        "| questions of | databases | questions | stored literals | at 1 | at 5 | at 10 | texts | index | a question |"
    )
    print("|---" * 10 + "|")
    with tempfile.TemporaryDirectory() as root, SqlEngine(Limits(), workers=1) as sql:
        for kind in ("spider", "kaggledbqa"):
            measure(questions(kind, data / kind, Path(root)), sql)


if __name__ == "__main__":
    main()
