"""Which question a client of a server asks for: one of the recipe's pools, or a row whose database it may name."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.environment.core import Environment, example_of
from pipelines.errors import DataError
from pipelines.types import Example


class Asked:
    """The questions that a server gives out.

    Args:
        databases: the folder whose files a client's own rows may name; None refuses such rows, for a client could read
            any database that the server can.
    """

    def __init__(self, environment: Environment, databases: Path | None) -> None:
        self._environment = environment
        self._databases = None if databases is None else databases.resolve()
        self.pool = functools.cache(self._read)

    def _read(self, name: str) -> Sequence[Example]:
        return self._environment.questions(name)

    def example(self, asked: Mapping[str, Any]) -> Example:
        """The question of `{"pool": NAME, "index": NUMBER}`, or of a row with question, sql and database (a file).

        Raises:
            DataError: there is no such question, or the row's database is not one that clients may name.
        """
        if "pool" not in asked:
            return self._own(asked)
        pool, index = asked["pool"], asked.get("index", 0)
        if not isinstance(pool, str) or not isinstance(index, int):
            raise DataError("a question is named by its pool (a text) and its index (a whole number)")
        examples = self.pool(pool)
        if not 0 <= index < len(examples):
            raise DataError(f"the pool {pool!r} has no question {index}", f"It has {len(examples)}, from 0 on.")
        return examples[index]

    def _own(self, row: Mapping[str, Any]) -> Example:
        if self._databases is None:
            raise DataError(
                "this server takes no rows of its clients",
                "Ask by pool and index, or start it with --databases FOLDER.",
            )
        if not isinstance(name := row.get("database"), str) or "record" in row:
            raise DataError("the row's field 'database' is missing or is no text")
        try:
            file = (self._databases / name).resolve()
            is_there = file.is_relative_to(self._databases) and file.is_file()
        except (ValueError, OSError, RuntimeError):  # a name no file bears: NUL, 300 characters, a ring of links
            is_there = False
        if not is_there:
            raise DataError(f"there is no database {name[:100]!r} in the server's folder")
        return example_of({**row, "database": str(file)})
