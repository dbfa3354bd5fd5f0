"""What a hostile statement can do to a DuckDB file, its host and its worker: nothing."""

import shutil
import subprocess
import sys

import pytest
from shops import run

from pipelines.core.types import Database, ExecutionStatus
from pipelines.sql.engine import Limits, Pair

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
