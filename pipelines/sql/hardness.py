"""Spider's hardness levels by the official rules (Yu et al. 2018, `evaluation.py: eval_hardness`), on any SQL.

The official code reads a small dialect with its own parser. Here sqlglot reads, and the official counting, with its habits,
is done on its tree; where the official parser gives up (CTE, CASE, window, bracketed conditions, EXISTS, outer joins), the same
counts are taken in the sense that they have: a CTE or a subquery is a nested query, a window function an aggregation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sqlglot import exp

from pipelines.sql.parsing import first_select, parse, unwrap
from pipelines.types import EngineName, Hardness

AGGREGATES = (exp.Max, exp.Min, exp.Count, exp.Sum, exp.Avg)


class Condition(NamedTuple):
    """One comparison of a WHERE, ON or HAVING.

    Attributes:
        joined_by: "and" or "or" before it; "" for the first.
        column_value: it is held against a column or an expression, not a literal or a subquery.
    """

    joined_by: str
    negated: bool
    like: bool
    nested: int
    column_value: bool


class Counts(NamedTuple):
    """The three counts that decide the level."""

    component1: int
    component2: int
    others: int


def level(counts: Counts) -> Hardness:
    """The level of the counts (`Evaluator.eval_hardness`)."""
    first, second, others = counts
    if first <= 1 and others == 0 and second == 0:
        return "easy"
    if second == 0 and ((others <= 2 and first <= 1) or (first <= 2 and others < 2)):
        return "medium"
    if second == 0 and ((others > 2 and first <= 2) or (2 < first <= 3 and others <= 2)):
        return "hard"
    if first <= 1 and others == 0 and second <= 1:
        return "hard"
    return "extra"


def hardness(sql: str, engine: EngineName = "sqlite") -> Hardness:
    """The level of a query; "extra" for text that no parser reads."""
    tree = parse(sql, engine)
    if tree is None:
        return "extra"
    try:
        return level(count(tree))
    except RecursionError:
        return "extra"


def count(tree: exp.Expression) -> Counts:
    """The counts of a query: of its first SELECT, as the official parser hangs all else of a set operation below it."""
    select = first_select(tree)
    on = _on_conditions(select)
    where, having = _clause(select, "where"), _clause(select, "having")
    conditions = on + where + having
    group = select.args.get("group")
    keys = group.expressions if group else []
    order = select.args.get("order")
    joins = select.args.get("joins") or []
    first = bool(where) + bool(group) + bool(order) + bool(select.args.get("limit")) + len(joins)
    first += sum(condition.joined_by == "or" for condition in conditions)
    first += sum(condition.like for condition in conditions)
    nested = sum(condition.nested for condition in conditions) + (unwrap(tree) is not select) + _outside(tree, select)
    aggregates = sum(map(_aggregates, select.expressions))
    aggregates += sum(condition.negated for condition in where + having)
    aggregates += sum(_all_aggregates(key) for key in (order.expressions if order else []))
    aggregates += max(0, len(having) - 1)  # the official count takes each AND and OR of a HAVING for an aggregation
    others = (aggregates > 1) + (len(select.expressions) > 1) + (len(where) > 1) + (len(keys) > 1)
    return Counts(first, nested, others)


def _on_conditions(select: exp.Expression) -> list[Condition]:
    found: list[Condition] = []
    for join in select.args.get("joins") or []:
        if join.args.get("on"):
            own = _conditions(join.args["on"])
            found += [own[0]._replace(joined_by="and" if found else ""), *own[1:]]
    return found


def _clause(select: exp.Expression, name: str) -> list[Condition]:
    clause = select.args.get(name)
    return _conditions(clause.this) if clause else []


def _conditions(node: exp.Expression) -> list[Condition]:
    """The comparisons under AND and OR, in the order of the text, less what the official parser loses: after a value that is a
    column it skips to the next AND (`parse_value`), so that "a = b OR c = d" is one comparison."""
    kept: list[Condition] = []
    skipping = False
    for joined_by, leaf in _leaves(node, ""):
        skipping = skipping and joined_by == "or"
        if not skipping:
            kept.append(_condition(joined_by, leaf))
            skipping = kept[-1].column_value
    return kept


def _leaves(node: exp.Expression, joined_by: str) -> Iterator[tuple[str, exp.Expression]]:
    if isinstance(node, exp.Paren) and isinstance(node.this, exp.Connector | exp.Paren):
        yield from _leaves(node.this, joined_by)
    elif isinstance(node, exp.Connector):
        yield from _leaves(node.this, joined_by)
        yield from _leaves(node.expression, "or" if isinstance(node, exp.Or) else "and")
    else:
        yield joined_by, node


def _condition(joined_by: str, leaf: exp.Expression) -> Condition:
    negated = isinstance(leaf, exp.Not)
    inner = leaf.this if negated else leaf
    while isinstance(inner, exp.Paren):
        inner = inner.this
    like = isinstance(inner, exp.Like | exp.ILike | exp.Glob | exp.SimilarTo)
    nested = sum(1 for _ in _subqueries(inner))
    value = inner.expression if isinstance(inner, exp.Binary) else None
    return Condition(joined_by, negated, like, nested, _is_column(value) and not nested)


def _is_column(value: exp.Expression | None) -> bool:
    """Whether a value is a column or an expression; a lone "double-quoted" word is Spider's way to write a text."""
    if isinstance(value, exp.Column):
        return bool(value.table) or not value.this.args.get("quoted")
    return isinstance(value, exp.Func | exp.Add | exp.Sub | exp.Mul | exp.Div)


def _subqueries(node: exp.Expression) -> Iterator[exp.Expression]:
    """The outermost queries under a node."""
    for child in node.iter_expressions():
        if isinstance(child, exp.Query) and not (isinstance(child, exp.Subquery) and not isinstance(child.this, exp.Query)):
            yield child
        else:
            yield from _subqueries(child)


def _outside(tree: exp.Expression, select: exp.Expression) -> int:
    """Nested queries where the official grammar knows none: CTEs, and subqueries in SELECT, GROUP BY and ORDER BY."""
    owners = {id(tree): tree, id(unwrap(tree)): unwrap(tree), id(select): select}
    found = sum(len(owner.args["with_"].expressions) for owner in owners.values() if owner.args.get("with_"))
    parts = [*select.expressions, select.args.get("group"), select.args.get("order")]
    return found + sum(1 for part in parts if part is not None for _ in _subqueries(part))


def _aggregates(item: exp.Expression) -> int:
    """1 if a SELECT item aggregates: the official parser keeps one aggregate an item."""
    return int(any(True for _ in _aggregate_nodes(item)))


def _all_aggregates(item: exp.Expression) -> int:
    return sum(1 for _ in _aggregate_nodes(item))


def _aggregate_nodes(node: exp.Expression) -> Iterator[exp.Expression]:
    if isinstance(node, exp.Query):
        return
    if isinstance(node, AGGREGATES) or isinstance(node, exp.Window):
        yield node
        return
    for child in node.iter_expressions():
        yield from _aggregate_nodes(child)
