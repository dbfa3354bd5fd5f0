"""Resolves the names in a query against a schema, and lists those that do not exist.

Unlike an optimiser's name resolution it goes on after a wrong name: wrong names are its results.
"""

import dataclasses
from collections.abc import Container, Iterator, Mapping, Sequence

from sqlglot import exp
from sqlglot.optimizer.scope import Scope, traverse_scope

from pipelines.core.types import SchemaItems
from pipelines.sql.analysis.parsing import joined_clauses, parse, unwrap
from pipelines.sql.schema import Schema

Item = tuple[str, str]  # (table, column), lower-cased
_BUILT_IN_COLUMNS = frozenset({"rowid", "oid", "_rowid_"})
_BUILT_IN_TABLES = frozenset({"sqlite_master", "sqlite_schema", "information_schema"})
_OPERAND = (exp.Predicate, exp.Binary, exp.Between, exp.In, exp.Tuple, exp.Paren)


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    """A name that the schema does not have where the query looks for it."""

    name: str  # Text of the query, with its qualifier.
    kind: str  # "table" or "column", by its use.
    elsewhere: tuple[str, ...] = ()  # Tables of the database that do have such a column.


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """A query whose columns carry the names of their tables."""

    tree: exp.Expression  # Each column is qualified by its table's own name, in lower case; aliases are gone.
    tables: frozenset[str]  # Base tables that it reads.
    unknown: tuple[Unknown, ...]  # Wrong names, in the order of the text.
    ctes: Mapping[str, exp.CTE]  # WITH queries by their lower-cased names.


def columns_of(schema: Schema) -> dict[str, tuple[str, ...]]:
    """Column names by table name, all lower-cased; of tables whose names differ in case alone those of all."""
    columns: dict[str, tuple[str, ...]] = {}
    for table in schema.tables:
        table_name = table.name.lower()
        names = [column.name.lower() for column in table.columns]
        columns.setdefault(table_name, ())
        columns[table_name] += tuple(names)
    return columns


def known_name(table: exp.Expr, known: Container[str]) -> str:
    """The lower-cased name of a table, or of a column's table: with its schema if that is how it is known."""
    name = table.name.lower()
    if isinstance(table, exp.Column):
        name = table.table.lower()
    database_schema = table.text("db").lower()
    qualified = f"{database_schema}.{name}"
    if qualified in known:
        return qualified
    return name


def resolve_names(sql: str, schema: Schema, engine: str) -> Resolved | None:
    """A query with its names resolved; None when it can't be parsed as one query.

    May raise anything on a tree that parses but makes no sense: `query_clauses.read_clauses` is the total function.
    """
    tree = parse(sql, engine)
    if not isinstance(tree, exp.Select | exp.SetOperation | exp.Subquery):
        return None
    resolver = _Resolver(tree.copy(), columns_of(schema))
    tree = resolver.tree
    for select in list(tree.find_all(exp.Select)):
        resolver.sources[id(select)] = resolver.from_sources(select)
        resolver.write_using_as_on(select)
    columns = list(tree.find_all(exp.Column))
    sources = [resolver.source_of(column) for column in columns]  # before any column changes
    for column, source in zip(columns, sources, strict=True):
        _qualify(column, source)
    tables = frozenset(resolver.base_tables())
    return Resolved(tree, tables, tuple(resolver.unknown), resolver.ctes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """The meaning of an alias in FROM: a base table or a subquery."""

    table: str | None  # Name of the base table; None for a subquery.
    columns: tuple[str, ...] | None  # Lower-cased names; None if they are not known, so that any name passes.

    def has(self, column: str) -> bool:
        if self.columns is None or column in self.columns:
            return True
        return self.table is not None and column in _BUILT_IN_COLUMNS


_STRING = _Source(None, ())  # no source at all: SQLite reads an unknown "name" as a string


def _qualify(column: exp.Column, source: _Source | None) -> None:
    """Qualify a column by its table's own name, or one of a subquery by nothing."""
    if source is _STRING:
        column.replace(exp.Literal.string(column.name))
        return
    table = None
    if source is not None and source.table:
        table = exp.to_identifier(source.table)
    if not isinstance(column.this, exp.Star):
        name = exp.to_identifier(column.name.lower())
        column.set("this", name)
        column.set("table", table)
        column.set("db", None)
    elif source is not None and source.table is not None:  # the star of a subquery keeps its alias
        column.set("table", table)


class _Resolver:
    """The state of one query's resolution."""

    def __init__(self, tree: exp.Expression, schema: Mapping[str, tuple[str, ...]]) -> None:
        self.tree = tree
        self.schema = schema
        self.ctes = {cte.alias.lower(): cte for cte in tree.find_all(exp.CTE)}
        self.unknown: list[Unknown] = []
        self.open: list[exp.CTE] = []
        self.sources: dict[int, dict[str, _Source]] = {}  # key: the id of a SELECT, then an alias

    def from_sources(self, select: exp.Select) -> dict[str, _Source]:
        """The sources of a SELECT by their aliases; an unknown table is recorded."""
        sources: dict[str, _Source] = {}
        for node in from_items(select):
            source = self._from_source(node)
            key = self.alias(node) or f"?{len(sources)}"
            sources[key] = source
        return sources

    def _from_source(self, node: exp.Expr) -> _Source:
        """The source that an item of FROM is."""
        if isinstance(node, exp.Subquery):
            return _Source(None, self._outputs(node.this))
        if not isinstance(node, exp.Table) or not isinstance(node.this, exp.Identifier):
            return _Source(None, None)  # a table-valued function
        name = node.name.lower()
        if name in self.ctes and not node.db:
            return self._cte_source(self.ctes[name])
        known = known_name(node, self.schema)
        if known in self.schema:
            return _Source(known, self.schema[known])
        if name not in _BUILT_IN_TABLES and node.db.lower() not in _BUILT_IN_TABLES:
            self.unknown.append(Unknown(node.name, "table"))
        return _Source(None, None)

    def _cte_source(self, cte: exp.CTE) -> _Source:
        if cte in self.open:  # a recursive one has its own columns
            return _Source(None, None)
        self.open.append(cte)
        columns = cte.args["alias"].columns
        names: tuple[str, ...] | None = tuple(column.name.lower() for column in columns)
        if not names:
            names = self._outputs(cte.this)
        self.open.pop()
        return _Source(None, names)

    def write_using_as_on(self, select: exp.Select) -> None:
        """Write `JOIN b USING (x)` as `JOIN b ON a.x = b.x`, which is the same to an error analysis."""
        sources = self.sources[id(select)]
        for join in select.args.get("joins") or ():
            right = self.alias(join.this)
            for identifier in join.args.get("using") or ():
                name = identifier.name
                left = _other_holder(name.lower(), right, sources)
                left_column = exp.column(name, left)
                right_column = exp.column(name, right)
                condition: exp.Expr = exp.EQ(this=left_column, expression=right_column)
                if join.args.get("on") is not None:
                    condition = exp.and_(join.args["on"], condition)
                join.set("on", condition)
            join.set("using", None)

    def base_tables(self) -> Iterator[str]:
        """The names of the base tables of all SELECTs."""
        for by_alias in self.sources.values():
            for source in by_alias.values():
                if source.table:
                    yield source.table

    def alias(self, node: exp.Expr) -> str:
        """The key of a source: its alias, else its name, as the schema has it."""
        if isinstance(node, exp.Table) and not node.alias:
            return known_name(node, self.schema)
        return node.alias_or_name.lower()

    def _outputs(self, query: exp.Expr) -> tuple[str, ...] | None:
        """The column names of a subquery; None if they are not known."""
        if not isinstance(query, exp.Query):
            return None
        select = query.find(exp.Select)
        if select is None:
            return None
        names: list[str] = []
        for projection in select.expressions:
            if not projection.is_star:
                names.append(projection.alias_or_name.lower())
                continue
            is_qualified = isinstance(projection, exp.Column) and projection.name == "*"
            for alias, source in self.from_sources(select).items():
                bare_alias = alias.rpartition(".")[2]
                if is_qualified and projection.table.lower() not in (alias, bare_alias):
                    continue
                if source.columns is None:
                    return None
                names.extend(source.columns)
        return tuple(names)

    def source_of(self, column: exp.Column) -> _Source | None:
        """The source of a column: the nearest query around it that knows its name; records it when there is none."""
        name = column.name.lower()
        qualifier = column.table.lower()
        owner = known_name(column, self.schema)  # "b.t" of the column b.t.x
        for select in _selects_around(column):
            sources = self.sources[id(select)]
            qualifier = _matching_alias(qualifier, owner, sources)
            if isinstance(column.this, exp.Star):
                return sources.get(qualifier)
            if qualifier:
                qualified = sources.get(qualifier)
                if qualified is None:
                    continue
                if qualified.has(name):
                    return qualified
                break
            source = _likely_holder(name, sources)
            if source is not None:
                return source
            if _has_alias(select, name):
                return None
        # An unknown name that is quoted and compared with something is meant as a string.
        is_bare_quoted = not qualifier and column.this.args.get("quoted")
        if is_bare_quoted and isinstance(column.parent, _OPERAND):
            return _STRING
        elsewhere = tuple(table for table, columns in self.schema.items() if name in columns)
        text = column.sql().replace('"', "")
        self.unknown.append(Unknown(text, "column", elsewhere))
        return None


def _other_holder(column: str, right: str, sources: Mapping[str, _Source]) -> str:
    """The first alias but the right one whose source has a column; "" if there is none."""
    for alias, source in sources.items():
        if alias != right and source.has(column):
            return alias
    return ""


def _matching_alias(qualifier: str, owner: str, sources: Mapping[str, _Source]) -> str:
    """The alias that a column's qualifier stands for; the qualifier itself if there is none."""
    if owner in sources:
        return owner
    if not qualifier or qualifier in sources:
        return qualifier
    for alias in sources:  # hr.person without an alias is person, too
        if alias.endswith(f".{qualifier}"):
            return alias
    return qualifier


def _likely_holder(column: str, sources: Mapping[str, _Source]) -> _Source | None:
    """The first source that has a column; a certain one goes before one whose columns are not known."""
    holders = [source for source in sources.values() if source.has(column)]
    if not holders:
        return None
    return min(holders, key=lambda source: source.columns is None)


def _has_alias(query: exp.Expr, name: str) -> bool:
    """Whether an item of a SELECT list bears an alias."""
    return any(item.alias and item.alias.lower() == name for item in query.expressions)


def _selects_around(column: exp.Column) -> Iterator[exp.Select]:
    """The SELECTs around a column, the nearest first. An ORDER BY of a set operation belongs to its first query."""
    node: exp.Expr | None = column.parent
    while node is not None:
        if isinstance(node, exp.Select):
            yield node
        elif isinstance(node, exp.SetOperation):
            select = node.find(exp.Select)
            if select is not None:
                yield select
        node = node.parent


def from_items(select: exp.Select) -> Iterator[exp.Expr]:
    """The tables and subqueries of FROM and JOIN, parentheses opened."""
    items = [clause.this for clause in joined_clauses(select)]
    while items:
        item = items.pop(0)
        joined = [clause.this for clause in joined_clauses(item)]
        items = joined + items
        is_bracket = isinstance(item, exp.Subquery) and isinstance(item.this, exp.Table | exp.Subquery)
        if is_bracket:
            items.insert(0, item.this)
        else:
            yield item


# The tables and columns of the database that a query reads.

Known = Mapping[str, frozenset[str]]  # lower-cased columns by lower-cased table


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
            base_tables = _base_tables(scope, known)
            tables.update(table for _, table in base_tables)
            columns |= _scope_items(scope, base_tables, known)
    except Exception:  # sqlglot's scopes raise freely on trees that parse but make no sense
        return None
    return SchemaItems(frozenset(tables), frozenset(columns))


def _base_tables(scope: Scope, known: Known) -> list[tuple[str, str]]:
    """The alias and the name of each base table of a scope, in lower case."""
    base_tables: list[tuple[str, str]] = []
    for alias, source in scope_sources(scope):
        if isinstance(source, exp.Table):
            base_tables.append((alias.lower(), known_name(source, known)))
    return base_tables


def _scope_items(scope: Scope, base_tables: Sequence[tuple[str, str]], known: Known) -> set[Item]:
    """The base columns that one scope reads by name, by a star, or by a join on columns of one name."""
    items: set[Item] = set()
    for column in scope_columns(scope):
        item = _read_item(scope, column, known)
        if item is not None:
            items.add(item)
    for star in _own_stars(scope):
        for alias, table in base_tables:
            if star in ("", alias):
                items.update((table, name) for name in known.get(table, ()))
    # USING and NATURAL compare columns that stand nowhere else.
    columns_of_tables = {table: known.get(table, frozenset()) for _, table in base_tables}
    for join in scope.expression.args.get("joins") or []:
        compared = _names_compared_by(join, columns_of_tables)
        for table, columns in columns_of_tables.items():
            items.update((table, name) for name in compared & columns)
    return items


def _names_compared_by(join: exp.Expr, columns_of_tables: Known) -> set[str]:
    """The lower-cased columns that USING names, or that all tables of a NATURAL JOIN have."""
    using = join.args.get("using") or []
    names = {identifier.name.lower() for identifier in using}
    if join.args.get("method") == "NATURAL" and columns_of_tables:
        names |= frozenset.intersection(*columns_of_tables.values())
    return names


def _read_item(scope: Scope, column: exp.Column, known: Known) -> Item | None:
    """The base column that a column stands for, under the table "" if no table has it; None for another's output."""
    name = column.name.lower()
    qualifier = column.table.lower()
    query = unwrap(scope.expression)
    if not qualifier and _is_output_in_order(column, query):
        return None
    level: Scope | None = scope
    while level is not None:
        is_read, table = _table_in_scope(column, level, known)
        if is_read and table is None:
            return None
        if is_read and table is not None:
            return table, name
        level = level.parent
    if not qualifier and _is_alias_or_built_in(column, query):
        return None
    return "", name


def _table_in_scope(column: exp.Column, scope: Scope, known: Known) -> tuple[bool, str | None]:
    """Whether a source of a scope has a column, and that source's table: None for a subquery, whose own scope has the
    columns that it reads.
    """
    name = column.name.lower()
    qualifier = column.table.lower()
    owner = known_name(column, known)
    for alias, source in scope_sources(scope):
        if qualifier and alias.lower() != qualifier:
            continue
        if isinstance(source, exp.Table):
            table = known_name(source, known)
            if owner not in (qualifier, table):
                continue
            if qualifier or name in known.get(table, ()):
                return True, table
        elif qualifier or name in _scope_outputs(source, known):
            return True, None
    return False, None


def _is_alias_or_built_in(column: exp.Column, query: exp.Expr) -> bool:
    """Whether a name that no table has is an alias of the query, a quoted text, or the built-in number of a row."""
    name = column.name.lower()
    for item in getattr(query, "expressions", []):
        if isinstance(item, exp.Alias) and item.alias.lower() == name:
            return True
    return bool(column.this.args.get("quoted")) or name in ("rowid", "oid")


def _is_output_in_order(column: exp.Column, query: exp.Expr) -> bool:
    """Whether a name is a whole term of the query's own ORDER BY and names an output, which goes before a column."""
    if not isinstance(column.parent, exp.Ordered):
        return False
    order = column.parent.parent
    if order is None or order.parent is not query:
        return False
    outputs = {output.lower() for output in getattr(query, "named_selects", [])}
    return column.name.lower() in outputs


def _scope_outputs(query: Scope, known: Known, within: tuple[Scope, ...] = ()) -> set[str]:
    """The names of a subquery's columns, those of its stars included."""
    names = output_names(query)
    if "*" not in names or query in within:
        return names
    first = query
    while first.set_operation_scopes:  # the first query of a set operation names its columns
        first = first.set_operation_scopes[0]
    stars = set(_own_stars(first))
    for alias, source in scope_sources(first):
        if not stars & {"", alias.lower()}:
            continue
        if isinstance(source, exp.Table):
            names |= known.get(known_name(source, known), frozenset())
        else:
            names |= _scope_outputs(source, known, (*within, query))
    return names


def scope_sources(scope: Scope) -> list[tuple[str, exp.Table | Scope]]:
    """The tables and subqueries of a scope's FROM and JOIN, each with its alias: without the CTEs that it could read
    and does not. SQLite takes one alias twice.
    """
    sources: list[tuple[str, exp.Table | Scope]] = []
    for alias, node in scope.references:
        if alias not in scope.sources:
            continue
        known = scope.sources[alias]
        if isinstance(node, exp.Table) and isinstance(known, exp.Table):
            sources.append((alias, node))
        else:
            sources.append((alias, known))
    return sources


def scope_columns(scope: Scope) -> Iterator[exp.Column]:
    """The columns of a scope, stars left out."""
    for column in scope.find_all(exp.Column):
        if isinstance(column, exp.Column) and not isinstance(column.this, exp.Star):
            yield column


def _own_stars(scope: Scope) -> Iterator[str]:
    """The qualifiers of the SELECT list's stars; "" for a bare one."""
    if not isinstance(scope.expression, exp.Select):
        return
    for item in scope.expression.expressions:
        if isinstance(item, exp.Star):
            yield ""
        elif isinstance(item, exp.Column) and isinstance(item.this, exp.Star):
            yield item.table.lower()


def output_names(source: Scope) -> set[str]:
    """The lower-cased names of a subquery's columns, those of its alias before its own; "*" if it has none."""
    names = source.outer_columns or getattr(source.expression, "named_selects", [])
    if not names:
        return {"*"}
    return {name.lower() for name in names}
