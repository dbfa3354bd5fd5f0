"""The names that a query's text reads of the database, the words that it makes up, and the values that it looks up."""

import re
from collections.abc import Mapping

from sqlglot import exp
from sqlglot.optimizer.scope import Scope, traverse_scope

from pipelines.sql.analysis.name_resolution import known_name, output_names, scope_columns, scope_sources
from pipelines.sql.analysis.parsing import joined_clauses, parse, unwrap
from pipelines.sql.schema import Schema

# The engine of a query is not known here; the first that reads it decides.
_ENGINES: tuple[str, ...] = ("sqlite", "duckdb", "mysql")
_WORD = re.compile(r"\w+")
_LETTER = re.compile(r"[^\W\d]")
# Functions that make a text out of numbers, or of parts of texts.
_TEXT_MAKERS = """
char chr concat concat_ws convert_from decode format from_base64 from_hex printf quote replace unhex
"""
_MAKE_TEXT = frozenset(_TEXT_MAKERS.split())
_TEXT_NODES = (exp.Literal, exp.HexString, exp.RawString, exp.National, exp.ByteString)
_COMPARISONS = (exp.EQ, exp.NEQ, exp.Like, exp.ILike, exp.In)


def naming(sql: str) -> tuple[list[str], list[str], bool] | None:
    """Lower-cased: the names of tables and columns that a query reads of the database; the words that it writes itself,
    as aliases and as texts in its results; and whether it puts text together there. None if it does not parse.

    A column counts where it can only be one of a table: not the output of a subquery or a CTE, not an alias, and no
    word in double quotes without its table, which SQLite takes as text where there is no such column.
    """
    tree = _parse_in_any_dialect(sql)
    if tree is None:
        return None
    lowered = sql.lower()
    try:
        names = _names_read(tree, lowered)
    except Exception:  # sqlglot's scopes raise freely on trees that parse but make no sense
        return None
    literals = _written_literals(tree)
    texts = _made_names(tree) + literals
    for column in tree.find_all(exp.Column):
        if not column.table and _is_double_quoted(column.name, lowered):
            texts.append(column.name)
    words: set[str] = set()
    for text in texts:
        words.update(_WORD.findall(text.lower()))
    writes_text = bool(literals) or _makes_text(tree)
    return sorted(names), sorted(words), writes_text


def _parse_in_any_dialect(sql: str) -> exp.Expr | None:
    """The tree of a query by the first engine that reads it."""
    for engine in _ENGINES:
        tree = parse(sql, engine)
        if tree is not None:
            return tree
    return None


def _names_read(tree: exp.Expr, sql: str) -> set[str]:
    """The names of the tables and columns of the database that a query reads."""
    names: set[str] = set()
    for scope in traverse_scope(tree):
        for _, source in scope_sources(scope):
            if isinstance(source, exp.Table) and source.name:
                names.add(source.name.lower())
        for column in scope_columns(scope):
            if _is_of_database(scope, column, sql):
                names.add(column.name.lower())
    return names


def _made_names(tree: exp.Expr) -> list[str]:
    """The names that a query makes up: aliases, CTEs and their columns, keys of structs, named arguments."""
    names: list[str] = []
    for node in tree.find_all(exp.Alias, exp.TableAlias):
        name = node.alias if isinstance(node, exp.Alias) else node.name
        names.append(name)
        for column in node.args.get("columns") or []:
            names.append(column.name)
    for key in tree.find_all(exp.PropertyEQ, exp.Kwarg):
        names.append(key.name)
    return names


def _written_literals(tree: exp.Expr) -> list[str]:
    """The texts that may come out as they stand: no condition compares with them, no function reads a table by them."""
    literals: list[str] = []
    for node in tree.find_all(*_TEXT_NODES):
        if isinstance(node, exp.Literal) and not _is_word(node):
            continue
        clause = node.find_ancestor(exp.Where, exp.Having, exp.Join, exp.Table)
        if clause is None or _is_plain_table_function(clause):
            literals.append(node.name)
    return literals


def _is_word(literal: exp.Literal) -> bool:
    """Whether a literal is a text with a letter in it."""
    return literal.is_string and _LETTER.search(literal.name) is not None


def _is_plain_table_function(clause: exp.Expr) -> bool:
    """Whether a clause is a table that is no pragma: a text in it is an argument that may come out."""
    if not isinstance(clause, exp.Table):
        return False
    name = clause.this.name.lower()
    return not name.startswith("pragma_")


def _makes_text(tree: exp.Expr) -> bool:
    """Whether a query puts text together."""
    if tree.find(exp.DPipe) is not None:
        return True
    calls = tree.find_all(exp.Func)
    return any(function_name(call).lower() in _MAKE_TEXT for call in calls)


def function_name(call: exp.Func) -> str:
    """The name of the function that is called, in any case."""
    if isinstance(call, exp.Anonymous):
        return call.name
    return call.sql_name()


def _is_double_quoted(name: str, sql: str) -> bool:
    return f'"{name.lower()}"' in sql


def _is_of_database(scope: Scope, column: exp.Column, sql: str) -> bool:
    """Whether a column can only be one of a table of the database."""
    name = column.name.lower()
    qualifier = column.table.lower()
    if qualifier:
        return _is_of_table(scope, qualifier, name)
    if _is_double_quoted(name, sql) or _may_be_other_alias(scope, column):
        return False
    has_table = False
    level: Scope | None = scope
    while level is not None:
        for _, source in scope_sources(level):
            if isinstance(source, exp.Table):
                has_table |= bool(source.name)
                outputs = _renamed_columns(source)
            else:
                outputs = output_names(source)
            if name in outputs:
                return False
        # A subquery of a condition or of a SELECT list sees the query around it; no other does.
        level = level.parent if level.is_subquery else None
    return has_table


def _is_of_table(scope: Scope, qualifier: str, name: str) -> bool:
    """Whether a qualifier is a table of the database, under whose own columns the name stands."""
    level: Scope | None = scope
    while level is not None:
        for alias, source in scope_sources(level):
            if alias.lower() == qualifier:
                return isinstance(source, exp.Table) and name not in _renamed_columns(source)
        level = level.parent
    return False


def _may_be_other_alias(scope: Scope, column: exp.Column) -> bool:
    """Whether a name may be the alias of another item in the SELECT list of its query."""
    name = column.name.lower()
    query = unwrap(scope.expression)
    for item in getattr(query, "expressions", []):
        if not isinstance(item, exp.Alias) or item.alias.lower() != name:
            continue
        ancestor = column.parent
        while ancestor is not None and ancestor is not item:
            ancestor = ancestor.parent
        if ancestor is None:
            return True
    return False


def _renamed_columns(table: exp.Table) -> set[str]:
    """The names that `FROM t AS alias(a, b)` gives to columns."""
    alias = table.args.get("alias")
    if alias is None:
        return set()
    columns = alias.args.get("columns") or []
    return {column.name.lower() for column in columns}


# The lookups of a query: the texts that it compares with columns, and its first table.

Compared = tuple[str, str, str, str]  # table, column, text, and the query that shows the column's values


def lookups(sql: str, schema: Schema | None, engine: str) -> list[Compared]:
    """Every text that the query compares with a column of a known table, in reading order; a schema resolves
    unqualified columns, and parts a double-quoted text from a column.
    """
    tree = parse(sql, engine)
    if tree is None:
        return []
    tables_by_column = _tables_by_column(schema)
    compared: dict[tuple[str, str, str], Compared] = {}
    for node in tree.find_all(*_COMPARISONS, bfs=False):
        column = node.this
        texts = _compared_texts(node, tables_by_column)
        if not texts or not isinstance(column, exp.Column):
            continue
        source = _only_table(column, tables_by_column)
        if source is None:
            continue
        table = ".".join(part.name for part in source.parts)
        values_query = _values_query(column, table)
        probe = values_query.sql(engine)
        for text in texts:
            key = (table, column.name, text)
            compared.setdefault(key, (*key, probe))
    return list(compared.values())


def _values_query(column: exp.Column, table: str) -> exp.Select:
    """The query that shows the values of a column."""
    bare_column = exp.column(column.this.copy())
    select = exp.select(bare_column).distinct()
    return select.from_(exp.to_table(table))


def _tables_by_column(schema: Schema | None) -> dict[str, set[str]]:
    """The tables that have a column, by its name, all in lower case."""
    tables: dict[str, set[str]] = {}
    if schema is None:
        return tables
    for table in schema.tables:
        for column in table.columns:
            holders = tables.setdefault(column.name.lower(), set())
            holders.add(table.name.lower())
    return tables


def _compared_texts(comparison: exp.Expr, tables_by_column: Mapping[str, set[str]]) -> list[str]:
    """The texts on the right side of a comparison, without the signs of a pattern at their ends."""
    operands = [comparison.expression]
    if isinstance(comparison, exp.In):
        operands = comparison.expressions
    texts = []
    for operand in operands:
        is_text = isinstance(operand, exp.Literal) and operand.is_string
        # SQLite also reads a double-quoted name that no column has as a text.
        if _is_bare_quoted(operand):
            is_text = bool(tables_by_column) and operand.name.lower() not in tables_by_column
        if is_text:
            texts.append(operand.name.strip("%"))
    return texts


def _is_bare_quoted(operand: exp.Expr) -> bool:
    """Whether an operand is a name in quotes without its table."""
    if not isinstance(operand, exp.Column) or operand.table:
        return False
    return bool(operand.this.args.get("quoted"))


def _only_table(column: exp.Column, tables_by_column: Mapping[str, set[str]]) -> exp.Table | None:
    """The table of a column in its SELECT: by its qualifier, else the only one that has it; None if that is unclear."""
    select = column.find_ancestor(exp.Select)
    if select is None:
        return None
    tables = _joined_tables(select)
    if column.table:
        alias = column.table.lower()
        tables = [table for table in tables if table.alias_or_name.lower() == alias]
    elif tables_by_column:
        holders = tables_by_column.get(column.name.lower(), set())
        tables = [table for table in tables if known_name(table, holders) in holders]
    if len(tables) != 1:
        return None
    return tables[0]


def _joined_tables(select: exp.Select) -> list[exp.Table]:
    """The tables of FROM and JOIN; subqueries are left out."""
    return [clause.this for clause in joined_clauses(select) if isinstance(clause.this, exp.Table)]


def first_table(sql: str, engine: str) -> str | None:
    """The first table that the query names; None if it names none, or cannot be read."""
    tree = parse(sql, engine)
    if tree is None:
        return None
    table = tree.find(exp.Table)
    if table is None:
        return None
    return table.name
