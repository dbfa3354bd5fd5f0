"""The tables and columns of the database that a query reads."""

from __future__ import annotations

from collections.abc import Iterator

from sqlglot import exp
from sqlglot.optimizer.scope import Scope, traverse_scope

from pipelines.sql.analysis.parsing import parse, unwrap
from pipelines.sql.schema import Schema
from pipelines.types import EngineName, SchemaItems


def schema_items(sql: str, schema: Schema, engine: EngineName = "sqlite") -> SchemaItems | None:
    """The tables and columns of the database that a query reads, through CTEs, subqueries and aliases; None if it does
    not parse. A column that no table in its scope has comes with the table "".
    """
    tree = parse(sql, engine)
    if tree is None:
        return None
    try:
        resolver = _Resolver(schema)
        for scope in traverse_scope(tree):
            resolver.read(scope)
    except Exception:  # sqlglot's scopes raise freely on trees that parse but make no sense
        return None
    return SchemaItems(frozenset(resolver.tables), frozenset(resolver.columns))


class _Resolver:
    """Collects the tables and columns of all scopes of a query."""

    def __init__(self, schema: Schema) -> None:
        self._known = {table.name.lower(): {column.name.lower() for column in table.columns} for table in schema.tables}
        self.tables: set[str] = set()
        self.columns: set[tuple[str, str]] = set()

    def read(self, scope: Scope) -> None:
        """Add what one scope reads."""
        for _, source in sources(scope):
            if isinstance(source, exp.Table):
                self.tables.add(source.name.lower())
        for column in _own_columns(scope):
            self._column(scope, column)
        for star in _own_stars(scope):
            self._star(scope, star)
        self._joins(scope)

    def _column(self, scope: Scope, column: exp.Column) -> None:
        name, qualifier = column.name.lower(), column.table.lower()
        if not qualifier and _is_ordered_output(scope, column):
            return  # what the SELECT list reads for it is found there
        level: Scope | None = scope
        while level is not None:
            for alias, source in sources(level):
                if qualifier and alias.lower() != qualifier:
                    continue
                if isinstance(source, exp.Table):
                    if qualifier or name in self._known.get(source.name.lower(), ()):
                        self.columns.add((source.name.lower(), name))
                        return
                elif qualifier or name in self._outputs(source):
                    return  # the column of a subquery: what it reads is found in its own scope
            level = level.parent
        if not column.table and (_is_alias(scope, name) or column.this.args.get("quoted") or name in ("rowid", "oid")):
            return
        self.columns.add(("", name))

    def _outputs(self, query: Scope, within: tuple[Scope, ...] = ()) -> set[str]:
        """The names of a subquery's columns, what its stars stand for included."""
        names = outputs(query)
        if "*" not in names or query in within:
            return names
        first = query
        while first.set_operation_scopes:  # the first query of a set operation names its columns
            first = first.set_operation_scopes[0]
        stars = set(_own_stars(first))
        for alias, source in sources(first):
            if stars & {"", alias.lower()}:
                if isinstance(source, exp.Table):
                    names |= self._known.get(source.name.lower(), set())
                else:
                    names |= self._outputs(source, (*within, query))
        return names

    def _star(self, scope: Scope, qualifier: str) -> None:
        for alias, source in sources(scope):
            if isinstance(source, exp.Table) and (not qualifier or alias.lower() == qualifier):
                table = source.name.lower()
                self.columns |= {(table, name) for name in self._known.get(table, ())}

    def _joins(self, scope: Scope) -> None:
        """The columns that USING and NATURAL compare."""
        tables = [source.name.lower() for _, source in sources(scope) if isinstance(source, exp.Table)]
        for join in scope.expression.args.get("joins") or []:
            names = {identifier.name.lower() for identifier in join.args.get("using") or []}
            if join.args.get("method") == "NATURAL":
                columns = [self._known.get(table, set()) for table in tables]
                names |= set.intersection(*columns) if columns else set()
            self.columns |= {(table, name) for table in tables for name in names if name in self._known.get(table, ())}


def sources(scope: Scope) -> list[tuple[str, exp.Table | Scope]]:
    """What stands in a scope's FROM and JOIN, with its alias: without the CTEs that it could read and does not.

    SQLite takes one alias twice.
    """
    pairs = [(alias, node, scope.sources[alias]) for alias, node in scope.references if alias in scope.sources]
    return [
        (alias, node if isinstance(node, exp.Table) and isinstance(known, exp.Table) else known)
        for alias, node, known in pairs
    ]


def _is_ordered_output(scope: Scope, column: exp.Column) -> bool:
    """Whether a column is a whole term of the scope's own ORDER BY and names an output: that goes before a column."""
    term, query = column.parent, unwrap(scope.expression)
    order = term.parent if isinstance(term, exp.Ordered) else None
    outputs = getattr(query, "named_selects", [])
    return order is not None and order.parent is query and column.name.lower() in {name.lower() for name in outputs}


def _own_columns(scope: Scope) -> Iterator[exp.Column]:
    for column in scope.find_all(exp.Column):
        if isinstance(column, exp.Column) and not isinstance(column.this, exp.Star):
            yield column


def _own_stars(scope: Scope) -> Iterator[str]:
    """The qualifiers of the SELECT list's stars; "" for a bare one."""
    for item in scope.expression.expressions if isinstance(scope.expression, exp.Select) else []:
        if isinstance(item, exp.Star):
            yield ""
        elif isinstance(item, exp.Column) and isinstance(item.this, exp.Star):
            yield item.table.lower()


def outputs(source: Scope) -> set[str]:
    """The lower-cased names of a subquery's columns, those of its alias before its own; "*" where it says none."""
    names = source.outer_columns or getattr(source.expression, "named_selects", [])
    return {name.lower() for name in names} or {"*"}


def _is_alias(scope: Scope, name: str) -> bool:
    select = unwrap(scope.expression)
    items = getattr(select, "expressions", [])
    return any(isinstance(item, exp.Alias) and item.alias.lower() == name for item in items)
