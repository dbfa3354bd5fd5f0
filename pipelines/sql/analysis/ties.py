"""Queries that show whether the LIMIT of another query cuts through a tie of its ORDER BY."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sqlglot import exp

from pipelines.sql.analysis.parsing import parse
from pipelines.types import EngineName

Probe = tuple[str, int, int]  # its SQL; rows that the query reads before its cut; sort keys behind the columns


def tie_probes(sql: str, engine: EngineName) -> list[Probe]:
    """A probe for each SELECT that has a LIMIT under an ORDER BY."""
    tree = parse(sql, engine)
    return [probe for select in (tree.find_all(exp.Select) if tree else ()) if (probe := _tie_probe(select, engine))]


def _tie_probe(select: exp.Select, engine: EngineName) -> Probe | None:
    """A SELECT with its sort keys behind its columns, and one row more; None without a LIMIT under an ORDER BY."""
    limit = _number(select.args.get("limit"))
    if not limit or not select.args.get("order") or select.args.get("distinct"):
        return None
    n_kept = limit + (_number(select.args.get("offset")) or 0)
    items = select.expressions
    aliases = {item.alias.lower(): item.unalias() for item in items if isinstance(item, exp.Alias)}
    keys = [_key(ordered.this, items, aliases) for ordered in select.args["order"].expressions]
    probe = select.copy()
    probe.set("expressions", [*probe.expressions, *(exp.alias_(key.copy(), f"tie_{n}") for n, key in enumerate(keys))])
    probe.set("limit", exp.Limit(expression=exp.Literal.number(n_kept + 1)))
    probe.set("offset", None)
    return probe.sql(dialect=engine), n_kept, len(keys)


def _key(key: exp.Expr, items: Sequence[exp.Expr], aliases: Mapping[str, exp.Expr]) -> exp.Expr:
    """A sort key as an expression: positions and aliases stand for an item of the SELECT list."""
    if isinstance(key, exp.Literal) and not key.is_string and 0 < int(key.this) <= len(items):
        return items[int(key.this) - 1].unalias()
    if isinstance(key, exp.Column) and not key.table and key.name.lower() in aliases:
        return aliases[key.name.lower()]
    return key


def _number(clause: exp.Expr | None) -> int | None:
    value = clause.args.get("expression") if clause is not None else None
    return int(value.this) if isinstance(value, exp.Literal) and str(value.this).isdigit() else None
