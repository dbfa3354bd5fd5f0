"""Spider's hardness levels by the official rules (Yu et al. 2018, `evaluation.py: eval_hardness`), on any SQL.

A query that Spider's own parser reads is counted as that parser sees it (`spider_grammar.py`). Where it gives up (CTE,
CASE, window, bracketed conditions, EXISTS, outer joins, ...), sqlglot reads and the same counts are taken in their
sense: a CTE, and a subquery anywhere but in FROM, is a nested query; a window function is an aggregation.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sqlglot import exp

from pipelines.core.types import Hardness
from pipelines.sql.analysis.parsing import MAX_CHARS, parse, unwrap
from pipelines.sql.equalities import spider_grammar

AGGREGATES = (exp.Max, exp.Min, exp.Count, exp.Sum, exp.Avg, exp.GroupConcat, exp.Window)
PATTERNS = (exp.Like, exp.ILike, exp.Glob, exp.SimilarTo)


class Counts(NamedTuple):
    """The three counts of a query's level."""

    component1: int
    component2: int
    others: int


def hardness(sql: str, engine: str = "sqlite") -> Hardness:
    """The level of a query; "extra" for text that cannot be read at all."""
    counts = count_components(sql, engine)
    if counts is None:
        return "extra"
    return level(counts)


def level(counts: Counts) -> Hardness:
    """The level of the counts (`Evaluator.eval_hardness`)."""
    first, second, others = counts
    if first <= 1 and others == 0 and second == 0:
        return "easy"
    is_medium = (others <= 2 and first <= 1) or (first <= 2 and others < 2)
    if second == 0 and is_medium:
        return "medium"
    is_hard = (others > 2 and first <= 2) or (2 < first <= 3 and others <= 2)
    if second == 0 and is_hard:
        return "hard"
    if first <= 1 and others == 0 and second <= 1:
        return "hard"
    return "extra"


def count_components(sql: str, engine: str = "sqlite") -> Counts | None:
    """The counts (`count_component1`, `count_component2`, `count_others`); None if neither parser reads the query."""
    if len(sql) > MAX_CHARS:
        return None
    query = spider_grammar.parse_query(sql)
    if query is not None:
        return _official_counts(query)
    tree = parse(sql, engine)
    if tree is None:
        return None
    try:
        return _tree_counts(tree)
    except RecursionError:
        return None


def _official_counts(query: spider_grammar.ParsedQuery) -> Counts:
    """The counts with the official habits: an item of SELECT aggregates only if it starts with an aggregate; a NOT
    counts as an aggregation, and so does each AND and OR of a HAVING.
    """
    component1 = bool(query.where) + bool(query.group) + bool(query.order)
    component1 += query.limited
    component1 += max(0, query.units - 1)
    component2 = int(query.combined)
    for condition in (*query.on, *query.where, *query.having):
        component1 += condition.joined_by == "or"
        component1 += condition.operator == "like"
        component2 += condition.nested

    aggregates = 0
    for aggregate, _ in query.select:
        aggregates += aggregate != "none"
    for key in _official_keys(query):
        aggregates += key.aggregate != "none"
    for condition in (*query.where, *query.having):
        aggregates += condition.negated
    for condition in query.having:
        aggregates += condition.joined_by != ""
    others = _count_above_one(aggregates, len(query.select), len(query.where), len(query.group))
    return Counts(component1, component2, others)


def _official_keys(query: spider_grammar.ParsedQuery) -> list[spider_grammar.ColumnUnit]:
    """The columns of GROUP BY and ORDER BY."""
    keys = list(query.group)
    for value in query.order:
        keys.append(value.left)
        if value.right is not None:
            keys.append(value.right)
    return keys


def _count_above_one(*counts: int) -> int:
    """The number of counts that are greater than one."""
    return sum(count > 1 for count in counts)


def _tree_counts(tree: exp.Expr) -> Counts:
    """The same counts on a tree: of a set operation's first SELECT, as in the official code."""
    query = unwrap(tree)
    select = query
    while isinstance(select, exp.SetOperation):
        select = unwrap(select.this)
    joins = select.args.get("joins") or ()
    join_conditions: list[exp.Expr] = []
    for join in joins:
        condition = join.args.get("on")
        if condition:
            join_conditions.append(condition)
    where_condition = _clause_condition(select, "where")
    having_condition = _clause_condition(select, "having")
    on: list[exp.Expr] = []
    for condition in join_conditions:
        on += _comparisons(condition)
    where = list(_comparisons(where_condition))
    having = list(_comparisons(having_condition))
    selected = select.expressions
    group = _clause_keys(select, "group")
    order = _clause_keys(select, "order")

    component1 = bool(where) + bool(group) + bool(order)
    component1 += len(joins)
    component1 += _is_limited(select)
    for node_with_ors in (*join_conditions, where_condition, having_condition):
        component1 += _count_ors(node_with_ors)
    for comparison in (*on, *where, *having):
        component1 += _is_pattern(comparison)

    component2 = int(query is not select)
    component2 += _count_ctes([tree, query, select])
    for node in (*on, *where, *having, *selected, *group, *order):
        component2 += len(_outermost(node, exp.Query))

    aggregates = 0
    for item in selected:
        aggregates += _count_aggregates(item) > 0
    for key in order:
        aggregates += _count_aggregates(key)
    for comparison in (*where, *having):
        aggregates += _is_negated(comparison)
    others = _count_above_one(aggregates, len(selected), len(where), len(group))
    return Counts(component1, component2, others)


def _clause_condition(select: exp.Expr, clause: str) -> exp.Expr | None:
    """The condition of WHERE or HAVING."""
    node = select.args.get(clause)
    if not node:
        return None
    condition: exp.Expr = node.this
    return condition


def _clause_keys(select: exp.Expr, clause: str) -> list[exp.Expr]:
    """The keys of GROUP BY or ORDER BY."""
    node = select.args.get(clause)
    if not node:
        return []
    keys: list[exp.Expr] = node.expressions
    return keys


def _is_limited(select: exp.Expr) -> bool:
    limit = select.args.get("limit")
    fetch = select.args.get("fetch")
    return bool(limit or fetch)


def _count_ors(condition: exp.Expr | None) -> int:
    if condition is None:
        return 0
    ors = condition.find_all(exp.Or)
    return len(list(ors))


def _is_pattern(comparison: exp.Expr) -> bool:
    """Whether a comparison is a LIKE or its kin, with or without a NOT."""
    if isinstance(comparison, exp.Not):
        comparison = comparison.this.unnest()
    return isinstance(comparison, PATTERNS)


def _is_negated(comparison: exp.Expr) -> bool:
    if isinstance(comparison, exp.Not):
        return True
    return bool(comparison.args.get("negate"))


def _count_ctes(owners: Sequence[exp.Expr]) -> int:
    """The number of WITH queries of these nodes, of which several may be the same one."""
    distinct_owners = {id(owner): owner for owner in owners}
    count = 0
    for owner in distinct_owners.values():
        with_clause = owner.args.get("with_")
        if with_clause:
            count += len(with_clause.expressions)
    return count


def _count_aggregates(node: exp.Expr) -> int:
    """The number of outermost aggregations. One inside a subquery belongs to that subquery."""
    outermost = _outermost(node, (*AGGREGATES, exp.Query))
    return sum(isinstance(inner, AGGREGATES) for inner in outermost)


def _comparisons(node: exp.Expr | None) -> Iterator[exp.Expr]:
    """The comparisons under AND, OR and brackets, in the order of the text."""
    if node is None:
        return
    if not isinstance(node, exp.Connector | exp.Paren):
        yield node
        return
    yield from _comparisons(node.this)
    if isinstance(node, exp.Connector):
        yield from _comparisons(node.expression)


def _outermost(node: exp.Expr, kinds: type[exp.Expr] | tuple[type[exp.Expr], ...]) -> list[exp.Expr]:
    """The outermost nodes of these kinds at or under a node."""
    if isinstance(node, kinds):
        return [node]
    outermost: list[exp.Expr] = []
    for child in node.iter_expressions():
        outermost += _outermost(child, kinds)
    return outermost
