"""A query in the schema's words: the same query, with the names that a reader of the schema would copy."""

from collections import Counter
from collections.abc import Iterable, Mapping

from sqlglot import exp
from sqlglot.optimizer.scope import Scope, traverse_scope

from pipelines.sql.analysis.name_resolution import scope_columns, scope_sources
from pipelines.sql.analysis.parsing import parse
from pipelines.sql.schema import Schema, written

Spellings = Mapping[str, str]  # key: a name in lower case


def in_schema_words(sql: str, schema: Schema, engine: str = "sqlite") -> str | None:
    """A query whose tables and columns are spelled as the schema spells them, each table under its own name.

    Aliases of tables go where nothing needs them: not in a self-join, and in no query with a correlated subquery. A
    double-quoted text that SQLite reads as a string becomes one. Spaces and keywords are sqlglot's.

    None for what cannot be parsed as one query. The result may differ from the query where sqlglot misunderstands it:
    whoever uses it compares the two by their rows.
    """
    tree = parse(sql, engine)
    if not isinstance(tree, exp.Select | exp.SetOperation):
        return None
    tree = tree.copy()
    scopes = traverse_scope(tree)
    is_correlated = any(scope.is_correlated_subquery for scope in scopes)
    spellings: dict[str, str] = {}
    columns: dict[str, Spellings] = {}
    for schema_table in schema.tables:
        table_name = schema_table.name.lower()
        spellings[table_name] = schema_table.name
        columns[table_name] = {column.name.lower(): column.name for column in schema_table.columns}
    for scope in scopes:
        _spell_columns(scope, columns, schema)
    if not is_correlated:
        for scope in scopes:
            _drop_table_aliases(scope)
    for table in tree.find_all(exp.Table):
        _spell(table.this, spellings, schema)
    for column in tree.find_all(exp.Column):
        _spell(column.args.get("table"), spellings, schema)
    return tree.sql(dialect=engine)


def _spell_columns(scope: Scope, columns: Mapping[str, Spellings], schema: Schema) -> None:
    """Spell the columns of one SELECT by the tables that it reads, else by all tables if they agree.

    Args:
        columns: the spellings of each table's columns, by its lower-cased name.
    """
    tables: dict[str, Spellings] = {}  # key: an alias of this SELECT, or of one around it
    reads_only_tables = True
    for alias, source in scope_sources(scope):
        columns_of_source = None
        if isinstance(source, exp.Table):
            columns_of_source = columns.get(source.name.lower())
        if columns_of_source is None:
            reads_only_tables = False
        else:
            tables[alias.lower()] = columns_of_source
    outer = scope.parent
    while outer is not None:
        for alias, source in scope_sources(outer):
            if isinstance(source, exp.Table):
                outer_columns = columns.get(source.name.lower(), {})
                tables.setdefault(alias.lower(), outer_columns)
        outer = outer.parent
    for column in scope_columns(scope):
        name = column.name.lower()
        candidates = list(tables.values())
        if column.table:
            qualifier = column.table.lower()
            candidates = [tables.get(qualifier, {})]
        known = [spellings for spellings in candidates if name in spellings]
        if known:
            _spell(column.this, known[0], schema)
        elif reads_only_tables and _is_text(column, scope):
            column.replace(exp.Literal.string(column.name))
        else:
            _spell_anywhere(column, columns.values(), schema)


def _spell_anywhere(column: exp.Column, spellings_of_tables: Iterable[Spellings], schema: Schema) -> None:
    """Spell a column as the tables that have one of this name do, if all of them spell it alike."""
    name = column.name.lower()
    spellings = {columns[name] for columns in spellings_of_tables if name in columns}
    if len(spellings) == 1:
        _spell(column.this, {name: spellings.pop()}, schema)


def _is_text(column: exp.Column, scope: Scope) -> bool:
    """Whether SQLite reads a name that no table has as a string: one in double quotes that is no name of the SELECT."""
    is_quoted = column.this.args.get("quoted")
    if column.table or not is_quoted or scope.is_correlated_subquery:
        return False
    select = scope.expression
    if not isinstance(select, exp.Query):
        return True
    outputs = {name.lower() for name in select.named_selects}
    return column.name.lower() not in outputs


def _drop_table_aliases(scope: Scope) -> None:
    """Call the tables of one SELECT by their own names, those of a self-join excepted."""
    sources = scope_sources(scope)
    uses: Counter[str] = Counter()
    for alias, source in sources:
        name = source.name if isinstance(source, exp.Table) else alias
        uses[name.lower()] += 1
    table_names: dict[str, str] = {}  # key: an alias
    for alias, source in sources:
        if not isinstance(source, exp.Table) or not source.alias or source.db:
            continue
        if uses[source.name.lower()] == 1:
            table_names[alias.lower()] = source.name
            source.set("alias", None)
    for column in scope.columns:
        table_name = table_names.get(column.table.lower())
        if table_name is not None:
            column.set("table", exp.to_identifier(table_name))


def _spell(identifier: exp.Expr | None, spellings: Spellings, schema: Schema) -> None:
    """Give an identifier its spelling, in quotes where the engine wants them; one that is not known stays as it is."""
    if not isinstance(identifier, exp.Identifier):
        return
    spelling = spellings.get(identifier.name.lower())
    if spelling is None:
        return
    write = written(schema.engine)
    identifier.set("this", spelling)
    identifier.set("quoted", write(spelling) != spelling)
