"""What a hostile statement can do to a DuckDB file, its host and its worker: nothing."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb
import pytest
from shops import run
from test_sandbox_state import BOUNDS, NoClock

from pipelines.core.types import Database, ExecutionStatus
from pipelines.sql.dialects import base
from pipelines.sql.dialects.duckdb import Duckdb, DuckdbSession
from pipelines.sql.engine import Limits, Pair, SqlEngine

pytestmark = pytest.mark.filterwarnings("error")
LIMITS = Limits(timeout_s=1, max_rows=1000, max_bytes=1_000_000, memory_mb=256)


def test_a_file_open_for_writing_is_locked(engine, duckdb_shop, tmp_path):
    database = Database("held", "duckdb", str(shutil.copy(duckdb_shop.location, tmp_path / "held.duckdb")))
    hold = f"import duckdb; c = duckdb.connect({database.location!r}); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        result = run(engine, database, "SELECT count(*) FROM customer")
        assert (result.status, result.error_class) == (ExecutionStatus.UNAVAILABLE, "database_locked")
        holder.communicate("\n")
    assert run(engine, database, "SELECT count(*) FROM customer").rows == ((4,),)


def test_a_file_has_as_many_names_as_there_are_links(engine, duckdb_shop, tmp_path):
    for name in ("data", "test"):
        (tmp_path / name).symlink_to(duckdb_shop.location)
        assert run(engine, Database("shop", "duckdb", str(tmp_path / name)), "SELECT count(*) FROM customer").ok


def test_an_infinite_date_is_not_the_last_day_of_9999(engine, duckdb_shop):
    pair = Pair(duckdb_shop, "SELECT 'infinity'::DATE", "SELECT DATE '9999-12-31'")
    (verdict,) = engine.verdicts([pair], ["strict"])
    assert (verdict.scores, verdict.broken) == ({"strict": 0.0}, False)


def many(seed, folder, count):
    paths = [folder / f"{number}.duckdb" for number in range(count)]
    for path in paths:
        shutil.copy(seed, path)
    return [Database(path.stem, "duckdb", str(path)) for path in paths]


@pytest.mark.parametrize(("count", "memory_mb"), [(20, 256), pytest.param(500, 512, marks=pytest.mark.slow)])
def test_a_worker_that_meets_many_databases_breaks_no_verdict(tmp_path, count, memory_mb):
    seed = tmp_path / "seed.duckdb"
    with duckdb.connect() as connection:
        # Small blocks make small files.
        connection.execute(f"ATTACH '{seed}' AS seed (BLOCK_SIZE 16384); CREATE TABLE seed.t AS FROM range(2000) t(a)")
    databases = many(seed, tmp_path, count)
    pairs = [Pair(database, "SELECT sum(a) FROM t", "SELECT 1999 * 1000") for database in databases]
    with SqlEngine(Limits(timeout_s=30, memory_mb=memory_mb), workers=1) as engine:
        verdicts = engine.verdicts(pairs, ["strict"])
    assert [verdict.error_class for verdict in verdicts] == [None] * count
    assert [verdict.scores for verdict in verdicts] == [{"strict": 1.0}] * count


def test_an_open_database_has_no_thread_of_its_own(duckdb_shop):
    before = len(os.listdir("/proc/self/task"))
    with Duckdb.catalog(duckdb_shop.location, 1.0) as first, Duckdb.catalog(duckdb_shop.location, 1.0) as second:
        settings = "SELECT current_setting('errors_as_json'), current_setting('lock_configuration')"
        assert list(first.query(settings)) == list(second.query(settings)) == [(True, True)]
        assert len(os.listdir("/proc/self/task")) == before


def test_a_statement_that_lacks_what_other_databases_took_is_run_again_without_them(tmp_path):
    seed = tmp_path / "seed.duckdb"
    with duckdb.connect(seed) as connection:
        connection.execute("CREATE TABLE t AS SELECT md5(range::VARCHAR) AS a FROM range(400000)")  # 7.6 MB
    databases = many(seed, tmp_path, 16)
    with SqlEngine(Limits(timeout_s=30, memory_mb=256), workers=1) as engine:
        engine.execute_many([(database, "SELECT max(a) FROM t") for database in databases])
        in_order = "SELECT sum(length(a)) FROM (SELECT repeat(a, 10) AS a FROM t ORDER BY a)"
        (result,) = engine.execute_many([(databases[0], in_order)])
    assert result.rows == ((400_000 * 10 * 32,),)


def test_what_is_out_of_memory_is_not_called_corrupt(duckdb_shop):
    with SqlEngine(Limits(timeout_s=120, memory_mb=8), workers=1) as engine:
        (verdict,) = engine.verdicts([Pair(duckdb_shop, "SELECT 1", "SELECT 1")], ["strict"])
    assert verdict.broken
    # Where memory ends differs by machine: DuckDB says so, its own invariants break, or the worker dies or is too slow.
    assert verdict.error_class != "database_corrupt"


@pytest.mark.parametrize("kept_bytes", [0, 100, 20_000])
def test_a_damaged_file_is_called_corrupt(engine, duckdb_shop, tmp_path, kept_bytes):
    path = tmp_path / "block.duckdb"  # "lock" is in its name
    path.write_bytes(Path(duckdb_shop.location).read_bytes()[:kept_bytes])
    result = run(engine, Database("damaged", "duckdb", str(path)), "SELECT 1")
    assert (result.status, result.error_class) == (ExecutionStatus.UNAVAILABLE, "database_corrupt")


def test_a_file_that_may_not_be_read_is_not_called_corrupt(duckdb_shop):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = shutil.copy(duckdb_shop.location, folder)
        os.chmod(path, 0)
        user = os.geteuid()
        try:
            if user == 0:  # root may read any file
                os.seteuid(65534)
            with pytest.raises(base.OpenFailure) as failure:
                DuckdbSession(path, BOUNDS, NoClock())
        finally:
            os.seteuid(user)
    assert failure.value.args[0] == "database_unreadable"
