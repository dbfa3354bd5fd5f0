"""A server's password from the environment reaches the sandbox's workers, and no dataset."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sql"))
from servers import binaries, make_reader, postgres

from pipelines.config import Execution
from pipelines.registry import DIALECTS
from pipelines.sql.catalogs import introspect
from pipelines.sql.dialects.hiding import identity
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.types import Database


def test_only_an_address_without_a_password_gets_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    bare, whole = "postgresql://me@host/shop", "postgresql://me:own@host/shop"
    monkeypatch.delenv("PGPASSWORD", raising=False)
    assert DIALECTS["postgres"].with_environment(bare) == bare
    monkeypatch.setenv("PGPASSWORD", "p@ ss")
    monkeypatch.setenv("MYSQL_PWD", "p@ss")
    found = DIALECTS["postgres"].with_environment(bare)
    assert "password='p@ ss'" in found
    assert identity(found) == identity(bare)  # what is hidden of it stays hidden
    assert DIALECTS["postgres"].with_environment(whole) == whole
    assert DIALECTS["mysql"].with_environment("mysql://me@host/shop") == "mysql://me:p%40ss@host/shop"
    assert DIALECTS["postgres"].with_environment("no address") == "no address"


@pytest.mark.services
@pytest.mark.timeout(120)
def test_a_server_that_wants_a_password_gets_it_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = binaries()
    if programs is None:
        pytest.skip("PostgreSQL's programs are not installed")
    with postgres(programs) as admin:
        import psycopg

        make_reader(programs, admin, "reader", "secret")
        with psycopg.connect(admin, autocommit=True) as connection:
            (rules,) = connection.execute("SHOW hba_file").fetchone() or ("",)
            place = Path(str(rules))
            place.write_text("host all reader all scram-sha-256\n" + place.read_text())
            connection.execute("SELECT pg_reload_conf()")
        port = admin.partition("port=")[2].partition(" ")[0]
        shop = Database("shop", "postgres", f"postgresql://reader@127.0.0.1:{port}/postgres")
        monkeypatch.delenv("PGPASSWORD", raising=False)
        with SqlEngine(Limits.of(Execution())) as sql:
            assert not sql.execute_many([(shop, "SELECT 1")])[0].ok
        monkeypatch.setenv("PGPASSWORD", "secret")
        with SqlEngine(Limits.of(Execution())) as sql:
            assert sql.execute_many([(shop, "SELECT 1")])[0].rows == ((1,),)
        assert introspect(shop).tables == ()
