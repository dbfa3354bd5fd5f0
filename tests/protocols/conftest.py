"""One small database's schema, and protocols built as recipes build them."""

from collections.abc import Callable
from typing import Any

import pytest

from pipelines.core.types import Database, Example
from pipelines.protocols.base import Protocol, build
from pipelines.recipe import config
from pipelines.sql.schema import Column, ForeignKey, Schema, Table

SINGER = Table("singer", (Column("singer_id", "INTEGER", True), Column("name", "TEXT"), Column("kind", "TEXT")))
CONCERT = Table(
    "concert",
    (Column("year", "INTEGER"), Column("singer_id", "INTEGER")),
    (ForeignKey("singer_id", "singer", "singer_id"),),
)


@pytest.fixture
def schema() -> Schema:
    return Schema((SINGER, CONCERT))


@pytest.fixture
def example() -> Example:
    return Example("e1", "How many string singers are there?", Database("music", "sqlite", "music.sqlite"), "SELECT 1")


@pytest.fixture
def protocol() -> Callable[..., Protocol]:
    def make(name: str = "react", prompt: str = "full", **settings: Any) -> Protocol:
        return build(config.ProtocolSection(name=name, prompt=prompt, **settings))  # type: ignore[arg-type]

    return make
