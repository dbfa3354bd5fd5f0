"""The functions that a query calls."""

from __future__ import annotations

from sqlglot import exp

from pipelines.sql.analysis.parsing import parse
from pipelines.types import EngineName


def functions(sql: str, engine: EngineName = "sqlite") -> list[str]:
    """The names of the functions that a query calls, in lower case, sorted, each once; [] if it does not parse."""
    tree = parse(sql, engine)
    if tree is None:
        return []
    called = (node for node in tree.find_all(exp.Func) if not isinstance(node, exp.Connector))
    return sorted({(node.name if isinstance(node, exp.Anonymous) else node.sql_name()).lower() for node in called})
