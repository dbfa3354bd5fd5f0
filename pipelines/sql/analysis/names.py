"""What a query's text shows of the database by itself: the names that it reads there, and the words that it made up."""

import re
from collections.abc import Iterator

from sqlglot import exp
from sqlglot.optimizer.scope import Scope, traverse_scope

from pipelines.core.types import EngineName
from pipelines.sql.analysis.name_resolution import outputs, sources
from pipelines.sql.analysis.parsing import parse, unwrap
from pipelines.sql.schema import Schema

_ENGINES: tuple[EngineName, ...] = (
    "sqlite",
    "duckdb",
    "mysql",
)  # whose the query is, nobody says: the first that reads it
_WORD = re.compile(r"\w+")
_LETTER = re.compile(r"[^\W\d]")
# Functions that make a text out of numbers, or of parts of texts.
_WRITERS = frozenset(
    {"char", "chr", "concat", "concat_ws", "convert_from", "decode", "format", "from_base64", "from_hex", "printf"}
    | {"quote", "replace", "unhex"}
)


def naming(sql: str) -> tuple[list[str], list[str], bool] | None:
    """Lower-cased: the names of tables and columns that a query reads of the database; the words that it writes itself,
    as aliases and as texts in what it selects; and whether it puts text together there. None if it does not parse.

    A column counts where it can only be one of a table: not the output of a subquery or a CTE, not an alias, and no
    word in double quotes without its table, which SQLite takes as text where there is no such column.
    """
    for engine in _ENGINES:
        tree = parse(sql, engine)
        if tree is None:
            continue
        try:
            names = {name for scope in traverse_scope(tree) for name in _names(scope, sql.lower())}
        except Exception:  # sqlglot's scopes raise freely on trees that parse but make no sense
            return None
        own = {word for text in _own(tree, sql.lower()) for word in _WORD.findall(text.lower())}
        return sorted(names), sorted(own), _writes(tree)
    return None


def _names(scope: Scope, sql: str) -> Iterator[str]:
    for _, source in sources(scope):
        if isinstance(source, exp.Table) and source.name:
            yield source.name.lower()
    for column in scope.find_all(exp.Column):
        if isinstance(column, exp.Column) and not isinstance(column.this, exp.Star) and _is_read(scope, column, sql):
            yield column.name.lower()


def _is_read(scope: Scope, column: exp.Column, sql: str) -> bool:
    """Whether a column can only be one of a table of the database."""
    name, qualifier = column.name.lower(), column.table.lower()
    level: Scope | None = scope
    while qualifier and level is not None:
        for alias, source in sources(level):
            if alias.lower() == qualifier:
                return isinstance(source, exp.Table) and name not in _renamed(source)
        level = level.parent
    if qualifier or f'"{name}"' in sql or _is_alias(scope, column):
        return False
    has_table = False
    level = scope
    while level is not None:  # a subquery of a condition or of a SELECT list sees what is around it; no other does
        for _, source in sources(level):
            if isinstance(source, exp.Table):
                has_table |= bool(source.name)
            if name in (_renamed(source) if isinstance(source, exp.Table) else outputs(source)):
                return False
        level = level.parent if level.is_subquery else None
    return has_table


def _renamed(table: exp.Table) -> set[str]:
    """The names that `FROM t AS alias(a, b)` gives to columns."""
    alias = table.args.get("alias")
    return {column.name.lower() for column in alias.args.get("columns") or []} if alias is not None else set()


def _is_alias(scope: Scope, column: exp.Column) -> bool:
    """Whether a name may be another item's alias in the SELECT list of its query."""
    name = column.name.lower()
    for item in getattr(unwrap(scope.expression), "expressions", []):
        if isinstance(item, exp.Alias) and item.alias.lower() == name:
            within = column.parent
            while within is not None and within is not item:
                within = within.parent
            if within is None:
                return True
    return False


def _own(tree: exp.Expr, sql: str) -> Iterator[str]:
    """Aliases, names of CTEs and their columns, texts that are selected, and words in double quotes without a table."""
    for node in tree.find_all(exp.Alias, exp.TableAlias):
        yield node.alias if isinstance(node, exp.Alias) else node.name
        yield from (column.name for column in node.args.get("columns") or [])
    yield from (key.name for key in tree.find_all(exp.PropertyEQ, exp.Kwarg))
    yield from (node.name for node in _selected_texts(tree))
    for column in tree.find_all(exp.Column):
        if not column.table and f'"{column.name.lower()}"' in sql:
            yield column.name


def _selected_texts(tree: exp.Expr) -> Iterator[exp.Expr]:
    """Texts that may come out as they stand: all but those that a condition compares with, and arguments of pragmas."""
    for node in tree.find_all(exp.Literal, exp.HexString, exp.RawString, exp.National, exp.ByteString):
        if isinstance(node, exp.Literal) and not (node.is_string and _LETTER.search(node.name)):
            continue
        above = node.parent
        while above is not None and not isinstance(above, exp.Where | exp.Having | exp.Join | exp.Table):
            above = above.parent
        is_pragma = isinstance(above, exp.Table) and above.this.name.lower().startswith("pragma_")
        if not (isinstance(above, exp.Where | exp.Having | exp.Join) or is_pragma):
            yield node


def _writes(tree: exp.Expr) -> bool:
    if tree.find(exp.DPipe) is not None or any(_selected_texts(tree)):
        return True
    functions = (node.name if isinstance(node, exp.Anonymous) else node.sql_name() for node in tree.find_all(exp.Func))
    return any(name.lower() in _WRITERS for name in functions)


# What a query looks up: the texts that it compares with columns, its first table, the first row of a table.

Compared = tuple[str, str, str, str]  # table, column, text, and the query that shows the column's values


def lookups(sql: str, schema: Schema | None, engine: EngineName) -> list[Compared]:
    """Every text that the query compares with a column of a known table, in reading order.

    Args:
        schema: resolves unqualified columns, and tells a double-quoted text from a column; may be None.
    """
    tree = parse(sql, engine)
    owners = _owners(schema)
    compared: dict[tuple[str, str, str], Compared] = {}
    for column, text in _compared(tree, owners) if tree else ():
        table = _table_of(column, owners)
        if table is not None:
            probe = exp.select(exp.column(column.this.copy())).distinct().from_(exp.to_table(table.name)).sql(engine)
            compared.setdefault((table.name, column.name, text), (table.name, column.name, text, probe))
    return list(compared.values())


def first_table(sql: str, engine: EngineName) -> str | None:
    """The first table that the query names; None where it names none, or cannot be read."""
    tree = parse(sql, engine)
    table = tree.find(exp.Table) if tree else None
    return table.name if table else None


def first_row(table: str, engine: EngineName) -> str:
    """The query that shows the first row of a table."""
    return exp.select("*").from_(exp.to_identifier(table)).limit(1).sql(engine)


def _owners(schema: Schema | None) -> dict[str, set[str]]:
    """Tables by column, in lower case."""
    owners: dict[str, set[str]] = {}
    for table in schema.tables if schema else ():
        for column in table.columns:
            owners.setdefault(column.name.lower(), set()).add(table.name.lower())
    return owners


def _compared(tree: exp.Expr, owners: dict[str, set[str]]) -> Iterator[tuple[exp.Column, str]]:
    """Columns that are compared with a text, with the text, in reading order."""
    for node in tree.find_all(exp.EQ, exp.NEQ, exp.Like, exp.ILike, exp.In, bfs=False):
        column = node.this
        if not isinstance(column, exp.Column):
            continue
        for other in node.expressions if isinstance(node, exp.In) else [node.expression]:
            if _is_text(other, owners):
                yield column, other.name.strip("%")


def _is_text(node: exp.Expr, owners: dict[str, set[str]]) -> bool:
    """A text literal; SQLite also reads a double-quoted name that no column has as one."""
    if isinstance(node, exp.Literal):
        return node.is_string
    if not isinstance(node, exp.Column) or node.table or not node.this.args.get("quoted"):
        return False
    return bool(owners) and node.name.lower() not in owners


def _table_of(column: exp.Column, owners: dict[str, set[str]]) -> exp.Table | None:
    """The table that a column of a SELECT stands for: by its qualifier, else the only source that has it."""
    scope = column.find_ancestor(exp.Select)
    if scope is None:
        return None
    sources = [clause.this for clause in (scope.args.get("from_"), *(scope.args.get("joins") or ())) if clause]
    tables = [source for source in sources if isinstance(source, exp.Table)]
    if column.table:
        tables = [table for table in tables if table.alias_or_name.lower() == column.table.lower()]
    elif owners:
        tables = [table for table in tables if table.name.lower() in owners.get(column.name.lower(), ())]
    return tables[0] if len(tables) == 1 else None
