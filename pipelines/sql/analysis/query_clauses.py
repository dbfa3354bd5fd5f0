"""Reads a resolved query into the clauses that an error analysis compares."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from sqlglot import exp

from pipelines.sql.analysis.name_resolution import Item, Resolved, columns_of, from_items, resolve_names
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
        column = ".".join(self.column)
        texts = ["NULL" if value is None else repr(value) for value in self.values]
        values = ", ".join(texts)
        return f"{column} {self.operator} {values}"


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """A query's clauses with aliases resolved; texts are canonical SQL. Clauses are those of all its (sub)queries."""

    resolved: Resolved  # Query itself.
    columns: frozenset[Item]  # Base columns that decide its result: shown, filtered, grouped, ordered or aggregated by.
    loose: frozenset[Item]  # Columns that only join tables or stand in a plain COUNT: another column would do as well.
    equal: tuple[tuple[Item, Item], ...]  # Pairs of columns that it sets equal.
    output: tuple[str, ...]  # Result columns in order.
    distinct: bool  # True if a SELECT has DISTINCT.
    limit: tuple[str, ...]  # LIMIT and OFFSET clauses, sorted.
    ordering: tuple[str, ...]  # Sort keys in order.
    grouping: frozenset[str]  # Grouping keys.
    having: tuple[str, ...]  # HAVING conditions, sorted.
    set_operators: tuple[str, ...]  # UNION, INTERSECT and EXCEPT with their ALL, sorted.
    aggregates: Counter[str]  # Names of aggregate functions, counted.
    conditions: tuple[Condition, ...]  # Comparisons with constants.
    logic: tuple[str, ...]  # ORs, then NOTs.
    joins: tuple[str, ...]  # Sides of outer joins, sorted.
    subqueries: int  # Number of SELECTs.


def read_clauses(sql: str, schema: Schema, engine: str) -> Reading | None:
    """A query's clauses; None when it can't be parsed as one query. Total: no text makes it raise."""
    try:
        resolved = resolve_names(sql, schema, engine)
        if resolved is None:
            return None
        return _reading_of(resolved, schema)
    except Exception:  # trees that parse but make no sense have nodes where others are expected
        return None


def _reading_of(resolved: Resolved, schema: Schema) -> Reading:
    tree = resolved.tree
    selects = list(tree.find_all(exp.Select))
    joining = _joining_columns(tree)
    deciding, loose = _deciding_and_loose_items(tree, joining)
    starred = _starred_items(selects, resolved, schema)
    return Reading(
        resolved=resolved,
        columns=frozenset(deciding | starred),
        loose=frozenset(loose),
        equal=tuple(_equal_items(tree, joining)),
        output=_result_columns(selects, resolved, schema),
        distinct=_has_distinct(selects),
        limit=_limit_texts(tree),
        ordering=tuple(_key_texts(tree, exp.Order)),
        grouping=frozenset(_key_texts(tree, exp.Group)),
        having=_having_texts(tree),
        set_operators=_set_operators(tree),
        aggregates=_count_aggregate_names(tree),
        conditions=tuple(_constant_conditions(tree)),
        logic=_logic_words(tree),
        joins=_outer_sides(tree),
        subqueries=len(selects),
    )


def _deciding_and_loose_items(
    tree: exp.Expr, joining: Sequence[tuple[exp.Column, exp.Column]]
) -> tuple[set[Item], set[Item]]:
    """The base columns that decide a query's result, and the others, which only join or stand in a plain COUNT."""
    loose_nodes: set[int] = set()
    for left, right in joining:
        loose_nodes.add(id(left))
        loose_nodes.add(id(right))
    # Without NULLs any column counts the same.
    for count in tree.find_all(exp.Count):
        if isinstance(count.this, exp.Column):
            loose_nodes.add(id(count.this))
    every_item: set[Item] = set()
    deciding: set[Item] = set()
    for column in tree.find_all(exp.Column):
        item = _base_item(column)
        if item is None:
            continue
        every_item.add(item)
        if id(column) not in loose_nodes:
            deciding.add(item)
    return deciding, every_item - deciding


def _has_distinct(selects: Sequence[exp.Select]) -> bool:
    return any(select.args.get("distinct") for select in selects)


def _limit_texts(tree: exp.Expr) -> tuple[str, ...]:
    limits = [*tree.find_all(exp.Limit), *tree.find_all(exp.Offset)]
    texts = map(_canonical_sql, limits)
    return tuple(sorted(texts))


def _key_texts(tree: exp.Expr, clause: type[exp.Order | exp.Group]) -> Iterator[str]:
    """The canonical SQL of each key of all ORDER BY or GROUP BY clauses."""
    for node in tree.find_all(clause):
        yield from map(_canonical_sql, node.expressions)


def _having_texts(tree: exp.Expr) -> tuple[str, ...]:
    clauses = tree.find_all(exp.Having)
    texts = [_canonical_sql(having.this) for having in clauses]
    return tuple(sorted(texts))


def _set_operators(tree: exp.Expr) -> tuple[str, ...]:
    operations = tree.find_all(exp.SetOperation)
    names = map(_set_operator, operations)
    return tuple(sorted(names))


def _count_aggregate_names(tree: exp.Expr) -> Counter[str]:
    calls = tree.find_all(exp.AggFunc)
    return Counter(map(_aggregate, calls))


def _logic_words(tree: exp.Expr) -> tuple[str, ...]:
    ors = list(tree.find_all(exp.Or))
    nots = list(tree.find_all(exp.Not))
    return ("OR",) * len(ors) + ("NOT",) * len(nots)


def _outer_sides(tree: exp.Expr) -> tuple[str, ...]:
    """LEFT, RIGHT and FULL of the outer joins, sorted."""
    joins = tree.find_all(exp.Join)
    sides = [join.side for join in joins if join.side]
    return tuple(sorted(sides))


def _joining_columns(tree: exp.Expr) -> list[tuple[exp.Column, exp.Column]]:
    """The columns of each `a.x = b.y`."""
    pairs = []
    for equality in tree.find_all(exp.EQ):
        left = equality.this
        right = equality.expression
        are_columns = isinstance(left, exp.Column) and isinstance(right, exp.Column)
        if are_columns and left.table != right.table:
            pairs.append((left, right))
    return pairs


def _starred_items(selects: Sequence[exp.Select], resolved: Resolved, schema: Schema) -> set[Item]:
    """The base columns that a `*` or `t.*` shows; those of a subquery are shown in that subquery."""
    items: set[Item] = set()
    for select in selects:
        for projection in select.expressions:
            if not projection.is_star or isinstance(projection, exp.Count):
                continue
            for _, columns in _starred_sources(projection, select, resolved, schema):
                items.update(columns)
    return items


def _equal_items(tree: exp.Expr, joining: Sequence[tuple[exp.Column, exp.Column]]) -> Iterator[tuple[Item, Item]]:
    """The base columns that ON, WHERE or IN (SELECT ...) set equal."""
    pairs: list[tuple[exp.Expr, exp.Expr]] = [*joining]
    for member in tree.find_all(exp.In):
        query = member.args.get("query")
        if query is None:
            continue
        inner = query.find(exp.Select)
        if inner is not None and len(inner.expressions) == 1:
            pairs.append((member.this, inner.expressions[0]))
    for left, right in pairs:
        left_item = _base_item(left)
        right_item = _base_item(right)
        if left_item is not None and right_item is not None:
            yield left_item, right_item


def _constant_conditions(tree: exp.Expr) -> Iterator[Condition]:
    """The comparisons of one column with constants."""
    for node in tree.find_all(*_COMPARISONS):
        compared: list[exp.Column] = []
        constants: list[Constant] = []
        for operand in _operands(node):
            bare = operand
            if isinstance(operand, exp.Lower | exp.Upper | exp.Paren):
                bare = operand.this
            if isinstance(bare, exp.Column) and bare.table:
                compared.append(bare)
            constants += _constant(bare)
        if len(compared) != 1 or not constants:
            continue
        (column,) = compared
        item = _base_item(column)
        if item is None:
            continue
        operator = _COMPARISONS[type(node)]
        if isinstance(node.parent, exp.Not):
            operator = f"NOT {operator}"
        yield Condition(item, operator, tuple(constants))


def _operands(comparison: exp.Expr) -> list[exp.Expr | None]:
    """The left side of a comparison, its right side or bounds, and the members of a list, in that order."""
    operands = [comparison.this]
    for key in ("expression", "low", "high"):
        operands.append(comparison.args.get(key))
    return [*operands, *comparison.expressions]


def _result_columns(selects: Sequence[exp.Select], resolved: Resolved, schema: Schema) -> tuple[str, ...]:
    """The columns of the result: those of the first query of the text that is not nested in another one."""
    for select in selects:
        if select.find_ancestor(exp.Select, exp.CTE) is None:
            return tuple(_output_texts(select, resolved, schema, ()))
    return ()


def _set_operator(node: exp.SetOperation) -> str:
    name = type(node).__name__.upper()
    if node.args.get("distinct", True):
        return name
    return f"{name} ALL"


def _aggregate(call: exp.AggFunc) -> str:
    name = type(call).__name__.upper()
    if isinstance(call.this, exp.Distinct):
        return f"{name} DISTINCT"
    return name


def _base_item(column: exp.Expr) -> Item | None:
    """(table, column) of a resolved base column; None for anything else."""
    if not isinstance(column, exp.Column) or isinstance(column.this, exp.Star):
        return None
    if not column.table:
        return None
    return column.table, column.name


def _canonical_sql(node: exp.Expr) -> str:
    return node.sql(dialect="sqlite", comments=False)


def _starred_sources(
    star: exp.Expr, select: exp.Select, resolved: Resolved, schema: Schema
) -> Iterator[tuple[exp.Expr, list[Item]]]:
    """The tables, CTEs and subqueries of FROM and JOIN that a star stands for, a base table with its columns."""
    qualifier = ""
    if isinstance(star, exp.Column):
        qualifier = star.table.lower()
    for node in from_items(select):
        name = node.name.lower()
        if qualifier not in ("", node.alias_or_name.lower(), name):
            continue
        items: list[Item] = []
        if isinstance(node, exp.Table) and (node.db or name not in resolved.ctes):
            names = columns_of(schema).get(name, ())
            items = [(name, column) for column in names]
        yield node, items


def _output_texts(
    select: exp.Select, resolved: Resolved, schema: Schema, within: tuple[exp.Select, ...]
) -> Iterator[str]:
    """The canonical SQL of each column of a query; a star is looked up in the subquery that it is of."""
    for projection in select.expressions:
        if not projection.is_star or isinstance(projection, exp.Count):
            yield _canonical_sql(projection.unalias())
            continue
        for node, items in _starred_sources(projection, select, resolved, schema):
            if items:
                yield from map(".".join, items)
                continue
            inner = _inner_select(node, resolved)
            around = (*within, select)
            is_recursive = any(inner is outer for outer in around)
            if inner is not None and not is_recursive:
                yield from _output_texts(inner, resolved, schema, around)


def _inner_select(node: exp.Expr, resolved: Resolved) -> exp.Select | None:
    """The first SELECT of a subquery or CTE that stands in FROM."""
    query: exp.Expr | None = resolved.ctes.get(node.name.lower())
    if isinstance(node, exp.Subquery):
        query = node.this
    if query is None:
        return None
    return query.find(exp.Select)


def _constant(node: exp.Expr | None) -> tuple[Constant, ...]:
    """A constant as a tuple of one; () for anything else."""
    if isinstance(node, exp.Null):
        return (None,)
    is_negative = isinstance(node, exp.Neg)
    literal = node
    if isinstance(node, exp.Neg):
        literal = node.this
    if not isinstance(literal, exp.Literal):
        return ()
    if literal.is_string:
        return (literal.name,)
    value = _number(literal.name)
    if is_negative:
        value = -value
    return (value,)


def _number(text: str) -> int | float:
    """A number's value; NaN for too many digits, or a spelling of another dialect."""
    try:
        if text.isdecimal():
            return int(text)
        return float(text)
    except ValueError:
        return float("nan")
