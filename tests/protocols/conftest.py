"""One small database's schema, and protocols built as recipes build them."""

import pytest

from pipelines.core.types import Database, Example
from pipelines.protocols.base import build_protocol
from pipelines.recipe import config
from pipelines.sql.schema import Column, ForeignKey, Schema, Table

SINGER = Table("singer", (Column("singer_id", "INTEGER", True), Column("name", "TEXT"), Column("kind", "TEXT")))
CONCERT = Table(
    "concert",
    (Column("year", "INTEGER"), Column("singer_id", "INTEGER")),
    (ForeignKey("singer_id", "singer", "singer_id"),),
)


@pytest.fixture
def schema():
    return Schema((SINGER, CONCERT))


@pytest.fixture
def example():
    return Example("e1", "How many string singers are there?", Database("music", "sqlite", "music.sqlite"), "SELECT 1")


@pytest.fixture
def protocol():
    return lambda name="react", **settings: build_protocol(
        config.ProtocolSection(name=name, **{"prompt": "full", **settings})
    )
