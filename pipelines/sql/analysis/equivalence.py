"""Normal forms of two SQLite queries, and databases on which they may differ, for the equality `proved`.

sqlglot qualifies names, merges subqueries and simplifies conditions. Its rules that compute with literals are left out,
for SQLite's affinities matter there, and so are those that NULLs or duplicate rows refute.
"""

import contextlib
import math
import random
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from sqlglot import errors, exp
from sqlglot.optimizer.merge_subqueries import merge_subqueries
from sqlglot.optimizer.qualify import qualify
from sqlglot.optimizer.simplify import Simplifier

from pipelines.core.types import Scalar
from pipelines.sql.analysis.parsing import parse, unwrap
from pipelines.sql.dialects.base import quoted
from pipelines.sql.schema import Schema, Table

DATABASES = 32
Item = tuple[str, str]  # (table, column), lower-cased
Tables = Mapping[str, Table]  # by lower-cased name
_NODES = """
Select Union Intersect Except From Join Table TableAlias Identifier Column Literal Null Boolean Star Alias Where Group
Having Order Ordered Limit Offset Distinct Subquery Paren And Or Not EQ NEQ NullSafeEQ NullSafeNEQ LT LTE GT GTE Is In
Between Like Exists Case If Count Sum Avg Min Max Add Sub Mul Div Mod Neg DPipe Abs Round Lower Upper Trim Replace
Length Substring Coalesce Nullif Cast DataType With CTE
"""  # those that the rules were made for: none of them is chance
# The parser drops a sign that takes a column's affinity away, and reads these types, numbers in SQLite, as other ones.
_UNPARSED = re.compile(r"\+|\b(STR(ING)?|LONG|SHORT|BYTE|BYTEA)\b", re.IGNORECASE)


class Sound(Simplifier):
    """The rules on conditions that hold for all types and under three-valued logic."""

    simplify_equality = simplify_literals = lambda _, node, *__: node
    _simplify_comparison = lambda *_, **__: None  # noqa: E731  `a > 10 AND a > 9`: not so if `a` is a text


def proof_plan(
    gold: str, predicted: str, schema: Schema, ddl: Mapping[str, str], required: Sequence[tuple[str, str]]
) -> tuple[bool, list[str], list[str]]:
    """See `analyst.proof_plan`."""
    never_null = {(table.lower(), column.lower()) for table, column in required}
    tables = {table.name.lower(): table for table in schema.tables if table.name in ddl}
    names = {name.lower() for table in tables.values() for name in (table.name, *(each.name for each in table.columns))}
    trees, ends = [unwrap(parse(text) or exp.Placeholder()).copy() for text in (gold, predicted)], list[str]()
    for column in [column for tree in trees for column in tree.find_all(exp.Column)]:
        # SQLite takes a name in double quotes that is none for a text.
        if column.this.args.get("quoted") and not column.table and column.name.lower() not in names:
            column.replace(exp.Literal.string(column.name))
    with contextlib.suppress(errors.SqlglotError, ValueError, KeyError):
        ends = [_end(_qualified(trees[0], tables, names), is_last) for is_last in (False, True)]
        order = trees[0].args.get("order")
        one, other = (_form(_qualified(tree, tables, names), never_null, order) for tree in trees)
        if one == other and not _UNPARSED.search(gold + predicted):
            return True, [], []
    rngs = [random.Random(f"{n}{gold}") for n in range(DATABASES if ends else 0)]
    return gold == predicted, ends, [_script(ddl, tables, trees, never_null, rng) for rng in rngs]


def _qualified(tree: exp.Expr, tables: Tables, names: set[str]) -> exp.Expr:
    """A copy in which each column has its table, each table an alias of its own, and no star is left."""
    for node in tree.walk():
        # Between a column and an alias of its name SQLite decides by the clause.
        is_clash = isinstance(node, exp.Alias | exp.CTE) and node.alias.lower() in names
        if (
            type(node).__name__ not in _NODES.split()
            or (is_clash and not (isinstance(node.this, exp.Column) and node.this.name.lower() == node.alias.lower()))
            or (isinstance(node, exp.Join) and (node.side not in ("", "LEFT") or node.method or node.args.get("using")))
        ):
            raise ValueError(node)
    kinds = {name: {each.name.lower(): each.type or "TEXT" for each in table.columns} for name, table in tables.items()}
    return qualify(tree.copy(), schema={**kinds}, dialect="sqlite", canonicalize_table_aliases=True)


def _sources(select: exp.Expr) -> list[exp.Expr]:
    return [part for part in (select.args.get("from_"), *(select.args.get("joins") or ())) if part]


def _end(tree: exp.Expr, is_last: bool) -> str:
    """The query that takes the first (or last) of what chance may choose: rows in the order of their columns behind
    every ORDER BY, and of a column that its groups do not settle the least (or greatest) value.
    """
    pick = "MAX({0})" if is_last else "CASE WHEN COUNT({0}) = COUNT(*) THEN MIN({0}) END"
    for select in list(tree.find_all(exp.Select)):
        own = {part.this.alias_or_name for part in _sources(select)}
        clauses = [part for part in (*select.expressions, select.args.get("having"), select.args.get("order")) if part]
        called = [call for part in clauses for call in part.find_all(exp.AggFunc) if call.parent_select is select]
        is_grouped = bool(called or select.args.get("group"))
        for column in [each for part in clauses if is_grouped for each in part.find_all(exp.Column)]:
            if column.table in own and column.find_ancestor(exp.AggFunc, exp.Select) not in called:
                column.replace(exp.paren(exp.condition(pick.format(column.sql("sqlite")), dialect="sqlite")))
    for query in list(tree.find_all(exp.Select, exp.SetOperation)):
        if not isinstance(query.parent, exp.SetOperation):
            ties = [exp.Ordered(this=exp.Literal.number(n + 1), desc=is_last) for n in range(len(query.selects))]
            keys = query.args["order"].expressions if query.args.get("order") else []
            query.set("order", exp.Order(expressions=[*keys, *ties]))
    return tree.sql("sqlite")


def _form(tree: exp.Expr, never_null: Set[Item], order: exp.Expr | None) -> exp.Expr:
    """The normal form of a qualified query, beside a gold query with this ORDER BY."""
    if not order and not tree.args.get("limit"):
        tree.set("order", None)
    if not any(each.args.get("side") or each.parent is not tree for each in tree.find_all(exp.Join, exp.Order)):
        tree = merge_subqueries(tree)
    sound = Sound("sqlite", annotate_new_expressions=False)
    tree = sound.simplify(tree)
    # Inner joins are conditions, and their tables stand in the order of their names.
    for select in tree.find_all(exp.Select):
        parts = _sources(select)
        if len(parts) > 1 and not any(part.args.get("side") for part in parts):
            select.where(*(part.args["on"] for part in parts if part.args.get("on")), copy=False)
            first, *others = sorted((part.this for part in parts), key=lambda table: str(table.this))
            select.set("from_", exp.From(this=first))
            select.set("joins", [exp.Join(this=table) for table in others])
    tree = qualify(tree, dialect="sqlite", canonicalize_table_aliases=True, validate_qualify_columns=False)
    # Nothing reads the names of the result's columns, and some columns never hold NULL.
    named = {each.alias: each.unalias() for each in tree.expressions}
    for key in tree.args["order"].expressions if tree.args.get("order") else ():
        if isinstance(key.this, exp.Column) and not key.this.table:
            key.set("this", named[key.this.name].copy())
    tree.set("expressions", [each.unalias() for each in tree.expressions])
    is_inner = not any(part.args.get("side") for part in _sources(tree))
    table_of = {part.this.alias: part.this.name.lower() for part in _sources(tree) if is_inner}
    for count in tree.find_all(exp.Count):
        counted = count.this
        is_value = isinstance(counted, exp.Literal)
        if isinstance(counted, exp.Column):
            is_value = (table_of.get(counted.table, ""), counted.name.lower()) in never_null
        if count.parent_select is tree and is_value:
            count.set("this", exp.Star())
    return sound.simplify(tree)


def _script(
    ddl: Mapping[str, str], tables: Tables, trees: list[exp.Expr], never_null: Set[Item], rng: random.Random
) -> str:
    """A small database of the tables that the queries name, with values that they name: what keys and CHECK refuse is
    not inserted, and a row that refers to none is deleted. Most of these databases hold NULLs in every column that may.
    """
    near, counts = defaultdict[str, list[Scalar]](list), [0, 1, 2, 3, 4, 6, 9]
    for each in [each for tree in trees for each in tree.find_all(exp.Literal)]:
        around, bare = each.find_ancestor(exp.Predicate), each.name.replace("%", "").replace("_", "a")
        counts += [int(bare) + 1] if bare.isdigit() and len(bare) < 2 else []
        for name in {column.name.lower() for column in around.find_all(exp.Column)} if around else ():
            near[name] += [bare, bare, f"{bare}b", f"a{bare}", bare.swapcase(), bare[:-1]]
            with contextlib.suppress(ValueError):
                near[name] += [float(bare), float(bare), float(bare) - 1, float(bare) + 1]
    used = {node.name.lower() for tree in trees for node in tree.find_all(exp.Table)}
    wanted, inserts, deletes = [tables[name] for name in tables if name in used], list[str](), list[str]()
    for table in wanted:
        references = [key for key in table.foreign_keys if key.to_table.lower() in used]
        if len({key.to_table for key in references}) < len({(key.to_table, key.to_column) for key in references}):
            raise ValueError(table)  # columns that refer to one row together
        for key, to in ((key, quoted(key.to_column)) for key in references):
            known = f"SELECT {to} FROM {quoted(key.to_table)} WHERE {to} IS NOT NULL"
            deletes.append(f"DELETE FROM {quoted(table.name)} WHERE {quoted(key.column)} NOT IN ({known})")
        null_share, pools = rng.choice((0, 0.2, 0.5)), list[list[Scalar]]()
        for column in table.columns:
            is_number = bool(re.search("INT|REAL|FLOA|DOUB|NUM|DEC|BOOL", column.type.upper()))
            values = [value for value in near[column.name.lower()] if isinstance(value, float) == is_number]
            other: list[Scalar] = [*range(1, 9)] if is_number else [*"abBcd1", "2001-02-03", "2010-12-31"]
            is_key = column.primary_key or any(column.name == key.column for key in table.foreign_keys)
            pool = [*other, *values] if is_key else rng.choices([*values * 2, *other], k=rng.choice((2, 3, 5)))
            may_be_null = (table.name.lower(), column.name.lower()) not in never_null
            pools.append(pool + [None] * (math.ceil(len(pool) * null_share) if may_be_null else 0))
        rows = [exp.convert(tuple(map(rng.choice, pools))).sql("sqlite") for _ in range(rng.choice(counts))]
        names = ", ".join(quoted(column.name) for column in table.columns)
        inserts += [f"INSERT OR IGNORE INTO {quoted(table.name)} ({names}) VALUES {', '.join(rows)}"] if rows else []
    return ";\n".join([*(ddl[table.name] for table in wanted), *inserts, *(deletes * 9)])
