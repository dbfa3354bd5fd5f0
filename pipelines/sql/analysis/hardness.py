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
    counts = count(sql, engine)
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


def count(sql: str, engine: str = "sqlite") -> Counts | None:
    """The counts (`count_component1`, `count_component2`, `count_others`); None if neither parser reads the query."""
    if len(sql) > MAX_CHARS:
        return None
    query = spider_grammar.read(sql)
    if query is None:
        tree = parse(sql, engine)
        try:
            return None if tree is None else _tree_counts(tree)
        except RecursionError:
            return None
    # The official habits: an item of SELECT aggregates only if it starts with an aggregate; a NOT counts as an
    # aggregation, and so does each AND and OR of a HAVING.
    conditions = [*query.on, *query.where, *query.having]
    first = bool(query.where) + bool(query.group) + bool(query.order) + query.limited + max(0, query.units - 1)
    first += sum((condition.joined_by == "or") + (condition.operator == "like") for condition in conditions)
    keys = [key for value in query.order for key in (value.left, value.right)] + list(query.group)
    aggregates = sum(aggregate != "none" for aggregate, _ in query.select)
    aggregates += sum(key is not None and key.aggregate != "none" for key in keys)
    aggregates += sum(condition.negated for condition in (*query.where, *query.having))
    aggregates += sum(condition.joined_by != "" for condition in query.having)
    second = sum(condition.nested for condition in conditions) + query.combined
    others = (aggregates > 1) + sum(len(part) > 1 for part in (query.select, query.where, query.group))
    return Counts(first, second, others)


def _tree_counts(tree: exp.Expr) -> Counts:
    """The same counts on a tree: of a set operation's first SELECT, as in the official code."""
    select = unwrap(tree)
    while isinstance(select, exp.SetOperation):
        select = unwrap(select.this)
    joins = select.args.get("joins") or ()
    on_parts = [join.args["on"] for join in joins if join.args.get("on")]
    where_part, having_part = (select.args[key].this if select.args.get(key) else None for key in ("where", "having"))
    where = [] if where_part is None else list(_leaves(where_part))
    having = [] if having_part is None else list(_leaves(having_part))
    group, order = (select.args[key].expressions if select.args.get(key) else () for key in ("group", "order"))
    conditions = [*(leaf for part in on_parts for leaf in _leaves(part)), *where, *having]
    first = bool(where) + bool(group) + bool(order) + len(joins)
    first += bool(select.args.get("limit") or select.args.get("fetch"))
    first += sum(len(list(part.find_all(exp.Or))) for part in (*on_parts, where_part, having_part) if part is not None)
    bare = [leaf.this.unnest() if isinstance(leaf, exp.Not) else leaf for leaf in conditions]
    first += sum(isinstance(leaf, PATTERNS) for leaf in bare)
    owners = {id(owner): owner for owner in (tree, unwrap(tree), select)}.values()
    second = sum(len(owner.args["with_"].expressions) for owner in owners if owner.args.get("with_"))
    second += unwrap(tree) is not select
    second += sum(len(_outermost(node, exp.Query)) for node in (*conditions, *select.expressions, *group, *order))
    # An aggregation inside a query is that query's.
    kinds = (*AGGREGATES, exp.Query)
    items = (_outermost(item, kinds) for item in select.expressions)
    aggregates = sum(any(isinstance(node, AGGREGATES) for node in nodes) for nodes in items)
    aggregates += sum(isinstance(node, AGGREGATES) for key in order for node in _outermost(key, kinds))
    aggregates += sum(isinstance(leaf, exp.Not) or bool(leaf.args.get("negate")) for leaf in (*where, *having))
    others = (aggregates > 1) + sum(len(part) > 1 for part in (select.expressions, where, group))
    return Counts(first, second, others)


def _leaves(node: exp.Expr) -> Iterator[exp.Expr]:
    """The comparisons under AND, OR and brackets, in the order of the text."""
    if not isinstance(node, exp.Connector | exp.Paren):
        yield node
        return
    yield from _leaves(node.this)
    if isinstance(node, exp.Connector):
        yield from _leaves(node.expression)


def _outermost(node: exp.Expr, kinds: type[exp.Expr] | tuple[type[exp.Expr], ...]) -> list[exp.Expr]:
    """The outermost nodes of these kinds at or under a node."""
    if isinstance(node, kinds):
        return [node]
    return [inner for child in node.iter_expressions() for inner in _outermost(child, kinds)]
