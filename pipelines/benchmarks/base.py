"""The common part of all readers: the dispatch by kind, the selection of examples, declared layouts, the gold check.

A reader is one file with one function, `(source, seed, root) -> Loaded`. It looks at structure only: a bad row
is rejected with a reason and the reading goes on; a missing file is a `DataError`. It may give its examples one at a
time, so that a file of millions of rows is never whole in memory. Gold SQL is run by `check_gold`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipelines.benchmarks import corrections
from pipelines.core.errors import DataError
from pipelines.core.registry import DIALECTS, READERS
from pipelines.core.rows import good_rows
from pipelines.core.text_files import read_json_text
from pipelines.core.types import (
    GOLD_SQLS,
    BadRow,
    Database,
    Example,
    ExecutionResult,
    ExecutionStatus,
    gold_queries,
    is_plain_name,
    text_field,
)
from pipelines.recipe.config import Source
from pipelines.sql.dialects.dialect import has_password

if TYPE_CHECKING:
    import polars as pl

    from pipelines.sql.engine import SqlEngine

EMPTY = "gold_empty"  # the reason of `check_gold` that is not a fault
UNUSED_CORRECTION = "unused_correction"  # the reason of a correction that is of no question
DUPLICATE_ID = "duplicate_id"  # the reason of a row whose id an earlier row of its source or its pool has
HIDDEN_SQL = "its SQL is not repeated here, for the database has hidden parts"
JsonObject = dict[str, Any]
PROBE_SQL = "SELECT 1"  # looks for the database, if the gold is a result and not a query


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A row that did not become an example."""

    row: str  # its place: "dev.json[12]", "questions.jsonl:4".
    reason: str  # a short stable word ("missing_database", "empty_question", ...).
    detail: str  # the reason in a line, for a person.
    # Whether it counts among the rows that a source's levels and count choose. Nobody can know which of the rejected
    # rows they would have chosen, so as large a share of them counts as of the good rows.
    chosen: bool = True


@dataclasses.dataclass
class Loaded:
    """The content of a source: good examples in its order, and the rejected rows."""

    examples: Iterable[Example]  # a list, or an iterator that can be walked once.
    quarantine: list[Rejected]  # rejected rows; complete as soon as the examples have been walked.


@dataclasses.dataclass
class Questions(Loaded):
    """The examples that a source's levels and count choose, all in memory."""

    examples: list[Example]


def read(source: Source, seed: int, root: Path) -> Questions:
    """Read a source, keep the levels and the count that it asks for, and put its databases within reach of `root`.

    Args:
        seed: decides which `count` examples are taken (and the miniature's world).
        root: the data stage's folder. Files are linked or made under `root/databases`, and an example's location is
            relative to `root`: no record holds a path of this machine. `resolve_locations` makes them absolute.
    """
    loaded = load(source, seed, root)
    examples = with_hardness(list(loaded.examples))
    rows, rejected = choose_rows(selection_frame(examples), loaded.quarantine, source, seed)
    chosen = [examples[row] for row in rows]
    return Questions(chosen, rejected)


def load(source: Source, seed: int, root: Path) -> Loaded:
    """The examples of a source's reader, with corrected gold SQL; the arguments are those of `read`."""
    loaded: Loaded = READERS[source.kind].read(source, seed, root)
    if source.corrections is None:
        return loaded

    def unused(line: str, name: str) -> None:
        detail = f"a correction of {name}, and this source has no such question"
        loaded.quarantine.append(Rejected(line, UNUSED_CORRECTION, detail, chosen=False))

    path = Path(source.corrections).expanduser()
    corrected = corrections.correct(loaded.examples, path, unused)
    return Loaded(corrected, loaded.quarantine)


def selection_frame(examples: Sequence[Example]) -> pl.DataFrame:
    """What `choose_rows` looks at: the `id`, `hardness` and conversation (`interaction`, or null) of each example."""
    import polars as pl

    columns = {
        "id": [example.id for example in examples],
        "hardness": [example.hardness for example in examples],
        "interaction": [example.meta.get("interaction") for example in examples],
    }
    return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))


def choose_rows(
    frame: pl.DataFrame, rejected: Sequence[Rejected], source: Source, seed: int
) -> tuple[pl.Series, list[Rejected]]:
    """The rows of a source that its levels and its count choose, rising, and all rejected rows.

    The first of several rows with one id counts. A count takes conversations whole.

    Args:
        frame: the `selection_frame` of all examples, in order.
        rejected: rows that the reader rejected.
    """
    ids = frame["id"]
    is_first = ids.is_first_distinct()
    all_rejected = list(rejected)
    for id in ids.filter(~is_first):
        all_rejected.append(Rejected(id, DUPLICATE_ID, "another row has the same id"))
    good = is_first.arg_true()
    rows = good
    if source.hardness is not None:
        is_of_level = frame["hardness"].gather(good).is_in(list(source.hardness))
        rows = good.filter(is_of_level)
    if source.count is not None and source.count < len(rows):
        interactions = frame["interaction"].gather(rows)
        indices = _draw(interactions, source.count, random.Random(f"{seed}/count"))
        rows = rows.gather(indices)
    return rows, mark_chosen(all_rejected, len(rows), len(good))


def _draw(interactions: pl.Series, count: int, rng: random.Random) -> list[int]:
    """The indices of `count` questions, rising; of conversations as many whole ones as `count` has room for.

    A conversation of which some questions are missing has no interaction match. Where all are longer than `count`, it
    is the beginning of one.

    Args:
        interactions: the conversation of each question, null for a single one.
        count: fewer than there are questions.
    """
    all_indices = range(len(interactions))
    if interactions.null_count() == len(interactions):
        return sorted(rng.sample(all_indices, count))
    members_of: dict[str | int, list[int]] = {}
    for index, interaction in enumerate(interactions):
        name = index if interaction is None else interaction
        members_of.setdefault(name, []).append(index)
    conversations = list(members_of.values())
    rng.shuffle(conversations)
    chosen: list[int] = []
    for members in conversations:
        if len(chosen) + len(members) <= count:
            chosen += members
    if not chosen:
        chosen = conversations[0][:count]
    return sorted(chosen)


def mark_chosen(rejected: list[Rejected], chosen: int, good: int) -> list[Rejected]:
    """Rejected rows, as large a share of them marked as chosen as of the good ones, evenly through the file.

    A row that never counts among the chosen ones stays so.

    Args:
        chosen, good: the numbers of good rows that are chosen, and of all good rows.
    """
    if chosen == good:
        return rejected
    candidates = [row for row in rejected if row.chosen]
    never_chosen = [row for row in rejected if not row.chosen]
    marked = []
    for index, row in enumerate(candidates):
        chosen_before = index * chosen // good
        chosen_with_it = (index + 1) * chosen // good
        marked.append(dataclasses.replace(row, chosen=chosen_with_it > chosen_before))
    return marked + never_chosen


def files(source: Source) -> Iterator[Path] | None:
    """The files that a source's reader reads, the databases that its questions name among them, there or not.

    None if the reader declares no `files`. A stage's key holds their digests: a file that a reader reads and does not
    name can change without notice.
    """
    reader = READERS[source.kind]
    if reader.files is None:
        return None
    paths = iter(reader.files(source))
    if source.corrections is None:
        return paths
    path = Path(source.corrections).expanduser()
    return itertools.chain(paths, [path])


def addresses(source: Source) -> Iterator[str]:
    """The addresses of servers that a source's options name, and those that its reader declares (`addresses`).

    An address without a database stands for all databases of that server.
    """
    for value in source.options.values():
        if isinstance(value, str) and "://" in value:
            yield value
    reader = READERS[source.kind]
    if reader.addresses is not None:
        yield from reader.addresses(source)


def resolve_locations(examples: Iterable[Example], root: Path) -> list[Example]:
    """The same examples with absolute locations, ready to be executed; connection strings stay as they are."""
    resolved = []
    for example in examples:
        database = example.database
        if not DIALECTS[database.engine].is_server:
            database = dataclasses.replace(database, location=str(root / database.location))
            example = dataclasses.replace(example, database=database)
        resolved.append(example)
    return resolved


def check_gold(
    examples: Sequence[Example], engine: SqlEngine, root: Path, drop_empty: bool = False
) -> tuple[list[Example], list[Rejected]]:
    """Run every gold SQL and separate the examples whose gold runs from those whose gold fails.

    A database that cannot be reached has another reason than a gold SQL that is wrong. An empty result is no failure.
    If the gold is a result (Spider 2.0) there may be no gold SQL: then only the database is looked for. A further gold
    query that fails is noted, and its example stays. If the database has hidden parts, no detail quotes SQL, which may
    name them.

    Args:
        root: the folder that the examples' locations are relative to.
        drop_empty: reject examples whose gold SQL returns nothing, too (MTIR-SQL, 4.1), as `EMPTY`.
    """
    jobs = []
    for example in resolve_locations(examples, root):
        sql = example.gold_sql or PROBE_SQL
        jobs.append((example.database, sql))
    results = engine.execute_many(jobs, max_rows=1)
    good: list[Example] = []
    rejected: list[Rejected] = []
    for example, (database, _), result in zip(examples, jobs, results, strict=True):
        is_empty = result.ok and not result.rows
        if result.ok and not (drop_empty and is_empty):
            good.append(example)
            continue
        quoted_sql = HIDDEN_SQL if engine.hides(database) else example.gold_sql
        rejected.append(_failed_gold(example, result, quoted_sql))
    with_further_gold = [example for example in good if GOLD_SQLS in example.meta]
    notes = _failed_further_gold(resolve_locations(with_further_gold, root), engine)
    return good, rejected + notes


def _failed_gold(example: Example, result: ExecutionResult, quoted_sql: str) -> Rejected:
    """The reason to reject an example by the result of its gold SQL."""
    if result.ok:
        return Rejected(example.id, EMPTY, quoted_sql)
    status = result.status.value
    reason = f"gold_{result.error_class or status}"
    if result.status is ExecutionStatus.UNAVAILABLE:
        reason = "database_unavailable"
    return Rejected(example.id, reason, f"{result.error or status}: {quoted_sql}")


def _failed_further_gold(examples: Sequence[Example], engine: SqlEngine) -> list[Rejected]:
    """A note on each further gold query that gives no result, which verdicts leave out; it counts as no bad row."""
    jobs = []
    ids = []
    for example in examples:
        for sql in example.annotations.gold_sqls:
            jobs.append((example.database, sql))
            ids.append(example.id)
    if not jobs:
        return []
    results = engine.execute_many(jobs, max_rows=1)
    notes = []
    for id, (database, sql), result in zip(ids, jobs, results, strict=True):
        if result.ok:
            continue
        status = result.status.value
        reason = f"further_gold_{result.error_class or status}"
        quoted_sql = HIDDEN_SQL if engine.hides(database) else sql
        error = result.error or status
        detail = f"the question stays, without its further gold query: {error}: {quoted_sql}"
        notes.append(Rejected(id, reason, detail, chosen=False))
    return notes


def source_folder(source: Source) -> Path:
    """The folder that a benchmark's source points to."""
    if not source.path:
        raise DataError(f"a {source.kind} source needs a path", "Set it, such as data.rl.0.path=FOLDER")
    folder = Path(source.path).expanduser()
    if not folder.exists():
        hint = f"It is the path of a {source.kind} source"
        raise DataError(f"no such file or folder: {folder}", hint)
    return folder


def read_objects(path: Path, hint: str) -> list[JsonObject]:
    """The JSON objects in a file of JSON lines; DataError if a row is none."""
    rows = [row.value for row in good_rows(path, hint=hint)]
    if not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} holds something else than objects", hint)
    return rows


def by_name(rows: Iterable[JsonObject], field: str, path: Path) -> dict[str, JsonObject]:
    """The rows of a benchmark's file by the name that each has in a field; DataError for a name that two rows have."""
    named: dict[str, JsonObject] = {}
    for row in rows:
        name = str(row.get(field))
        if name in named:
            raise DataError(f"{path} has two rows of {field} {name!r}", "Take one of them out.")
        named[name] = row
    return named


def link_database(target: Path, root: Path, source: Source, namespace: str = "") -> str:
    """Link a benchmark's database under `root` and return its location relative to `root`.

    The folder's name comes from the path as the recipe writes it, so that sources with equal file names do not clash;
    if another file is linked there already, the next one gets a folder of its own.

    Args:
        namespace: tells databases with equal file names within the source.
    """
    file = target.resolve()
    number = 0
    while True:
        name = f"{source.path}\0{namespace}"
        if number:
            name += f"\0{number}"
        digest = hashlib.sha256(name.encode()).hexdigest()[:6]
        location = Path("databases") / f"{source.kind}_{digest}" / target.name
        symlink = root / location
        if not symlink.is_symlink():
            symlink.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(file, symlink)
        if symlink.readlink() == file:
            return str(location)
        number += 1


def collect_examples(rows: Iterable[tuple[str, Any]], make: Callable[[Any], Example]) -> Loaded:
    """Make an example of each (name, row) as they are asked for; a `BadRow` goes to quarantine under that name."""
    quarantine: list[Rejected] = []

    def examples() -> Iterator[Example]:
        for name, row in rows:
            try:
                example = make(row)
            except BadRow as bad:
                quarantine.append(Rejected(name, bad.reason, bad.detail))
            else:
                yield example

    return Loaded(examples(), quarantine)


def distinct_texts(rows: Iterable[Any], *fields: str) -> list[str]:
    """The different texts in the first of these fields that a row has, sorted; rows without one are skipped."""
    texts = set()
    for row in rows:
        with contextlib.suppress(BadRow):  # the reader rejects the row with a reason
            texts.add(text_field(row, *fields))
    return sorted(texts)


def split_files(folder: Path, name: str, hint: str) -> list[Path]:
    """A split's file of each database, in the folders of their names; else the one file in the folder itself."""
    paths = sorted(folder.glob(f"*/{name}"))
    if not paths and (folder / name).is_file():
        paths = [folder / name]
    if not paths:
        raise DataError(f"no {name} under {folder}", hint)
    return paths


def check_plain(id: str) -> None:
    """Reject a database's name that could lead out of its folder or address."""
    if not is_plain_name(id):
        raise BadRow("bad_database_id", f"{id!r} is not a plain name")


def check_address(address: str) -> None:
    """Reject an address with a password in it."""
    if has_password(address):
        detail = "a password in an address would be kept in datasets: use PGPASSWORD, MYSQL_PWD or a password file"
        raise BadRow("password_in_address", detail)


def find_database(id: str, candidates: Callable[[str], Sequence[Path]]) -> Path:
    """The SQLite file of a database: the first candidate, or another existing one if the first is bad."""
    check_plain(id)
    first, *others = candidates(id)
    try:
        check_file(first)
    except BadRow:
        for other in others:
            if other.is_file():
                check_file(other)
                return other
        raise
    return first


def check_file(path: Path) -> None:
    """Look at an SQLite file's first bytes."""
    try:
        if not path.is_file():
            raise BadRow("missing_database", f"no such file: {path}")
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise BadRow("unreadable_database", f"cannot read {path}: {error.strerror}") from None
    if head not in (b"SQLite format 3\0", b""):
        raise BadRow("not_a_database", f"{path} is not an SQLite file")


class QuestionFile(NamedTuple):
    """A JSON list of questions."""

    path: Path
    title: str  # its name in the places of rejected rows.
    stem: str  # its part of the questions' ids.


class NumberedRow(NamedTuple):
    """A row of a question file."""

    place: str  # its place in the file: "dev.json[12]".
    number: str  # the end of its question's id, if the row has no id.
    row: Any


@dataclasses.dataclass(frozen=True)
class Layout:
    """A source whose questions are rows of JSON lists: its files, and the fields of a row."""

    name: str  # the benchmark's name: the questions' source, and the begin of their ids.
    hint: str  # the layout in one line, for a person whose files differ.
    files: Sequence[QuestionFile]
    databases: Callable[[str], Sequence[Path]]  # id -> the files that may hold the database, the likeliest first.
    question: str = "question"
    sql: tuple[str, ...] = ("query",)
    id: str | None = None  # the field with a question's id; null takes its file and number.
    on_server: Callable[[str], Database] | None = None  # id -> a server's database; None reads SQLite files.
    main_folder: str | None = None  # The one of several folders of databases whose files need no folder of their own.
    skip: Callable[[Any], bool] = lambda row: False  # row -> whether it is no question to learn from.
    turns: Callable[[Any], Iterable[Any]] | None = None  # entry -> its rows, if entries are conversations.
    described_by: Callable[[str], Iterable[Path]] = lambda id: ()  # id -> the files that describe the database.

    def rows(self) -> Iterator[NumberedRow]:
        """Each row with its place and its number."""
        for path, title, stem in self.files:
            entries = read_json_text(path, self.hint)
            if not isinstance(entries, list):
                raise DataError(f"{path} holds a {type(entries).__name__}, not a list of questions", self.hint)
            for index, entry in enumerate(entries):
                if self.turns is None:
                    yield NumberedRow(f"{title}[{index}]", f"{stem}_{index}", entry)
                    continue
                for turn, row in enumerate(self.turns(entry)):
                    yield NumberedRow(f"{title}[{index}][{turn}]", f"{stem}_{index}_{turn}", row)

    def paths(self) -> Iterator[Path]:
        """The question files, and the databases that they name with the files that describe them."""
        for file in self.files:
            yield file.path
        rows = (numbered.row for numbered in self.rows())
        for id in distinct_texts(rows, "db_id"):
            if not is_plain_name(id):
                continue
            if self.on_server is None:
                yield from self.databases(id)
            yield from self.described_by(id)

    def read(self, source: Source, root: Path, finish: Callable[[Example, Any], Example] | None = None) -> Loaded:
        """The questions; `finish` adds the fields of a row that only this benchmark has."""

        def make(numbered: NumberedRow) -> Example:
            row = numbered.row
            number = numbered.number
            if self.id is not None:
                number = text_field(row, self.id)
            database_id = text_field(row, "db_id")
            question = text_field(row, self.question)
            sql, meta = gold_queries(row, *self.sql)
            example = Example(
                id=f"{self.name}_{number}",
                question=question,
                database=self._database(database_id, source, root),
                gold_sql=sql,
                source=self.name,
                meta=meta,
            )
            if finish is None:
                return example
            return finish(example, row)

        return collect_examples(self._named_questions(), make)

    def _named_questions(self) -> Iterator[tuple[str, NumberedRow]]:
        """Each row that is a question, behind its place."""
        for numbered in self.rows():
            if not self.skip(numbered.row):
                yield numbered.place, numbered

    def _database(self, id: str, source: Source, root: Path) -> Database:
        """The database of that id: a server's, or a file that is linked under `root`."""
        if self.on_server is not None:
            check_plain(id)
            return self.on_server(id)
        path = find_database(id, self.databases)
        folder = path.parent.parent.name
        namespace = ""
        if self.main_folder not in (None, folder):  # databases of two folders may have one name
            namespace = folder
        location = link_database(path, root, source, namespace)
        return Database(id, "sqlite", location)


def with_hardness(examples: list[Example]) -> list[Example]:
    """The examples with a level each; those whose source gives none get their gold SQL's."""
    without_level = [example for example in examples if example.hardness is None]
    if not without_level:
        return examples
    from pipelines.sql import analyst

    queries = [(example.gold_sql, "sqlite") for example in without_level]
    levels = iter(analyst.hardness(queries))
    with_level = []
    for example in examples:
        if example.hardness is None:
            example = dataclasses.replace(example, hardness=next(levels))
        with_level.append(example)
    return with_level
