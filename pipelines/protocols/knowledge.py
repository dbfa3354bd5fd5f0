"""TRUST-SQL's schema knowledge, read off a trajectory: the proposal, and the names verified before it (section 3.2).

The rule of verification (the paper names the set K_t and no rule): a table or a column is verified once an earlier
turn's query ran and either read it by name or showed its name as a whole word in its observation. So a look into the
catalogue verifies the names that it showed, and `SELECT DISTINCT kind FROM singer` verifies `singer` and `kind`. A
query that failed verifies nothing. Nor do the agent's own words (`sql/analysis/naming.py`): comments, texts, names that
the query gives (aliases, those of WITH, outputs of subqueries), functions and variables; a word in double quotes
without its table, which SQLite takes as text if there is no such column; an alias that the result repeats, and a result
that may hold a text of the query or one that was put together (`||`, `char`, ...). Of a look by command (PRAGMA,
DESCRIBE, SHOW, SUMMARIZE) the result's cells verify, not its header (`type`, `pk`, ...), and the argument of a pragma
about a table that gave rows. In the prefilled variant the synthetic first turn's observation counts like any other.
"""

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, Literal

from pipelines.core.types import ActionKind, ExecutionStatus, SchemaItems, Trajectory, is_valid_unicode
from pipelines.protocols import tools
from pipelines.protocols.observations import json_text
from pipelines.sql import analyst

Phase = Literal["explore", "propose", "generate", "confirm"]
PHASES: Mapping[Phase, ActionKind] = {
    "explore": ActionKind.EXPLORE,
    "propose": ActionKind.PROPOSE,
    "generate": ActionKind.GENERATE,
    "confirm": ActionKind.SOLUTION,
}
_SCHEMA_KEYS = ({"tables", "columns"}, {"tables", "columns", "joins"})  # keys that a proposal in JSON may have
_WORD = re.compile(r"\w+")
_LOOK = re.compile(
    r"\s*(?:pragma\s+(?:\w+\s*\.\s*)?(?P<pragma>\w+)(?:\s*\(\s*['\"`\[]?(?P<table>\w+))?"
    r"|(?:describe|desc|show|summarize)\b(?!.*(?:\(|\b(?:select|values|with)\b)))",  # such a query names its columns
    re.IGNORECASE | re.DOTALL,
)
# Pragmas whose argument is a table; they give no row if it is not there.
_TABLE_PRAGMAS = frozenset(
    {"table_info", "table_xinfo", "table_list", "foreign_key_list", "foreign_key_check", "index_list"}
)
# Headers of looks by command, in SQLite, DuckDB and MySQL.
_HEADER_WORDS = """
    cid name type notnull dflt_value pk hidden schema ncol wr strict id seq table from to on_update on_delete match
    rowid parent fkid unique origin partial seqno desc coll key builtin enc narg flags file
    column_name column_type null default extra database column_names column_types temporary
    min max approx_unique avg std q25 q50 q75 count null_percentage
    field collation privileges comment non_unique key_name seq_in_index column cardinality sub_part packed index_type
"""
_HEADERS = frozenset(_HEADER_WORDS.split())
_TAG = re.compile(r"\A\s*<\w+>|</\w+>\s*\Z")
_AFTER_ROWS = re.compile(r"\s*(?:\(.*\brows?\b.*\)|you have \d+ turns? left to complete the task\.|\d+ left)\s*")


def proposed_turn(trajectory: Trajectory) -> int | None:
    """Index of the turn that proposed last: the schema that the agent is committed to at the end; None without one."""
    last = None
    for index, turn in enumerate(trajectory.turns):
        if turn.action.kind is ActionKind.PROPOSE:
            last = index
    return last


def proposed(trajectory: Trajectory) -> SchemaItems | None:
    """The tables and columns of the last proposal, lower-cased; None without one."""
    last = proposed_turn(trajectory)
    if last is None:
        return None
    value = json.loads(trajectory.turns[last].action.content)  # JSON, as the protocol has checked
    tables = {name.lower() for name in value["tables"]}
    columns: set[tuple[str, str]] = set()
    for table, names in value["columns"].items():
        columns |= {(table.lower(), name.lower()) for name in names}
    return SchemaItems(frozenset(tables), frozenset(columns))


def proposal(tables: Sequence[str], columns: Mapping[str, Sequence[str]], joins: Sequence[Any] = ()) -> str:
    """A proposed schema as an action's content, one canonical JSON text; its tables are those of both arguments."""
    all_tables = dict.fromkeys((*tables, *columns))
    value: dict[str, Any] = {
        "tables": list(all_tables),
        "columns": {table: list(names) for table, names in columns.items()},
    }
    if joins:
        value["joins"] = list(joins)
    return json.dumps(value, ensure_ascii=False)


def read_schema(text: str, brief: bool) -> tuple[str, str | None]:
    """A proposal in its canonical form, and None; or "" and `bad_json`, `bad_schema` or `invalid_unicode`.

    It is JSON, `{"tables": [...], "columns": {table: [...]}, "joins": [...]}`, where the joins may be left out; in
    brief, `singer : name , age ; concert`.
    """
    if brief:
        value = _read_brief(text)
        if value is None:
            return "", "bad_schema"
    else:
        value = tools.json_value(text)
        if value is None:
            return "", "bad_json"
    if not isinstance(value, Mapping) or set(value) not in _SCHEMA_KEYS:
        return "", "bad_schema"
    tables = value["tables"]
    columns = value["columns"]
    joins = value.get("joins", [])
    if not isinstance(columns, Mapping) or not isinstance(joins, list):
        return "", "bad_schema"
    if not tables and not columns:
        return "", "bad_schema"
    lists_of_names = (tables, *columns.values())
    if not all(map(_is_list_of_names, lists_of_names)):
        return "", "bad_schema"
    content = proposal(tables, columns, joins)
    if not is_valid_unicode(content):
        return "", "invalid_unicode"
    return content, None


def _is_list_of_names(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return all(isinstance(name, str) and name.strip() for name in value)


def _read_brief(text: str) -> Any:
    """The value of a brief proposal; None if a name is empty, or a table comes twice."""
    tables: list[str] = []
    columns: dict[str, list[str]] = {}
    for clause in text.split(";"):
        head, colon, tail = clause.partition(":")
        table = head.strip()
        if not table or table in tables:
            return None
        tables.append(table)
        if not colon:
            continue
        columns[table] = [name.strip() for name in tail.split(",")]
        if not all(columns[table]):
            return None
    return {"tables": tables, "columns": columns}


def write_schema(content: str, brief: bool) -> str:
    """A proposal as an agent writes it."""
    _, error = read_schema(content, brief=False)
    if error:
        raise ValueError("not a proposed schema")
    value = json.loads(content)
    if not brief:
        return json_text(value)
    clauses = []
    for table in value["tables"]:
        names = value["columns"].get(table, [])
        clause = " , ".join(names)
        clauses.append(f"{table} : {clause}".rstrip(" :"))
    return " ; ".join(clauses)


def unverified(trajectory: Trajectory) -> frozenset[str]:
    """Names in the last proposal that no earlier turn had verified: hallucinated, or guessed."""
    last = proposed_turn(trajectory)
    items = proposed(trajectory)
    if last is None or items is None:
        return frozenset()
    texts = _texts_that_verify(trajectory, last)
    words: set[str] = set()
    for text in texts:
        words.update(_WORD.findall(text))
    names = items.tables | {column for _, column in items.columns}
    return frozenset(name for name in names if not _is_verified(name, words, texts))


def _texts_that_verify(trajectory: Trajectory, end: int) -> list[str]:
    """In lower case: the prefilled schema, then the names that queries before a turn read, and what they showed."""
    texts: list[str] = []
    if any(role == "assistant" for role, _ in trajectory.prompt):  # the schema is prefilled
        _, schema = trajectory.prompt[-1]
        texts.append(schema.lower())
    turns = [turn for turn in trajectory.turns[:end] if turn.status is ExecutionStatus.OK]
    namings = analyst.naming([turn.action.content for turn in turns])
    for turn, naming in zip(turns, namings, strict=True):
        observation = (turn.observation or "").lower()
        look = _LOOK.match(turn.action.content)
        if naming is not None:
            texts += _verifying_texts(naming, observation)
        elif look is not None and turn.n_rows:  # a pragma for a table that is not there gives no row, and no error
            texts.append(_shown_cells(observation))
            pragma = look["pragma"] or ""
            if pragma.lower() in _TABLE_PRAGMAS:
                table = look["table"] or ""
                texts.append(table.lower())
    return texts


def _is_verified(name: str, words: Set[str], texts: Sequence[str]) -> bool:
    """Whether a name stands as a whole word, or one with other signs ("Charter School (Y/N)") anywhere in a text."""
    if _WORD.fullmatch(name):
        return name in words
    return any(name in text for text in texts)


def _verifying_texts(naming: analyst.Naming, observation: str) -> Iterator[str]:
    """The names that a query reads and, if its result holds no text of the query, what it showed."""
    yield "\n".join(naming.names)
    if not naming.is_made_up:
        pieces = re.split(r"(\W+)", observation)
        yield "".join(piece for piece in pieces if piece not in naming.written_words)


def _shown_cells(observation: str) -> str:
    """The cells of an observation's rows, which are JSON records, or a table with or without its header."""
    body = _TAG.sub("", observation)
    value = tools.json_value(body)
    if isinstance(value, Mapping):
        rows = value.get("data", [])
        cells = itertools.chain.from_iterable(rows)
        return "\n".join(map(str, cells))
    lines = body.strip().split("\n")
    header = lines[0].split("|")
    if all(cell.strip() in _HEADERS for cell in header):
        del lines[0]
    return "\n".join(line for line in lines if not _AFTER_ROWS.fullmatch(line))


# What counts as a probe: a rule for TRUST-SQL's explore action, and the mark of an agent that lists everything.

_TOKEN = re.compile(
    r"--[^\n]*|/\*(?:[^*]|\*(?!/))*(?:\*/)?"  # comments
    r"|'(?:[^']|'')*'?"  # strings
    r"|\"(?P<double>(?:[^\"]|\"\")*)\"?|`(?P<tick>[^`]*)`?|\[(?P<bracket>[^\]]*)\]?"  # quoted names
    r"|(?P<word>\w+)|(?P<sign>[^\w\s])"
)
_CATALOGUE = re.compile(
    r'"*(?:SQLITE_(?:TEMP_)?(?:MASTER|SCHEMA)|INFORMATION_SCHEMA|PG_(?:CATALOG|TABLES|CLASS|ATTRIBUTE|CONSTRAINT)'
    r"|DUCKDB_(?:TABLES|COLUMNS|CONSTRAINTS)|PRAGMA_.*)",
    re.DOTALL,
)
_COMMANDS = frozenset({"PRAGMA", "DESCRIBE", "DESC", "SHOW"})
_NOT_IN_A_LOOK = frozenset(["JOIN", "GROUP", "HAVING", "UNION", "INTERSECT", "EXCEPT", "WITH", "OVER"])
_ANSWERING = frozenset(["COUNT", "SUM", "AVG", "TOTAL", "GROUP_CONCAT", "STRING_AGG", "ARRAY_AGG", "LIST"])
_CLAUSE_ENDS = frozenset({"WHERE", "ORDER", "LIMIT", "OFFSET", "FETCH"})
_TABLE_NAMES = frozenset({"NAME", "TBL_NAME", "TABLE_NAME", "RELNAME"})


def _tokens(sql: str) -> Iterator[str]:
    """Words and quoted names in upper case, the latter with a mark before them, and signs; no comments, no strings."""
    for match in _TOKEN.finditer(sql):
        kind = match.lastgroup
        if kind in ("word", "sign"):
            yield match[0].upper()
        elif kind is not None:
            yield '"' + match[kind].upper()


def _reads_catalogue(tokens: list[str]) -> bool:
    """Whether a query reads the engine's catalogue and nothing else."""
    if tokens and tokens[0] in _COMMANDS:
        return True
    sources = []
    for token, behind in itertools.pairwise(tokens):
        if token in ("FROM", "JOIN") and behind != "(":  # a bracket leads to a FROM of its own
            sources.append(behind)
    return bool(sources) and all(map(_CATALOGUE.fullmatch, sources))


def is_probe(sql: str) -> bool:
    """Whether a query may be asked in the explore phase."""
    tokens = list(_tokens(sql))
    if _reads_catalogue(tokens):
        return True
    # A look at the values of one table.
    has_one_source = tokens.count("SELECT") == 1 and tokens.count("FROM") == 1
    if not has_one_source or not _NOT_IN_A_LOOK.isdisjoint(tokens):
        return False
    if any(token in _ANSWERING and behind == "(" for token, behind in itertools.pairwise(tokens)):
        return False
    start = tokens.index("FROM") + 1
    for token in tokens[start:]:
        if token in _CLAUSE_ENDS:
            break
        if token == ",":
            return False
    return True


def lists_everything(sql: str) -> bool:
    """Whether a query lists the columns of all tables at once: TRUST-SQL's reward hack (section 5.4).

    It reads column details from the catalogue (definitions, `pragma_table_info` over all names, the standard's columns
    view) and names no table.
    """
    tokens = list(_tokens(sql))
    if not _reads_catalogue(tokens):
        return False
    pairs = list(itertools.pairwise(tokens))
    of_catalogue = [token for token in tokens if _CATALOGUE.fullmatch(token)]
    is_info_of_all = len(of_catalogue) > 1 and any("_INFO" in token for token in tokens)
    has_details = not {"SQL", "COLUMNS", "DUCKDB_COLUMNS"}.isdisjoint(tokens)
    lists_columns = is_info_of_all or has_details or ("SELECT", "*") in pairs
    names_table = any(token in _TABLE_NAMES and behind in ("=", "IN", "LIKE") for token, behind in pairs)
    return lists_columns and not names_table and tokens[0] not in _COMMANDS
