"""A server's password from the environment reaches the sandbox's workers, and no dataset."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "sql"))
from servers import binaries, make_reader, postgres

from pipelines.core.errors import DatabaseError, DataError
from pipelines.core.registry import DIALECTS
from pipelines.core.types import Database
from pipelines.databases import card, catalogue, named
from pipelines.recipe.config import Execution
from pipelines.sql.dialects.base import identity
from pipelines.sql.dialects.mysql import encryption_of
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import introspect


def test_only_an_address_without_a_password_gets_that_of_the_environment(monkeypatch):
    bare, whole = "postgresql://me@host/shop", "postgresql://me:own@host/shop"
    monkeypatch.delenv("PGPASSWORD", raising=False)
    assert DIALECTS["postgres"].locate(bare) == bare
    monkeypatch.setenv("PGPASSWORD", "p@ ss")
    monkeypatch.setenv("MYSQL_PWD", "p@ss")
    found = DIALECTS["postgres"].locate(bare)
    assert "password='p@ ss'" in found
    assert identity(found) == identity(bare)  # what is hidden of it stays hidden
    assert DIALECTS["postgres"].locate(whole) == whole
    assert DIALECTS["mysql"].locate("mysql://me@host/shop") == "mysql://me:p%40ss@host/shop"
    assert DIALECTS["postgres"].locate("no address") == "no address"


FILES = {"ca": "/ca.pem", "cert": "/c.pem", "key": "/k.pem"}


@pytest.mark.parametrize(
    ("options", "encryption"),
    [
        ("", {}),
        ("?ssl-mode=disabled", {"ssl_disabled": True}),
        ("?ssl_mode=REQUIRED", {"ssl": {"check_hostname": False, "verify_mode": "none"}}),
        ("?ssl_ca=/ca.pem", {"ssl": {"ca": "/ca.pem", "check_hostname": False, "verify_mode": "required"}}),
        (
            "?ssl-mode=VERIFY_IDENTITY&ssl-ca=/ca.pem&ssl-cert=/c.pem&ssl-key=/k.pem",
            {"ssl": FILES | {"check_hostname": True, "verify_mode": "required"}},
        ),
    ],
)
def test_a_mysql_address_says_how_the_connection_is_encrypted(options, encryption):
    assert encryption_of(f"mysql://me@host/shop{options}") == encryption


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("nonsense=1", "option 'nonsense'"),
        ("ssl_mode=SAFE", "ssl_mode=SAFE is not known"),
        ("ssl_mode=VERIFY_CA", "needs ssl_ca"),
        ("ssl_mode=DISABLED&ssl_ca=/ca.pem", "asks for no certificate"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options, message):
    with pytest.raises(DataError, match=message):
        named.driver_address(f"mysql://me@host/shop?{options}", "mysql", None)


def one(database):
    with SqlEngine(Limits.of(Execution())) as sql:
        return sql.execute_many([(database, "SELECT 1")])[0]


@pytest.mark.services
@pytest.mark.timeout(120)
def test_a_server_gets_its_password_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    programs = binaries() or pytest.skip("PostgreSQL's programs are not installed")
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
        assert not one(shop).ok
        with pytest.raises(DataError, match=r"cannot be opened: .* or password\. A password comes from .* PGPASSWORD"):
            catalogue.connection_role(named.find(shop.location))
        known = card.DatabaseCard(engine="postgres", location=shop.location, tables={"t": {"columns": {"a": {}}}})
        with SqlEngine(Limits()) as sql, pytest.raises(DatabaseError, match=r"is away: .* comes from PGPASSWORD"):
            named.OpenableDatabase(shop, shop.location, known).schema(sql)  # before a model is paid
        Path("pass").write_text(f"127.0.0.1:{port}:*:reader:secret\n")
        Path("pass").chmod(0o600)
        monkeypatch.setenv("PGPASSFILE", "pass")  # as seen from this folder; a worker has another one
        assert one(shop).rows == ((1,),)
        monkeypatch.setenv("PGSSLMODE", "require")  # which this server cannot
        assert not one(shop).ok
        monkeypatch.delenv("PGSSLMODE")
        monkeypatch.delenv("PGPASSFILE")
        monkeypatch.setenv("PGPASSWORD", "secret")
        assert one(shop).rows == ((1,),)
        assert introspect(shop).tables == ()
