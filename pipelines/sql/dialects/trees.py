"""What a statement is made of, by the engine's own parser: the first fence around engines that have no authorizer.

Both parsers give a tree as JSON, with every name as the engine will look it up: unescaped, unquoted, and in the place
where it is a function or a relation. The kinds of nodes are allow-listed too, so that a part of SQL that is new to us
(a query that writes inside WITH, say) is refused until somebody has read what it does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipelines.sql.dialects.base import ERROR, REFUSED, Raw, failure
from pipelines.sql.dialects.guard import FUNCTIONS, HIDDEN
from pipelines.sql.dialects.hiding import Hidden, Named

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


def refused_by_duckdb(sql: str, serialize: Callable[[str], str], hidden: Hidden | None = None) -> Raw | None:
    """Why DuckDB may not run a statement; None if it may.

    Args:
        serialize: DuckDB's json_serialize_sql. It takes queries only, and says of anything else that it is none.
        hidden: what it may not read.
    """
    parsed = json.loads(serialize(sql))
    if parsed["error"]:
        if parsed.get("error_type") == "parser":
            return _mistake(parsed["error_message"])
        return failure(REFUSED, "not_authorized", "not authorized: this is no query")
    refused = _several(parsed["statements"]) or _first(map(_refused_in_duckdb, _nodes(parsed["statements"])))
    return refused or (None if hidden is None else hidden.refused(_named_in_duckdb(parsed["statements"])))


def named_by_duckdb(sql: str, serialize: Callable[[str], str]) -> Named | None:
    """What a query names; None for what DuckDB's parser does not read as one."""
    parsed = json.loads(serialize(sql))
    return None if parsed["error"] else _named_in_duckdb(parsed["statements"])


def refused_by_postgres(sql: str, hidden: Hidden | None = None) -> Raw | None:
    """Why PostgreSQL may not run a statement; None if it may.

    Args:
        hidden: what it may not read.
    """
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
    refused = _several(statements) or _first(map(_refused_in_postgres, _nodes(statements)))
    return refused or (None if hidden is None else hidden.refused(_named_in_postgres(statements)))


def named_by_postgres(sql: str) -> Named | None:
    """What a query names; None for what PostgreSQL's parser cannot read."""
    from pglast import Error
    from pglast.parser import parse_sql_json

    try:
        return _named_in_postgres(json.loads(parse_sql_json(sql)).get("stmts", []))
    except Error:
        return None


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
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


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


def _named_in_duckdb(tree: Any) -> Named:
    """What a statement names, by DuckDB's tree. A star, `#1`, SHOW and renamed columns read without naming."""
    nodes = list(_nodes(tree))
    tables = [node for node in nodes if node.get("type") in ("BASE_TABLE", "SHOW_REF")]
    columns = [node["column_names"] for node in nodes if node.get("class") == "COLUMN_REF"]
    joined = [name for node in nodes for name in node.get("using_columns", ())]
    paths = [list(node.get("qualified_name", {}).get("path", ())) for node in tables]
    unnamed = any(
        node.get("class") in ("STAR", "POSITIONAL_REFERENCE")
        or node.get("type") in ("SHOW_REF", "PIVOT")
        or node.get("ref_type") == "NATURAL"
        or node.get("column_name_alias")
        for node in nodes
    )
    return Named(
        relations=frozenset(path[-1] for path in paths if path),
        aliases=frozenset(str(node["alias"]) for node in tables if "alias" in node),
        columns=frozenset([*(name for names in columns for name in names), *joined]),
        values=frozenset(names[-1] for names in columns if names),
        unnamed=unnamed,
        catalogue=any(_is_described(path) for path in paths if path)
        or any(node.get("type") == "SHOW_REF" for node in nodes),
        functions=frozenset(str(node["function_name"]) for node in nodes if "function_name" in node),
    )


def _named_in_postgres(tree: Any) -> Named:
    """What a statement names, by PostgreSQL's tree. A star, a natural join and renamed columns read without naming."""
    nodes = list(_nodes(tree))
    tables = [node for node in nodes if "relname" in node]
    columns = [_texts(node["ColumnRef"].get("fields", ())) for node in nodes if "ColumnRef" in node]
    joined = [name for node in nodes for name in _texts(node.get("usingClause", ()))]
    aliases = [node["alias"] for node in nodes if isinstance(node.get("alias"), dict)]
    schemas = [[str(node.get("schemaname", "")), str(node["relname"])] for node in tables]
    return Named(
        relations=frozenset(str(node["relname"]) for node in tables),
        aliases=frozenset(str(alias.get("aliasname", "")) for alias in aliases),
        columns=frozenset([*(name for names in columns for name in names), *joined]),
        values=frozenset(names[-1] for names in columns if names),
        unnamed=any("A_Star" in node or "isNatural" in node for node in nodes)
        or any(alias.get("colnames") for alias in aliases),
        catalogue=any(map(_is_described, schemas)),
        types=frozenset(_texts(node["names"])[-1] for node in nodes if "names" in node),
        functions=frozenset(_texts(node["funcname"])[-1] for node in nodes if "funcname" in node),
    )


def _texts(nodes: Iterable[Any]) -> list[str]:
    return [str(node["String"]["sval"]) for node in nodes if "String" in node]


def _is_described(path: Sequence[str]) -> bool:
    """Whether a relation is one of those that describe the tables."""
    return "information_schema" in [part.lower() for part in path[:-1]] or HIDDEN.match(path[-1]) is not None
