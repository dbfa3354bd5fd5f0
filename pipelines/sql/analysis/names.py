"""The names that a query's text reads of the database, the words that it makes up, and the values that it looks up."""

import re

from sqlglot import exp
from sqlglot.optimizer.scope import Scope, traverse_scope

from pipelines.sql.analysis.name_resolution import known_name, output_names, scope_columns, scope_sources
from pipelines.sql.analysis.parsing import parse, unwrap
from pipelines.sql.schema import Schema

_ENGINES: tuple[str, ...] = ("sqlite", "duckdb", "mysql")  # a query's engine is not known: the first to read it
_WORD = re.compile(r"\w+")
_LETTER = re.compile(r"[^\W\d]")
# Functions that make a text out of numbers, or of parts of texts.
_WRITERS = frozenset(
    {"char", "chr", "concat", "concat_ws", "convert_from", "decode", "format", "from_base64", "from_hex", "printf"}
    | {"quote", "replace", "unhex"}
)


def naming(sql: str) -> tuple[list[str], list[str], bool] | None:
    """Lower-cased: the names of tables and columns that a query reads of the database; the words that it writes itself,
    as aliases and as texts in its results; and whether it puts text together there. None if it does not parse.

    A column counts where it can only be one of a table: not the output of a subquery or a CTE, not an alias, and no
    word in double quotes without its table, which SQLite takes as text where there is no such column.
    """
    tree = next(filter(None, (parse(sql, engine) for engine in _ENGINES)), None)
    if tree is None:
        return None
    text = sql.lower()
    names: set[str] = set()
    try:
        for scope in traverse_scope(tree):
            tables = [source for _, source in scope_sources(scope) if isinstance(source, exp.Table)]
            names |= {table.name.lower() for table in tables if table.name}
            names |= {column.name.lower() for column in scope_columns(scope) if _is_read(scope, column, text)}
    except Exception:  # sqlglot's scopes raise freely on trees that parse but make no sense
        return None
    # Own words: aliases, names of CTEs and their columns, texts in results, words in double quotes without a table.
    own: list[str] = []
    for node in tree.find_all(exp.Alias, exp.TableAlias):
        own.append(node.alias if isinstance(node, exp.Alias) else node.name)
        own += [column.name for column in node.args.get("columns") or []]
    own += [key.name for key in tree.find_all(exp.PropertyEQ, exp.Kwarg)]
    # A text may come out as it stands unless a condition compares with it or it is an argument of a pragma.
    writes = tree.find(exp.DPipe) is not None
    for node in tree.find_all(exp.Literal, exp.HexString, exp.RawString, exp.National, exp.ByteString):
        if isinstance(node, exp.Literal) and not (node.is_string and _LETTER.search(node.name)):
            continue
        above = node.find_ancestor(exp.Where, exp.Having, exp.Join, exp.Table)
        is_pragma = isinstance(above, exp.Table) and above.this.name.lower().startswith("pragma_")
        if above is None or (isinstance(above, exp.Table) and not is_pragma):
            own.append(node.name)
            writes = True
    bare = (column.name for column in tree.find_all(exp.Column) if not column.table)
    own += [name for name in bare if f'"{name.lower()}"' in text]
    called = (node.name if isinstance(node, exp.Anonymous) else node.sql_name() for node in tree.find_all(exp.Func))
    writes = writes or any(name.lower() in _WRITERS for name in called)
    return sorted(names), sorted({word for name in own for word in _WORD.findall(name.lower())}), writes


def _is_read(scope: Scope, column: exp.Column, sql: str) -> bool:
    """Whether a column can only be one of a table of the database."""
    name, qualifier = column.name.lower(), column.table.lower()
    level: Scope | None = scope
    while qualifier and level is not None:
        for alias, source in scope_sources(level):
            if alias.lower() == qualifier:
                return isinstance(source, exp.Table) and name not in _renamed(source)
        level = level.parent
    if qualifier or f'"{name}"' in sql:
        return False
    # The name may be another item's alias in the SELECT list of its query.
    for item in getattr(unwrap(scope.expression), "expressions", []):
        if isinstance(item, exp.Alias) and item.alias.lower() == name:
            within = column.parent
            while within is not None and within is not item:
                within = within.parent
            if within is None:
                return False
    has_table = False
    level = scope
    while level is not None:  # a subquery of a condition or of a SELECT list sees the query around it; no other does
        for _, source in scope_sources(level):
            if isinstance(source, exp.Table):
                has_table |= bool(source.name)
            if name in (_renamed(source) if isinstance(source, exp.Table) else output_names(source)):
                return False
        level = level.parent if level.is_subquery else None
    return has_table


def _renamed(table: exp.Table) -> set[str]:
    """The names that `FROM t AS alias(a, b)` gives to columns."""
    alias = table.args.get("alias")
    return {column.name.lower() for column in alias.args.get("columns") or []} if alias is not None else set()


# The lookups of a query: the texts that it compares with columns, and its first table.

Compared = tuple[str, str, str, str]  # table, column, text, and the query that shows the column's values


def lookups(sql: str, schema: Schema | None, engine: str) -> list[Compared]:
    """Every text that the query compares with a column of a known table, in reading order; a schema resolves
    unqualified columns, and parts a double-quoted text from a column.
    """
    tree = parse(sql, engine)
    owners: dict[str, set[str]] = {}  # tables by column, in lower case
    for known_table in schema.tables if schema else ():
        for known_column in known_table.columns:
            owners.setdefault(known_column.name.lower(), set()).add(known_table.name.lower())
    compared: dict[tuple[str, str, str], Compared] = {}
    for node in tree.find_all(exp.EQ, exp.NEQ, exp.Like, exp.ILike, exp.In, bfs=False) if tree else ():
        column, texts = node.this, []
        for other in node.expressions if isinstance(node, exp.In) else [node.expression]:
            is_text = isinstance(other, exp.Literal) and other.is_string
            # SQLite also reads a double-quoted name that no column has as a text.
            if isinstance(other, exp.Column) and not other.table and other.this.args.get("quoted"):
                is_text = bool(owners) and other.name.lower() not in owners
            texts += [other.name.strip("%")] if is_text else []
        select = column.find_ancestor(exp.Select) if texts and isinstance(column, exp.Column) else None
        if select is None:
            continue
        # The column's table: by its qualifier, else the only one that has it.
        clauses = [clause.this for clause in (select.args.get("from_"), *(select.args.get("joins") or ())) if clause]
        tables = [source for source in clauses if isinstance(source, exp.Table)]
        if column.table:
            tables = [table for table in tables if table.alias_or_name.lower() == column.table.lower()]
        elif owners:
            having = owners.get(column.name.lower(), set())
            tables = [table for table in tables if known_name(table, having) in having]
        if len(tables) == 1:
            table = ".".join(part.name for part in tables[0].parts)
            probe = exp.select(exp.column(column.this.copy())).distinct().from_(exp.to_table(table)).sql(engine)
            for text in texts:
                compared.setdefault((table, column.name, text), (table, column.name, text, probe))
    return list(compared.values())


def first_table(sql: str, engine: str) -> str | None:
    """The first table that the query names; None if it names none, or cannot be read."""
    tree = parse(sql, engine)
    table = tree.find(exp.Table) if tree else None
    return table.name if table else None
