"""The facts of a dbt project in a database's card: descriptions, tests and metrics of `target/manifest.json`."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError
from pipelines.databases.card import DatabaseCard, Reference, TableCard

TABLES = ("model", "seed", "snapshot", "source")  # kinds of nodes that are tables or views
_REF = re.compile(r"""ref\(\s*(?:['"][^'"]*['"]\s*,\s*)?['"]([^'"]+)['"]""")


def with_dbt(card: DatabaseCard, folder: Path) -> tuple[DatabaseCard, Counter[str]]:
    """The card with a dbt project's facts (of its `target` folder, or its manifest), and how many of each were taken;
    what a person wrote in the card stays.

    A test says what a column holds: `accepted_values` the values, `unique` and `not_null` that they are, and
    `relationships` is a foreign key. A metric is found by its name in a question, as the card's own metrics are.
    """
    path, hint = folder / "manifest.json" if folder.is_dir() else folder, "Run dbt parse, and pass its target/ folder."
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a dbt manifest: {error}", hint) from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("nodes"), dict):
        raise DataError(f"{path} is not a dbt manifest: it has no nodes", hint)
    taken: Counter[str] = Counter()
    nodes: dict[str, Any] = {**manifest["nodes"], **(manifest.get("sources") or {})}
    names = {name.lower(): name for name in card.tables}
    tables: dict[str, TableCard] = dict(card.tables)
    table_of: dict[str, str] = {}  # tables by the ids of nodes, and by the names of models
    for id, node in nodes.items():
        if node.get("resource_type") in TABLES:
            stored = str(node.get("alias") or node.get("identifier") or node.get("name"))
            if (qualified := f"{node.get('schema')}.{stored}").lower() in names:
                stored = qualified
            if stored.lower() not in names:
                taken["models without a table here"] += 1
                continue
            name = table_of[id] = table_of[str(node.get("name"))] = names[stored.lower()]
            described = {column.lower(): facts for column, facts in (node.get("columns") or {}).items()}
            columns = dict(tables[name].columns)
            for column, facts in columns.items():
                text = str((described.get(column.lower()) or {}).get("description") or "").strip()
                if text and not facts.description:
                    columns[column] = facts.model_copy(update={"description": text})
                    taken["descriptions"] += 1
            update: dict[str, Any] = {"columns": columns}
            if (text := str(node.get("description") or "").strip()) and not tables[name].description:
                update["description"] = text
                taken["descriptions"] += 1
            tables[name] = tables[name].model_copy(update=update)
    for node in nodes.values():
        test = node.get("test_metadata") or {}
        owner, arguments = table_of.get(str(node.get("attached_node"))), test.get("kwargs") or {}
        asked = str(node.get("column_name") or arguments.get("column_name") or "").strip('"`').lower()
        tested = next((name for name in tables[owner].columns if name.lower() == asked), None) if owner else None
        if owner is None or tested is None:
            continue
        facts = tables[owner].columns[tested]
        if test["name"] == "relationships":
            target = _REF.search(str(arguments.get("to")))
            to_table = table_of.get(target[1]) if target else None
            reference = Reference(column=tested, to_table=to_table or "", to_column=str(arguments.get("field")))
            if to_table and reference not in tables[owner].references:
                references = (*tables[owner].references, reference)
                tables[owner] = tables[owner].model_copy(update={"references": references})
                taken["references"] += 1
            continue
        values = ", ".join(map(str, arguments.get("values") or ()))
        notes = {"accepted_values": f"one of: {values}", "unique": "no value twice", "not_null": "never null"}
        note = notes.get(test["name"], "")
        if note and note not in facts.description:
            text = "; ".join(filter(None, (facts.description, note)))
            columns = {**tables[owner].columns, tested: facts.model_copy(update={"description": text})}
            tables[owner] = tables[owner].model_copy(update={"columns": columns})
            taken["tests"] += 1
    metrics = dict(card.metrics)
    for metric in (manifest.get("metrics") or {}).values():
        name = str(metric.get("label") or metric["name"]).replace("_", " ").lower()
        text = " ".join(str(metric.get("description") or "").split())
        if text and name not in metrics:
            metrics[name] = text
            taken["metrics"] += 1
    return card.model_copy(update={"tables": tables, "metrics": metrics}), taken
