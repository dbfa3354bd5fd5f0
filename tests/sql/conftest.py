"""One small shop database for all tests of SQL, in every dialect, and an engine with short limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from shops import build_shop

from pipelines.sql.engine import Limits, SqlEngine
from pipelines.types import Database, ExecutionResult

Run = Callable[[str], ExecutionResult]


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Database:
    return build_shop(tmp_path_factory.mktemp("shop") / "shop.sqlite")


@pytest.fixture(scope="module")
def engine() -> Iterator[SqlEngine]:
    with SqlEngine(Limits(timeout_s=2, max_rows=1000, max_bytes=1_000_000, memory_mb=256)) as engine:
        yield engine


@pytest.fixture
def run(engine: SqlEngine, shop: Database) -> Run:
    return lambda sql: engine.execute_many([(shop, sql)])[0]
