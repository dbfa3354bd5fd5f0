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
import logging
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

log = logging.getLogger(__name__)
EQUALITY = "livesqlbench"
GOLD = re.compile(r".*_gts?(?:_.*)?\.jsonl", re.IGNORECASE)
HINT = (
    "The gold SQL and the test cases are not in the public file: write to bird.bench25@gmail.com, with the subject "
    '"[livesqlbench-base-lite-SQLite GT&Test Cases]", "[mini-interact GT&Test Cases]" or "[bird-critic-1 GT&Test '
    'Cases]", and put the file that comes back beside the questions'
)
ISSUE = "\n\nThe SQL that has the issue:\n"
# Groups of a question's vague words, and whether an answer depends on them.
AMBIGUITY_GROUPS = {"critical_ambiguity": True, "non_critical_ambiguity": False, "knowledge_ambiguity": True}
# Calls of the published default test case; a test case with other calls is a test of its own.
DEFAULT_TEST = frozenset(("remove_comments", "remove_distinct", "remove_round", "ex_base"))
KNOWLEDGE = "_kb.jsonl"
MEANINGS = "_column_meaning_base.json"
Row = Mapping[str, Any]


class FileLayout(NamedTuple):
    """The name of a benchmark's question file, the fields of question and database, the databases' folder, and whether
    knowledge and meanings lie beside its databases.
    """

    file: str
    question: str = "query"
    database: str = "selected_database"
    folder: str = ""
    has_evidence: bool = True


LAYOUTS = {
    "livesqlbench": FileLayout("livesqlbench_data_sqlite.jsonl"),
    "mini_interact": FileLayout("mini_interact.jsonl", question="amb_user_query"),
    "bird_critic": FileLayout("sqlite-00000-of-00001.jsonl", database="db_id", folder="database", has_evidence=False),
}


class LiveSqlBenchOptions(Section):
    """The files that are read, and the parts of the evidence."""

    # the file with gold SQL and test cases, relative to the path; null takes the file whose name has `_gt_`.
    gold: str | None = None
    # whether questions that change data are decided by the state of the database; false rejects those whose test case
    # is a Python function, which leaves what the official script decides in the same way.
    state: bool = True
    knowledge: bool = True  # whether the database's own knowledge is in the evidence.
    meanings: bool = True  # whether the meanings of all columns are in the evidence.


def livesqlbench_files(source: Source) -> Iterator[Path]:
    """The questions, their gold SQL, and the databases that they name with their knowledge and meanings."""
    options = LiveSqlBenchOptions.model_validate(source.options)
    folder = base.source_folder(source)
    layout = LAYOUTS[source.kind]
    home = folder / layout.folder
    yield folder / layout.file
    yield from _gold(folder, options)
    rows = base.read_objects(folder / layout.file, HINT)
    for name in base.distinct_texts(rows, layout.database):
        if is_plain_name(name):
            yield _database_file(home, name)
            yield home / name / f"{name}{KNOWLEDGE}"
            yield home / name / f"{name}{MEANINGS}"


@reader("livesqlbench", options=LiveSqlBenchOptions, files=livesqlbench_files, equality=EQUALITY)
@reader("mini_interact", options=LiveSqlBenchOptions, files=livesqlbench_files, equality=EQUALITY)
@reader("bird_critic", options=LiveSqlBenchOptions, files=livesqlbench_files, equality=EQUALITY)
def read_livesqlbench(source: Source, seed: int, root: Path) -> base.Loaded:
    """The questions in the file's order; `meta` has the ambiguities that a simulated user knows of."""
    options = LiveSqlBenchOptions.model_validate(source.options)
    folder = base.source_folder(source)
    layout = LAYOUTS[source.kind]
    home = folder / layout.folder
    gold: dict[str, Any] = {}
    for path in _gold(folder, options):
        answers = base.read_objects(path, HINT)
        gold |= base.by_name(answers, "instance_id", path)
    evidence_of = functools.cache(_evidence)

    def make(row: Any) -> Example:
        id = text_field(row, "instance_id")
        name = text_field(row, layout.database)
        question = text_field(row, layout.question)
        issue = _joined_script(row, "issue_sql")
        if issue:
            question += ISSUE + issue
        if not is_plain_name(name) or not is_plain_name(id):
            raise BadRow("bad_database_id", f"{name!r} or {id!r} is not a plain name")
        setup = _joined_script(row, "preprocess_sql")
        path = _database_file(home, name)
        base.check_file(path)
        location = base.link_database(path, root, source)
        if setup:
            location = _link_with_setup(path, root, location, id, setup)
        if layout.has_evidence:
            _warn_of_missing_evidence(home / name / name, options.knowledge, options.meanings)
        ambiguities = _ambiguities(row)
        answer = {**row, **gold.get(id, {})}
        sql = _gold_script(answer, options)
        deleted = _deleted_knowledge(ambiguities)
        meta: dict[str, Any] = {"difficulty": _difficulty(row)}
        if setup:
            meta["setup"] = setup
        if source.kind == "mini_interact":
            meta["ambiguities"] = ambiguities
        evidence = evidence_of(home / name / name, deleted, options.knowledge, options.meanings)
        return Example(
            id=f"{source.kind}_{id}",
            question=question,
            database=Database(name, "sqlite_stateful", location),
            gold_sql=sql,
            evidence=evidence,
            source=source.kind,
            meta=meta,
        )

    rows = base.read_objects(folder / layout.file, HINT)
    named_rows = [(f"{layout.file}[{index}]", row) for index, row in enumerate(rows)]
    return base.collect_examples(named_rows, make)


def _link_with_setup(path: Path, root: Path, location: str, id: str, setup: str) -> str:
    """The location of a question's own link to a database, beside the script that must prepare it."""
    link = Path(location).parent / id / path.name
    link_path = root / link
    link_path.parent.mkdir(exist_ok=True)
    link_path.unlink(missing_ok=True)
    link_path.symlink_to(path.resolve())
    script = root / f"{link}{SETUP_SUFFIX}"
    script.write_text(setup, encoding="utf-8")
    return str(link)


def _ambiguities(row: Row) -> list[dict[str, Any]]:
    """The vague words of a question: each with its meaning in SQL, its kind, whether an answer depends on it, and the
    number of the knowledge that was taken out.
    """
    groups = row
    nested = row.get("user_query_ambiguity")
    if isinstance(nested, dict):
        groups = {**nested, **row}
    ambiguities = []
    for group, is_critical in AMBIGUITY_GROUPS.items():
        for mark in _marks(groups, group):
            ambiguity = {
                "term": mark["term"],
                "means": mark["sql_snippet"],
                "kind": str(mark.get("type", "")),
                "critical": is_critical,
                "deleted": mark.get("deleted_knowledge"),
            }
            ambiguities.append(ambiguity)
    return ambiguities


def _deleted_knowledge(ambiguities: list[dict[str, Any]]) -> frozenset[int]:
    """The numbers of the knowledge that was taken out for a question."""
    numbers = [ambiguity["deleted"] for ambiguity in ambiguities]
    return frozenset(number for number in numbers if isinstance(number, int))


def _difficulty(row: Row) -> str:
    category = row.get("category", "")
    tier = row.get("difficulty_tier", "")
    return f"{category} {tier}".strip()


def _gold_script(answer: Row, options: LiveSqlBenchOptions) -> str:
    """The gold SQL of a question that can be decided without its test cases."""
    sql = _joined_script(answer, "sol_sql")
    if not sql:
        raise BadRow("missing_gold", "no gold SQL: it is not in the public file")
    changes_data = writes(sql)
    tests = _listed(answer.get("test_cases"))
    has_own_test = any(_is_own_test(str(test)) for test in tests)
    if has_own_test and not (options.state and changes_data):
        raise BadRow("python_test_case", "its test case is a Python function, which is never run")
    conditions = answer.get("conditions")
    is_ordered = isinstance(conditions, dict) and conditions.get("order") is True
    if is_ordered and not changes_data:
        return IN_ORDER + sql
    return sql


def _is_own_test(test: str) -> bool:
    """Whether a test case calls anything else than the published default one."""
    calls = set(re.findall(r"(\w+)\s*\(", test))
    return calls - {"test_case"} != DEFAULT_TEST


def _gold(folder: Path, options: LiveSqlBenchOptions) -> list[Path]:
    """The file with gold SQL; [] if the question file has been joined with it."""
    if options.gold is not None:
        return [folder / options.gold]
    paths = sorted(path for path in folder.glob("*.jsonl") if GOLD.fullmatch(path.name))
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise DataError(f"{folder} has several gold files: {names}", "Say which by options.gold=NAME.")
    return paths


def _database_file(folder: Path, name: str) -> Path:
    template = folder / name / f"{name}_template.sqlite"
    if template.is_file():
        return template
    return folder / name / f"{name}.sqlite"


def _joined_script(row: Row, field: str) -> str:
    """The statements of a field, which is a list of texts, as one script."""
    texts = row.get(field) or []
    if isinstance(texts, str):
        texts = [texts]
    are_texts = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    if not are_texts:
        raise BadRow("wrong_type", f"{field} is no list of texts")
    statements = []
    for text in texts:
        statement = text_field({field: text}, field, required=False)
        if statement:
            statements.append(statement.rstrip(";").rstrip())
    return ";\n".join(statements)


def _listed(value: Any) -> list[Any]:
    """A list as it is, None as an empty list, anything else as its one item."""
    if value is None:
        return []
    if isinstance(value, list):
        return value
    return [value]


def _marks(row: Row, group: str) -> list[Row]:
    """A group of a question's vague words; BadRow for an entry without words or meaning."""
    marks = _listed(row.get(group))
    for mark in marks:
        fields = mark if isinstance(mark, dict) else {}
        term = fields.get("term")
        sql = fields.get("sql_snippet")
        if not isinstance(term, str) or not isinstance(sql, str):
            raise BadRow("malformed_ambiguity", f"{group} has an entry without term or sql_snippet")
    return marks


def _evidence(stem: Path, deleted: frozenset[int], knowledge: bool, meanings: bool) -> str:
    """The database's knowledge without the deleted entries, and the meanings of its columns.

    Args:
        stem: the begin of the paths of the database's files.
    """
    lines: list[str] = []
    if knowledge:
        knowledge_file = stem.with_name(stem.name + KNOWLEDGE)
        lines += _knowledge_lines(knowledge_file, deleted)
    if meanings:
        meanings_file = stem.with_name(stem.name + MEANINGS)
        lines += _meaning_lines(meanings_file)
    bare_lines = [" ".join(line.split()) for line in lines]
    return "\n".join(bare_lines)


@functools.cache  # many questions ask one database, and its user is warned once
def _warn_of_missing_evidence(stem: Path, knowledge: bool, meanings: bool) -> None:
    """Say which files of a database are missing, so that its evidence lacks them."""
    wanted = []
    if knowledge:
        wanted.append(("knowledge", KNOWLEDGE))
    if meanings:
        wanted.append(("meanings", MEANINGS))
    for option, suffix in wanted:
        path = stem.with_name(stem.name + suffix)
        if not path.is_file():
            log.warning("no such file: %s; evidence goes without it, as with options.%s=false", path, option)


def _knowledge_lines(path: Path, deleted: frozenset[int]) -> Iterator[str]:
    if path.is_file():
        for row in base.read_objects(path, HINT):
            if row.get("id") not in deleted:
                yield _knowledge_line(row)


def _knowledge_line(row: Row) -> str:
    """An entry's knowledge, description and definition; fields that it lacks are left out."""
    line = str(row.get("knowledge") or "")
    if row.get("description") is not None:
        line += f" ({row['description']})"
    if row.get("definition") is not None:
        line += f": {row['definition']}"
    return line


def _meaning_lines(path: Path) -> Iterator[str]:
    if not path.is_file():
        return
    hint = "It has the meanings of a database's columns; options.meanings=false reads none."
    named_columns = read_json_text(path, hint)
    if not isinstance(named_columns, dict):
        raise DataError(f"{path} holds no JSON object of columns and their meanings", hint)
    for name, meaning in named_columns.items():
        text = meaning
        if not isinstance(meaning, str):
            text = json.dumps(meaning, ensure_ascii=False)
        steps = name.split("|")
        table_and_column = ".".join(steps[-2:])
        yield f"{table_and_column}: {text}"
