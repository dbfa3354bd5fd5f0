"""`sqltrain connect`: read a database once, list likely problems, and write the card that a person edits."""

from collections import Counter
from typing import Any

from flows import terminal
from flows.terminal import Bars
from pipelines.core.errors import DataError
from pipelines.core.registry import DIALECTS
from pipelines.databases import card, named, reading
from pipelines.databases import named as addresses
from pipelines.databases.reading import DatabaseFinding
from pipelines.endpoints import client
from pipelines.report.terminal import plain
from pipelines.sql.dialects.dialect import of_address

SHOWN = 5  # findings of one kind that are printed


def connect(text: str, name: str | None, allow_writes: bool) -> dict[str, Any]:
    """Write or renew `databases/NAME.yaml`, and say what was found, as JSON values.

    Args:
        text: a file, an address, or the name of a card.
        allow_writes: connect with a role that may write, too.
    """
    where = named.find(text, "Pass a file, or an address such as postgresql://reader@host/shop.")
    title = name or (text if named.is_connected(text) else card.name_of(where.address) or where.database.id)
    place = card.place(_checked(title))
    old = card.read(place) if place.is_file() else None
    if old is not None and old.location != where.address:
        raise DataError(f"{place} describes another database", "Pass --name for this one.")
    _check_role(where, allow_writes)
    first = card.name_of(where.address)
    if old is None and first is not None:
        terminal.say(f"note: {card.place(first)} describes this database, too; what either hides is hidden")
    with Bars(terminal.console) as bars:
        bars.begin("read", 1, "tables")
        catalogue = reading.read(where, _variable(text, title))
        bars.advance(1)
    database_card = catalogue.card if old is None else card.merged(catalogue.card, old)
    card.write(place, database_card)
    _tell(catalogue, where)
    _next(text, title, place.as_posix(), database_card.password_env)
    return {
        "name": title,
        "card": place.as_posix(),
        "engine": database_card.engine,
        "tables": len(database_card.tables),
        "columns": sum(len(table.columns) for table in database_card.tables.values()),
        "findings": dict(Counter(finding.kind for finding in catalogue.findings)),
    }


def _checked(name: str) -> str:
    if not name or not all(sign.isalnum() or sign in "_-" for sign in name):
        raise DataError(f"{name!r} cannot be the name of a card", "Pass --name with letters, digits, _ and - only.")
    return name


def _variable(text: str, name: str) -> str | None:
    """Where the password is to come from, when the address that was given holds one."""
    if of_address(text) is None or addresses.parted(text)[1] is None:
        return None
    return f"{name.upper().replace('-', '_')}_PASSWORD"


def _check_role(where: named.OpenableDatabase, allow_writes: bool) -> None:
    role, schema = reading.role(where)
    if not role.writes:
        return
    terminal.say(f"warning: the role of this connection may do more than read: {'; '.join(role.writes)}")
    terminal.say("an administrator makes a role that only reads with:")
    for line in DIALECTS[where.database.engine].reader_grants(where.address, schema):
        terminal.say(f"  {line}")
    if role.is_turned_away:
        raise DataError("the sandbox refuses a role with such rights", "Connect as a role that only reads.")
    if not allow_writes:
        raise DataError("this role may write", "Connect as one that only reads, or pass --allow-writes.")


def _tell(catalogue: reading.Found, where: named.OpenableDatabase) -> None:
    tables = catalogue.card.tables.values()
    rows = sum(table.rows or 0 for table in tables)
    columns = sum(len(table.columns) for table in tables)
    title = DIALECTS[where.database.engine].title
    terminal.say(f"{where.database.id}: {title}, {len(tables):,} tables, {columns:,} columns, {rows:,} rows")
    by_kind: dict[str, list[DatabaseFinding]] = {}
    for finding in catalogue.findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    for kind, findings in by_kind.items():
        terminal.say(f"{kind}: {len(findings)}")
        for finding in findings[:SHOWN]:
            terminal.say(f"  {plain(finding.where)}: {plain(finding.advice)}")
        if len(findings) > SHOWN:
            terminal.say(f"  ... and {len(findings) - SHOWN} more")


def _next(text: str, name: str, place: str, variable: str | None) -> None:
    known = client.endpoints(client.place())
    model = f"endpoint:{next(iter(known), 'NAME')}"
    terminal.say(f'wrote {place}: edit it, then ask with: sqltrain ask "..." --database {name} --model {model}')
    if not known:
        terminal.say(f"  there is no endpoint yet: add one to {client.place()}: {client.EXAMPLE}")
        terminal.say(f"  --model takes a checkpoint folder, too; without any, sqltrain mcp {name} serves the SQL tool")
    if variable is not None and of_address(text) is not None:
        terminal.say(f"the password is not in it: set the environment variable {variable}")
