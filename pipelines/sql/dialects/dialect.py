"""The interface of a database engine: a class with its name, its files or addresses, and its catalog queries.

A new engine is one file with such a class, registered under its name for recipes and commands, and with the
`DatabaseSession` of its workers. Drivers are imported where they are used: all dialects are imported to list their
names.
"""

import abc
import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import quote, urlsplit

from pipelines.core.errors import DataError
from pipelines.core.registry import DIALECTS

SAMPLED_ROWS = 10_000  # rows of a table that example values are taken from
# Words that PostgreSQL's grammar, or DuckDB's, which began as a copy of it, does not read as a name.
RESERVED = """
    all analyse analyze and anti any array as asc asof asymmetric at authorization binary both by case cast check
    collate collation column concurrently constraint create cross current_catalog current_date current_role
    current_schema current_time current_timestamp current_user default deferrable desc describe distinct do else end
    except false fetch for foreign freeze from full glob grant group having ilike in initially inner intersect into is
    isnull join lambda lateral leading left like limit localtime localtimestamp natural not notnull null offset on only
    or order outer overlaps pivot pivot_longer pivot_wider placing positional primary qualify references returning right
    select semi session_user show similar some summarize symmetric system_user table tablesample then to trailing true
    union unique unpack unpivot user using variadic verbose when where window with
"""
Query = Callable[[str], Iterable[Sequence[Any]]]


class ViewLimitExceeded(Exception):
    """A view did not run within its limits."""


class Catalog(NamedTuple):
    """An open database."""

    query: Query  # Function that reads its catalog and tables.
    view: Query  # Function that reads its views, within limits.
    views_until: float = math.inf  # Time after which no further view is read, as `time.monotonic` counts.


class Role(NamedTuple):
    """The rights of a connection's role that go beyond reading."""

    writes: tuple[str, ...] = ()  # Rights in words, such as "write to orders"; () for a plain reader.
    is_turned_away: bool = False  # True if the sandbox refuses every statement of it, whatever a person allows.
    # Statements that take from PUBLIC, whose rights every role has, the rights that a reader must not have.
    revocations: tuple[str, ...] = ()
    has_own_writes: bool = True  # True if some of `writes` are not PUBLIC's, so that another role would be better.


class Dialect(abc.ABC):
    """A database engine."""

    title: ClassVar[str]  # Name for people and prompts ("PostgreSQL").
    session: ClassVar[str]  # Class of the `DatabaseSession` of its workers, as "module:class".
    sqlglot: ClassVar[str]  # Name for sqlglot.
    text_type: ClassVar[str] = "VARCHAR"  # Type of a text in a cast.
    quote: ClassVar[str] = '"'  # Mark around a name; any mode of the engine reads it so.
    # Words, lower-cased, that are names in quotes only.
    reserved: ClassVar[frozenset[str]] = frozenset(RESERVED.split())
    folds_names: ClassVar[bool] = False  # True if a name without quotes is looked up in lower case.
    suffixes: ClassVar[tuple[str, ...]] = ()  # Suffixes of its files, the commonest first; () for a server.
    is_server: ClassVar[bool] = False  # True if a location is the address of a server and not a file.
    schemes: ClassVar[tuple[str, ...]] = ()  # Beginnings of the addresses of its servers ("postgresql://").
    # Query of an agent for the names of the tables.
    tables_query: ClassVar[str] = "SELECT table_name FROM information_schema.tables"
    # Query for the table, column and type of every column, in order.
    columns_query: ClassVar[str] = (
        "SELECT table_name, column_name, data_type FROM information_schema.columns"
        " WHERE table_schema = current_schema() ORDER BY table_name, ordinal_position"
    )
    # Query for the names of views.
    views_query: ClassVar[str] = (
        "SELECT table_name FROM information_schema.tables"
        " WHERE table_schema = current_schema() AND table_type <> 'BASE TABLE'"
    )
    # Query for the table, "PRIMARY KEY" or "FOREIGN KEY", columns, and for the latter the table and columns it names.
    keys_query: ClassVar[str] = ""
    # Query for each partitioned table and the number of its partitions, which themselves are not listed; "" if the
    # engine shows partitions as one table.
    partitions_query: ClassVar[str] = ""
    # Query for the table, column ("" for the table itself) and its comment; "" if the engine has no comments.
    comments_query: ClassVar[str] = ""
    # Query for each schema that the role may use, and its place among those that are read (null for another schema), in
    # that order; "" if the engine reads one alone.
    schema_query: ClassVar[str] = ""
    magic: ClassVar[tuple[int, bytes] | None] = None  # Position in its files of these bytes; None for a server.
    password_variable: ClassVar[str] = ""  # Environment variable that the engine's own client reads a password from.
    needs_packages: ClassVar[bool] = True  # True if its session needs more than Python's standard library.
    # True if an episode works on a copy of its own, which its statements may change. One that may have done so is sent
    # again before each later one, with `TURN_SEPARATOR` behind it, for that must meet its changes.
    keeps_state: ClassVar[bool] = False

    @classmethod
    def identifier(cls, name: str) -> str:
        """A name as this engine's statements write it: in quotes only if the engine needs them."""
        is_word = name.replace("_", "a").isalnum() and not name[0].isdigit()
        is_folded = cls.folds_names and name != name.lower()
        if is_word and not is_folded and name.lower() not in cls.reserved:
            return name
        return cls.quoted(name)

    @classmethod
    def quoted(cls, name: str) -> str:
        """A name in quotes, as any mode of this engine reads it."""
        escaped = name.replace(cls.quote, cls.quote * 2)
        return f"{cls.quote}{escaped}{cls.quote}"

    @classmethod
    def reading(cls, location: str) -> str:
        """How the statements of a database are read: a dialect that `sql/analysis/parsing.py` knows."""
        return cls.sqlglot

    @classmethod
    def remarks(cls, location: str) -> list[str]:
        """What a person who connects a database should know of how its statements are read."""
        return []

    @staticmethod
    @abc.abstractmethod
    def catalog(location: str, view_seconds: float) -> contextlib.AbstractContextManager[Catalog]:
        """Open a database to read its catalog; its views run for `view_seconds` at most. Raises the driver's error."""

    @staticmethod
    def with_password(address: str, password: str) -> str:
        """The address with this password; ValueError, which does not quote it, for no address of such a server."""
        url = urlsplit(address)
        user, _, host = url.netloc.rpartition("@")
        encoded_password = quote(password, safe="")
        with_password = url._replace(netloc=f"{user}:{encoded_password}@{host}")
        return with_password.geturl()

    @staticmethod  # noqa: B027
    def check_address(address: str) -> None:
        """Raise ValueError if the driver would not do what an option of the address asks for."""

    @classmethod
    def worker_environment(cls) -> dict[str, str]:
        """The variables of this process that the driver of a worker reads: none, but for PostgreSQL."""
        return {}

    @classmethod
    def locate(cls, location: str) -> str:
        """The location for a worker, which has no environment: an absolute path, or an address with the password of
        `password_variable` if it holds none.
        """
        if not cls.is_server:
            return location if location.startswith("/") else os.path.abspath(location)
        password = None
        if cls.password_variable:
            password = os.environ.get(cls.password_variable)
        if password is None or has_password(location):
            return location
        with contextlib.suppress(ValueError):  # the connection will fail, with the reason
            return cls.with_password(location, password)
        return location

    @staticmethod
    def role(query: Query) -> Role:
        """The role of an open connection; a file is opened read-only by its engine, and has none."""
        return Role()

    @staticmethod
    def reader_grants(address: str, schemas: Sequence[str]) -> list[str]:
        """Statements for an administrator that make a role that reads this database and does nothing else."""
        return []

    @staticmethod
    def database_address(address: str, name: str) -> str:
        """The location of one of a benchmark's databases on a server; ValueError for no address of such a server."""
        raise ValueError(f"{address} is not the address of a server that holds {name}")

    @classmethod
    def with_schemas(cls, address: str, schemas: Sequence[str]) -> str:
        """The address that reads these schemas; the tables of all but the first have qualified names."""
        hint = "Pass it with a PostgreSQL or DuckDB database."
        raise DataError(f"--schema is not for {cls.title}", hint)


def find_name(name: str, names: Iterable[str], engine: str) -> str | None:
    """The known name that the engine reads a name of a statement, a card or a dbt project as; None if there is none.
    The same letters always match. Beyond that PostgreSQL reads a name without quotes in lower case, and the others
    compare without case, SQLite and DuckDB that of ASCII letters alone; if several names match so, none counts.
    """
    known = list(names)
    if name in known:
        return name
    dialect = DIALECTS[engine]
    if dialect.folds_names:
        folded = name.lower()
        return folded if folded in known else None
    fold = str.lower if dialect.is_server else _ascii_lower
    wanted = fold(name)
    matches = [candidate for candidate in known if fold(candidate) == wanted]
    if len(matches) != 1:
        return None
    return matches[0]


def _ascii_lower(name: str) -> str:
    signs = [sign.lower() if sign.isascii() else sign for sign in name]
    return "".join(signs)


def engine_of_file(path: Path) -> str | None:
    """The engine of a file by its suffix."""
    for name in DIALECTS:
        if path.suffix in DIALECTS[name].suffixes:
            return name
    return None


def engine_of_head(head: bytes, path: Path) -> str | None:
    """The engine of a file by its first bytes, and by its suffix if several engines read such files."""
    names: list[str] = []
    for name in DIALECTS:
        magic = DIALECTS[name].magic
        if magic is None:
            continue
        position, mark = magic
        if head[position:].startswith(mark):
            names.append(name)
    for name in names:
        if path.suffix in DIALECTS[name].suffixes:
            return name
    if not names:
        return None
    return names[0]


def engine_of_address(address: str) -> str | None:
    """The engine whose server has such an address; None if the text is not an address."""
    for name in DIALECTS:
        if address.startswith(DIALECTS[name].schemes):
            return name
    return None


def file_suffixes() -> tuple[str, ...]:
    """The suffixes of all engines' files."""
    suffixes: dict[str, None] = {}
    for name in DIALECTS:
        suffixes |= dict.fromkeys(DIALECTS[name].suffixes)
    return tuple(suffixes)


_RAW_SIGNS = "/ ? # [ ]"  # signs that end the part of an address in which user and password stand
ENCODING = "Write @ as %40, : as %3A, / as %2F, ? as %3F, # as %23, [ as %5B and ] as %5D in a user or a password."


def raw_sign_fault(address: str) -> str | None:
    """Why the user or the password of a server's address cannot be told from its host; None if they can.

    A raw sign ends the part before the host too early, so that an `@` stands where none belongs: in the path, behind
    a host without a path, in the name of an option, or behind a `#`, which no address of a database has.
    """
    rest = address.partition("://")[2]
    beginning = re.split(r"[/?#]", rest, maxsplit=1)[0]
    behind = rest[len(beginning) :]
    path, _, query = behind.partition("?")
    credentials = beginning.rpartition("@")[0]
    options = query.split("&")
    option_names = [option.partition("=")[0] for option in options]
    has_raw_sign = (
        "@" in path
        or "#" in rest
        or any("@" in name for name in option_names)
        or ("@" in query and not path.strip("/"))
        or "[" in credentials
        or "]" in credentials
    )
    if not has_raw_sign:
        return None
    return f"the address cannot be read: its user or its password holds a raw sign, such as {_RAW_SIGNS}"


def has_password(text: str) -> bool:
    """Whether a text holds a database's address with a password, which would be kept in datasets."""
    if re.search(r"\w+://[^/@]*:[^/@]+@", text) or "password=" in text:
        return True
    for address in re.findall(r"\w+://[^\s\"']+", text):
        if engine_of_address(address) and "@" in address and raw_sign_fault(address) is not None:
            return True
    return False
