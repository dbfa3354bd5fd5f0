"""The facts of a dbt project in a database's card: descriptions, tests and metrics of `target/manifest.json`."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError
from pipelines.core.text_files import read_json_text
from pipelines.databases.card import DatabaseCard, Reference, TableCard
from pipelines.sql.dialects.dialect import find_name

TABLES = ("model", "seed", "snapshot", "source")  # kinds of nodes that are tables or views
READ_TESTS = ("accepted_values", "unique", "not_null", "relationships")
_CALL = re.compile(r"(ref|source)\((.*?)\)", re.DOTALL)
_NAME = re.compile(r"""(?<![=\w])\s*['"]([^'"]+)['"]""")  # an argument that has no keyword


def with_dbt(card: DatabaseCard, folder: Path) -> tuple[DatabaseCard, Counter[str]]:
    """The card with a dbt project's facts (of its `target` folder, or its manifest), and how many of each were taken
    and were not; what a person wrote in the card stays.

    A test says what a column holds: `accepted_values` the values, `unique` and `not_null` that they are, and
    `relationships` is a foreign key. A metric is found by its name in a question, as the card's own metrics are.
    """
    path, hint = folder / "manifest.json" if folder.is_dir() else folder, "Run dbt parse, and pass its target/ folder."
    try:
        manifest = read_json_text(path)
    except DataError as error:
        raise DataError(f"{path} is not a dbt manifest: {error.message}", hint) from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("nodes"), dict):
        raise DataError(f"{path} is not a dbt manifest: it has no nodes", hint)
    misshapen = _misshapen(manifest)
    if misshapen is not None:
        raise DataError(f"{path} is not a dbt manifest: {misshapen} has another shape than dbt writes", hint)
    taken: Counter[str] = Counter()
    nodes: dict[str, Any] = {**manifest["nodes"], **(manifest.get("sources") or {})}
    tables: dict[str, TableCard] = dict(card.tables)
    table_of: dict[str, str] = {}  # tables by the ids of nodes
    for id, node in nodes.items():
        if node.get("resource_type") in TABLES:
            stored = str(node.get("alias") or node.get("identifier") or node.get("name"))
            candidates = (f"{node.get('schema')}.{stored}", stored)
            matches = (find_name(candidate, card.tables, card.engine) for candidate in candidates)
            name = next(filter(None, matches), None)
            if name is None:
                taken["models without a table here"] += 1
                continue
            table_of[id] = name
            columns = dict(tables[name].columns)
            for described, about in (node.get("columns") or {}).items():
                text = str((about or {}).get("description") or "").strip()
                column = find_name(_bare(described), columns, card.engine)
                if text and column is None:
                    taken["descriptions of columns that are not here"] += 1
                elif text and column is not None and not columns[column].description:
                    columns[column] = columns[column].model_copy(update={"description": text})
                    taken["descriptions"] += 1
            update: dict[str, Any] = {"columns": columns}
            if (text := str(node.get("description") or "").strip()) and not tables[name].description:
                update["description"] = text
                taken["descriptions"] += 1
            tables[name] = tables[name].model_copy(update=update)
    for node in nodes.values():
        test = node.get("test_metadata") or {}
        if node.get("resource_type") != "test" and not test:
            continue
        if test.get("name") not in READ_TESTS:
            taken["tests of other kinds"] += 1
            continue
        owner, arguments = table_of.get(str(node.get("attached_node"))), _arguments(test)
        asked = _bare(str(node.get("column_name") or arguments.get("column_name") or ""))
        tested = find_name(asked, tables[owner].columns, card.engine) if owner else None
        if owner is None or tested is None:
            taken["tests of what is not here"] += 1
            continue
        facts = tables[owner].columns[tested]
        rule = test["name"]
        if rule == "relationships":
            to_table = table_of.get(_referred(str(arguments.get("to")), nodes) or "")
            field = _bare(str(arguments.get("field")))
            to_column = find_name(field, tables[to_table].columns, card.engine) if to_table else None
            if to_table is None or to_column is None:
                taken["relationships to what is not here"] += 1
                continue
            reference = Reference(column=tested, to_table=to_table, to_column=to_column)
            if reference not in tables[owner].references:
                references = (*tables[owner].references, reference)
                tables[owner] = tables[owner].model_copy(update={"references": references})
                taken["references"] += 1
            continue
        values = ", ".join(map(str, arguments.get("values") or ()))
        notes = {"accepted_values": f"one of: {values}", "unique": "no value twice", "not_null": "never null"}
        note = notes[rule]
        if note not in facts.description:
            text = "; ".join(filter(None, (facts.description, note)))
            columns = {**tables[owner].columns, tested: facts.model_copy(update={"description": text})}
            tables[owner] = tables[owner].model_copy(update={"columns": columns})
            taken["tests"] += 1
    metrics = dict(card.metrics)
    for metric in (manifest.get("metrics") or {}).values():
        name = str(metric.get("label") or metric["name"]).replace("_", " ").lower()
        text = " ".join(str(metric.get("description") or "").split())
        if not text:
            taken["metrics without a description"] += 1
        elif name not in metrics:
            metrics[name] = text
            taken["metrics"] += 1
    return card.model_copy(update={"tables": tables, "metrics": metrics}), taken


def _misshapen(manifest: Mapping[str, Any]) -> str | None:
    """The first part of a manifest that is not shaped as dbt's; None if all that is read here is."""
    for kind in ("nodes", "sources", "metrics"):
        entries = manifest.get(kind) or {}
        if not isinstance(entries, dict):
            return kind
        for id, entry in entries.items():
            if not isinstance(entry, dict):
                return f"{kind}: {id}"
            columns = entry.get("columns") or {}
            is_right = isinstance(columns, dict) and all(isinstance(one or {}, dict) for one in columns.values())
            test = entry.get("test_metadata") or {}
            is_right = is_right and isinstance(test, dict) and isinstance(test.get("name", ""), str)
            if not (is_right and _has_arguments(test)) or (kind == "metrics" and not entry.get("name")):
                return f"{kind}: {id}"
    return None


def _has_arguments(test: Mapping[str, Any]) -> bool:
    """Whether the arguments of a test are an object, and its values a list."""
    written = test.get("kwargs") or {}
    if not isinstance(written, dict) or not isinstance(written.get("arguments") or {}, dict):
        return False
    return isinstance(_arguments(test).get("values") or [], list)


def _bare(name: str) -> str:
    """A name without the quotes that a project may write around it."""
    return name.strip('"`[]')


def _arguments(test: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a test; newer projects write them under `arguments`."""
    written = test.get("kwargs") or {}
    return {**written, **(written.get("arguments") or {})}


def _referred(to: str, nodes: Mapping[str, Any]) -> str | None:
    """The id of the node that `ref('model')`, `ref('package', 'model')` or `source('schema', 'table')` means."""
    call = _CALL.search(to)
    names = _NAME.findall(call[2]) if call is not None else []
    if call is None or not names:
        return None
    for id, node in nodes.items():
        kind = node.get("resource_type")
        if kind not in TABLES or node.get("name") != names[-1] or (kind == "source") != (call[1] == "source"):
            continue
        home = node.get("source_name") if kind == "source" else node.get("package_name")
        if len(names) == 1 or home in (None, names[0]):
            return id
    return None
