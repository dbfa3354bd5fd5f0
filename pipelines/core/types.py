"""The nouns that every stage passes on: frozen records that round-trip through JSONL and Parquet.

No record holds a wall-clock time: the same recipe and seed must give the same bytes. Timings go to metrics files.
"""

import dataclasses
import enum
import functools
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar

import pydantic

from pipelines.core.errors import DataError
from pipelines.core.files import read_lines
from pipelines.core.registry import DIALECTS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Scalar = str | int | float | bytes | None

Say = Callable[[str], None]  # tells the user one line of progress, or a note
Message = tuple[str, str]  # (role, text); roles are "system", "user" and "assistant"
EngineName = Annotated[str, pydantic.AfterValidator(DIALECTS.check)]
History = Sequence[Sequence[str]]  # questions asked before, each with its SQL, "" for SQL that is not known
Hardness = Literal["easy", "medium", "hard", "extra"]
HARDNESS_LEVELS: tuple[Hardness, ...] = ("easy", "medium", "hard", "extra")
ABSTENTION = "SELECT 'unanswerable'"  # gold SQL, and answer, where the database has none for a question


def is_abstention(sql: str | None) -> bool:
    """Whether an answer is `ABSTENTION`, in whatever spaces and under whatever column name."""
    return bool(re.fullmatch(r"\s*(?i:select)\s+'unanswerable'(\s+(?i:as)\s+[^\s;]+)?[\s;]*", sql or ""))


@dataclasses.dataclass(frozen=True, slots=True)
class Database:
    """Where a question's answer lives."""

    id: str  # the benchmark's name for it ("concert_singer").
    engine: EngineName  # the dialect that reads it.
    location: str  # a file path (sqlite, duckdb) or a connection string (postgres).


@dataclasses.dataclass(frozen=True, slots=True)
class SchemaItems:
    """Tables and columns that a query reads, lower-cased."""

    tables: frozenset[str]  # table names.
    columns: frozenset[tuple[str, str]]  # (table, column) pairs; the table is "" if it could not be resolved.


@dataclasses.dataclass(frozen=True, slots=True)
class StoredValueFilter:
    """A stored value that a question asks for: the plan of a teacher's probe."""

    table: str
    column: str
    asked: str | None  # the question's word for the value; None if the source does not give it.
    stored: str  # the text that the database holds.


@dataclasses.dataclass(frozen=True, slots=True)
class Ambiguity:
    """A vague part of a question (LiveSQLBench's mini-interact)."""

    term: str  # the vague words of the question.
    means: str  # their meaning, as SQL.
    critical: bool  # whether the answer depends on it.


class AcceptedResults(TypedDict):
    """The gold of a question that result files decide (Spider 2.0)."""

    results: list[list[list[str]]]  # each accepted result: its header, then its rows, all cells as text.
    columns: list[list[int]]  # indices of the columns that count, for each result; [] if all of them count.
    ignore_order: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Annotations:
    """Knowledge of a question's source beside its gold SQL: fields of `Example.meta` under their own names."""

    difficulty: str = ""  # the benchmark's own level; "" if it gives none.
    interaction: str | None = None  # the conversation that the question belongs to; None for a single question.
    # questions of that conversation; None for a single question, or if the source does not tell.
    interaction_questions: int | None = None
    needs_probe: bool | None = None  # whether the answer needs a look at stored values; None if the source is silent.
    # Stored values that the question asks for; None if the source gives no such plan.
    filters: tuple[StoredValueFilter, ...] | None = None
    reads: Mapping[str, list[str]] | None = None  # columns that the gold SQL reads, by table; keys are left out.
    ambiguities: tuple[Ambiguity, ...] = ()
    gold_sqls: tuple[str, ...] = ()  # further gold queries: a match with any of them counts.
    gold_results: AcceptedResults | None = None  # accepted results in place of a gold query.
    # Texts ("sql", "question", "evidence") as they were published, with the "reason" of their correction.
    corrected: Mapping[str, str] | None = None

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> "Annotations":
        """The annotations among the fields of an example's `meta`."""
        return cls(
            difficulty=str(meta.get("difficulty", "")),
            interaction=meta.get("interaction"),
            interaction_questions=meta.get("interaction_questions"),
            needs_probe=meta.get("needs_probe"),
            filters=_filters_in_meta(meta.get("filters")),
            reads=meta.get("reads"),
            ambiguities=_ambiguities_in_meta(meta.get("ambiguities")),
            gold_sqls=tuple(meta.get(GOLD_SQLS, ())),
            gold_results=meta.get("gold_results"),
            corrected=meta.get("corrected"),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PromptContext:
    """The parts of a prompt that belong to one question: fields of `Example.meta` under their own names."""

    history: tuple[tuple[str, str], ...] = ()  # earlier questions, each with its SQL ("" if that is not known).
    # Stored values that the question mentions, as (table, column, value); None before they are looked up.
    values: tuple[tuple[str, str, str], ...] | None = None
    linked_schema: SchemaItems | None = None  # the schema linker's choice; None before it is asked.
    fitted_schema: SchemaItems | None = None  # the part that fits of a schema that is too large to be shown whole.

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> "PromptContext":
        """The context among the fields of an example's `meta`."""
        history = [(question, sql) for question, sql in meta.get("history", ())]
        values = meta.get("values")
        if values is not None:
            values = tuple((str(table), str(column), str(value)) for table, column, value in values)
        return cls(
            history=tuple(history),
            values=values,
            linked_schema=_schema_items(meta.get("linked_schema")),
            fitted_schema=_schema_items(meta.get("fitted_schema")),
        )


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    """The mappings in a list of JSON values; a reader of somebody else may keep anything under our name."""
    if not isinstance(value, list | tuple):
        return []
    return [entry for entry in value if isinstance(entry, Mapping)]


def _filters_in_meta(value: Any) -> tuple[StoredValueFilter, ...] | None:
    """Filters from their JSON form; None for none, and without those that lack a field."""
    if value is None:
        return None
    filters = []
    for entry in _mappings(value):
        if {"table", "column", "stored"} <= entry.keys():
            value_filter = StoredValueFilter(entry["table"], entry["column"], entry.get("asked"), entry["stored"])
            filters.append(value_filter)
    return tuple(filters)


def _ambiguities_in_meta(value: Any) -> tuple[Ambiguity, ...]:
    """Ambiguities from their JSON form."""
    ambiguities = []
    for entry in _mappings(value):
        term = str(entry.get("term", ""))
        means = str(entry.get("means"))
        is_critical = bool(entry.get("critical"))
        ambiguities.append(Ambiguity(term, means, is_critical))
    return tuple(ambiguities)


def _schema_items(value: Any) -> SchemaItems | None:
    """Schema items from their JSON form, `{"tables": [...], "columns": [[table, column], ...]}`."""
    if not isinstance(value, Mapping):
        return None
    tables = frozenset(map(str, value["tables"]))
    columns = frozenset((str(table), str(column)) for table, column in value["columns"])
    return SchemaItems(tables, columns)


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A question with its gold SQL."""

    id: str  # unique within a dataset; stable across runs.
    question: str
    database: Database
    gold_sql: str
    evidence: str = ""  # external knowledge given with the question (BIRD); may be empty.
    hardness: Hardness | None = None  # Spider's level; None until computed.
    source: str = ""  # the benchmark or pool that it came from ("spider", "miniature", ...).
    # Further fields, as JSON values: the source's own, and those of `annotations` and `prompt_context`.
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def annotations(self) -> Annotations:
        """Knowledge of the source about the question."""
        return Annotations.from_meta(self.meta)

    @property
    def prompt_context(self) -> PromptContext:
        """The parts of a prompt that belong to this question alone."""
        return PromptContext.from_meta(self.meta)

    def with_meta(self, **fields: Any) -> "Example":
        """The example with these fields (JSON values) in its `meta`, added or replaced."""
        return dataclasses.replace(self, meta={**self.meta, **fields})

    def in_context(self, marks: tuple[str, str] = ("\nSQL: ", "\nFollow-up question: ")) -> str:
        """The question behind its history, with `marks` before each SQL and each next question."""
        before_sql, before_next = marks
        text = ""
        for earlier_question, sql in self.meta.get("history", ()):
            text += f"{earlier_question}{before_sql}{sql or 'none'}{before_next}"
        return text + self.question


class ExecutionStatus(enum.StrEnum):
    """How an execution ended. Only `UNAVAILABLE` is a broken boundary; the others are facts about the query."""

    OK = "ok"
    ERROR = "error"  # the engine refused to prepare or run it (unknown column, syntax, type)
    REFUSED = "refused"  # the sandbox refused it (writes, ATTACH, PRAGMA, several statements, ...)
    TIMEOUT = "timeout"  # the wall-clock limit
    LIMIT = "limit"  # a row, byte, cell or memory limit that left no usable result
    UNAVAILABLE = "unavailable"  # the database is missing, or no worker could run the query: never scored


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutionResult:
    """The result of a query: rows in order, with their column names and duplicates."""

    status: ExecutionStatus
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Scalar, ...], ...] = ()  # at most the row limit; `truncated` if there were more.
    truncated: bool = False
    error: str | None = None  # the message, without paths or host details; None when the status is OK.
    # a short stable word for the error ("no_such_column", "syntax", "timeout", ...); None when OK.
    error_class: str | None = None
    # what an agent is told behind the error: where the names are that the query looked for in the wrong place.
    notes: tuple[str, ...] = ()
    # wall-clock of the execution in the worker; never part of a dataset.
    elapsed_ms: float = dataclasses.field(default=0.0, compare=False)
    # thousands of SQLite's virtual machine steps, which no load changes; 0 on other engines.
    work: int = dataclasses.field(default=0, compare=False)

    @property
    def ok(self) -> bool:
        """Whether the query ran to its end within the limits."""
        return self.status is ExecutionStatus.OK


class ActionKind(enum.StrEnum):
    """The request of an agent turn; a protocol maps its own tags onto these."""

    SQL = "sql"  # run a query, look at the rows
    EXPLORE = "explore"  # TRUST-SQL: a probe of metadata or values
    PROPOSE = "propose"  # TRUST-SQL: commit to a schema
    GENERATE = "generate"  # TRUST-SQL: a candidate query, executed
    ASK = "ask"  # a question to the user
    SOLUTION = "solution"  # the final SQL: ends the episode, unless the protocol gives failed answers back
    INVALID = "invalid"  # a named format error; the episode goes on


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
    """The reading of a model's text; parsing is total, so any text gives one."""

    kind: ActionKind
    content: str = ""  # the SQL, the JSON of a proposed schema, or the question to the user; "" when invalid.
    reasoning: str = ""  # the text of the thinking block; "" when there is none.
    # a short stable word ("missing_reasoning", "two_actions", ...); None when well-formed. A turn can carry a usable
    # action and still have a format error.
    format_error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """An action of the agent and the answer of the environment."""

    text: str  # the agent's text, exactly as generated.
    action: Action
    observation: str | None = None  # the environment's answer as the agent saw it; None after the final turn.
    status: ExecutionStatus | None = None  # the status of the action's execution; None when nothing was executed.
    error_class: str | None = None  # the class of that execution's error; None when it was fine.
    n_rows: int = 0  # rows that the execution returned.

    @property
    def ran_well(self) -> bool:
        """Whether the SQL of the turn ran, if it has any."""
        return self.status in (None, ExecutionStatus.OK)


class StopReason(enum.StrEnum):
    """Why an episode ended."""

    SOLUTION = "solution"  # the agent answered
    TURN_LIMIT = "turn_limit"  # the cap was reached without an answer
    TOKEN_LIMIT = "token_limit"  # the episode's token budget was spent
    BROKEN = "broken"  # a boundary failed (worker, endpoint): excluded, never scored
    UNASKED = "unasked"  # an evaluation gave the model up before this question: wrong, without a turn


@dataclasses.dataclass(frozen=True, slots=True)
class Trajectory:
    """The token-exact record of one episode."""

    example_id: str  # the question it answers.
    sample: int  # index within the question's group, 0-based.
    policy: str  # the name of the policy that generated it.
    protocol: str  # the name of the protocol it speaks.
    prompt: tuple[tuple[str, str], ...]  # the first messages, as (role, text).
    turns: tuple[Turn, ...]  # the agent's turns in order.
    final_sql: str | None  # the answer; None when there is none.
    stop: StopReason  # the reason for its end.
    failure: str | None = None  # the class of the broken boundary when `stop` is BROKEN, else None.
    forced: bool = False  # the last turn is the one forced at the turn cap (SQL-Trail, algorithm 1, line 29).
    # (T,) prompt and all turns as the policy saw them; () for policies that speak text only.
    token_ids: tuple[int, ...] = ()
    agent_mask: tuple[int, ...] = ()  # (T,) 1 where the agent generated the token, else 0.
    # (T,) the sampler's log-probability of each agent token, 0.0 elsewhere; () when not known.
    logprobs: tuple[float, ...] = ()
    turn_ends: tuple[int, ...] = ()  # for each turn, the index just past its last agent token: tracks are cut here.

    @property
    def well_formed(self) -> bool:
        """Whether every turn is well-formed and a final SQL is present (the reward panels' meaning of format)."""
        has_error = any(turn.action.format_error is not None for turn in self.turns)
        return self.final_sql is not None and not has_error


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """All that a reward may look at: the episode, and the results of its final SQL and of the gold SQL.

    Analyses that no reward term reads are left out: then fields are None or empty.
    """

    example_id: str
    trajectory: Trajectory
    equality: str
    correct: bool  # the verdict by `equality`; False when there is no final SQL.
    status: ExecutionStatus | None  # the status of the final SQL's execution; None when there is no final SQL.
    n_rows: int  # rows that the final SQL returned.
    broken: bool  # a boundary failed for the final SQL or the gold SQL: no reward may be given.
    hardness: Hardness | None  # Spider's level of the gold SQL; None if no analysis asked for it.
    max_turns: int  # the turn cap T that the episode ran under.
    # predicted_schema, gold_items: tables and columns of the final SQL and the gold SQL; None when the SQL does not
    # parse or is absent.
    predicted_schema: SchemaItems | None
    gold_items: SchemaItems | None
    gold_schema: SchemaItems | None  # the gold schema by consensus; None if the example has none.
    # predicted_bigrams, gold_bigrams: sets of adjacent token pairs; empty when absent.
    predicted_bigrams: frozenset[tuple[str, str]]
    gold_bigrams: frozenset[tuple[str, str]]
    judge: float | None = None  # a judge's grade in [0, 1]; None when it was not asked.

    @property
    def executable(self) -> bool:
        return self.status is ExecutionStatus.OK


_HALF = re.compile("[\ud800-\udfff]")
Record = TypeVar("Record", bound="DataclassInstance")
_adapter: Callable[[Any], pydantic.TypeAdapter[Any]] = functools.cache(pydantic.TypeAdapter)


def to_dict(record: Any) -> dict[str, Any]:
    """A record as JSON-ready values."""
    value: dict[str, Any] = _adapter(record.__class__).dump_python(record, mode="json")
    return value


def from_dict(kind: type[Record], value: Mapping[str, Any]) -> Record:
    """A record from the values of `to_dict`."""
    try:
        record: Record = _adapter(kind).validate_python(value)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise DataError(f"a {kind.__name__.lower()} has a bad field {field!r}: {first['msg']}") from None
    return record


def write_jsonl(path: Path, records: Iterable[Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            text = json.dumps(to_dict(record), ensure_ascii=False, separators=(",", ":"))
            file.write(f"{text}\n")


def read_jsonl(path: Path, kind: type[Record]) -> Iterator[Record]:
    """Records from a JSONL file that `write_jsonl` wrote."""
    for _, value in read_lines(path):
        yield from_dict(kind, value)


def is_valid_unicode(text: str) -> bool:
    """Whether files and databases take a text: JSON, YAML and a command line may hold half characters."""
    return text.isascii() or not _HALF.search(text)


LONGEST_INTEGER = 128  # bits; `str` refuses an integer of more than 4,300 digits


def text_of(value: object) -> str:
    """Any value of a database as text. Total: whatever a worker sent, nothing raises here."""
    if isinstance(value, int) and value.bit_length() > LONGEST_INTEGER:
        return hex(value)
    try:
        return str(value)
    except (ValueError, RecursionError):  # a value that no database has, with such an integer or depth in it
        return f"a {type(value).__name__} that cannot be shown"


def shortened(text: str, max_chars: int) -> str:
    """A text of at most so many characters; an ellipsis stands for what is cut off."""
    if len(text) <= max_chars:
        return text
    return f"{text[: max_chars - 1]}…"


def shortened_line(text: str, max_chars: int) -> str:
    """A text on one line, of at most so many characters."""
    line = " ".join(text.split())
    return shortened(line, max_chars)


def escape_surrogates(text: str) -> str:
    r"""The text with half characters as their escapes (`\ud800`), so that a file takes it."""
    return text.encode("utf-8", "backslashreplace").decode()


def escape_sequence(character: str) -> str:
    r"""A character by its escape, such as `\x1b` or `\u202e`."""
    return character.encode("unicode_escape").decode("ascii")


def plain(words: str, lines: bool = False) -> str:
    r"""Words that a terminal shows as they are, whoever wrote them: a user, a model, a database.

    What does not print (escape sequences, control and bidirectional characters, half characters) is shown by its escape
    (`\x1b`); narrow and unbroken spaces are plain ones.

    Args:
        lines: keep line breaks; without it they are shown too, so that one line stays one.
    """
    if words.isprintable():
        return words
    printable = []
    for character in words:
        if character.isprintable() or (lines and character == "\n"):
            printable.append(character)
        elif unicodedata.category(character) == "Zs":  # such as the narrow space between thousands
            printable.append(" ")
        else:
            printable.append(escape_sequence(character))
    return "".join(printable)


# Fields of a row from outside: text and names that can be used, and the error of the others.

# Names of the fields that hold a row's SQL and its database, in the order of preference.
SQL = ("sql", "query", "SQL", "gold_sql")
GOLD_SQLS = "gold_sqls"  # the field of a row, and of an example's `meta`, with further gold queries.
DATABASE = ("database", "db", "db_id", "db_path")
LONGEST_NAME = 200  # bytes of a database's name: file systems take 255, with suffixes


@dataclasses.dataclass(eq=False)
class BadRow(Exception):
    """A row that cannot become an example."""

    reason: str  # a short stable word.
    detail: str  # line for a person.
    text: str = ""  # text of the row itself, if it is known; no message has it.


def text_field(row: Any, *names: str, required: bool = True) -> str:
    """The first of a row's fields that holds text, stripped; "" when none does and it is not required.

    Spider's files have the parsed tree under `sql` and the text under `query`.
    """
    if not isinstance(row, dict):
        raise BadRow("not_an_object", f"a {type(row).__name__} where an object was expected")
    texts = []
    others = []  # fields with a value that is no text
    for name in names:
        value = row.get(name)
        if isinstance(value, str):
            texts.append(value.strip())
        elif value is not None:
            others.append(f"{name} is a {type(value).__name__}, not text")
    if others and not texts:
        raise BadRow("wrong_type", others[0])
    text: str = next(filter(None, texts), "")
    if not is_valid_unicode(text):
        raise BadRow("invalid_unicode", f"{names[0]} holds half a character, which no file or database takes")
    if "\0" in text:
        raise BadRow("zero_byte", f"{names[0]} holds a character of zeros (U+0000), which no query takes")
    if required and not text:
        any_name = " or ".join(names)
        raise BadRow(f"empty_{names[0].lower()}", f"no {any_name}")
    return text


def gold_queries(row: Any, *names: str) -> tuple[str, dict[str, Any]]:
    """The gold query of a row, and the `meta` of its example, which has the further ones of several (`GOLD_SQLS`)."""
    listed = row.get(GOLD_SQLS) if isinstance(row, dict) else None
    if listed is None:
        return text_field(row, *names), {}
    if not isinstance(listed, list) or not listed:
        raise BadRow("wrong_type", f"{GOLD_SQLS} is no list of queries")
    texts = [text_field({GOLD_SQLS: text}, GOLD_SQLS) for text in listed]
    first = text_field(row, *names, required=False) or texts[0]
    further = [text for text in dict.fromkeys(texts) if text != first]
    if not further:
        return first, {}
    return first, {GOLD_SQLS: further}


def history_field(row: Mapping[str, Any]) -> History:
    """The list `history` of a row, [question, SQL] pairs; [] if it has none."""
    history = row.get("history") or []
    if not isinstance(history, list) or not all(map(_is_pair_of_texts, history)):
        raise BadRow("bad_history", "history is a list of [question, SQL] pairs")
    return history


def _is_pair_of_texts(value: Any) -> bool:
    """Whether a value is [question, SQL]."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(isinstance(text, str) and is_valid_unicode(text) for text in value)


def is_plain_name(id: str) -> bool:
    """Whether a database's name may be part of a path, also with a suffix."""
    has_plain_letters = bool(re.fullmatch(r"[\w.+ -]+", id))
    return has_plain_letters and not id.startswith(".") and len(id.encode()) <= LONGEST_NAME
