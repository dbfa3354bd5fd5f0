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
from pipelines.sql.analysis.parsing import joined_clauses, parse, unwrap
from pipelines.sql.dialects.base import quoted
from pipelines.sql.schema import Column, Schema, Table

DATABASES = 32  # databases to try where no proof succeeds
Item = tuple[str, str]  # (table, column), lower-cased
Tables = Mapping[str, Table]  # tables by lower-cased name
_NODES = """
Select Union Intersect Except From Join Table TableAlias Identifier Column Literal Null Boolean Star Alias Where Group
Having Order Ordered Limit Offset Distinct Subquery Paren And Or Not EQ NEQ NullSafeEQ NullSafeNEQ LT LTE GT GTE Is In
Between Like Exists Case If Count Sum Avg Min Max Add Sub Mul Div Mod Neg DPipe Abs Round Lower Upper Trim Replace
Length Substring Coalesce Nullif Cast DataType With CTE
"""
SUPPORTED_NODES = frozenset(_NODES.split())  # The rules were made for these; none of them depends on chance.
# The parser drops a sign that takes a column's affinity away, and reads these types, numbers in SQLite, as other ones.
_UNPARSED = re.compile(r"\+|\b(STR(ING)?|LONG|SHORT|BYTE|BYTEA)\b", re.IGNORECASE)
_NUMBER_TYPE = re.compile("INT|REAL|FLOA|DOUB|NUM|DEC|BOOL")
SOME_NUMBERS: Sequence[Scalar] = range(1, 9)
SOME_TEXTS: Sequence[Scalar] = (*"abBcd1", "2001-02-03", "2010-12-31")
ROW_COUNTS = (0, 1, 2, 3, 4, 6, 9)
UNPROVABLE = (errors.SqlglotError, ValueError, KeyError)  # errors on queries beyond the rules


class Sound(Simplifier):
    """The rules on conditions that hold for all types and under three-valued logic."""

    simplify_equality = simplify_literals = lambda _, node, *__: node
    _simplify_comparison = lambda *_, **__: None  # noqa: E731  `a > 10 AND a > 9`: not so if `a` is a text


def proof_plan(
    gold: str, predicted: str, schema: Schema, ddl: Mapping[str, str], required: Sequence[tuple[str, str]]
) -> tuple[bool, list[str], list[str]]:
    """See `analyst.proof_plan`."""
    never_null = {(table.lower(), column.lower()) for table, column in required}
    tables: dict[str, Table] = {}
    for table in schema.tables:
        if table.name in ddl:
            tables[table.name.lower()] = table
    names = _names_of_tables(tables)
    gold_tree = _query_tree(gold, names)
    predicted_tree = _query_tree(predicted, names)
    try:
        extremes = []
        for is_last in (False, True):
            qualified_gold = _qualified_copy(gold_tree, tables, names)
            extremes.append(_extreme_query(qualified_gold, is_last))
    except UNPROVABLE:
        return gold == predicted, [], []
    have_one_form = _have_one_form(gold_tree, predicted_tree, tables, names, never_null)
    if have_one_form and not _UNPARSED.search(gold + predicted):
        return True, [], []
    scripts = []
    trees = [gold_tree, predicted_tree]
    for number in range(DATABASES):
        rng = random.Random(f"{number}{gold}")
        script = database_script(ddl, tables, trees, never_null, rng)
        scripts.append(script)
    return gold == predicted, extremes, scripts


def _names_of_tables(tables: Tables) -> set[str]:
    """The lower-cased names of tables and their columns."""
    names: set[str] = set()
    for table in tables.values():
        names.add(table.name.lower())
        names.update(column.name.lower() for column in table.columns)
    return names


def _have_one_form(
    gold_tree: exp.Expr, predicted_tree: exp.Expr, tables: Tables, names: Set[str], never_null: Set[Item]
) -> bool:
    """Whether two queries have the same normal form."""
    order = gold_tree.args.get("order")
    try:
        qualified_gold = _qualified_copy(gold_tree, tables, names)
        gold_form = _normal_form(qualified_gold, never_null, order)
        qualified_prediction = _qualified_copy(predicted_tree, tables, names)
        predicted_form = _normal_form(qualified_prediction, never_null, order)
        return bool(gold_form == predicted_form)
    except UNPROVABLE:
        return False


def _query_tree(sql: str, names: Set[str]) -> exp.Expr:
    """A tree of a query that may be changed. SQLite takes an unknown name in double quotes for a text."""
    shared_tree = parse(sql) or exp.Placeholder()
    tree = unwrap(shared_tree).copy()
    for column in list(tree.find_all(exp.Column)):
        is_bare_quoted = column.this.args.get("quoted") and not column.table
        if is_bare_quoted and column.name.lower() not in names:
            column.replace(exp.Literal.string(column.name))
    return tree


def _qualified_copy(tree: exp.Expr, tables: Tables, names: Set[str]) -> exp.Expr:
    """A copy in which each column has its table, each table an alias of its own, and no star is left."""
    for node in tree.walk():
        is_supported = type(node).__name__ in SUPPORTED_NODES
        if not is_supported or _is_ambiguous(node, names) or _is_other_join(node):
            raise ValueError(node)
    types: dict[str, object] = {}
    for name, table in tables.items():
        types_of_columns = {column.name.lower(): column.type or "TEXT" for column in table.columns}
        types[name] = types_of_columns
    return qualify(tree.copy(), schema=types, dialect="sqlite", canonicalize_table_aliases=True)


def _is_ambiguous(node: exp.Expr, names: Set[str]) -> bool:
    """Whether an alias hides a name of the database: SQLite decides between them by the clause."""
    if not isinstance(node, exp.Alias | exp.CTE):
        return False
    alias = node.alias.lower()
    named_node = node.this
    is_own_name = isinstance(named_node, exp.Column) and named_node.name.lower() == alias
    return alias in names and not is_own_name


def _is_other_join(node: exp.Expr) -> bool:
    """Whether a join is another than an inner or a left one with its condition."""
    if not isinstance(node, exp.Join):
        return False
    if node.side not in ("", "LEFT") or node.method:
        return True
    return bool(node.args.get("using"))


def _is_inner(clauses: Sequence[exp.Expr]) -> bool:
    """Whether none of the joins is an outer one."""
    return not any(clause.args.get("side") for clause in clauses)


def _order_keys(query: exp.Expr) -> list[exp.Expr]:
    order = query.args.get("order")
    if not order:
        return []
    return list(order.expressions)


def _extreme_query(tree: exp.Expr, is_last: bool) -> str:
    """The query that takes the first (or last) of what chance may choose: rows in the order of their columns behind
    every ORDER BY, and of a column that its groups do not settle the least (or greatest) value.
    """
    pick = "CASE WHEN COUNT({0}) = COUNT(*) THEN MIN({0}) END"
    if is_last:
        pick = "MAX({0})"
    for select in list(tree.find_all(exp.Select)):
        for column in _unsettled_columns(select):
            text = pick.format(column.sql("sqlite"))
            choice = exp.condition(text, dialect="sqlite")
            column.replace(exp.paren(choice))
    for query in list(tree.find_all(exp.Select, exp.SetOperation)):
        if isinstance(query.parent, exp.SetOperation):
            continue
        keys = _order_keys(query)
        for position in range(1, len(query.selects) + 1):
            number = exp.Literal.number(position)
            keys.append(exp.Ordered(this=number, desc=is_last))
        query.set("order", exp.Order(expressions=keys))
    return tree.sql("sqlite")


def _unsettled_columns(select: exp.Select) -> list[exp.Column]:
    """The columns of a grouped SELECT that stand outside its aggregates."""
    clauses = [*select.expressions]
    for name in ("having", "order"):
        clause = select.args.get(name)
        if clause:
            clauses.append(clause)
    aggregates = []
    for clause in clauses:
        for call in clause.find_all(exp.AggFunc):
            if call.parent_select is select:
                aggregates.append(call)
    if not aggregates and not select.args.get("group"):
        return []
    aliases = {clause.this.alias_or_name for clause in joined_clauses(select)}
    columns = []
    for clause in clauses:
        for column in clause.find_all(exp.Column):
            # A column is inside an aggregate of this SELECT if that is the nearest aggregate or SELECT around it.
            nearest = column.find_ancestor(exp.AggFunc, exp.Select)
            if column.table in aliases and nearest not in aggregates:
                columns.append(column)
    return columns


def _normal_form(tree: exp.Expr, never_null: Set[Item], gold_order: exp.Expr | None) -> exp.Expr:
    """The normal form of a qualified query, for a comparison with a gold query that has this ORDER BY."""
    if not gold_order and not tree.args.get("limit"):
        tree.set("order", None)
    can_merge = True
    for node in tree.find_all(exp.Join, exp.Order):
        if node.args.get("side") or node.parent is not tree:
            can_merge = False
    if can_merge:
        tree = merge_subqueries(tree)
    sound = Sound("sqlite", annotate_new_expressions=False)
    tree = sound.simplify(tree)
    for select in tree.find_all(exp.Select):
        _sort_inner_joins(select)
    tree = qualify(tree, dialect="sqlite", canonicalize_table_aliases=True, validate_qualify_columns=False)
    _drop_aliases(tree)
    _count_rows(tree, never_null)
    return sound.simplify(tree)


def _sort_inner_joins(select: exp.Select) -> None:
    """Turn the conditions of inner joins into those of WHERE, and put the tables into the order of their names."""
    clauses = joined_clauses(select)
    if len(clauses) < 2 or not _is_inner(clauses):
        return
    conditions = []
    tables = []
    for clause in clauses:
        tables.append(clause.this)
        condition = clause.args.get("on")
        if condition:
            conditions.append(condition)
    select.where(*conditions, copy=False)
    first, *others = sorted(tables, key=lambda table: str(table.this))
    select.set("from_", exp.From(this=first))
    joins = [exp.Join(this=table) for table in others]
    select.set("joins", joins)


def _drop_aliases(tree: exp.Expr) -> None:
    """Take the names off the result's columns, which nothing reads but ORDER BY."""
    bare_items = [item.unalias() for item in tree.expressions]
    by_alias: dict[str, exp.Expr] = {}
    for item, bare_item in zip(tree.expressions, bare_items, strict=True):
        by_alias[item.alias] = bare_item
    for key in _order_keys(tree):
        if isinstance(key.this, exp.Column) and not key.this.table:
            item = by_alias[key.this.name]
            key.set("this", item.copy())
    tree.set("expressions", bare_items)


def _count_rows(tree: exp.Expr, never_null: Set[Item]) -> None:
    """Write COUNT(*) for a COUNT of what is never NULL."""
    clauses = joined_clauses(tree)
    table_of: dict[str, str] = {}
    if _is_inner(clauses):
        for clause in clauses:
            table_of[clause.this.alias] = clause.this.name.lower()
    for count in tree.find_all(exp.Count):
        counted = count.this
        is_value = isinstance(counted, exp.Literal)
        if isinstance(counted, exp.Column):
            table = table_of.get(counted.table, "")
            is_value = (table, counted.name.lower()) in never_null
        if count.parent_select is tree and is_value:
            count.set("this", exp.Star())


def database_script(
    ddl: Mapping[str, str], tables: Tables, trees: list[exp.Expr], never_null: Set[Item], rng: random.Random
) -> str:
    """A small database of the tables that the queries name, with values that they name: what keys and CHECK refuse is
    not inserted, and a row that refers to none is deleted. Most of these databases hold NULLs in every column that may.
    """
    values_near, row_counts = _values_near_constants(trees)
    used: set[str] = set()
    for tree in trees:
        used.update(table.name.lower() for table in tree.find_all(exp.Table))
    creates: list[str] = []
    inserts: list[str] = []
    deletes: list[str] = []
    for name, table in tables.items():
        if name not in used:
            continue
        creates.append(ddl[table.name])
        deletes += _orphan_deletes(table, used)
        rows = _random_rows(table, values_near, row_counts, never_null, rng)
        if rows:
            inserts.append(_insert_statement(table, rows))
    deletes_along_chains = deletes * 9  # A chain of references is followed over nine tables.
    return ";\n".join([*creates, *inserts, *deletes_along_chains])


def _insert_statement(table: Table, rows: Sequence[str]) -> str:
    name = quoted(table.name)
    columns = ", ".join(quoted(column.name) for column in table.columns)
    values = ", ".join(rows)
    return f"INSERT OR IGNORE INTO {name} ({columns}) VALUES {values}"


def _values_near_constants(trees: Sequence[exp.Expr]) -> tuple[Mapping[str, Sequence[Scalar]], Sequence[int]]:
    """Values at and beside the constants that queries compare, by lower-cased column; and numbers of rows to try."""
    values: defaultdict[str, list[Scalar]] = defaultdict(list)
    row_counts = list(ROW_COUNTS)
    literals: list[exp.Literal] = []
    for tree in trees:
        literals += tree.find_all(exp.Literal)
    for literal in literals:
        constant = literal.name.replace("%", "").replace("_", "a")
        if constant.isdigit() and len(constant) < 2:  # It may be a LIMIT, or a bound of COUNT(*).
            row_counts.append(int(constant) + 1)
        condition = literal.find_ancestor(exp.Predicate)
        if condition is None:
            continue
        columns = condition.find_all(exp.Column)
        names = {column.name.lower() for column in columns}
        near_values = _values_near(constant)
        for name in names:
            values[name] += near_values
    return values, row_counts


def _values_near(constant: str) -> list[Scalar]:
    """A constant, texts that differ from it a little, and the numbers beside it."""
    near_values: list[Scalar] = [constant, constant]
    near_values += [f"{constant}b", f"a{constant}", constant.swapcase(), constant[:-1]]
    with contextlib.suppress(ValueError):
        number = float(constant)
        near_values += [number, number, number - 1, number + 1]
    return near_values


def _orphan_deletes(table: Table, used: Set[str]) -> list[str]:
    """Statements that delete the rows whose foreign keys refer to no row; ValueError for a key of several columns."""
    references = [key for key in table.foreign_keys if key.to_table.lower() in used]
    to_tables = {key.to_table for key in references}
    targets = {(key.to_table, key.to_column) for key in references}
    if len(to_tables) < len(targets):
        raise ValueError(table)
    deletes = []
    name = quoted(table.name)
    for key in references:
        column = quoted(key.column)
        to_table = quoted(key.to_table)
        to_column = quoted(key.to_column)
        known = f"SELECT {to_column} FROM {to_table} WHERE {to_column} IS NOT NULL"
        deletes.append(f"DELETE FROM {name} WHERE {column} NOT IN ({known})")
    return deletes


def _random_rows(
    table: Table,
    values_near: Mapping[str, Sequence[Scalar]],
    row_counts: Sequence[int],
    never_null: Set[Item],
    rng: random.Random,
) -> list[str]:
    """The rows of a table as lists of SQL values."""
    null_share = rng.choice((0, 0.2, 0.5))
    foreign = {key.column for key in table.foreign_keys}
    pools: list[list[Scalar]] = []
    for column in table.columns:
        name = column.name.lower()
        common, near_values = _candidate_values(column, values_near)
        pool = [*common, *near_values]
        if not column.primary_key and column.name not in foreign:
            candidates = [*near_values, *near_values, *common]
            size = rng.choice((2, 3, 5))
            pool = rng.choices(candidates, k=size)
        if (table.name.lower(), name) not in never_null:
            n_nulls = math.ceil(len(pool) * null_share)
            pool += [None] * n_nulls
        pools.append(pool)
    n_rows = rng.choice(row_counts)
    rows = []
    for _ in range(n_rows):
        row = tuple(rng.choice(pool) for pool in pools)
        values = exp.convert(row)
        rows.append(values.sql("sqlite"))
    return rows


def _candidate_values(
    column: Column, values_near: Mapping[str, Sequence[Scalar]]
) -> tuple[Sequence[Scalar], list[Scalar]]:
    """The common values of a column's type, and those of this type near the constants that it is compared with."""
    is_number = bool(_NUMBER_TYPE.search(column.type.upper()))
    near_values: list[Scalar] = []
    for value in values_near.get(column.name.lower(), ()):
        if isinstance(value, float) == is_number:
            near_values.append(value)
    if is_number:
        return SOME_NUMBERS, near_values
    return SOME_TEXTS, near_values
