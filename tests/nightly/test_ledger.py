"""The champion is what the lines say; a rollback goes one back; a torn line never happened."""

from pathlib import Path

import pytest

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.store import Store
from pipelines.nightly.ledger import ChampionChanged, Ledger, NightInProgress, ledgers


def ledger(folder: Path) -> Ledger:
    made = Ledger(Store(folder), "farms")
    made.batches.mkdir(parents=True, exist_ok=True)
    return made


def night(book: Ledger, decision: str, key: str = "", new: tuple[str, ...] = ()) -> None:
    for name in new:
        (book.batches / name).mkdir(exist_ok=True)
    made = {"stage": "grpo", "key": key}
    book.add("night", decision=decision, reason="", challenger=made, new=list(new), learned=list(new))


def make(folder: Path, key: str) -> None:
    Store(folder).make("grpo", key, lambda place: None, {}, lambda: None)


def test_a_champion_whose_checkpoint_is_gone_does_not_come_back(tmp_path: Path) -> None:
    book = ledger(tmp_path)
    for key in ("k1", "k2"):
        night(book, "promoted", key)
    with pytest.raises(DataError, match="the champion before, grpo/k1, is not in the store any more"):
        book.rollback()
    assert [one.key for one in book.champions()] == ["k1", "k2"]


def test_promotions_push_and_rollbacks_pop(tmp_path: Path) -> None:
    book = ledger(tmp_path)
    make(tmp_path, "k1")
    assert book.champion() is None
    night(book, "promoted", "k1")
    night(book, "kept", "k2")
    night(book, "promoted", "k3", ("0001-a",))
    assert [one.key for one in book.champions()] == ["k1", "k3"]
    left, came = book.rollback()
    assert (left.key, came.key) == ("k3", "k1")
    champion = book.champion()
    assert champion is not None
    assert champion.key == "k1"
    assert [row["from"] for row in book.lines() if row["event"] == "rollback"] == ["k3"]
    with pytest.raises(DataError, match="no earlier champion"):
        book.rollback()


def test_a_batch_that_was_set_aside_is_not_used_and_one_that_was_kept_is(tmp_path: Path) -> None:
    book = ledger(tmp_path)
    night(book, "kept", "k1", ("0002-plain",))
    night(book, "worse", "k2", ("0003-poison",))
    (book.batches / "0004-new").mkdir()
    assert [path.name for path in book.usable()] == ["0002-plain", "0004-new"]
    assert [path.name for path in book.undecided()] == ["0004-new"]


def test_a_refused_batch_was_never_taken_and_may_come_again(tmp_path: Path) -> None:
    book, bad = ledger(tmp_path), tmp_path / "quarantine.jsonl"
    bad.write_text("{}\n")
    for _ in range(2):  # the same rows, two nights in a row
        night(book, "refused", new=("0001-bad",))
        assert [path.name for path in book.undecided()] == ["0001-bad"]
        place = book.take_back(book.batches / "0001-bad", bad)
        assert (place / "quarantine.jsonl").is_file()
        assert book.usable() == book.undecided() == []


def test_a_line_that_a_kill_cut_short_never_happened(tmp_path: Path) -> None:
    book = ledger(tmp_path)
    night(book, "promoted", "k1")
    with (book.folder / "ledger.jsonl").open("a") as file:
        file.write('{"event": "night", "decision": "prom')
    assert len(book.lines()) == 1
    night(book, "promoted", "k2")
    assert [one.key for one in book.champions()] == ["k1", "k2"]


def test_one_night_at_a_time(tmp_path: Path) -> None:
    book = ledger(tmp_path)
    with book.locked(), pytest.raises(NightInProgress, match="another night"), ledger(tmp_path).locked():
        pass


def test_a_line_about_a_champion_that_has_left_is_not_written(tmp_path: Path) -> None:
    book = ledger(tmp_path)
    make(tmp_path, "k1")
    for key in ("k1", "k2"):
        night(book, "promoted", key)
    with book.locked():  # a night is at work
        ledger(tmp_path).rollback()
    with pytest.raises(ChampionChanged, match="another champion of farms stands by now"):
        book.add("night", standing="k2", decision="kept")
    assert [row["event"] for row in book.lines()] == ["night", "night", "rollback"]


def test_a_store_that_is_no_folder_is_one_plain_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "x")
    with pytest.raises(ResourceError, match=r"cannot write .*--store DIR"), Ledger(store, "farms").locked():
        pass


def test_a_store_knows_its_recipes(tmp_path: Path) -> None:
    night(ledger(tmp_path), "promoted", "k1")
    assert list(ledgers(Store(tmp_path))) == ["farms"]
