"""What a query looks up: the texts that it compares with columns, its first table, the first row of a table."""

from __future__ import annotations

from collections.abc import Iterator

from sqlglot import exp

from pipelines.sql.analysis.parsing import parse
from pipelines.sql.schema import Schema
from pipelines.types import EngineName

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
