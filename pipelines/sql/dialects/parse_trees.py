"""Parse trees of statements by the engine's own parser: the first fence around engines that have no authorizer.

Both parsers give a tree as JSON, with every name as the engine will look it up: unescaped, unquoted, and in the place
where it is a function or a relation. The kinds of nodes are allow-listed too, so that a part of SQL that is new to us
(a query that writes inside WITH, say) is refused until somebody has read what it does.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipelines.sql.dialects.base import ERROR, REFUSED, Hidden, RawResult, StatementNames, failure, fold
from pipelines.sql.dialects.guard import FUNCTIONS, HIDDEN

Node = Mapping[str, Any]


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DUCKDB_NODES = _word_set(
    """
    select_node set_operation_node recursive_cte_node cte_node
    base_table subquery join table_function expression_list empty pivot show_ref
    distinct_modifier limit_modifier limit_percent_modifier order_modifier
    between case cast collate column_ref comparison conjunction constant default function lambda operator parameter
    positional_reference star type window
    """
)
# Functions that the parser itself writes for an operator or a special form.
_DUCKDB_FORMS = _word_set(
    """
    timezone like_escape not_like_escape ilike_escape not_ilike_escape list_apply list_filter list_transform
    struct_extract array_extract array_slice row map trim overlay position substring date_part count_star unnest
    """
)
_DUCKDB_LEAVES = _word_set(
    "LOGICAL_CTE_REF LOGICAL_DELIM_GET LOGICAL_DUMMY_SCAN LOGICAL_EMPTY_RESULT LOGICAL_EXPRESSION_GET"
)
# Other table functions take a table by its name.
_DUCKDB_TABLE_FUNCTIONS = _word_set("generate_series json_each json_tree range repeat repeat_row unnest")
# The fields whose text names no column that is read; another field may hold one. For `path` see `_duckdb_uses`.
_DUCKDB_NAMELESS = _word_set(
    """
    class type alias aliases key catalog schema path table_name type_name function_name collation identifier kind text
    value id join_type ref_type aggregate_handling start end exclude_clause syntax_type comparison_type subquery_type
    setop_type null_order nearest_order_type materialized with_ordinality method
    """
)
_SHOWABLE = frozenset(('"tables"',))  # the names of the tables; SHOW can show more
_POSTGRES_NODES = _word_set(
    """
    SelectStmt ResTarget ColumnRef A_Star A_Const A_Expr A_ArrayExpr A_Indices A_Indirection BoolExpr BooleanTest
    CaseExpr CaseWhen CoalesceExpr CollateClause CommonTableExpr CTESearchClause CTECycleClause ColumnDef FuncCall
    GroupingFunc GroupingSet JoinExpr List MinMaxExpr MultiAssignRef NamedArgExpr NullTest ParamRef RangeFunction
    RangeSubselect RangeTableSample RangeVar RowExpr SQLValueFunction SortBy String Integer Float Boolean BitString
    SubLink TypeCast TypeName WindowDef WithClause Alias JsonIsPredicate XmlSerialize
    """
)
# The special forms of SQL that the parser turns into calls.
_POSTGRES_FORMS = _word_set(
    """
    extract timezone position substring btrim ltrim rtrim overlay normalize is_normalized xmlexists overlaps
    like_escape similar_to_escape similar_escape system bernoulli
    """
)
# The fields that hold a list of names, none of them a column's.
_POSTGRES_NAMELESS = _word_set("funcname names name colnames aliascolnames collname")
_TRIMS = ("btrim", "ltrim", "rtrim")
_MAX_TRIMMED = 100  # characters that they may be asked to trim
_DATES = ("SVFOP_CURRENT_DATE", "SVFOP_CURRENT_TIME", "SVFOP_LOCALTIME")  # the other words tell who is connected
# Views of information_schema that describe the tables; the rest describes the server, its roles and their rights.
_DESCRIPTIONS = _word_set(
    """
    check_constraints columns constraint_column_usage key_column_usage referential_constraints schemata
    table_constraints tables views
    """
)
# Types whose values are looked up in the catalog: a cast from a number names any role, table or function of the server.
_LOOKED_UP = _word_set(
    "regclass regcollation regdictionary regnamespace regoper regoperator regproc regprocedure regrole"
)
_DIRECTIONS = frozenset(("ASCENDING", "DESCENDING", "ORDER_DEFAULT"))
_SYSTEM = frozenset(("pg_catalog", "pg_toast", "system", "temp", "pg_temp"))


def duckdb_refusal(
    sql: str,
    serialize: Callable[[str], str],
    hidden: Hidden | None = None,
    names_in: Callable[[Any], StatementNames] | None = None,
) -> RawResult | None:
    """The refusal of a statement by DuckDB's own json_serialize_sql, which takes queries only; None if it may run.
    `names_in` gives the names in its tree, see `duckdb_names`.
    """
    parsed = json.loads(serialize(sql))
    if parsed["error"]:
        if parsed.get("error_type") == "parser":
            return _syntax_error(parsed["error_message"])
        return failure(REFUSED, "not_authorized", "not authorized: this is no query")
    return _tree_refusal(parsed["statements"], _duckdb_node_refusal, hidden, names_in or _duckdb_tree_names)


def duckdb_body(sql: str, serialize: Callable[[str], str]) -> Any:
    """The tree of a view's query; None if a statement with a part of it would be refused, or is not read."""
    parsed = json.loads(serialize(sql))
    if parsed["error"] or len(parsed["statements"]) != 1:
        return None
    if any(_duckdb_node_refusal(node) for node in _nodes(parsed["statements"])):
        return None
    return parsed["statements"]


def duckdb_names(tree: Any, plan: str, views: Container[str]) -> StatementNames:
    """The names in a tree and, by DuckDB's own plan of it, before its optimizer changes that, the columns which it
    reads: views, macros and computed columns are resolved there. The names alone say it where there is no such plan.
    """
    names = _duckdb_tree_names(tree)
    parsed = json.loads(plan)
    if parsed["error"]:
        return names
    reads = duckdb_reads(parsed["plans"])
    if reads is None or _is_type_of_query(tree):
        return names
    enums = {",".join(labels) for labels in _duckdb_enums(parsed["plans"])}
    relations = {name for name in _duckdb_tables(tree) if fold(name) in views}
    return names._replace(relations=frozenset(relations), types=names.types | enums, reads=reads)


def _duckdb_tables(tree: Any) -> Iterator[str]:
    """The names of tables and views in a tree, without those that are of common table expressions where they stand."""
    waiting: list[tuple[Any, frozenset[str]]] = [(tree, frozenset())]
    while waiting:
        item, common = waiting.pop()
        if isinstance(item, list):
            waiting += [(value, common) for value in item]
        if not isinstance(item, dict):
            continue
        if item.get("type") == "BASE_TABLE":
            path = item["qualified_name"]["path"]
            if len(path) > 1 or path[0] not in common:
                yield str(path[-1])
        for entry in item.get("cte_map", {}).get("map", ()):
            name = str(entry["key"])
            query = entry["value"]
            with_this = common | {name}
            node = query.get("query_node", {})
            if node.get("type") == "RECURSIVE_CTE_NODE":
                waiting.append((query, with_this))
            else:
                waiting.append((query, common))
            common = with_this
        for key, value in item.items():
            if key != "cte_map":
                waiting.append((value, common))


def duckdb_reads(plans: Any) -> frozenset[tuple[str, str]] | None:
    """(table, column) of what DuckDB's plan reads; None if a part of it is not known."""
    reads: set[tuple[str, str]] = set()
    for node in _nodes(plans):
        kind = str(node.get("type"))
        if kind == "LOGICAL_GET":
            path = node["qname"]["path"]
            if path == ["seq_scan"]:
                reads.update(_scan_reads(node))
            elif path[-1] not in _DUCKDB_TABLE_FUNCTIONS:
                return None
        elif kind.startswith("LOGICAL_") and not node.get("children") and kind not in _DUCKDB_LEAVES:
            return None
    return frozenset(reads)


def _scan_reads(scan: Node) -> Iterator[tuple[str, str]]:
    """(table, column) of each column that a scan reads, and (table, "")."""
    table = scan["function_data"]["table"]
    names = scan["names"]
    yield table, ""
    for entry in scan.get("column_indexes", ()):
        index = entry["index"]
        if index < len(names):  # beyond them: a row's number
            yield table, names[index]


def _is_type_of_query(tree: Any) -> bool:
    """Whether DuckDB's statement asks for the type of a query's value: its plan has the answer, and not the query."""
    calls = []
    for node in _nodes(tree):
        function = str(node.get("function_name")).lower()
        if function in ("typeof", "pg_typeof"):
            calls.append(node)
    return any(node.get("class") == "SUBQUERY" for node in _nodes(calls))


def _duckdb_enums(plans: Any) -> Iterator[Sequence[str]]:
    """The values of the ENUM types of all that a plan computes."""
    for node in _nodes(plans, without="returned_types"):  # it has types of columns that are not read, too
        if node.get("type") == "ENUM_TYPE_INFO":
            yield node.get("values", ())


def postgres_refusal(
    sql: str, hidden: Hidden | None, calls: Mapping[str, bool], schemas: Sequence[str], visible: Mapping[str, str]
) -> RawResult | None:
    """The refusal of a statement for PostgreSQL; None if it may run. `calls` has the server's functions that
    (value).name calls, each with whether table.name calls it too, with a row; `schemas` those whose tables may be read;
    `visible` the qualified names of relations by the bare ones that stand for them.
    """
    from pglast import Error
    from pglast.parser import parse_sql_json

    try:
        statements = json.loads(parse_sql_json(sql)).get("stmts", [])
    except Error as error:
        return _syntax_error(str(error.args[0]))
    if not statements:
        return failure(ERROR, "empty", "there is no query to run")
    if "SelectStmt" not in statements[0]["stmt"]:
        return failure(REFUSED, "not_authorized", "not authorized: this is no query")
    node_refusal = functools.partial(_postgres_node_refusal, calls, (None, "information_schema", *schemas))
    names_in = functools.partial(_postgres_tree_names, visible=visible)
    return _tree_refusal(statements, node_refusal, hidden, names_in)


def postgres_names(sql: str, visible: Mapping[str, str], pure: Container[str]) -> StatementNames | None:
    """The names in the query of a view; None if a part of it is not known, as a statement's would be refused. It may
    call what a statement may, and functions that are `pure`.
    """
    from pglast import Error
    from pglast.parser import parse_sql_json

    try:
        tree = json.loads(parse_sql_json(sql)).get("stmts", [])
    except Error:
        return None
    for node in _nodes(tree):
        kind = next(iter(node), "")
        if kind[:1].isupper() and kind not in _POSTGRES_NODES:
            return None
        if "funcname" not in node:
            continue
        function = _called_function(node)
        if function not in pure and _function_refusal("postgres", function, _POSTGRES_FORMS):
            return None
    return _postgres_tree_names(tree, visible)


def _called_function(call: Node) -> str:
    """The name of the function that a call of PostgreSQL's tree names, without its schema."""
    name: str = call["funcname"][-1]["String"]["sval"]
    return name


def _syntax_error(message: str) -> RawResult:
    """What the parser cannot read is never run: another version of it might."""
    if "depth" in message:
        return failure(ERROR, "too_complex", message)
    return failure(ERROR, "syntax", message)


def _tree_refusal(
    statements: list[Any],
    node_refusal: Callable[[Node], str],
    hidden: Hidden | None,
    names_in: Callable[[Any], StatementNames],
) -> RawResult | None:
    if len(statements) > 1:
        return failure(REFUSED, "several_statements", "only one statement may be run at a time")
    for node in _nodes(statements):
        reason = node_refusal(node)
        if reason:
            return failure(REFUSED, "not_authorized", reason)
    if hidden is None:
        return None
    return hidden.refusal(names_in(statements))


def _nodes(tree: Any, without: str = "") -> Iterator[Node]:
    """All objects of a tree, but for what a field `without` holds; without recursion: a hostile one is deep."""
    waiting = [tree]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting += [value for field, value in item.items() if field != without]
        elif isinstance(item, list):
            waiting += item


def _duckdb_node_refusal(node: Node) -> str:
    """The reason to refuse an object of DuckDB's tree; "" if there is none."""
    if "function_name" in node:
        reason = _function_refusal("duckdb", node["function_name"], _DUCKDB_FORMS)
        if reason:
            return reason
    kind = node.get("class") or node.get("type")
    if not isinstance(kind, str) or kind.endswith("_TYPE_INFO") or kind in _DIRECTIONS:
        return ""  # no part of a query: the description of a type, the direction of a sort
    if kind.lower() not in _DUCKDB_NODES:
        return f"this part of SQL is not allowed here: {kind}"
    if kind == "BASE_TABLE":
        return _relation_refusal(node["qualified_name"]["path"])
    if kind == "TABLE_FUNCTION":
        function = node["function"]["function_name"]
        if function.lower() not in _DUCKDB_TABLE_FUNCTIONS:
            return f"not authorized to use table function: {function}"
    if kind == "SHOW_REF":
        return _show_refusal(node)
    return ""


def _show_refusal(node: Node) -> str:
    """The reason to refuse a SHOW or DESCRIBE; "" if there is none."""
    shown_name = node.get("table_name")
    if node.get("query") or shown_name in _SHOWABLE:
        return ""
    if node.get("show_type") != "SHOW_FROM":
        return f"not authorized to show {shown_name}"
    schema = str(node.get("schema_name"))
    return _relation_refusal([schema, "tables"])


def _postgres_node_refusal(calls: Mapping[str, bool], schemas: Sequence[str | None], node: Node) -> str:
    """The reason to refuse an object of PostgreSQL's tree; "" if there is none.

    A node that may be of several kinds is an object with its kind as the only key; one that can be of one kind only
    comes without it, so that its fields tell what it is.
    """
    kind = next(iter(node), "")
    if kind[:1].isupper() and kind not in _POSTGRES_NODES:
        return f"this part of SQL is not allowed here: {kind}"
    if "intoClause" in node or "lockingClause" in node:
        return "not authorized: only a query that reads"
    if "funcname" in node:
        name = _called_function(node)
        return _trim_refusal(name, node) or _function_refusal("postgres", name, _POSTGRES_FORMS)
    dotted_calls = _dotted_calls(calls, node)
    if dotted_calls:
        return max(_function_refusal("postgres", name, _POSTGRES_FORMS) for name in dotted_calls)
    if "names" in node:
        type_name = _string_values(node["names"])[-1].lower()
        if type_name in _LOOKED_UP:
            return f"not authorized to use type: {type_name}"
    if "relname" in node:
        return _postgres_relation_refusal(schemas, node)
    operation = str(node.get("op", ""))
    if operation.startswith("SVFOP_") and not operation.startswith(_DATES):
        return "not authorized to ask who is connected"
    return ""


def _dotted_calls(calls: Mapping[str, bool], node: Node) -> list[str]:
    """The functions that a reference `table.name` or `(value).name` may call."""
    qualified = _string_values(node.get("fields", ()))[1:]
    of_rows = [name for name in qualified if calls.get(name)]
    if of_rows:
        return of_rows
    steps = _string_values(node.get("indirection", ()))
    return [name for name in steps if name in calls]


def _postgres_relation_refusal(schemas: Sequence[str | None], node: Node) -> str:
    """The reason to refuse reading a relation of PostgreSQL's tree; "" if there is none."""
    path = [node[key] for key in ("catalogname", "schemaname", "relname") if key in node]
    refusal = _relation_refusal(path)
    if refusal:
        return refusal
    if node.get("schemaname") not in schemas:
        return f"not authorized to use schema {node['schemaname']}"
    return ""


def _trim_refusal(name: str, call: Node) -> str:
    """The reason to refuse a call that trims: each character of the text is looked up among all that it names, and
    nothing interrupts the server at it.
    """
    if name not in _TRIMS:
        return ""
    for characters in call.get("args", ())[1:2]:
        constant = characters.get("A_Const", {}).get("sval")
        if constant is None or len(constant.get("sval", "")) >= _MAX_TRIMMED:
            return f"{name} takes a constant of fewer than {_MAX_TRIMMED} characters to trim"
    return ""


def _function_refusal(engine: str, function: str, forms: frozenset[str]) -> str:
    """The reason to refuse a call; "" if there is none. An operator's name has no letters."""
    name = function.lower()
    is_operator = not any(character.isalnum() or character == "_" for character in name)
    if is_operator or name in FUNCTIONS[engine] or name in forms:
        return ""
    return f"not authorized to use function: {name}"


def _relation_refusal(path: list[str]) -> str:
    """The reason to refuse reading a relation; "" if there is none."""
    *schemas, name = [step.lower() for step in path]
    if HIDDEN.match(name) or _SYSTEM.intersection(schemas):
        return f"not authorized to use {name}"
    if "information_schema" in schemas and name not in _DESCRIPTIONS:
        return f"not authorized to use information_schema.{name}"
    return ""


def _duckdb_tree_names(tree: Any) -> StatementNames:
    """The names in a statement, by DuckDB's tree. A star, `#1`, SHOW and renamed columns read without naming."""
    nodes = list(_nodes(tree))
    paths: list[Sequence[str]] = []
    rows: set[tuple[str, str]] = set()
    joins: list[str] = []  # aliases of joins, each of which may stand for a row of any table
    types: set[str] = set()
    functions: set[str] = set()
    is_catalogue = False
    for node in nodes:
        kind = node.get("type")
        if kind == "BASE_TABLE":
            path = node["qualified_name"]["path"]
            table = path[-1]
            paths.append(path)
            rows.add((table, table))
            rows.add((node.get("alias", table), table))
            is_catalogue |= _is_described(path)
        if kind == "JOIN" and node.get("alias"):
            joins.append(node["alias"])
        if kind == "SHOW_REF":
            is_catalogue = True
        if node.get("class") == "TYPE":
            types.add(str(node["type_name"]))
        if node.get("pivot_enum"):  # a column for each of its values
            types.add(str(node["pivot_enum"]))
        if "function_name" in node:
            functions.add(str(node["function_name"]))
    relations = frozenset(path[-1] for path in paths)
    for alias in joins:
        rows.update((alias, relation) for relation in relations)
    return StatementNames(
        relations=relations,
        rows=frozenset(rows),
        uses=frozenset(_duckdb_uses(nodes)),
        unnamed=any(map(_reads_without_naming, nodes)),
        catalogue=is_catalogue,
        types=frozenset(types),
        functions=frozenset(functions),
    )


def _duckdb_uses(nodes: Iterable[Node]) -> Iterator[tuple[str, ...]]:
    """The names in objects of DuckDB's tree that may be a column's or a row's."""
    for node in nodes:
        if node.get("column_names"):
            yield tuple(node["column_names"])
        if "function_name" in node:  # x.upper()
            path = tuple(node["qualified_name"]["path"][:-1])
            if path:
                yield path
        for key, value in node.items():
            if key in _DUCKDB_NAMELESS:
                continue
            texts = value if isinstance(value, list) and key != "column_names" else [value]
            for text in texts:
                if isinstance(text, str):
                    yield (text,)


def _reads_without_naming(node: Node) -> bool:
    """Whether an object of DuckDB's tree reads columns that it does not name."""
    return bool(
        node.get("class") in ("STAR", "POSITIONAL_REFERENCE")
        or node.get("type") == "PIVOT"
        or node.get("ref_type") == "NATURAL"
        or node.get("column_name_alias")
    )


def _postgres_tree_names(tree: Any, visible: Mapping[str, str]) -> StatementNames:
    """The names in a statement, by PostgreSQL's tree, relations and types with their schemas; each of its queries is a
    part with names of its own.
    """
    is_catalogue = False
    types: set[str] = set()
    functions: set[str] = set()
    for node in _nodes(tree):
        if "relname" in node:
            schema = str(node.get("schemaname", ""))
            is_catalogue |= _is_described((schema, str(node["relname"])))
        if "names" in node:
            path = _string_values(node["names"])
            types.add(_qualified(visible, *path))
        operator = node.get("name")
        if isinstance(operator, list):
            functions.update(_string_values(operator)[-1:])
        if "funcname" in node:
            functions.update(_string_values(node["funcname"])[-1:])
    return StatementNames(
        relations=frozenset(),
        rows=frozenset(),
        uses=frozenset(),
        unnamed=False,
        catalogue=is_catalogue,
        types=frozenset(types),
        functions=frozenset(functions),
        parts=tuple(_postgres_queries(tree, visible)),
    )


def _qualified(visible: Mapping[str, str], *path: str) -> str:
    """The name of a relation or type with its schema, which `visible` knows for a bare one."""
    if len(path) > 1:
        return ".".join(path[-2:])
    return visible.get(path[0], path[0])


def _postgres_queries(tree: Any, visible: Mapping[str, str]) -> Iterator[StatementNames]:
    """The names in each query of a statement. A hostile tree is deep: queries and nodes wait in lists."""
    waiting: list[_Query] = []
    top = _Query({}, frozenset(), frozenset(), visible)
    top.collect_names(tree)
    waiting += top.inner
    yield top.names()
    while waiting:
        query = waiting.pop()
        query.collect()
        waiting += query.inner
        yield query.names()


class _Query:
    """A SELECT of PostgreSQL's tree: where its rows come from, and the names that it uses outside its subqueries."""

    def __init__(
        self, select: Node, common: frozenset[str], outer: frozenset[tuple[str, str]], visible: Mapping[str, str]
    ) -> None:
        self._select = select
        self._visible = visible
        self._common = common  # the names of the common table expressions that it may read
        self._outer = outer  # rows of the queries around it, as in StatementNames
        self._rows: set[tuple[str, str]] = set()
        self._uses: set[tuple[str, ...]] = set()
        self._stars: set[str] = set()  # names of rows that are read whole; "" for all
        self._starred: set[str] = set()
        self._subqueries: list[tuple[Node, frozenset[str]]] = []

    def collect(self) -> None:
        """Note the names and subqueries of the SELECT."""
        self._collect_common_tables()
        for side in ("larg", "rarg"):
            if side in self._select:
                self._subqueries.append((self._select[side], self._common))
        for source in self._select.get("fromClause", ()):
            self._collect_source(source)
        rest = _without(self._select, "withClause", "larg", "rarg", "fromClause")
        self.collect_names(rest)

    def _collect_common_tables(self) -> None:
        clause = self._select.get("withClause", {})
        expressions = [item["CommonTableExpr"] for item in clause.get("ctes", ())]
        every_name = self._common.union(item["ctename"] for item in expressions)
        for item in expressions:
            visible = self._common
            if clause.get("recursive"):
                visible = every_name
            query = item["ctequery"]["SelectStmt"]
            self._subqueries.append((query, visible))
            self._common |= {item["ctename"]}
            rest = _without(item, "ctequery", "ctename", "aliascolnames")
            self.collect_names(rest)

    def _collect_source(self, source: Node) -> None:
        """Note an item of FROM; a join's alias is a name for the rows of each of its sides."""
        waiting: list[tuple[Node, tuple[str, ...]]] = [(source, ())]
        while waiting:
            wrapped, names = waiting.pop()
            kind, node = next(iter(wrapped.items()))
            alias = node.get("alias", {})
            if alias:
                names = (*names, str(alias["aliasname"]))
            if kind == "JoinExpr":
                using_alias = node.get("join_using_alias", {}).get("aliasname")
                if using_alias:
                    names = (*names, str(using_alias))
                self._collect_join(node, alias)
                waiting.append((node["larg"], names))
                waiting.append((node["rarg"], names))
            elif kind == "RangeTableSample":
                waiting.append((node["relation"], names))
                self.collect_names(_without(node, "relation"))
            elif kind == "RangeVar":
                self._collect_relation(node, alias, names)
            else:
                self._rows.update((name, "") for name in names)
                self.collect_names(wrapped)

    def _collect_join(self, join: Node, alias: Node) -> None:
        """Note the columns that a join compares."""
        for text in _string_values(join.get("usingClause", ())):
            self._uses.add((text,))
        if join.get("isNatural") or alias.get("colnames"):
            self._stars.add("")
        self.collect_names(join.get("quals", {}))

    def _collect_relation(self, node: Node, alias: Node, names: tuple[str, ...]) -> None:
        """Note a table, a view or a common table expression under the names of its rows."""
        path = [node[key] for key in ("schemaname", "relname") if key in node]
        relation = _qualified(self._visible, *path)
        if len(path) == 1 and path[0] in self._common:
            relation = ""
        if not alias:
            names = (*names, path[-1])
        for name in names:
            self._rows.add((name, relation))
        if alias.get("colnames") and relation:
            self._starred.add(relation)

    def collect_names(self, tree: Any) -> None:
        """Note the names in a tree, and its subqueries."""
        waiting = [tree]
        while waiting:
            item = waiting.pop()
            if isinstance(item, list):
                waiting += item
            if not isinstance(item, dict):
                continue
            for key, value in item.items():
                if key == "SelectStmt":
                    self._subqueries.append((value, self._common))
                    continue
                waiting.append(value)
                if isinstance(value, list) and key not in _POSTGRES_NAMELESS:
                    self._collect_texts(key, value)

    def _collect_texts(self, key: str, values: list[Any]) -> None:
        """Note the texts of a field: a reference, the steps behind a value, or other names."""
        texts = _string_values(values)
        has_star = any("A_Star" in value for value in values)
        if key == "fields" and has_star:
            qualifier = texts[-1] if texts else ""
            self._stars.add(qualifier)
        elif key == "fields":
            self._uses.add(tuple(texts))
        elif key == "indirection" and has_star:
            self._stars.add("")
        elif key == "indirection":
            self._uses.update(("", text) for text in texts)
        else:
            self._uses.update((text,) for text in texts)

    def _visible_rows(self) -> frozenset[tuple[str, str]]:
        """Its rows and those of the queries around it, whose names its own ones hide."""
        names = {name for name, _ in self._rows}
        visible = set(self._rows)
        for name, relation in self._outer:
            if name not in names:
                visible.add((name, relation))
        return frozenset(visible)

    @property
    def inner(self) -> list[_Query]:
        rows = self._visible_rows()
        return [_Query(select, common, rows, self._visible) for select, common in self._subqueries]

    def names(self) -> StatementNames:
        relations = frozenset(relation for _, relation in self._rows if relation)
        outer_relations = frozenset(relation for _, relation in self._outer if relation)
        rows = self._visible_rows()
        for star in self._stars:
            starred = {relation for name, relation in rows if name == star}
            self._starred |= starred or relations
        return StatementNames(
            relations=relations,
            rows=rows,
            uses=frozenset(filter(None, self._uses)),
            unnamed=False,
            catalogue=False,
            starred=frozenset(self._starred),
            outer=outer_relations,
        )


def _without(node: Node, *keys: str) -> Node:
    return {key: value for key, value in node.items() if key not in keys}


def _string_values(nodes: Iterable[Any]) -> list[str]:
    return [str(node["String"]["sval"]) for node in nodes if "String" in node]


def _is_described(path: Sequence[str]) -> bool:
    """Whether a relation describes the tables of the database."""
    *schemas, name = path
    is_information = any(schema.lower() == "information_schema" for schema in schemas)
    return is_information or HIDDEN.match(name) is not None
