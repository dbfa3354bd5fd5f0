"""The audit log: what ran, on what, for how long, and how it ended."""

import asyncio
import json
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from pipelines.core.errors import ResourceError
from pipelines.core.types import Database
from pipelines.sql.audit import KEPT_FILES, AuditEntry, AuditLog
from pipelines.sql.engine import Limits, Pair, SqlEngine


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_statement_leaves_a_line(shop: Database, tmp_path: Path) -> None:
    path = tmp_path / "log" / "audit.jsonl"
    with SqlEngine(Limits(timeout_s=5), audit=path) as engine:
        engine.execute_many([(shop, "SELECT id FROM customer"), (shop, "DROP TABLE customer")])
        asyncio.run(engine.execute(shop, "SELECT nope"))
        pair = Pair(shop, "SELECT 1", "SELECT 2")
        engine.verdicts([pair, pair], ["strict"])
        engine.verdicts([pair], ["strict"])
    lines = read(path)
    assert [(line["role"], line["sql"], line["outcome"], line["rows"]) for line in lines] == [
        ("query", "SELECT id FROM customer", "ok", 4),
        ("query", "DROP TABLE customer", "refused", 0),
        ("query", "SELECT nope", "error", 0),
        ("gold", "SELECT 1", "ok", 1),
        ("prediction", "SELECT 2", "ok", 1),
        ("prediction", "SELECT 2", "ok", 1),  # the gold result was kept
    ]
    assert lines[0]["who"] == pwd.getpwuid(os.getuid()).pw_name
    assert lines[0]["database"] == "shop"
    assert lines[0]["ms"] > 0
    assert lines[2]["error_class"] == "no_such_column"
    assert lines[0]["at"].endswith("+00:00")


def test_no_log_is_kept_unless_it_is_asked_for(shop: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with SqlEngine(Limits()) as engine:
        engine.execute_many([(shop, "SELECT 1")])
    assert list(tmp_path.iterdir()) == []


def test_a_full_file_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, max_bytes=300)
    for number in range(40):
        log.write([AuditEntry("shop", "sqlite", "query", f"SELECT {number}\n", 0.1, 1, "ok", None)])
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["audit.jsonl", *(f"audit.jsonl.{n}" for n in range(1, KEPT_FILES + 1))]
    newest = [read(path)[-1], read(tmp_path / "audit.jsonl.1")[-1], read(tmp_path / "audit.jsonl.5")[-1]]
    numbers = [int(line["sql"].split()[1]) for line in newest]
    assert numbers[0] == 39
    assert numbers == sorted(numbers, reverse=True)


def test_a_log_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="audit log"):
        AuditLog(tmp_path / "file" / "audit.jsonl").write([AuditEntry("a", "sqlite", "query", "b", 0, 0, "ok", None)])
