"""Reads LiveSQLBench Base-Lite, BIRD-Interact's mini-interact and BIRD-Critic, all for SQLite, from their own layouts.

    <path>/livesqlbench_data_sqlite.jsonl     instance_id, selected_database, query, category, difficulty_tier,
                                              conditions, preprocess_sql, clean_up_sqls; of mini_interact.jsonl also
                                              amb_user_query, user_query_ambiguity, knowledge_ambiguity
    <path>/*_gt*.jsonl or *_GTs*.jsonl        instance_id, sol_sql, test_cases: sent by e-mail, not in the public file
    <path>/<db>/<db>_template.sqlite          the database, or <db>.sqlite where there is none
    <path>/<db>/<db>_kb.jsonl                 id, knowledge, description, definition: what its words mean
    <path>/<db>/<db>_column_meaning_base.json what its columns mean

BIRD-Critic's question file has db_id for selected_database, and issue_sql, the SQL that does not do what its user
wants; its databases lie in <path>/database/, without knowledge and meanings.

The databases are given on the engine `sqlite_stateful`, and `pipelines/sql/equalities/official.py` decides on answers
(equality `livesqlbench`). Test cases are Python functions. They are never run: a question that changes data is decided
by what it makes of the database, and a query with test cases of its own is rejected (`python_test_case`).
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.benchmarks import base
from pipelines.core.errors import DataError
from pipelines.core.registry import reader
from pipelines.core.text_files import read_json_text
from pipelines.core.types import BadRow, Database, Example, is_plain_name, text_field
from pipelines.recipe.config import Section, Source
from pipelines.sql.dialects.sqlite import SETUP_SUFFIX
from pipelines.sql.equalities.official import IN_ORDER
from pipelines.sql.lexical import writes

EQUALITY = "livesqlbench"
GOLD = re.compile(r".*_gts?(?:_.*)?\.jsonl", re.IGNORECASE)
HINT = (
    "The gold SQL and the test cases are not in the public file: write to bird.bench25@gmail.com, with the subject "
    '"[livesqlbench-base-lite-SQLite GT&Test Cases]", "[mini-interact GT&Test Cases]" or "[bird-critic-1 GT&Test '
    'Cases]", and put the file that comes back beside the questions'
)
ISSUE = "\n\nThe SQL that has the issue:\n"
# The calls of the published default test case. One that calls anything else is a test of its own.
DEFAULT_TEST = frozenset(("remove_comments", "remove_distinct", "remove_round", "ex_base"))
KNOWLEDGE, MEANINGS = "_kb.jsonl", "_column_meaning_base.json"
Row = Mapping[str, Any]


class FileLayout(NamedTuple):
    """The name of a benchmark's question file, the fields of question and database, and the databases' folder."""

    file: str
    question: str = "query"
    database: str = "selected_database"
    folder: str = ""


LAYOUTS = {
    "livesqlbench": FileLayout("livesqlbench_data_sqlite.jsonl"),
    "mini_interact": FileLayout("mini_interact.jsonl", question="amb_user_query"),
    "bird_critic": FileLayout("sqlite-00000-of-00001.jsonl", database="db_id", folder="database"),
}


class LiveSqlBenchOptions(Section):
    """The files that are read, and the parts of the evidence."""

    # the file with gold SQL and test cases, relative to the path; null takes the one whose name has `_gt_`.
    gold: str | None = None
    # whether questions that change data are decided by the state of the database; false rejects those whose test case
    # is a Python function, which leaves what the official script decides in the same way.
    state: bool = True
    knowledge: bool = True  # whether the database's own knowledge is in the evidence.
    meanings: bool = True  # whether the meanings of all columns are in the evidence.


def livesqlbench_files(source: Source) -> Iterator[Path]:
    """The questions, their gold SQL, and the databases that they name with their knowledge and meanings."""
    options, folder = LiveSqlBenchOptions.model_validate(source.options), base.source_folder(source)
    layout = LAYOUTS[source.kind]
    home = folder / layout.folder
    yield folder / layout.file
    yield from _gold(folder, options)
    rows = base.read_objects(folder / layout.file, HINT)
    for name in filter(is_plain_name, base.distinct_texts(rows, layout.database)):
        yield _database(home, name)
        yield from (home / name / f"{name}{end}" for end in (KNOWLEDGE, MEANINGS))


@reader("livesqlbench", options=LiveSqlBenchOptions, files=livesqlbench_files, equality=EQUALITY)
@reader("mini_interact", options=LiveSqlBenchOptions, files=livesqlbench_files, equality=EQUALITY)
@reader("bird_critic", options=LiveSqlBenchOptions, files=livesqlbench_files, equality=EQUALITY)
def read_livesqlbench(source: Source, seed: int, root: Path) -> base.Loaded:
    """The questions in the file's order; `meta` has the ambiguities that a simulated user knows of."""
    options = LiveSqlBenchOptions.model_validate(source.options)
    folder, layout = base.source_folder(source), LAYOUTS[source.kind]
    home = folder / layout.folder
    gold: dict[str, Any] = {}
    for path in _gold(folder, options):
        gold |= base.by_name(base.read_objects(path, HINT), "instance_id", path)
    evidence_of = functools.cache(_evidence)

    def make(row: Any) -> Example:
        id, name = text_field(row, "instance_id"), text_field(row, layout.database)
        question, issue = text_field(row, layout.question), _script(row, "issue_sql")
        if not is_plain_name(name) or not is_plain_name(id):
            raise BadRow("bad_database_id", f"{name!r} or {id!r} is not a plain name")
        setup = _script(row, "preprocess_sql")
        path = _database(home, name)
        base.check_file(path)
        place = base.link(path, root, source)
        if setup:  # a question whose script must prepare the database has a link of its own
            own = Path(place).parent / id / path.name
            (root / own).parent.mkdir(exist_ok=True)
            (root / own).unlink(missing_ok=True)
            (root / own).symlink_to(path.resolve())
            (root / f"{own}{SETUP_SUFFIX}").write_text(setup, encoding="utf-8")
            place = str(own)
        # The vague words of a question: each with its meaning in SQL, its kind, whether an answer depends on it, and
        # the number of the knowledge that was taken out.
        marked = row.get("user_query_ambiguity")
        by_name = {**marked, **row} if isinstance(marked, dict) else row
        groups = ((True, "critical_ambiguity"), (False, "non_critical_ambiguity"), (True, "knowledge_ambiguity"))
        ambiguities = [
            {
                "term": mark["term"],
                "means": mark["sql_snippet"],
                "kind": str(mark.get("type", "")),
                "critical": critical,
                "deleted": mark.get("deleted_knowledge"),
            }
            for critical, group in groups
            for mark in _marks(by_name, group)
        ]
        hidden = frozenset(mark["deleted"] for mark in ambiguities if isinstance(mark["deleted"], int))
        meta: dict[str, Any] = {"difficulty": f"{row.get('category', '')} {row.get('difficulty_tier', '')}".strip()}
        meta |= {"setup": setup} if setup else {}
        meta |= {"ambiguities": ambiguities} if source.kind == "mini_interact" else {}
        answer = {**row, **gold.get(id, {})}
        sql = _script(answer, "sol_sql")
        if not sql:
            raise BadRow("missing_gold", "no gold SQL: it is not in the public file")
        changes, tests = writes(sql), map(str, _listed(answer.get("test_cases")))
        own_tests = [test for test in tests if set(re.findall(r"(\w+)\s*\(", test)) - {"test_case"} != DEFAULT_TEST]
        if own_tests and not (options.state and changes):
            raise BadRow("python_test_case", "its test case is a Python function, which is never run")
        conditions = answer.get("conditions")
        if isinstance(conditions, dict) and conditions.get("order") is True and not changes:
            sql = IN_ORDER + sql
        evidence = evidence_of(home / name / name, hidden, options.knowledge, options.meanings)
        question += ISSUE + issue if issue else ""
        database = Database(name, "sqlite_stateful", place)
        return Example(f"{source.kind}_{id}", question, database, sql, evidence, source=source.kind, meta=meta)

    file = folder / layout.file
    rows = enumerate(base.read_objects(file, HINT))
    return base.collect(((f"{file.name}[{index}]", row) for index, row in rows), make)


def _gold(folder: Path, options: LiveSqlBenchOptions) -> list[Path]:
    """The file with gold SQL; none where the question file has been joined with it."""
    if options.gold is not None:
        return [folder / options.gold]
    paths = sorted(path for path in folder.glob("*.jsonl") if GOLD.fullmatch(path.name))
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise DataError(f"{folder} has several gold files: {names}", "Say which by options.gold=NAME.")
    return paths


def _database(folder: Path, name: str) -> Path:
    template = folder / name / f"{name}_template.sqlite"
    return template if template.is_file() else folder / name / f"{name}.sqlite"


def _script(row: Row, field: str) -> str:
    """The statements of a field, which is a list of texts, as one script."""
    value = row.get(field) or []
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise BadRow("wrong_type", f"{field} is no list of texts")
    return ";\n".join(part.strip().rstrip(";").rstrip() for part in parts if part.strip())


def _listed(value: Any) -> list[Any]:
    """A list as it is, nothing as an empty one, anything else as its one item."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _marks(row: Row, group: str) -> list[Row]:
    """A group of a question's vague words; BadRow for one without words or meaning, which nobody can tell."""
    marks = _listed(row.get(group))
    for mark in marks:
        if not isinstance(mark, dict) or not all(isinstance(mark.get(name), str) for name in ("term", "sql_snippet")):
            raise BadRow("malformed_ambiguity", f"{group} has an entry without term or sql_snippet")
    return marks


def _evidence(stem: Path, hidden: frozenset[int], knowledge: bool, meanings: bool) -> str:
    """The database's knowledge but for the hidden part, and the meanings of its columns."""
    lines = []
    about = stem.with_name(stem.name + KNOWLEDGE)
    for row in base.read_objects(about, HINT) if knowledge and about.is_file() else ():
        if row.get("id") not in hidden:
            lines.append(f"{row.get('knowledge')} ({row.get('description')}): {row.get('definition')}")
    columns = stem.with_name(stem.name + MEANINGS)
    if meanings and columns.is_file():
        named_columns = read_json_text(columns, "It has the meanings of a database's columns.")
        for name, meaning in named_columns.items() if isinstance(named_columns, dict) else ():
            text = meaning if isinstance(meaning, str) else json.dumps(meaning, ensure_ascii=False)
            lines.append(f"{'.'.join(name.split('|')[-2:])}: {text}")
    return "\n".join(" ".join(line.split()) for line in lines)
