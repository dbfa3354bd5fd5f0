"""How much of the gold schema the schema filter keeps within a budget of tokens; no database is read.

    python benchmarks/schema_filter.py                       # a generated warehouse of 1,000 tables, 10,000 columns
    python benchmarks/schema_filter.py SPIDER/tables.json SPIDER/dev.json SPIDER/train.json
    python benchmarks/schema_filter.py BIRD/dev_tables.json BIRD/dev.json
    python benchmarks/schema_filter.py SPIDER/tables.json SPIDER/dev.json --recipes

With files of a benchmark in Spider's or BIRD's format, each question is asked twice: of its own database, and of all
databases as one. With --recipes, the databases are written in BIRD's layout, once as they are and once joined into as
few as their tables' names allow (rows are taken from the folder database/ beside tables.json, if there is one; the
natural names are the descriptions), and the prompts of each recipe that do not fit its evaluation are counted, with
the whole schema and with the filter's part. The last line is one JSON object.
"""

import argparse
import contextlib
import csv
import json
import random
import resource
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Printed

from pipelines.benchmarks import prompt_schema
from pipelines.core.store import Store
from pipelines.core.types import Database, Example, SchemaItems
from pipelines.databases.schema_filter import CHARS_PER_TOKEN, SchemaFilter
from pipelines.recipe import recipes
from pipelines.sql.dialects.base import quoted
from pipelines.sql.schema import Column, ForeignKey, Schema, Table, render
from pipelines.stages import graph, prompt_fit, stage_making
from pipelines.stages.context import Silent

BUDGETS = (125, 250, 500, 1000, 2000, 4000)
Case = tuple[str, SchemaItems]  # a question and its gold schema
PAPERS = ("sql_trail", "trust_sql", "reasoning_sql", "skyrl_sql", "mtir_sql")
RECIPES = (*PAPERS, "arctic_sql", "revisql", "csc_sql", "sqltrain")
FILTER = ["protocol.schema_view=filtered", "data.linker=local"]
ROWS = 100  # of each table, for example values

AREAS = """sales purchasing inventory payroll hiring training claims policies lending deposits trading treasury tax
audit fleet shipping customs returns warehouse retail catalog pricing marketing campaign loyalty support network billing
energy metering maintenance safety clinical pharmacy laboratory admission research library housing events""".split()  # noqa: SIM905
THINGS = """account agent agreement asset batch budget case center contract customer delivery device document employee
incident invoice item location member order payment plan product request supplier""".split()  # noqa: SIM905
# A column's name as it is written in the warehouse, and the words by which people ask for it.
FACTS = (
    *(("nm", "name"), ("amt", "amount"), ("qty", "quantity"), ("st_cd", "status"), ("crt_dt", "creation date")),
    *(("upd_dt", "last change"), ("due_date", "due date"), ("country", "country"), ("region", "region")),
    *(("price", "price"), ("disc_pct", "discount percentage"), ("currency", "currency"), ("owner", "owner")),
    *(("priority", "priority"), ("wgt_kg", "weight"), ("len_cm", "length"), ("score", "score"), ("rating", "rating")),
    *(("email", "email"), ("phone", "phone"), ("cls_cd", "class"), ("prc_tm", "processing time"), ("year", "year")),
)


def warehouse(rng: random.Random, questions: int) -> tuple[Schema, list[Case]]:
    """1,000 tables of 10 columns each, and questions about one or two of them, in the words of people.

    Half of the short column names have a description.
    """
    tables = []
    words: dict[tuple[str, str], str] = {}
    for area in AREAS:
        for place, thing in enumerate(THINGS):
            name, other = f"{area}_{thing}", f"{area}_{THINGS[place - 1]}"
            columns = [Column(f"{thing}_id", "INTEGER", primary_key=True), Column(f"{THINGS[place - 1]}_id", "INTEGER")]
            for short, text in rng.sample(FACTS, 8):
                words[name, short] = text
                columns.append(Column(short, "TEXT", description=text if rng.random() < 0.5 else ""))
            key = ForeignKey(columns[1].name, other, columns[1].name)
            tables.append(Table(name, tuple(columns), (key,)))
    by_name = {table.name: table for table in tables}
    cases = []
    for _ in range(questions):
        table = rng.choice(tables)
        joined = [table, by_name[table.foreign_keys[0].to_table]] if rng.random() < 0.5 else [table]
        picked = [(one.name, column.name) for one in joined for column in rng.sample(one.columns[2:], 2)]
        texts = [f"the {words[pair]} of the {pair[0].replace('_', ' ')}" for pair in picked]
        pairs = set(picked)
        if len(joined) > 1:
            pairs |= {(one.name, table.foreign_keys[0].column) for one in joined}
        question = f"Show {' and '.join(texts)}"
        cases.append((question, SchemaItems(frozenset(one.name for one in joined), frozenset(pairs))))
    return Schema(tuple(tables)), cases


def described(entry: dict[str, Any], prefix: str = "") -> Schema:
    """The schema of an entry of tables.json, its natural names as descriptions.

    Args:
        prefix: of the tables' names.
    """
    names, natural = entry["table_names_original"], entry["table_names"]
    columns, texts, types = entry["column_names_original"], entry["column_names"], entry["column_types"]
    keys = {key for keys in entry["primary_keys"] for key in (keys if isinstance(keys, list) else [keys])}
    tables = []
    for at, name in enumerate(names):
        own = [place for place, (table, _) in enumerate(columns) if table == at]
        fields = [
            Column(columns[place][1], types[place].upper(), place in keys, description=texts[place][1]) for place in own
        ]
        joins = [
            ForeignKey(columns[one][1], prefix + names[columns[other][0]], columns[other][1])
            for one, other in entry["foreign_keys"]
            if one in own
        ]
        tables.append(Table(prefix + name, tuple(fields), tuple(joins), natural[at]))
    return Schema(tuple(tables))


def curve(title: str, asked: Sequence[tuple[Schema, Sequence[Case]]], console: Console) -> dict[str, Any]:
    """Print, and return, the recall at each budget."""
    started = time.perf_counter()
    filters = [(SchemaFilter(schema, False), schema, cases) for schema, cases in asked]
    built = time.perf_counter() - started
    whole = sum(len(render(schema, "ddl")) * len(cases) for schema, cases in asked) / CHARS_PER_TOKEN
    count = sum(len(cases) for _, cases in asked)
    table = Printed(title=f"{title}: {count} questions, {whole / count:,.0f} tokens of whole schema in the mean")
    for heading in ("budget", "tokens", "gold columns kept", "questions that lack nothing", "ms a question"):
        table.add_column(heading, justify="right")
    rows = []
    for budget in BUDGETS:
        kept, complete, tokens, started = 0.0, 0, 0.0, time.perf_counter()
        seconds = 0.0
        for ranked, schema, cases in filters:
            for question, gold in cases:
                begun = time.perf_counter()
                chosen = ranked.choose(question, budget) if not ranked.fits(budget) else None
                seconds += time.perf_counter() - begun
                tokens += len(render(schema, "ddl", chosen)) / CHARS_PER_TOKEN
                columns = gold.columns if chosen is None else gold.columns & chosen.columns
                has_tables = chosen is None or gold.tables <= chosen.tables
                kept += len(columns) / len(gold.columns) if gold.columns else float(has_tables)
                complete += has_tables and columns == gold.columns
        row = (budget, tokens / count, kept / count, complete / count, 1000 * seconds / count)
        table.add_row(
            f"{budget:,}", f"{row[1]:,.0f}", f"{100 * row[2]:.1f} %", f"{100 * row[3]:.1f} %", f"{row[4]:.1f}"
        )
        rows.append(row)
    console.print(table)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(f"Index made in {built:.1f} s; the process has {memory:,.0f} MiB at most.\n")
    return {"title": title, "rows": rows}


def write_bird(
    folder: Path, groups: Sequence[Sequence[dict[str, Any]]], rows: Sequence[dict[str, Any]], source: Path
) -> None:
    """Write the databases of each group as one, and the questions, in BIRD's layout."""
    home: dict[str, str] = {}
    for place, group in enumerate(groups):
        name = f"joined_{place}" if len(group) > 1 else group[0]["db_id"]
        home |= {entry["db_id"]: name for entry in group}
        descriptions = folder / "dev_databases" / name / "database_description"
        descriptions.mkdir(parents=True)
        with contextlib.closing(sqlite3.connect(descriptions.parent / f"{name}.sqlite")) as connection:
            for entry in group:
                schema = described(entry)
                connection.executescript(render(schema, "ddl"))
                file = source / "database" / entry["db_id"] / f"{entry['db_id']}.sqlite"
                if file.is_file():
                    connection.execute("ATTACH ? AS source", (str(file),))
                for table in schema.tables:
                    names = ", ".join(quoted(column.name) for column in table.columns)
                    if file.is_file():
                        connection.execute(
                            f"INSERT OR IGNORE INTO main.{quoted(table.name)} ({names})"
                            f" SELECT {names} FROM source.{quoted(table.name)} LIMIT {ROWS}"
                        )
                    with (descriptions / f"{table.name}.csv").open("w", newline="", encoding="utf-8") as out:
                        lines = [(column.name, column.description) for column in table.columns]
                        csv.writer(out).writerows([("original_column_name", "column_description"), *lines])
                connection.commit()
                if file.is_file():
                    connection.execute("DETACH source")
    questions = [
        {
            **{"question_id": place, "db_id": home[row["db_id"]], "question": row["question"]},
            **{"evidence": row.get("evidence", ""), "SQL": row.get("query") or row["SQL"], "difficulty": "simple"},
        }
        for place, row in enumerate(rows)
    ]
    (folder / "dev.json").write_text(json.dumps(questions), encoding="utf-8")


def unfit(entries: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]], source: Path) -> list[dict[str, Any]]:
    """Print, and return, how many prompts of each recipe do not fit."""
    groups: list[list[dict[str, Any]]] = []
    for entry in entries:  # a database joins the first group with none of its tables' names
        names = {name.lower() for name in entry["table_names_original"]}
        fitting = (
            group for group in groups if not names & {t.lower() for one in group for t in one["table_names_original"]}
        )
        (group := next(fitting, [])).append(entry)
        if len(group) == 1:
            groups.append(group)
    worlds = {"own database": [[entry] for entry in entries], "joined": groups}
    widths = [sum(len(entry["column_names_original"]) - 1 for entry in group) for group in groups]
    title = f"{len(rows)} questions of {len(entries)} databases, or of {len(groups)} joined ones with "
    table = Printed(title=title + f"{', '.join(map(str, widths))} columns: prompts that do not fit")
    for heading in ("recipe", "tokens", *(f"{world}, {view}" for world in worlds for view in ("whole", "filtered"))):
        table.add_column(heading, justify="left" if heading == "recipe" else "right")
    found = []
    with tempfile.TemporaryDirectory() as temporary:
        for world, joined in worlds.items():
            write_bird(Path(temporary) / world, joined, rows, source)
        for name in RECIPES:
            limit = recipes.load(name, []).evaluation.sampling.episode_tokens
            counts: list[int | None] = []
            for world in worlds:
                test = {"kind": "bird", "name": "bird_dev", "split": "dev", "path": str(Path(temporary) / world)}
                for settings in ([], FILTER):
                    recipe = recipes.load(name, [f"data.test={json.dumps([test])}", *settings])
                    if settings and recipes.load(name, []).protocol.schema_view != "full":
                        counts.append(None)  # its prompt shows no schema
                        continue
                    (step,) = graph.plan(recipe, store := Store(Path(temporary) / "store"), "test", among=("test",))
                    folder = stage_making.execute(step, recipe, store, Silent(), [step]).folder
                    counts.append(sum(pool.unfit for pool in prompt_fit.count_prompts(recipe, {"test": folder})))
            table.add_row(name, f"{limit:,}", *("–" if count is None else str(count) for count in counts))
            found.append({"recipe": name, "tokens": limit, "unfit": counts})
    Console(width=120).print(table)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="?", type=Path, help="a benchmark's tables.json")
    parser.add_argument("questions", nargs="*", type=Path, help="its files of questions")
    parser.add_argument("--recipes", action="store_true", help="count the prompts that do not fit, recipe by recipe")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    console = Console(width=100)
    if arguments.tables is None:
        schema, cases = warehouse(random.Random(arguments.seed), 500)
        title = f"a warehouse of {len(schema.tables):,} tables"
        print(json.dumps(curve(title, [(schema, cases)], console)))
        return
    entries = {entry["db_id"]: entry for entry in json.loads(arguments.tables.read_text(encoding="utf-8"))}
    rows = [row for path in arguments.questions for row in json.loads(path.read_text(encoding="utf-8"))]
    rows = [row for row in rows if row["db_id"] in entries]
    if arguments.recipes:
        asked = {row["db_id"] for row in rows}
        chosen = [entry for name, entry in entries.items() if name in asked]
        print(json.dumps(unfit(chosen, rows, arguments.tables.parent)))
        return
    own = {name: described(entry) for name, entry in entries.items()}
    examples = [
        Example(
            str(place), row["question"], Database(row["db_id"], "sqlite", row["db_id"]), row.get("query") or row["SQL"]
        )
        for place, row in enumerate(rows)
    ]
    found = prompt_schema.gold_items(examples, lambda database: own[database.id])
    gold = [(example.database.id, example.question, found[example.id]) for example in examples]
    apart = [
        (schema, [(question, items) for of, question, items in gold if of == name and items])
        for name, schema in own.items()
    ]
    # As one database, tables have a number before their names: it says nothing to a question.
    numbers = {name: f"d{place}_" for place, name in enumerate(entries)}
    union = Schema(tuple(table for name, entry in entries.items() for table in described(entry, numbers[name]).tables))
    together = [
        (
            question,
            SchemaItems(
                frozenset(numbers[of] + table for table in items.tables),
                frozenset((numbers[of] + table, column) for table, column in items.columns),
            ),
        )
        for of, question, items in gold
        if items
    ]
    results = [
        curve("its own database", [(schema, cases) for schema, cases in apart if cases], console),
        curve("all databases as one", [(union, together)], console),
    ]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
