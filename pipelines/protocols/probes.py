"""What counts as a probe: a rule for TRUST-SQL's explore action, and the mark of an agent that lists everything.

TRUST-SQL's prompt allows metadata queries only, while its case study (appendix E) also probes the values of one column.
The rule that covers both: an exploring query is a look into the engine's catalogue, or a look at one table: a single
SELECT without join, grouping, nesting, set operation, window, or counting and summing aggregate. Anything else tries to
answer the question and belongs to the generate phase. The rule is lexical, total and linear in the text's length; it
shapes behaviour and guards nothing: the sandbox does that.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_TOKEN = re.compile(
    r"--[^\n]*|/\*(?:[^*]|\*(?!/))*(?:\*/)?"  # comments
    r"|'(?:[^']|'')*'?"  # strings
    r"|\"(?P<double>(?:[^\"]|\"\")*)\"?|`(?P<tick>[^`]*)`?|\[(?P<bracket>[^\]]*)\]?"  # quoted names
    r"|(?P<word>\w+)|(?P<sign>[^\w\s])"
)
_CATALOGUES = frozenset(
    {"SQLITE_MASTER", "SQLITE_SCHEMA", "SQLITE_TEMP_MASTER", "SQLITE_TEMP_SCHEMA", "INFORMATION_SCHEMA"}
    | {"PG_CATALOG", "PG_TABLES", "PG_CLASS", "PG_ATTRIBUTE", "PG_CONSTRAINT"}
    | {"DUCKDB_TABLES", "DUCKDB_COLUMNS", "DUCKDB_CONSTRAINTS"}
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


def _is_catalogue(token: str) -> bool:
    name = token.lstrip('"')
    return name in _CATALOGUES or name.startswith("PRAGMA_")


def _sources(tokens: list[str]) -> list[str]:
    """The token after each FROM and JOIN; an opening bracket leads to a FROM of its own."""
    after = [tokens[i + 1] for i in range(len(tokens) - 1) if tokens[i] in ("FROM", "JOIN")]
    return [token for token in after if token != "("]


def _reads_catalogue(tokens: list[str]) -> bool:
    """Whether a query reads the engine's catalogue and nothing else."""
    if tokens and tokens[0] in _COMMANDS:
        return True
    sources = _sources(tokens)
    return bool(sources) and all(_is_catalogue(token) for token in sources)


def is_probe(sql: str) -> bool:
    """Whether a query may be asked in the explore phase."""
    tokens = list(_tokens(sql))
    return _reads_catalogue(tokens) or _looks_at_one_table(tokens)


def _looks_at_one_table(tokens: list[str]) -> bool:
    if tokens.count("SELECT") != 1 or tokens.count("FROM") != 1 or not _NOT_IN_A_LOOK.isdisjoint(tokens):
        return False
    if any(token in _ANSWERING and after == "(" for token, after in itertools.pairwise(tokens)):
        return False
    for token in tokens[tokens.index("FROM") + 1 :]:
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
    listing = len([token for token in tokens if _is_catalogue(token)]) > 1 and any("_INFO" in t for t in tokens)
    details = listing or "SQL" in tokens or "COLUMNS" in tokens or "DUCKDB_COLUMNS" in tokens or _star(tokens)
    names_table = any(
        token in _TABLE_NAMES and after in ("=", "IN", "LIKE") for token, after in itertools.pairwise(tokens)
    )
    return details and not names_table and tokens[0] not in _COMMANDS


def _star(tokens: list[str]) -> bool:
    return any(first == "SELECT" and second == "*" for first, second in itertools.pairwise(tokens))
