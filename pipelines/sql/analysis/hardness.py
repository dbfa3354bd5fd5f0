"""Spider's hardness levels by the official rules (Yu et al. 2018, `evaluation.py: eval_hardness`), on any SQL.

A query that Spider's own parser reads is counted as that parser sees it (`spider_grammar.py`). Where it gives up (CTE,
CASE, window, bracketed conditions, EXISTS, outer joins, ...), sqlglot reads and the same counts are taken in their
sense: a CTE, and a subquery anywhere but in FROM, is a nested query; a window function is an aggregation.
"""

from collections.abc import Iterator
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
    return "extra" if counts is None else level(counts)


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
    conditions = [*query.on, *query.where, *query.having]
    first = bool(query.where) + bool(query.group) + bool(query.order) + query.limited + max(0, query.units - 1)
    for condition in conditions:
        first += (condition.joined_by == "or") + (condition.operator == "like")
    second = sum(condition.nested for condition in conditions) + query.combined

    keys = list(query.group)
    for value in query.order:
        keys.append(value.left)
        if value.right is not None:
            keys.append(value.right)
    aggregates = sum(aggregate != "none" for aggregate, _ in query.select)
    aggregates += sum(key.aggregate != "none" for key in keys)
    aggregates += sum(condition.negated for condition in (*query.where, *query.having))
    aggregates += sum(condition.joined_by != "" for condition in query.having)
    others = (aggregates > 1) + (len(query.select) > 1) + (len(query.where) > 1) + (len(query.group) > 1)
    return Counts(first, second, others)


def _tree_counts(tree: exp.Expr) -> Counts:
    """The same counts on a tree: of a set operation's first SELECT, as in the official code."""
    query = unwrap(tree)
    select = query
    while isinstance(select, exp.SetOperation):
        select = unwrap(select.this)
    joins = select.args.get("joins") or ()
    join_conditions = [join.args["on"] for join in joins if join.args.get("on")]
    where_condition = select.args["where"].this if select.args.get("where") else None
    having_condition = select.args["having"].this if select.args.get("having") else None
    on = [comparison for condition in join_conditions for comparison in _comparisons(condition)]
    where = list(_comparisons(where_condition))
    having = list(_comparisons(having_condition))
    group = select.args["group"].expressions if select.args.get("group") else []
    order = select.args["order"].expressions if select.args.get("order") else []

    first = bool(where) + bool(group) + bool(order) + len(joins)
    first += bool(select.args.get("limit") or select.args.get("fetch"))
    for condition in (*join_conditions, where_condition, having_condition):
        if condition is not None:
            first += len(list(condition.find_all(exp.Or)))
    for comparison in (*on, *where, *having):
        pattern = comparison.this.unnest() if isinstance(comparison, exp.Not) else comparison
        first += isinstance(pattern, PATTERNS)

    second = int(query is not select)
    owners_of_ctes = {id(owner): owner for owner in (tree, query, select)}
    for owner in owners_of_ctes.values():
        if owner.args.get("with_"):
            second += len(owner.args["with_"].expressions)
    for node in (*on, *where, *having, *select.expressions, *group, *order):
        second += len(_outermost(node, exp.Query))

    # An aggregation inside a query is that query's.
    kinds = (*AGGREGATES, exp.Query)
    aggregates = 0
    for item in select.expressions:
        aggregates += any(isinstance(node, AGGREGATES) for node in _outermost(item, kinds))
    for key in order:
        aggregates += sum(isinstance(node, AGGREGATES) for node in _outermost(key, kinds))
    for comparison in (*where, *having):
        aggregates += isinstance(comparison, exp.Not) or bool(comparison.args.get("negate"))
    others = (aggregates > 1) + (len(select.expressions) > 1) + (len(where) > 1) + (len(group) > 1)
    return Counts(first, second, others)


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
