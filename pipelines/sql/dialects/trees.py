"""What a statement is made of, by the engine's own parser: the first fence around engines that have no authorizer.

Both parsers give a tree as JSON, with every name as the engine will look it up: unescaped, unquoted, and in the place
where it is a function or a relation. The kinds of nodes are allow-listed too, so that a part of SQL that is new to us
(a query that writes inside WITH, say) is refused until somebody has read what it does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipelines.sql.dialects.base import ERROR, REFUSED, Raw, failure
from pipelines.sql.dialects.guard import FUNCTIONS, HIDDEN

Node = Mapping[str, Any]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DUCKDB_PARTS = _words(
    """
    select_node set_operation_node recursive_cte_node cte_node
    base_table subquery join table_function expression_list empty pivot show_ref
    distinct_modifier limit_modifier limit_percent_modifier order_modifier
    between case cast collate column_ref comparison conjunction constant default function lambda operator parameter
    positional_reference star type window
    """
)
# What the parser itself writes for an operator or a special form.
_DUCKDB_FORMS = _words(
    """
    timezone like_escape not_like_escape ilike_escape not_ilike_escape list_apply list_filter list_transform
    struct_extract array_extract array_slice row map trim overlay position substring date_part count_star unnest
    """
)
_SHOWN = frozenset(('"tables"',))  # of what SHOW can show: the names of the tables
_POSTGRES_PARTS = _words(
    """
    SelectStmt ResTarget ColumnRef A_Star A_Const A_Expr A_ArrayExpr A_Indices A_Indirection BoolExpr BooleanTest
    CaseExpr CaseWhen CoalesceExpr CollateClause CommonTableExpr CTESearchClause CTECycleClause ColumnDef FuncCall
    GroupingFunc GroupingSet JoinExpr List MinMaxExpr MultiAssignRef NamedArgExpr NullTest ParamRef RangeFunction
    RangeSubselect RangeTableSample RangeVar RowExpr SQLValueFunction SortBy String Integer Float Boolean BitString
    SubLink TypeCast TypeName WindowDef WithClause Alias JsonIsPredicate XmlSerialize
    """
)
# The special forms of SQL that the parser turns into calls.
_POSTGRES_FORMS = _words(
    """
    extract timezone position substring btrim ltrim rtrim overlay normalize is_normalized xmlexists overlaps
    like_escape similar_to_escape similar_escape system bernoulli
    """
)
_DATES = ("SVFOP_CURRENT_DATE", "SVFOP_CURRENT_TIME", "SVFOP_LOCALTIME")  # the other words tell who is connected
# What describes the tables; the rest of this schema describes the server, its roles and who may do what.
_DESCRIBED = _words(
    """
    check_constraints columns constraint_column_usage key_column_usage referential_constraints schemata
    table_constraints tables views
    """
)
# Types whose values are looked up in the catalog: a cast from a number names any role, table or function of the server.
_LOOKED_UP = _words("regclass regcollation regdictionary regnamespace regoper regoperator regproc regprocedure regrole")
_DIRECTIONS = frozenset(("ASCENDING", "DESCENDING", "ORDER_DEFAULT"))
_SYSTEM = frozenset(("pg_catalog", "pg_toast", "system", "temp", "pg_temp"))


def refused_by_duckdb(sql: str, serialize: Callable[[str], str]) -> Raw | None:
    """Why DuckDB may not run a statement; None if it may.

    Args:
        serialize: DuckDB's json_serialize_sql. It takes queries only, and says of anything else that it is none.
    """
    parsed = json.loads(serialize(sql))
    if parsed["error"]:
        if parsed.get("error_type") == "parser":
            return _mistake(parsed["error_message"])
        return failure(REFUSED, "not_authorized", "not authorized: this is no query")
    return _several(parsed["statements"]) or _first(map(_refused_in_duckdb, _nodes(parsed["statements"])))


def refused_by_postgres(sql: str) -> Raw | None:
    """Why PostgreSQL may not run a statement; None if it may."""
    from pglast import Error
    from pglast.parser import parse_sql_json

    try:
        statements = json.loads(parse_sql_json(sql)).get("stmts", [])
    except Error as error:
        return _mistake(str(error.args[0]))
    if not statements:
        return failure(ERROR, "empty", "there is no query to run")
    if "SelectStmt" not in statements[0]["stmt"]:
        return failure(REFUSED, "not_authorized", "not authorized: this is no query")
    return _several(statements) or _first(map(_refused_in_postgres, _nodes(statements)))


def _mistake(message: str) -> Raw:
    """What the parser cannot read is never run: another version of it might."""
    return failure(ERROR, "too_complex" if "depth" in message else "syntax", message)


def _several(statements: list[Any]) -> Raw | None:
    if len(statements) < 2:
        return None
    return failure(REFUSED, "several_statements", "only one statement may be run at a time")


def _first(reasons: Iterator[str]) -> Raw | None:
    reason = next(filter(None, reasons), None)
    return None if reason is None else failure(REFUSED, "not_authorized", reason)


def _nodes(tree: Any) -> Iterator[Node]:
    """All objects of a tree, without recursion: a hostile one is deep."""
    left = [tree]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            yield item
            left += item.values()
        elif isinstance(item, list):
            left += item


def _refused_in_duckdb(node: Node) -> str:
    """Why an object of DuckDB's tree may not be there; "" if it may."""
    kind = node.get("class") or node.get("type")
    if "function_name" in node:
        reason = _called("duckdb", node["function_name"], _DUCKDB_FORMS)
        if reason:
            return reason
    if not isinstance(kind, str) or kind.endswith("_TYPE_INFO") or kind in _DIRECTIONS:
        return ""  # no part of a query: the description of a type, the direction of a sort
    if kind.lower() not in _DUCKDB_PARTS:
        return f"this part of SQL is not allowed here: {kind}"
    if kind == "BASE_TABLE":
        return _read(node["qualified_name"]["path"])
    if kind == "SHOW_REF" and not node.get("query") and node.get("table_name") not in _SHOWN:
        return f"not authorized to show {node.get('table_name')}"
    return ""


def _refused_in_postgres(node: Node) -> str:
    """Why an object of PostgreSQL's tree may not be there; "" if it may.

    A node that may be of several kinds is an object with its kind as the only key; one that can be of one kind only
    comes without it, so that its fields tell what it is.
    """
    kind = next(iter(node), "")
    if kind[:1].isupper() and kind not in _POSTGRES_PARTS:
        return f"this part of SQL is not allowed here: {kind}"
    if "intoClause" in node or "lockingClause" in node:
        return "not authorized: only a query that reads"
    if "funcname" in node:
        return _called("postgres", node["funcname"][-1]["String"]["sval"], _POSTGRES_FORMS)
    if "names" in node:
        return _cast(node["names"])
    if "relname" in node:
        return _read([node[part] for part in ("catalogname", "schemaname", "relname") if part in node])
    if str(node.get("op", "")).startswith("SVFOP_") and not node["op"].startswith(_DATES):
        return "not authorized to ask who is connected"
    return ""


def _called(engine: str, function: str, forms: frozenset[str]) -> str:
    """Why a function may not be called; "" if it may. An operator's name has no letters."""
    name = function.lower()
    is_operator = not any(character.isalnum() or character == "_" for character in name)
    if is_operator or name in FUNCTIONS[engine] or name in forms:
        return ""
    return f"not authorized to use function: {name}"


def _cast(names: list[Node]) -> str:
    """Why PostgreSQL may not cast to a type; "" if it may."""
    name = str(names[-1]["String"]["sval"]).lower()
    return f"not authorized to use type: {name}" if name in _LOOKED_UP else ""


def _read(path: list[str]) -> str:
    """Why a relation may not be read; "" if it may."""
    *schemas, name = [part.lower() for part in path]
    if HIDDEN.match(name) or _SYSTEM.intersection(schemas):
        return f"not authorized to use {name}"
    if "information_schema" in schemas and name not in _DESCRIBED:
        return f"not authorized to use information_schema.{name}"
    return ""
