"""Resolves the names in a query against a schema, and lists those that do not exist.

Unlike an optimiser's name resolution it goes on after a wrong name: wrong names are its results.
"""

import dataclasses
from collections.abc import Container, Iterator, Mapping

from sqlglot import exp
from sqlglot.optimizer.scope import Scope, traverse_scope

from pipelines.core.types import SchemaItems
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
    kind: str  # "table" or "column", by its use.
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
    """Column names by table name, all lower-cased; of tables whose names differ in case alone those of all."""
    columns: dict[str, tuple[str, ...]] = {}
    for table in schema.tables:
        names = (column.name.lower() for column in table.columns)
        columns[table.name.lower()] = (*columns.get(table.name.lower(), ()), *names)
    return columns


def known_name(table: exp.Expr, known: Container[str]) -> str:
    """The lower-cased name of a table, or of a column's table: with its schema if that is how it is known."""
    own = (table.table if isinstance(table, exp.Column) else table.name).lower()
    qualified = f"{table.text('db').lower()}.{own}"
    return qualified if qualified in known else own


def resolve(sql: str, schema: Schema, engine: str) -> Resolved | None:
    """A query with its names resolved; None when it can't be parsed as one query.

    May raise anything on a tree that parses but makes no sense: `query_clauses.read` is the total function.
    """
    tree = parse(sql, engine)
    if not isinstance(tree, exp.Select | exp.SetOperation | exp.Subquery):
        return None
    resolver = _Resolver(tree.copy(), columns_of(schema))
    tree = resolver.tree
    for select in list(tree.find_all(exp.Select)):
        sources = resolver.sources[id(select)] = resolver.from_sources(select)
        # `JOIN b USING (x)` becomes `JOIN b ON a.x = b.x`, which is the same to an error analysis.
        for join in select.args.get("joins") or ():
            right = resolver.alias(join.this)
            for name in join.args.get("using") or ():
                holders = (alias for alias, source in sources.items() if source.has(name.name.lower()))
                left = next((alias for alias in holders if alias != right), "")
                both = exp.EQ(this=exp.column(name.name, left), expression=exp.column(name.name, right))
                join.set("on", both if join.args.get("on") is None else exp.and_(join.args["on"], both))
            join.set("using", None)
    # A column is qualified by its table's own name; one of a subquery by nothing.
    for column, source in [(column, resolver.find(column)) for column in tree.find_all(exp.Column)]:
        table = source.table if source is not None else None
        if source is _STRING:
            column.replace(exp.Literal.string(column.name))
        elif not isinstance(column.this, exp.Star):
            column.set("this", exp.to_identifier(column.name.lower()))
            column.set("table", exp.to_identifier(table) if table else None)
            column.set("db", None)
        elif table is not None:  # the star of a subquery keeps its alias
            column.set("table", exp.to_identifier(table) if table else None)
    bases = (source.table for sources in resolver.sources.values() for source in sources.values())
    return Resolved(tree, frozenset(filter(None, bases)), tuple(resolver.unknown), resolver.ctes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """The meaning of an alias in FROM: a base table (with its name) or a subquery; `columns` is None when any goes."""

    table: str | None
    columns: tuple[str, ...] | None

    def has(self, column: str) -> bool:
        is_built_in = self.table is not None and column in _BUILT_IN_COLUMNS
        return is_built_in or self.columns is None or column in self.columns


_STRING = _Source(None, ())  # no source at all: SQLite reads an unknown "name" as a string


class _Resolver:
    """The state of one query's resolution."""

    def __init__(self, tree: exp.Expression, schema: Mapping[str, tuple[str, ...]]) -> None:
        self.tree = tree
        self.schema = schema
        self.ctes = {cte.alias.lower(): cte for cte in tree.find_all(exp.CTE)}
        self.unknown: list[Unknown] = []
        self.open: list[exp.CTE] = []
        self.sources: dict[int, dict[str, _Source]] = {}

    def from_sources(self, select: exp.Select) -> dict[str, _Source]:
        """The sources of a SELECT by their aliases; an unknown table is recorded."""
        sources: dict[str, _Source] = {}
        for node in from_items(select):
            name, source = node.name.lower(), _Source(None, None)  # of a table-valued function
            if isinstance(node, exp.Subquery):
                source = _Source(None, self._outputs(node.this))
            elif not isinstance(node, exp.Table) or not isinstance(node.this, exp.Identifier):
                pass
            elif name in self.ctes and not node.db:
                cte = self.ctes[name]
                if cte not in self.open:  # a recursive one has its own columns
                    self.open.append(cte)
                    names = tuple(column.name.lower() for column in cte.args["alias"].columns)
                    source = _Source(None, names or self._outputs(cte.this))
                    self.open.pop()
            elif (known := known_name(node, self.schema)) in self.schema:
                source = _Source(known, self.schema[known])
            elif name not in _BUILT_IN_TABLES and node.db.lower() not in _BUILT_IN_TABLES:
                self.unknown.append(Unknown(node.name, "table"))
            sources[self.alias(node) or f"?{len(sources)}"] = source
        return sources

    def alias(self, node: exp.Expr) -> str:
        """The key of a source: its alias, else its name, as the schema has it."""
        is_named = isinstance(node, exp.Table) and not node.alias
        return known_name(node, self.schema) if is_named else node.alias_or_name.lower()

    def _outputs(self, query: exp.Expr) -> tuple[str, ...] | None:
        """The column names of a subquery; None if they are not known."""
        select = query.find(exp.Select) if isinstance(query, exp.Query) else None
        if select is None:
            return None
        names: list[str] = []
        for projection in select.expressions:
            if not projection.is_star:
                names.append(projection.alias_or_name.lower())
                continue
            is_of_one = projection.name == "*" and isinstance(projection, exp.Column)
            for alias, source in self.from_sources(select).items():
                if not is_of_one or projection.table.lower() in (alias, alias.rpartition(".")[2]):
                    if source.columns is None:
                        return None
                    names.extend(source.columns)
        return tuple(names)

    def find(self, column: exp.Column) -> _Source | None:
        """The source of a column: the nearest query around it that knows its name; records it when there is none."""
        name, qualifier = column.name.lower(), column.table.lower()
        owner = known_name(column, self.schema)  # "b.t" of the column b.t.x
        node: exp.Expr | None = column.parent
        while node is not None:
            # An ORDER BY of a set operation belongs to its first query.
            select = node if isinstance(node, exp.Select) else None
            if isinstance(node, exp.SetOperation):
                select = node.find(exp.Select)
            node = node.parent
            if select is None:
                continue
            sources = self.sources[id(select)]
            if owner in sources:
                qualifier = owner
            elif qualifier and qualifier not in sources:  # hr.person without an alias is person, too
                qualifier = next((alias for alias in sources if alias.endswith(f".{qualifier}")), qualifier)
            if isinstance(column.this, exp.Star):
                return sources.get(qualifier)
            if qualifier and qualifier in sources:
                if sources[qualifier].has(name):
                    return sources[qualifier]
                break
            if not qualifier:
                holders = [source for source in sources.values() if source.has(name)]
                if holders:  # a certain one before a possible one
                    return min(holders, key=lambda source: source.columns is None)
                if any(item.alias and item.alias.lower() == name for item in select.expressions):
                    return None
        # An unknown name that is quoted and compared with something is meant as a string.
        if not qualifier and column.this.args.get("quoted") and isinstance(column.parent, _OPERAND):
            return _STRING
        elsewhere = tuple(table for table, columns in self.schema.items() if name in columns)
        self.unknown.append(Unknown(column.sql().replace('"', ""), "column", elsewhere))
        return None


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


# The tables and columns of the database that a query reads.


def schema_items(sql: str, schema: Schema, engine: str = "sqlite") -> SchemaItems | None:
    """The tables and columns of the database that a query reads, through CTEs, subqueries and aliases; None if it does
    not parse. A column that no table in its scope has comes with the table "".
    """
    tree = parse(sql, engine)
    if tree is None:
        return None
    known = {table: frozenset(columns) for table, columns in columns_of(schema).items()}
    tables: set[str] = set()
    columns: set[Item] = set()
    try:
        for scope in traverse_scope(tree):
            pairs = scope_sources(scope)
            bases = [(alias.lower(), known_name(one, known)) for alias, one in pairs if isinstance(one, exp.Table)]
            tables.update(table for _, table in bases)
            for column in scope_columns(scope):
                item = _read_item(scope, column, known)
                columns |= {item} if item is not None else set()
            for star in _own_stars(scope):
                starred = (table for alias, table in bases if star in ("", alias))
                columns |= {(table, name) for table in starred for name in known.get(table, ())}
            # USING and NATURAL compare columns that stand nowhere else.
            for join in scope.expression.args.get("joins") or []:
                names = {identifier.name.lower() for identifier in join.args.get("using") or []}
                if join.args.get("method") == "NATURAL" and bases:
                    names |= frozenset.intersection(*(known.get(table, frozenset()) for _, table in bases))
                columns |= {(table, name) for _, table in bases for name in names if name in known.get(table, ())}
    except Exception:  # sqlglot's scopes raise freely on trees that parse but make no sense
        return None
    return SchemaItems(frozenset(tables), frozenset(columns))


def _read_item(scope: Scope, column: exp.Column, known: Mapping[str, frozenset[str]]) -> Item | None:
    """The base column that a column stands for, under the table "" if no table has it; None for another's output."""
    name, qualifier, owner = column.name.lower(), column.table.lower(), known_name(column, known)
    query = unwrap(scope.expression)
    # A whole term of the scope's own ORDER BY that names an output: the output goes before a column.
    order = column.parent.parent if isinstance(column.parent, exp.Ordered) else None
    is_own_term = not qualifier and order is not None and order.parent is query
    if is_own_term and name in {output.lower() for output in getattr(query, "named_selects", [])}:
        return None
    level: Scope | None = scope
    while level is not None:
        for alias, source in scope_sources(level):
            if qualifier and alias.lower() != qualifier:
                continue
            if isinstance(source, exp.Table):
                table = known_name(source, known)
                if owner not in (qualifier, table):
                    continue
                if qualifier or name in known.get(table, ()):
                    return table, name
            elif qualifier or name in _outputs(source, known):
                return None  # the column of a subquery: its own scope has the columns that it reads
        level = level.parent
    items = getattr(query, "expressions", [])
    is_alias = any(isinstance(item, exp.Alias) and item.alias.lower() == name for item in items)
    if not qualifier and (is_alias or column.this.args.get("quoted") or name in ("rowid", "oid")):
        return None
    return "", name


def _outputs(query: Scope, known: Mapping[str, frozenset[str]], within: tuple[Scope, ...] = ()) -> set[str]:
    """The names of a subquery's columns, those of its stars included."""
    names = output_names(query)
    if "*" not in names or query in within:
        return names
    first = query
    while first.set_operation_scopes:  # the first query of a set operation names its columns
        first = first.set_operation_scopes[0]
    stars = set(_own_stars(first))
    for alias, source in scope_sources(first):
        if stars & {"", alias.lower()}:
            if isinstance(source, exp.Table):
                names |= known.get(known_name(source, known), frozenset())
            else:
                names |= _outputs(source, known, (*within, query))
    return names


def scope_sources(scope: Scope) -> list[tuple[str, exp.Table | Scope]]:
    """The tables and subqueries of a scope's FROM and JOIN, each with its alias: without the CTEs that it could read
    and does not. SQLite takes one alias twice.
    """
    pairs = [(alias, node, scope.sources[alias]) for alias, node in scope.references if alias in scope.sources]
    return [
        (alias, node if isinstance(node, exp.Table) and isinstance(known, exp.Table) else known)
        for alias, node, known in pairs
    ]


def scope_columns(scope: Scope) -> Iterator[exp.Column]:
    """The columns of a scope, stars left out."""
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


def output_names(source: Scope) -> set[str]:
    """The lower-cased names of a subquery's columns, those of its alias before its own; "*" if it has none."""
    names = source.outer_columns or getattr(source.expression, "named_selects", [])
    return {name.lower() for name in names} or {"*"}
