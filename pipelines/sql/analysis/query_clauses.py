"""Reads a resolved query into the clauses that an error analysis compares."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

from sqlglot import exp

from pipelines.sql.analysis.name_resolution import Item, Resolved, columns_of, from_items, resolve
from pipelines.sql.schema import Schema

Constant = str | int | float | None
_COMPARISONS: Mapping[type[exp.Expr], str] = {
    exp.EQ: "=",
    exp.NEQ: "!=",
    exp.GT: ">",
    exp.GTE: ">=",
    exp.LT: "<",
    exp.LTE: "<=",
    exp.Like: "LIKE",
    exp.Glob: "GLOB",
    exp.Is: "IS",
    exp.In: "IN",
    exp.Between: "BETWEEN",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of a column with constants: `state IN ('CA', 'NV')` is (state, "IN", ("CA", "NV"))."""

    column: Item
    operator: str
    values: tuple[Constant, ...]

    def __str__(self) -> str:
        values = ("NULL" if value is None else repr(value) for value in self.values)
        return f"{'.'.join(self.column)} {self.operator} {', '.join(values)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """A query's clauses with aliases resolved; texts are canonical SQL."""

    resolved: Resolved  # the query itself.
    # base columns that decide its result: shown, filtered, grouped, ordered or aggregated by.
    columns: frozenset[Item]
    # columns that only join tables or stand in a plain COUNT: another column would do as well.
    loose: frozenset[Item]
    equal: tuple[tuple[Item, Item], ...]  # pairs of columns that it sets equal.
    output: tuple[str, ...]  # the result columns in order.
    # distinct, limit, ordering, grouping, having, set_operators: the clauses of all its (sub)queries.
    distinct: bool
    limit: tuple[str, ...]
    ordering: tuple[str, ...]
    grouping: frozenset[str]
    having: tuple[str, ...]
    set_operators: tuple[str, ...]
    aggregates: Counter[str]  # name of each aggregate function, counted.
    conditions: tuple[Condition, ...]  # comparisons with constants.
    logic: tuple[str, ...]  # its ORs and NOTs; joins: its outer joins.
    joins: tuple[str, ...]
    subqueries: int  # how many queries it nests.


def read(sql: str, schema: Schema, engine: str) -> Reading | None:
    """A query's clauses; None when it can't be parsed as one query. Total: no text makes it raise."""
    try:
        resolved = resolve(sql, schema, engine)
        return _read(resolved, schema) if resolved is not None else None
    except Exception:  # trees that parse but make no sense have nodes where others are expected
        return None


def _read(resolved: Resolved, schema: Schema) -> Reading:
    tree = resolved.tree
    selects = list(tree.find_all(exp.Select))
    every_column = [(column, item) for column in tree.find_all(exp.Column) if (item := _item(column))]
    # Loose columns: those of `a.x = b.y`, and arguments of a plain COUNT (without NULLs any column counts the same).
    joining: list[tuple[exp.Column, exp.Column]] = []
    for equality in tree.find_all(exp.EQ):
        left, right = equality.this, equality.expression
        if isinstance(left, exp.Column) and isinstance(right, exp.Column) and left.table != right.table:
            joining.append((left, right))
    loose = {id(column) for pair in joining for column in pair}
    loose |= {id(node.this) for node in tree.find_all(exp.Count) if isinstance(node.this, exp.Column)}
    columns = {item for column, item in every_column if id(column) not in loose}
    # A `*` or `t.*` shows base columns; those of a subquery are shown in that subquery.
    shown = {
        item
        for select in selects
        for projection in select.expressions
        if projection.is_star and not isinstance(projection, exp.Count)
        for _, base_columns in _starred(projection, select, resolved, schema)
        for item in base_columns
    }
    # Columns are set equal by ON, WHERE or IN (SELECT ...).
    equal = [(_item(left), _item(right)) for left, right in joining]
    for member in tree.find_all(exp.In):
        query = member.args.get("query")
        inner = query.find(exp.Select) if query is not None else None
        if inner is not None and isinstance(member.this, exp.Column) and len(inner.expressions) == 1:
            only = inner.expressions[0]
            equal.append((_item(member.this), _item(only) if isinstance(only, exp.Column) else None))
    conditions = []
    for node in tree.find_all(*_COMPARISONS):
        operands = [node.this, *(node.args.get(key) for key in ("expression", "low", "high")), *node.expressions]
        bare = [part.this if isinstance(part, exp.Lower | exp.Upper | exp.Paren) else part for part in operands]
        compared = [part for part in bare if isinstance(part, exp.Column) and part.table]
        constants = tuple(constant for part in bare for constant in _constant(part))
        item = _item(compared[0]) if len(compared) == 1 else None
        if item is not None and constants:
            negated = "NOT " if isinstance(node.parent, exp.Not) else ""
            conditions.append(Condition(item, negated + _COMPARISONS[type(node)], constants))
    # The result's columns are those of the first query of the text that is not nested in another one.
    outer = next((select for select in selects if select.find_ancestor(exp.Select, exp.CTE) is None), None)
    return Reading(
        resolved=resolved,
        columns=frozenset(columns | shown),
        loose=frozenset({item for _, item in every_column} - columns),
        equal=tuple((first, second) for first, second in equal if first is not None and second is not None),
        output=() if outer is None else tuple(_outputs(outer, resolved, schema, ())),
        distinct=any(select.args.get("distinct") for select in selects),
        limit=tuple(sorted(_text(node) for kind in (exp.Limit, exp.Offset) for node in tree.find_all(kind))),
        ordering=tuple(_text(key) for order in tree.find_all(exp.Order) for key in order.expressions),
        grouping=frozenset(_text(key) for group in tree.find_all(exp.Group) for key in group.expressions),
        having=tuple(sorted(_text(having.this) for having in tree.find_all(exp.Having))),
        set_operators=tuple(
            sorted(
                type(node).__name__.upper() + ("" if node.args.get("distinct", True) else " ALL")
                for node in tree.find_all(exp.SetOperation)
            )
        ),
        aggregates=Counter(
            type(node).__name__.upper() + (" DISTINCT" if isinstance(node.this, exp.Distinct) else "")
            for node in tree.find_all(exp.AggFunc)
        ),
        conditions=tuple(conditions),
        logic=tuple(name.upper() for name in ("or", "not") for _ in tree.find_all(getattr(exp, name.title()))),
        joins=tuple(sorted(join.side for join in tree.find_all(exp.Join) if join.side)),
        subqueries=len(selects),
    )


def _item(column: exp.Column) -> Item | None:
    """(table, column) of a resolved base column."""
    return (column.table, column.name) if column.table and not isinstance(column.this, exp.Star) else None


def _text(node: exp.Expr) -> str:
    return node.sql(dialect="sqlite", comments=False)


def _starred(
    star: exp.Expr, select: exp.Select, resolved: Resolved, schema: Schema
) -> Iterator[tuple[exp.Expr, list[Item]]]:
    """The tables, CTEs and subqueries of FROM and JOIN that a star stands for, a base table with its columns."""
    only = star.table.lower() if isinstance(star, exp.Column) else ""
    for node in from_items(select):
        name = node.name.lower()
        if only in ("", node.alias_or_name.lower(), name):
            is_base = isinstance(node, exp.Table) and (bool(node.db) or name not in resolved.ctes)
            yield node, [(name, column) for column in columns_of(schema).get(name, ()) if is_base]


def _outputs(select: exp.Select, resolved: Resolved, schema: Schema, within: tuple[exp.Select, ...]) -> Iterator[str]:
    """The canonical SQL of each column of a query; a star is looked up in the subquery that it is of."""
    for projection in select.expressions:
        if not projection.is_star or isinstance(projection, exp.Count):
            yield _text(projection.unalias())
            continue
        for node, columns in _starred(projection, select, resolved, schema):
            yield from map(".".join, columns)
            if columns:
                continue
            query = node.this if isinstance(node, exp.Subquery) else resolved.ctes.get(node.name.lower())
            inner = query.find(exp.Select) if query is not None else None
            if inner is not None and all(inner is not other for other in (*within, select)):  # a recursive one
                yield from _outputs(inner, resolved, schema, (*within, select))


def _constant(node: exp.Expr | None) -> tuple[Constant, ...]:
    """A constant as a tuple of one; () for anything else."""
    if isinstance(node, exp.Null):
        return (None,)
    sign = -1 if isinstance(node, exp.Neg) else 1
    literal = node.this if isinstance(node, exp.Neg) else node
    if not isinstance(literal, exp.Literal):
        return ()
    if literal.is_string:
        return (literal.name,)
    try:
        return (sign * (int(literal.name) if literal.name.isdecimal() else float(literal.name)),)
    except ValueError:  # too many digits, or a spelling of another dialect
        return (float("nan"),)
