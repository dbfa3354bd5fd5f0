"""A disk that is full: one plain line whichever library notices it, nothing half made, and the next run goes on."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from pipelines.core import files
from pipelines.core.errors import BoundaryError, DataError, ResourceError
from pipelines.core.files import disk_full, read_json, write_atomic
from pipelines.core.store import Store
from pipelines.nightly import inbox
from pipelines.nightly.ledger import Ledger
from pipelines.recipe.config import Nightly

FULL = Path("/dev/full")  # a file of Linux that is always full


def write_text() -> None:
    FULL.write_text("x" * 10**6)


def write_parquet() -> None:
    pl.DataFrame({"row": range(1000)}).write_parquet(FULL)


def write_database() -> None:
    database = sqlite3.connect(":memory:")
    try:
        database.execute("PRAGMA max_page_count = 1")
        database.execute("CREATE TABLE shop (name TEXT)")
    finally:
        database.close()


def wrap() -> None:
    try:
        write_text()
    except OSError as error:
        raise BoundaryError("the worker processes kept dying") from error


WRITERS: list[Callable[[], None]] = [write_text, write_parquet, write_database, wrap]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_stage_on_a_full_disk_is_made_by_the_next_run(tmp_path: Path, write: Callable[[], None]) -> None:
    store = Store(tmp_path)

    def fails(folder: Path) -> None:
        (folder / "shard").write_text("done")
        write()

    with pytest.raises(ResourceError, match=r"^no space left under .*run again"):
        store.make("data", "k1", fails, {}, lambda: None)
    assert not store.has("data", "k1")
    kept: list[str] = []
    store.make("data", "k1", lambda folder: kept.append((folder / "shard").read_text()), {}, lambda: None)
    assert kept == ["done"]


def test_whatever_fails_on_a_disk_without_room_failed_for_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    died, bad = BoundaryError("the worker processes kept dying"), DataError("a bad row")
    assert disk_full(died, tmp_path) is None
    monkeypatch.setattr(files, "NO_ROOM", 1 << 60)
    assert disk_full(died, tmp_path) is not None
    assert disk_full(bad, tmp_path) is None, "a bad row is bad on any disk"
    assert disk_full(died, tmp_path / "gone") is None


def test_our_own_mistakes_keep_their_traceback(tmp_path: Path) -> None:
    def broken(folder: Path) -> None:
        raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        Store(tmp_path).make("data", "k1", broken, {}, lambda: None)


def full(monkeypatch: pytest.MonkeyPatch, *methods: str) -> None:
    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    for method in methods:
        monkeypatch.setattr(Path, method, refuse)


def test_a_file_beside_the_stages_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pins.json"
    write_atomic(path, "[]")
    with monkeypatch.context() as patch:
        full(patch, "write_text")
        with pytest.raises(ResourceError, match="no space left"):
            write_atomic(path, "[1]")
    assert path.read_text() == "[]"
    assert [each.name for each in tmp_path.iterdir()] == ["pins.json"]


def test_a_night_on_a_full_disk_leaves_the_ledger_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(Store(tmp_path / "store"), "farms")
    first = ledger.add("night", decision="nothing", reason="no new questions", new=[])
    with monkeypatch.context() as patch:
        full(patch, "open")
        with pytest.raises(ResourceError, match="no space left"):
            ledger.add("night", decision="kept", reason="", new=[])
    assert ledger.lines() == [first]


def test_a_batch_that_cannot_be_frozen_takes_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = tmp_path / "inbox"
    questions.mkdir()
    (questions / "new.jsonl").write_text('{"question": "?", "sql": "SELECT 1"}\n')
    settings, batches = Nightly(inbox=str(questions)), tmp_path / "batches"
    opened = Path.open

    def refuse(path: Path, mode: str = "r", **options: object) -> object:
        if mode == "w":
            raise OSError(28, "No space left on device", str(path))
        return opened(path, mode, **options)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(ResourceError, match="no space left"):
            inbox.collect(settings, batches)
    batch = inbox.collect(settings, batches)
    assert batch is not None
    assert len(read_json(batch / inbox.ROWS)) == 1
