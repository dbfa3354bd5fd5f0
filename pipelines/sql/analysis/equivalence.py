"""Two queries against one another without their data: their normal forms, and what a search for a database on which
they differ has to know.

A rewriting stands here only if it keeps the bag of rows on every database that keeps to the rules of its tables, with
NULLs and duplicates. A query with anything that is not in `UNDERSTOOD` is not rewritten. `benchmarks/proved.py` runs
each rule on databases.
"""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlglot import exp

from pipelines.core.types import EngineName
from pipelines.sql.analysis.parsing import parse, unwrap
from pipelines.sql.schema import TableRules

MAX_ROWS, MAX_DEPTH = 999_999, 6
Rules = Mapping[str, TableRules]
_UNDERSTOOD = """
Select Union Intersect Except From Join Table TableAlias Identifier Column Literal Null Boolean Star Alias Where Group
Having Order Ordered Limit Offset Distinct Subquery Paren And Or Not EQ NEQ LT LTE GT GTE Is In Between Like Exists Case
If Count Sum Avg Min Max Sub Mul Div Neg DPipe Abs Round Lower Upper Length Substring Coalesce Nullif
"""
UNDERSTOOD = frozenset(_UNDERSTOOD.split())
_OPPOSITE: dict[type[exp.Expr], type[exp.Expr]] = {
    exp.EQ: exp.NEQ,
    exp.NEQ: exp.EQ,
    exp.LT: exp.GTE,
    exp.GTE: exp.LT,
    exp.GT: exp.LTE,
    exp.LTE: exp.GT,
}
_COMPARED = (*_OPPOSITE, exp.Is, exp.In, exp.Between, exp.Like)
# The parts that a node may have.
_PARTS: dict[type[exp.Expr], str] = {
    exp.Select: "expressions from_ joins where group having order limit offset distinct",
    **dict.fromkeys((exp.Union, exp.Intersect, exp.Except), "this expression distinct"),
    exp.Join: "this on side kind",
    **dict.fromkeys((exp.Group, exp.Distinct), "expressions"),
    **dict.fromkeys((exp.Subquery, exp.Table), "this alias"),
    exp.Between: "this low high",
}
_IDENTICAL = ("INTEGER", "TEXT")  # kinds of columns: of two values of one kind that are equal, one is the other
# A column as the normal form writes it: its table, its place among the tables of its query, and its name. No literal
# holds these signs there.
_COLUMN = re.compile("\1([^\3]*)\3([^\3]*)\3([^\2]*)\2")
_NOT_NULL, _COUNT = "not(this=is(expression=null(), this={}))", "count(big_int=True, this={})"


class NotUnderstood(Exception):
    """A query that no rule here may touch."""


def proof_plan(gold: str, predicted: str, rules: Rules, engine: EngineName) -> tuple[bool, Any, Any, Any, Any]:
    """See `analyst.ProofPlan`."""
    trees = []
    for text in (gold, predicted):
        tree = parse(text, engine)
        if tree is None:
            raise NotUnderstood
        trees.append(unwrap(tree).copy())
        # SQLite takes a name in double quotes that is none for a text.
        known = {name for table, rule in rules.items() for name in (table, *rule.columns)}
        known |= {node.alias.lower() for node in trees[-1].find_all(exp.Alias, exp.Subquery, exp.CTE)}
        for column in list(trees[-1].find_all(exp.Column)) if engine == "sqlite" else ():
            if not column.table and column.this.args.get("quoted") and column.name.lower() not in known:
                column.replace(exp.Literal.string(column.name))
    named = sorted({node.name.lower() for tree in trees for node in tree.find_all(exp.Table)})
    values = list(dict.fromkeys(value for tree in trees for value in _values(tree)))
    is_same, chances, ties = gold == predicted, None, None
    try:
        chances, ties = _chances(trees[0], engine)
        if "+" not in gold + predicted:  # the parser drops a sign that takes a column's affinity away
            one, other = (_form(tree, rules, bool(trees[0].args.get("order"))) for tree in trees)
            is_same = is_same or one == other
    except NotUnderstood:
        pass
    return is_same, named, values, chances, ties


def _values(tree: exp.Expr) -> Iterator[tuple[str, str | float]]:
    """The values that columns are compared with, by the column's name; "" for a number beside no column."""
    for node in tree.find_all(*_COMPARED, exp.Limit):
        parts = list(node.walk(prune=lambda part: isinstance(part, exp.Query)))
        names = [part.name.lower() for part in parts if isinstance(part, exp.Column)]
        counts = any(isinstance(part, exp.Count) for part in parts)
        for part in parts:
            if isinstance(part, exp.Literal) and (part.is_string or names or part.name.isdigit()):
                value = part.name if part.is_string else float(part.name)
                yield from ((name, value) for name in ([""] if counts or not names else names))


# Where chance decides what a query returns: columns that its groups do not settle, and ties.

Probe = tuple[str, int, int]  # its SQL; rows that the query reads before its cut; sort keys behind the columns


def tie_probes(sql: str, engine: EngineName) -> list[Probe]:
    """A probe for each SELECT that has a LIMIT under an ORDER BY: sort keys behind its columns, and one row more."""
    tree = parse(sql, engine)
    probes = []
    for select in tree.find_all(exp.Select) if tree else ():
        clauses = (select.args.get(name) for name in ("limit", "offset"))
        values = (clause.args.get("expression") if clause is not None else None for clause in clauses)
        limit, offset = (
            int(value.this) if isinstance(value, exp.Literal) and str(value.this).isdigit() else 0 for value in values
        )
        if not limit or not select.args.get("order") or select.args.get("distinct"):
            continue
        items = select.expressions
        aliases = {item.alias.lower(): item.unalias() for item in items if isinstance(item, exp.Alias)}
        keys = []
        for ordered in select.args["order"].expressions:
            key = ordered.this  # a position or an alias stands for an item of the SELECT list
            if isinstance(key, exp.Literal) and not key.is_string and 0 < int(key.this) <= len(items):
                key = items[int(key.this) - 1].unalias()
            elif isinstance(key, exp.Column) and not key.table:
                key = aliases.get(key.name.lower(), key)
            keys.append(key)
        probe = select.copy()
        tie_columns = [exp.alias_(key.copy(), f"tie_{n}") for n, key in enumerate(keys)]
        probe.set("expressions", [*probe.expressions, *tie_columns])
        n_kept = limit + offset
        probe.set("limit", exp.Limit(expression=exp.Literal.number(n_kept + 1)))
        probe.set("offset", None)
        probes.append((probe.sql(dialect=engine), n_kept, len(keys)))
    return probes


def _chances(tree: exp.Expr, engine: EngineName) -> tuple[list[str], list[Probe]]:
    """Queries that return a row where chance decides, and the probe of the query's own ORDER BY."""
    _check(tree)
    chances, ties = list[str](), list[Probe]()
    for select in tree.find_all(exp.Select):
        items, keys = [item.unalias() for item in select.expressions], _terms(select, "group")
        if not keys and not any(item.find(exp.AggFunc) for item in items):
            continue
        aliases = {item.alias.lower() for item in select.expressions}
        clauses = [item for item in items if item not in keys] + _terms(select, "order")
        clauses += [select.args["having"].this] if select.args.get("having") else []
        bare = {
            node.sql(dialect=engine)
            for clause in clauses
            for node in clause.find_all(exp.Column)
            if node.find_ancestor(exp.AggFunc, exp.Select) is select
            and node not in keys
            and (clause in items or node.table or node.name.lower() not in aliases)
        }
        if bare:
            ways = (f"COUNT(DISTINCT {c}) > 1 OR (COUNT({c}) < COUNT(*) AND COUNT({c}) > 0)" for c in sorted(bare))
            probe = select.copy()
            for part in ("order", "limit", "offset", "distinct"):
                probe.set(part, None)
            probe.set("expressions", [exp.Literal.number(1)])
            probe.set("having", exp.Having(this=exp.condition(" OR ".join(ways), dialect=engine)))
            chances.append(probe.sql(dialect=engine))
    limits = list(tree.find_all(exp.Limit, exp.Offset))
    if isinstance(tree, exp.Select) and tree.args.get("order"):
        whole = tree if tree.args.get("limit") else tree.limit(MAX_ROWS)
        ties = tie_probes(whole.sql(dialect=engine), engine)
    if limits and (not ties or any(limit.parent is not tree for limit in limits)):
        raise NotUnderstood
    return chances, ties


def _check(tree: exp.Expr) -> None:
    """NotUnderstood if the tree holds anything that the rules were not made for."""
    for node in tree.walk():
        operands = [node.args.get(part) for part in ("this", "expression", "low", "high")]
        parts = {name for name, value in node.args.items() if value not in (None, False, [], "")}
        if (
            type(node).__name__ not in UNDERSTOOD
            or parts - {*_PARTS.get(type(node), " ".join(parts)).split()}
            or (isinstance(node, exp.Min | exp.Max) and node.expressions)
            or (
                isinstance(node, exp.Order)
                and node.parent
                and not node.parent.args.get("group")
                and node.find(exp.AggFunc)
            )
            or (isinstance(node, exp.SetOperation) and isinstance(node.find_ancestor(exp.Query), exp.SetOperation))
            or (isinstance(node, exp.Literal) and node.name.lower() == "now")
            or (isinstance(node, _COMPARED) and any(isinstance(each, exp.Predicate | exp.Not) for each in operands))
        ):
            raise NotUnderstood


def _terms(select: exp.Expr, clause: str) -> list[exp.Expr]:
    """The terms of a GROUP BY or an ORDER BY; a position stands for an item of the SELECT list."""
    terms = select.args[clause].expressions if select.args.get(clause) else []
    terms = [term.this if isinstance(term, exp.Ordered) else term for term in terms]
    items = [item.unalias() for item in select.expressions]
    places = [int(t.name) if isinstance(t, exp.Literal) and t.name.isdigit() and not t.is_string else 0 for t in terms]
    if any(places) and (select.is_star or max(places) > len(items)):
        raise NotUnderstood
    return [items[place - 1] if place else term for place, term in zip(places, terms, strict=True)]


# The normal form of a query: its SELECT as sets of texts, in which no alias and no order of commutative parts is left.


class NormalSelect(NamedTuple):
    """A SELECT."""

    places: dict[str, str]  # each use of a table, by a name that depends on the table and the depth alone.
    equal: frozenset[tuple[str, str]]  # what WHERE makes equal.
    parts: frozenset[str]  # the other conditions of WHERE.
    items: tuple[str, ...]
    group: frozenset[str]
    having: frozenset[str]
    order: tuple[str, ...]
    limit: tuple[str, ...]
    distinct: bool
    aggregates: bool

    def text(self) -> str:
        """The normal form."""
        equal = [f"{one} = {other}" for one, other in self.equal]
        clauses = (self.places, equal, self.parts, self.group, self.having)
        shown = [*map(sorted, clauses), self.items, self.order, self.limit]
        return f"select({self.distinct}; {'; '.join(map(', '.join, shown))})"


def _form(tree: exp.Expr, rules: Rules, is_ordered: bool) -> str:
    _check(tree)
    tree = tree.copy()
    if not is_ordered and not tree.args.get("limit"):
        tree.set("order", None)  # the order of rows that gold does not order counts for nothing
    return _block(tree, [], 0, rules).text() if isinstance(tree, exp.Select) else _write(tree, [], -1, rules, {})


def _block(select: exp.Expr, outer: Sequence[Mapping[str, str]], depth: int, rules: Rules) -> NormalSelect:
    scope, places = dict[str, str](), dict[str, str]()
    if depth > MAX_DEPTH:
        raise NotUnderstood

    def put(table: str) -> str:
        place = f"{table}\3{depth}.{list(places.values()).count(table)}"
        places[place] = table
        return place

    joins = select.args.get("joins") or []
    for node in [clause.this for clause in (select.args.get("from_"), *joins) if clause is not None]:
        name, alias = node.name.lower(), node.alias_or_name.lower()
        if not isinstance(node, exp.Table) or name not in rules or alias in scope:
            raise NotUnderstood
        scope[alias] = put(name)
    if any(join.side or join.kind not in ("", "INNER", "CROSS") for join in joins):
        raise NotUnderstood
    scopes = [scope, *outer]
    write = functools.partial(_write, scopes=scopes, depth=depth, rules=rules, aliases={})
    items = list[str]()
    for item in select.expressions:
        if item.is_star:
            chosen = [scope[item.table.lower()]] if isinstance(item, exp.Column) else list(places)
            items += [_column(place, name) for place in chosen for name in rules[places[place]].columns]
        else:
            items.append(write(item.unalias()))
    # In the clauses an alias stands for its item, unless it is the name of another column.
    aliases = {item.alias.lower(): item.this for item in select.expressions if isinstance(item, exp.Alias)}
    here = {name for table in places.values() for name in rules[table].columns}
    clash = {
        name
        for name, item in aliases.items()
        if name in here and not (isinstance(item, exp.Column) and item.name.lower() == name)
    }
    named = {name: None if name in clash else write(item) for name, item in aliases.items()}
    write = functools.partial(write, aliases=named)
    conditions = [join.args["on"] for join in joins if join.args.get("on")]
    conditions += [select.args["where"].this] if select.args.get("where") else []
    wanted = [part for condition in conditions for part in _parts(condition)]
    group, having = {write(term) for term in _terms(select, "group")}, set[str]()
    for part in _parts(select.args["having"].this if select.args.get("having") else None):
        columns = {match[0] for match in _COLUMN.finditer(write(part))}
        if columns and columns <= group and not part.find(exp.AggFunc, exp.Query):
            wanted.append(part)  # a condition on the groups' own columns chooses rows
        else:
            having.add(write(part))
    parts, equal = set[str](), set[tuple[str, str]]()
    for part in wanted:
        query = part.args.get("query") if isinstance(part, exp.In) else part.this
        query = unwrap(query) if isinstance(part, exp.In | exp.Exists) and query is not None else None
        inner = _block(query, scopes, depth + 1, rules) if isinstance(query, exp.Select) else None
        if inner and len(inner.places) == 1 and not (inner.group or inner.having or inner.limit or inner.aggregates):
            # What one row at most of another table meets, by a key of it, is a join with that table.
            ((old, table),) = inner.places.items()
            links = {(write(part.this), inner.items[0])} if isinstance(part, exp.In) else set(inner.equal)
            is_key = any(
                frozenset(_names(side, old)) in rules[table].keys and _COLUMN.fullmatch(side) and not _names(other, old)
                for link in links
                for side, other in (link, link[::-1])
            )
            if is_key:
                new = put(table)
                moved = [[side.replace(f"\1{old}\3", f"\1{new}\3") for side in pair] for pair in inner.equal | links]
                equal |= {(min(pair), max(pair)) for pair in moved}
                parts |= {text.replace(f"\1{old}\3", f"\1{new}\3") for text in inner.parts}
                continue
        if isinstance(part, exp.EQ):
            sides = write(part.this), write(part.expression)
            equal.add((min(sides), max(sides)))
        else:
            parts.add(write(part))
    # Columns that a condition makes equal, and whose equal values are the same, are one.
    chief = dict[str, str]()
    for pair in sorted(equal):
        matches = [_COLUMN.fullmatch(side) for side in pair]
        kinds = [rules[match[1]].columns[match[3]] if match else "" for match in matches]
        if kinds[0] == kinds[1] and kinds[0] in _IDENTICAL and pair[0] != pair[1]:
            first, second = sorted(chief.get(side, side) for side in pair)
            chief = {one: first if of == second else of for one, of in chief.items()} | {pair[0]: first, pair[1]: first}
            equal.remove(pair)
    filled = {_column(place, name) for place, table in places.items() for name in rules[table].filled} | {*chief}

    def settle(text: str) -> str:
        for column in filled:
            text = text.replace(_COUNT.format(column), _COUNT.format("star()"))
        for column, first in chief.items():
            text = text.replace(column, first)
        return text

    parts -= {_NOT_NULL.format(column) for column in filled}
    items, group = [*map(settle, items)], {*map(settle, group)}
    ordered = select.args["order"].expressions if select.args.get("order") else []
    directions = [f"{each.args.get('desc')} {each.args.get('nulls_first')}" for each in ordered]
    order = [settle(write(term)) for term in _terms(select, "order")]
    aggregates = any(item.find(exp.AggFunc) for item in select.expressions) or bool(having)
    distinct = bool(select.args.get("distinct"))
    if group and not aggregates and group == {*items} and {*order} <= group:
        group, distinct = set(), True
    keys = [
        [{settle(_column(place, name)) for name in key} for key in rules[table].keys] for place, table in places.items()
    ]
    if (group and group <= {*items}) or (
        not group and not aggregates and all(any(k <= {*items} for k in of) for of in keys)
    ):
        distinct = False
    return NormalSelect(
        places,
        frozenset((settle(one), settle(other)) for one, other in equal)
        | frozenset((of, one) for one, of in chief.items() if one != of),
        frozenset(map(settle, parts)),
        tuple(items),
        frozenset(group),
        frozenset(map(settle, having)),
        tuple(map(" ".join, zip(order, directions, strict=True))),
        tuple(write(select.args[part]) for part in ("limit", "offset") if select.args.get(part)),
        distinct,
        aggregates,
    )


def _column(place: str, name: str) -> str:
    return f"\1{place}\3{name}\2"


def _names(text: str, place: str) -> list[str]:
    """The columns of a place in a text."""
    return [match[3] for match in _COLUMN.finditer(text) if f"{match[1]}\3{match[2]}" == place]


def _spread(node: exp.Expr, is_true: bool = True) -> exp.Expr:
    """A condition with NOT at its leaves, and BETWEEN and lists of values as comparisons."""
    if isinstance(node, exp.Paren | exp.Not):
        return _spread(node.this, is_true != isinstance(node, exp.Not))
    if isinstance(node, exp.Between):
        low, high = (
            kind(this=node.this.copy(), expression=node.args[part].copy())
            for kind, part in ((exp.GTE, "low"), (exp.LTE, "high"))
        )
        node = exp.And(this=low, expression=high)
    elif isinstance(node, exp.In) and node.expressions and all(isinstance(v, exp.Literal) for v in node.expressions):
        each = (exp.EQ(this=node.this.copy(), expression=value.copy()) for value in node.expressions)
        node = exp.or_(*each, copy=False)
    if isinstance(node, exp.And | exp.Or):
        kind = type(node) if is_true else exp.Or if isinstance(node, exp.And) else exp.And
        return kind(this=_spread(node.this, is_true), expression=_spread(node.expression, is_true))
    node = node.copy()
    opposite = _OPPOSITE.get(type(node))
    return node if is_true else opposite(**node.args) if opposite else exp.Not(this=node)


def _parts(clause: exp.Expr | None) -> list[exp.Expr]:
    """The conditions that all hold."""
    whole = None if clause is None else _spread(clause)
    return list(whole.flatten()) if isinstance(whole, exp.And) else [] if whole is None else [whole]


def _write(node: Any, scopes: Any, depth: int, rules: Rules, aliases: Mapping[str, str | None]) -> str:
    """An expression of the SELECT at a depth as text."""
    write = functools.partial(_write, scopes=scopes, depth=depth, rules=rules, aliases=aliases)
    if isinstance(node, list):
        return f"[{', '.join(map(write, node))}]"
    if not isinstance(node, exp.Expr):
        return repr(node)
    if isinstance(node, exp.Paren | exp.Subquery):
        return write(node.this)
    if isinstance(node, exp.Select):
        block = _block(node, scopes, depth + 1, rules)
        outside = node.parent.parent if isinstance(node.parent, exp.Subquery) else node.parent
        # Of a condition's query neither the order of rows counts nor how often each comes.
        if isinstance(outside, exp.In | exp.Exists) and not block.limit and not block.aggregates:
            items = block.items if isinstance(outside, exp.In) else ()
            block = block._replace(distinct=False, order=(), items=items)
        return block.text()
    if isinstance(node, exp.Column):
        name, table = node.name.lower(), node.table.lower()
        if not table and name in aliases:
            if (text := aliases[name]) is None:
                raise NotUnderstood
            return text
        for scope in scopes:
            found = [
                p for alias, p in scope.items() if table in ("", alias) and name in rules[p.split("\3")[0]].columns
            ]
            if found:
                if len(found) > 1:
                    raise NotUnderstood
                return _column(found[0], name)
        raise NotUnderstood
    if isinstance(node, exp.And | exp.Or):
        texts = sorted({write(part) for part in node.flatten()})
        return texts[0] if len(texts) == 1 else f"{node.key}({', '.join(texts)})"
    if isinstance(node, exp.EQ | exp.NEQ | exp.Union | exp.Intersect):
        return f"{node.key}{node.args.get('distinct')}({', '.join(sorted(map(write, (node.this, node.expression))))})"
    if isinstance(node, exp.GT | exp.GTE):
        return write((exp.LT if isinstance(node, exp.GT) else exp.LTE)(this=node.expression, expression=node.this))
    if isinstance(node, exp.Count) and isinstance(node.this, exp.Literal):
        return _COUNT.format("star()")
    parts = {name: write(value) for name, value in sorted(node.args.items()) if value not in (None, False, [], "")}
    text = f"{node.key}({', '.join(f'{name}={part}' for name, part in parts.items())})"
    # An aggregate over a column of an outer query is the outer query's.
    if isinstance(node, exp.AggFunc) and any(match[2].split(".")[0] != str(depth) for match in _COLUMN.finditer(text)):
        raise NotUnderstood
    return text
