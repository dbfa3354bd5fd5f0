"""One small shop database for all tests of SQL, in every dialect, and an engine with short limits."""

from collections.abc import Callable

import pytest
from copies import to_duckdb, to_mysql, to_postgres
from servers import Server, binaries, make_reader, mariadb, mariadb_programs, postgres
from shops import build_shop

from pipelines.core.types import ExecutionResult
from pipelines.sql.engine import Limits, SqlEngine

Run = Callable[[str], ExecutionResult]


@pytest.fixture(scope="session")
def shop(tmp_path_factory):
    return build_shop(tmp_path_factory.mktemp("shop") / "shop.sqlite")


@pytest.fixture(scope="session")
def duckdb_shop(shop, tmp_path_factory):
    return to_duckdb(shop, tmp_path_factory.mktemp("duck") / "shop.duckdb")


@pytest.fixture(scope="module")
def engine(request):
    """An engine with short limits, or with the `LIMITS` of the module."""
    limits = Limits(timeout_s=2, max_rows=1000, max_bytes=1_000_000, memory_mb=256)
    with SqlEngine(getattr(request.module, "LIMITS", limits)) as engine:
        yield engine


@pytest.fixture
def run(engine, shop):
    return lambda sql: engine.execute_many([(shop, sql)])[0]


@pytest.fixture(scope="session")
def server(shop):
    programs = binaries() or pytest.skip("PostgreSQL's programs are not installed (apt-get install postgresql)")
    with postgres(programs) as admin:
        make_reader(programs, admin, "reader", "secret")
        reader = admin.replace("user=owner", "user=reader password=secret")
        yield Server(admin, reader, to_postgres(shop, admin, reader))


@pytest.fixture(scope="session")
def mysql_port():
    programs = mariadb_programs() or pytest.skip("MariaDB is not installed (apt-get install mariadb-server)")
    with mariadb(programs) as port:
        yield port


@pytest.fixture(scope="session")
def postgres_shop(server):
    return server.shop


@pytest.fixture(scope="session")
def mysql_shop(mysql_port, shop):
    return to_mysql(shop, mysql_port, "clerk")
