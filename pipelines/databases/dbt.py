"""The knowledge of a dbt project in a database's card: descriptions, tests and metrics of `target/manifest.json`."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipelines.core.errors import DataError
from pipelines.core.text_files import read_json_text
from pipelines.databases.card import DatabaseCard, Reference, TableCard
from pipelines.sql.dialects.dialect import find_name

TABLES = ("model", "seed", "snapshot", "source")  # kinds of nodes that are tables or views
READ_TESTS = ("accepted_values", "unique", "not_null", "relationships")
_CALL = re.compile(r"(ref|source)\((.*?)\)", re.DOTALL)
_NAME = re.compile(r"""(?<![=\w])\s*['"]([^'"]+)['"]""")  # an argument that has no keyword


class CardColumn(NamedTuple):
    """A column of a card by its names."""

    table: str
    name: str


def with_dbt(card: DatabaseCard, folder: Path) -> tuple[DatabaseCard, Counter[str]]:
    """The card with a dbt project's knowledge, and how many descriptions, tests and metrics were taken and were not.

    What a person wrote in the card stays. A test says what a column holds: `accepted_values` the values, `unique` and
    `not_null` that they are, and `relationships` is a foreign key. A metric is found by its name in a question, as the
    card's own metrics are.

    Args:
        folder: the project's `target` folder, or its manifest.
    """
    path = folder / "manifest.json" if folder.is_dir() else folder
    manifest = _read_manifest(path)
    sources = manifest.get("sources") or {}
    nodes = {**manifest["nodes"], **sources}
    metrics = manifest.get("metrics") or {}
    merger = _Merger(card, nodes)
    merger.add_descriptions()
    merger.add_tests()
    merger.add_metrics(metrics.values())
    merged = card.model_copy(update={"tables": merger.tables, "metrics": merger.metrics})
    return merged, merger.counts


def _read_manifest(path: Path) -> dict[str, Any]:
    """A dbt manifest; DataError for a file that has another shape."""
    hint = "Run dbt parse, and pass its target/ folder."
    try:
        manifest = read_json_text(path)
    except DataError as error:
        raise DataError(f"{path} is not a dbt manifest: {error.message}", hint) from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("nodes"), dict):
        raise DataError(f"{path} is not a dbt manifest: it has no nodes", hint)
    misshapen = _misshapen(manifest)
    if misshapen is not None:
        raise DataError(f"{path} is not a dbt manifest: {misshapen} has another shape than dbt writes", hint)
    return manifest


class _Merger:
    """Adds the parts of a manifest to a card's tables and metrics, and counts them."""

    def __init__(self, card: DatabaseCard, nodes: Mapping[str, Any]) -> None:
        self.tables: dict[str, TableCard] = dict(card.tables)
        self.metrics: dict[str, str] = dict(card.metrics)
        self.counts: Counter[str] = Counter()
        self._card = card
        self._nodes = nodes
        self._table_of: dict[str, str] = {}  # tables by the ids of their nodes

    def add_descriptions(self) -> None:
        """Find the table of each model, and take its descriptions if the card has none."""
        for id, node in self._nodes.items():
            if node.get("resource_type") not in TABLES:
                continue
            name = self._find_table(node)
            if name is None:
                self.counts["models without a table here"] += 1
                continue
            self._table_of[id] = name
            columns = node.get("columns") or {}
            for column, entry in columns.items():
                column_description = _dbt_description(entry or {})
                self._describe_column(name, _bare(column), column_description)
            description = _dbt_description(node)
            if description and not self.tables[name].description:
                self._update_table(name, description=description)
                self.counts["descriptions"] += 1

    def _update_table(self, name: str, **fields: Any) -> None:
        self.tables[name] = self.tables[name].model_copy(update=fields)

    def _find_table(self, node: Mapping[str, Any]) -> str | None:
        """The card's table that a node stands for."""
        stored_name = str(node.get("alias") or node.get("identifier") or node.get("name"))
        qualified_name = f"{node.get('schema')}.{stored_name}"
        for candidate in (qualified_name, stored_name):
            name = find_name(candidate, self._card.tables, self._card.engine)
            if name:
                return name
        return None

    def _describe_column(self, table: str, name: str, description: str) -> None:
        if not description:
            return
        column = self._find_column(table, name)
        if column is None:
            self.counts["descriptions of columns that are not here"] += 1
        elif not self.tables[table].columns[column].description:
            self._set_description(table, column, description)
            self.counts["descriptions"] += 1

    def _find_column(self, table: str, name: str) -> str | None:
        return find_name(name, self.tables[table].columns, self._card.engine)

    def _set_description(self, table: str, column: str, description: str) -> None:
        columns = dict(self.tables[table].columns)
        entry = columns[column]
        columns[column] = entry.model_copy(update={"description": description})
        self._update_table(table, columns=columns)

    def add_tests(self) -> None:
        """Take the tests of columns as notes in their descriptions, and relationships as references."""
        for node in self._nodes.values():
            test = node.get("test_metadata") or {}
            if node.get("resource_type") == "test" or test:
                self._add_test(node, test)

    def _add_test(self, node: Mapping[str, Any], test: Mapping[str, Any]) -> None:
        if test.get("name") not in READ_TESTS:
            self.counts["tests of other kinds"] += 1
            return
        arguments = _arguments(test)
        column_name = node.get("column_name") or arguments.get("column_name") or ""
        node_id = str(node.get("attached_node"))
        column = self._find_column_of(node_id, str(column_name))
        if column is None:
            self.counts["tests of what is not here"] += 1
        elif test["name"] == "relationships":
            self._add_relationship(column, arguments)
        else:
            self._add_note(column, _test_note(test["name"], arguments))

    def _find_column_of(self, node_id: str, name: str) -> CardColumn | None:
        """The card's column for a column of a node; None if the card has no such table or column."""
        table = self._table_of.get(node_id)
        if table is None:
            return None
        column = self._find_column(table, _bare(name))
        if column is None:
            return None
        return CardColumn(table, column)

    def _add_relationship(self, column: CardColumn, arguments: Mapping[str, Any]) -> None:
        target = str(arguments.get("to"))
        field = str(arguments.get("field"))
        node_id = _referred(target, self._nodes) or ""
        to_column = self._find_column_of(node_id, field)
        if to_column is None:
            self.counts["relationships to what is not here"] += 1
            return
        reference = Reference(column=column.name, to_table=to_column.table, to_column=to_column.name)
        references = self.tables[column.table].references
        if reference not in references:
            self._update_table(column.table, references=(*references, reference))
            self.counts["references"] += 1

    def _add_note(self, column: CardColumn, note: str) -> None:
        description = self.tables[column.table].columns[column.name].description
        if note not in description:
            with_note = "; ".join(filter(None, (description, note)))
            self._set_description(column.table, column.name, with_note)
            self.counts["tests"] += 1

    def add_metrics(self, metrics: Iterable[Mapping[str, Any]]) -> None:
        """Take the metrics whose names the card does not have."""
        for metric in metrics:
            label = str(metric.get("label") or metric["name"])
            name = label.replace("_", " ").lower()
            words = _dbt_description(metric).split()
            description = " ".join(words)
            if not description:
                self.counts["metrics without a description"] += 1
            elif name not in self.metrics:
                self.metrics[name] = description
                self.counts["metrics"] += 1
            elif self.metrics[name] != description:
                self.counts["metrics of a name that the card has"] += 1


def _dbt_description(entry: Mapping[str, Any]) -> str:
    description = entry.get("description") or ""
    return str(description).strip()


def _test_note(test: str, arguments: Mapping[str, Any]) -> str:
    """A test's promise about a column's values."""
    if test == "accepted_values":
        values = arguments.get("values") or ()
        listed = ", ".join(map(str, values))
        return f"one of: {listed}"
    if test == "unique":
        return "no value twice"
    return "never null"


def _misshapen(manifest: Mapping[str, Any]) -> str | None:
    """The first part of a manifest that is not shaped as dbt's; None if all that is read here is."""
    for kind in ("nodes", "sources", "metrics"):
        entries = manifest.get(kind) or {}
        if not isinstance(entries, dict):
            return kind
        for id, entry in entries.items():
            if not isinstance(entry, dict) or not _has_columns(entry) or not _has_test(entry):
                return f"{kind}: {id}"
            if kind == "metrics" and not entry.get("name"):
                return f"{kind}: {id}"
    return None


def _has_columns(entry: Mapping[str, Any]) -> bool:
    """Whether the columns of an entry, if it has any, are objects by name."""
    columns = entry.get("columns") or {}
    if not isinstance(columns, dict):
        return False
    return all(isinstance(column or {}, dict) for column in columns.values())


def _has_test(entry: Mapping[str, Any]) -> bool:
    """Whether the test of an entry, if it is one, has a name and arguments."""
    test = entry.get("test_metadata") or {}
    if not isinstance(test, dict) or not isinstance(test.get("name", ""), str):
        return False
    return _has_arguments(test)


def _has_arguments(test: Mapping[str, Any]) -> bool:
    """Whether the arguments of a test are an object, and its values a list."""
    kwargs = test.get("kwargs") or {}
    if not isinstance(kwargs, dict):
        return False
    inner_arguments = kwargs.get("arguments") or {}
    if not isinstance(inner_arguments, dict):
        return False
    values = _arguments(test).get("values") or []
    return isinstance(values, list)


def _bare(name: str) -> str:
    """A name without the quotes that a project may write around it."""
    return name.strip('"`[]')


def _arguments(test: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a test; newer projects write them under `arguments`."""
    kwargs = test.get("kwargs") or {}
    inner_arguments = kwargs.get("arguments") or {}
    return {**kwargs, **inner_arguments}


def _referred(to: str, nodes: Mapping[str, Any]) -> str | None:
    """The id of the node that `ref('model')`, `ref('package', 'model')` or `source('schema', 'table')` means."""
    call = _CALL.search(to)
    if call is None:
        return None
    function, arguments = call.groups()
    names = _NAME.findall(arguments)
    if not names:
        return None
    is_source = function == "source"
    home_field = "source_name" if is_source else "package_name"
    for id, node in nodes.items():
        kind = node.get("resource_type")
        if kind not in TABLES or node.get("name") != names[-1]:
            continue
        if (kind == "source") != is_source:
            continue
        home = node.get(home_field)
        if len(names) == 1 or home in (None, names[0]):
            return id
    return None
