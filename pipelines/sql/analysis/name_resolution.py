"""Resolves the names in a query against a schema, and says which of them do not exist.

Unlike an optimiser's name resolution it goes on after a name that is wrong: wrong names are what it looks for.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from sqlglot import exp
from sqlglot.optimizer.scope import Scope, traverse_scope

from pipelines.core.types import EngineName, SchemaItems
from pipelines.sql.analysis.parsing import parse, unwrap
from pipelines.sql.schema import Schema

Item = tuple[str, str]  # (table, column), lower-cased
_BUILT_IN_COLUMNS = frozenset({"rowid", "oid", "_rowid_"})
_BUILT_IN_TABLES = frozenset({"sqlite_master", "sqlite_schema", "information_schema"})
_OPERAND = (exp.Predicate, exp.Binary, exp.Between, exp.In, exp.Tuple, exp.Paren)


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """A name that the schema does not have where the query looks for it."""

    name: str  # as written, with its qualifier.
    kind: str  # what it was used as.
    elsewhere: tuple[str, ...] = ()  # tables of the database that do have such a column; () when none does.


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """A query whose columns carry the names of their tables."""

    # every resolved column is qualified by its table's own name, all lower-cased; aliases are gone.
    tree: exp.Expression
    tables: frozenset[str]  # base tables that it reads.
    unknown: tuple[Unknown, ...]  # wrong names, in the order of the text.
    ctes: Mapping[str, exp.CTE]  # its WITH queries by their lower-cased names.


def columns_of(schema: Schema) -> dict[str, tuple[str, ...]]:
    """Column names by table name, all lower-cased."""
    return {table.name.lower(): tuple(column.name.lower() for column in table.columns) for table in schema.tables}


def resolve(sql: str, schema: Schema, engine: EngineName) -> Resolved | None:
    """A query with its names resolved; None when it can't be parsed as one query.

    May raise anything on a tree that parses but makes no sense: `clauses.read` is the total function.
    """
    tree = parse(sql, engine)
    if not isinstance(tree, exp.Select | exp.SetOperation | exp.Subquery):
        return None
    return _Resolver(tree.copy(), columns_of(schema)).run()


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """What an alias in FROM stands for: a base table (with its name) or a subquery; `columns` is None when any goes."""

    table: str | None
    columns: tuple[str, ...] | None

    def has(self, column: str) -> bool:
        return (
            self.columns is None or column in self.columns or (self.table is not None and column in _BUILT_IN_COLUMNS)
        )


_STRING = _Source(None, ())  # no source at all: SQLite reads an unknown "name" as a string


class _Resolver:
    """One query's resolution; single use, since it rewrites the tree."""

    def __init__(self, tree: exp.Expression, schema: Mapping[str, tuple[str, ...]]) -> None:
        self.tree = tree
        self.schema = schema
        self.ctes = {cte.alias.lower(): cte for cte in tree.find_all(exp.CTE)}
        self.unknown: list[Unknown] = []
        self.open: list[exp.CTE] = []
        self.sources: dict[int, dict[str, _Source]] = {}

    def run(self) -> Resolved:
        selects = list(self.tree.find_all(exp.Select))
        for select in selects:
            self.sources[id(select)] = self._sources(select)
            _spell_out_using(select, self.sources[id(select)])
        columns = [(column, self._find(column)) for column in self.tree.find_all(exp.Column)]
        for column, source in columns:
            self._rewrite(column, source)
        bases = (source.table for sources in self.sources.values() for source in sources.values())
        return Resolved(
            self.tree, frozenset(table for table in bases if table is not None), tuple(self.unknown), self.ctes
        )

    def _sources(self, select: exp.Select) -> dict[str, _Source]:
        sources: dict[str, _Source] = {}
        for node in from_items(select):
            alias = node.alias_or_name.lower() or f"?{len(sources)}"
            sources[alias] = self._source(node)
        return sources

    def _source(self, node: exp.Expr) -> _Source:
        if isinstance(node, exp.Subquery):
            return _Source(None, self._outputs(node.this))
        name = node.name.lower()
        if not isinstance(node, exp.Table) or not isinstance(node.this, exp.Identifier):
            return _Source(None, None)  # a table-valued function
        if name in self.ctes and not node.db:
            return self._cte(self.ctes[name])
        if name in self.schema:
            return _Source(name, self.schema[name])
        if name not in _BUILT_IN_TABLES and node.db.lower() not in _BUILT_IN_TABLES:
            self.unknown.append(Unknown(node.name, "table"))
        return _Source(None, None)

    def _cte(self, cte: exp.CTE) -> _Source:
        if cte in self.open:
            return _Source(None, None)  # recursive: its columns are its own
        column_names = tuple(column.name.lower() for column in cte.args["alias"].columns)
        self.open.append(cte)
        outputs = column_names or self._outputs(cte.this)
        self.open.pop()
        return _Source(None, outputs)

    def _outputs(self, query: exp.Expr) -> tuple[str, ...] | None:
        """The column names that a subquery gives; None when they can't be told."""
        select = query.find(exp.Select) if isinstance(query, exp.Query) else None
        if select is None:
            return None
        names: list[str] = []
        for projection in select.expressions:
            if not projection.is_star:
                names.append(projection.alias_or_name.lower())
                continue
            for alias, source in self._sources(select).items():
                if (
                    projection.name != "*"
                    or not isinstance(projection, exp.Column)
                    or projection.table.lower() == alias
                ):
                    if source.columns is None:
                        return None
                    names.extend(source.columns)
        return tuple(names)

    def _find(self, column: exp.Column) -> _Source | None:
        """The source of a column: the nearest query around it that knows its name; records it when there is none."""
        name, qualifier = column.name.lower(), column.table.lower()
        for select in _around(column):
            sources = self.sources[id(select)]
            if isinstance(column.this, exp.Star):
                return sources.get(qualifier)
            if qualifier and qualifier in sources:
                return sources[qualifier] if sources[qualifier].has(name) else self._missed(column)
            if not qualifier:
                holders = [source for source in sources.values() if source.has(name)]
                if holders:
                    return min(
                        holders, key=lambda source: source.columns is None
                    )  # a certain one before a possible one
                if name in _aliases(select):
                    return None
        return _STRING if _can_be_string(column) else self._missed(column)

    def _missed(self, column: exp.Column) -> _Source | None:
        name = column.name.lower()
        elsewhere = tuple(table for table, columns in self.schema.items() if name in columns)
        self.unknown.append(Unknown(column.sql().replace('"', ""), "column", elsewhere))
        return None

    def _rewrite(self, column: exp.Column, source: _Source | None) -> None:
        """Qualify a column by its table's own name; one of a subquery by nothing."""
        if source is _STRING:
            column.replace(exp.Literal.string(column.name))
            return
        if not isinstance(column.this, exp.Star):
            column.set("this", exp.to_identifier(column.name.lower()))
        elif source is None or source.table is None:
            return  # the star of a subquery keeps its alias, which says of which one
        column.set("table", exp.to_identifier(source.table) if source is not None and source.table else None)


def from_items(select: exp.Select) -> Iterator[exp.Expr]:
    """The tables and subqueries of FROM and JOIN, parentheses opened."""
    start = select.args.get("from_")
    items = [start.this] if start is not None else []
    items += [join.this for join in select.args.get("joins") or ()]
    while items:
        item = items.pop(0)
        items = [join.this for join in item.args.get("joins") or ()] + items
        if isinstance(item, exp.Subquery) and isinstance(item.this, exp.Table | exp.Subquery):
            items.insert(0, item.this)
        else:
            yield item


def _around(node: exp.Expr) -> Iterator[exp.Select]:
    """The queries around a node, the nearest first; an ORDER BY of a set operation belongs to its first query."""
    while node.parent is not None:
        node = node.parent
        if isinstance(node, exp.Select):
            yield node
        elif isinstance(node, exp.SetOperation):
            first = node.find(exp.Select)
            if first is not None:
                yield first


def _aliases(select: exp.Select) -> set[str]:
    return {projection.alias.lower() for projection in select.expressions if projection.alias}


def _can_be_string(column: exp.Column) -> bool:
    """Whether an unknown name stands where people write strings: quoted, and compared with something."""
    return not column.table and bool(column.this.args.get("quoted")) and isinstance(column.parent, _OPERAND)


def _spell_out_using(select: exp.Select, sources: Mapping[str, _Source]) -> None:
    """Turn `JOIN b USING (x)` into `JOIN b ON a.x = b.x`, which says the same to an error analysis."""
    for join in select.args.get("joins") or ():
        right = join.this.alias_or_name.lower()
        for name in join.args.get("using") or ():
            left = next(
                (alias for alias, source in sources.items() if alias != right and source.has(name.name.lower())), ""
            )
            both = exp.EQ(this=exp.column(name.name, left), expression=exp.column(name.name, right))
            join.set("on", both if join.args.get("on") is None else exp.and_(join.args["on"], both))
        join.set("using", None)


# The tables and columns of the database that a query reads.


def schema_items(sql: str, schema: Schema, engine: EngineName = "sqlite") -> SchemaItems | None:
    """The tables and columns of the database that a query reads, through CTEs, subqueries and aliases; None if it does
    not parse. A column that no table in its scope has comes with the table "".
    """
    tree = parse(sql, engine)
    if tree is None:
        return None
    try:
        resolver = _ItemResolver(schema)
        for scope in traverse_scope(tree):
            resolver.read(scope)
    except Exception:  # sqlglot's scopes raise freely on trees that parse but make no sense
        return None
    return SchemaItems(frozenset(resolver.tables), frozenset(resolver.columns))


class _ItemResolver:
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
