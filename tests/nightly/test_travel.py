"""Nights on object storage: after a pull the champion is champion, and no row of a batch is new again."""

import shutil
from pathlib import Path

import pytest

from pipelines import recipes
from pipelines.config import Nightly
from pipelines.errors import DataError
from pipelines.nightly import inbox, travel
from pipelines.nightly.ledger import Ledger
from pipelines.remote import Remote
from pipelines.stages import train
from pipelines.stages.context import Context, Silent, checkpoint_of
from pipelines.store import Store

from . import farms


@pytest.fixture
def here(tmp_path: Path) -> Store:
    """A store with two nights and one batch of four rows."""
    store = Store(tmp_path / "here")
    book = Ledger(store, "farms")
    farms.questions(tmp_path / "inbox", "new.jsonl", farms.named("n", 2), [0, 1])
    batch = inbox.collect(Nightly(inbox=str(tmp_path / "inbox")), book.batches)
    assert batch is not None
    made = {"stage": "sft", "key": "k1"}
    book.add("night", decision="promoted", reason="", challenger=made, new=[batch.name], learned=[batch.name])
    book.add("night", decision="nothing", reason="", new=[])
    return store


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    return Remote((tmp_path / "remote").as_uri())


def test_after_a_pull_there_is_the_champion_and_nothing_is_new(tmp_path: Path, here: Store, remote: Remote) -> None:
    said: list[str] = []
    travel.push(remote, here, said.append)
    there = Store(tmp_path / "there")
    travel.pull(remote, there, said.append)
    assert said == ["pushed 2 nights of farms", "pulled 2 nights of farms"]
    champion = Ledger(there, "farms").champion()
    assert champion is not None
    assert (champion.stage, champion.key) == ("sft", "k1")
    batches = Ledger(there, "farms").batches
    assert inbox.collect(Nightly(inbox=str(tmp_path / "inbox")), batches) is None
    (batch,) = batches.glob("[0-9]*")
    assert (batch / "n00.sqlite").is_file()
    travel.pull(remote, there, said.append)
    travel.push(remote, there, said.append)
    assert len(said) == 2  # nothing is new on either side


def test_a_pull_that_was_cut_short_is_gone_on_with(
    tmp_path: Path, here: Store, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a file is none; links that a list of links names are made, however early the pull before it ended."""
    travel.push(remote, here, lambda line: None)
    there, get = Store(tmp_path / "there"), Remote.get

    def cut(remote: Remote, name: str, path: Path) -> None:
        get(remote, name, path)
        if name.endswith("questions.jsonl"):
            path.write_bytes(path.read_bytes()[:10])
            raise KeyboardInterrupt

    monkeypatch.setattr(Remote, "get", cut)
    with pytest.raises(KeyboardInterrupt):
        travel.pull(remote, there, lambda line: None)
    monkeypatch.setattr(Remote, "get", get)
    for link in Ledger(there, "farms").batches.rglob("*.sqlite"):
        link.unlink()
    travel.pull(remote, there, lambda line: None)
    (batch,), (whole,) = (Ledger(store, "farms").batches.glob("[0-9]*") for store in (there, here))
    assert (batch / "questions.jsonl").read_bytes() == (whole / "questions.jsonl").read_bytes()
    assert (batch / "n00.sqlite").is_symlink()


def test_ledgers_that_have_parted_are_not_mixed(tmp_path: Path, here: Store, remote: Remote) -> None:
    travel.push(remote, here, lambda line: None)
    there = Store(tmp_path / "there")
    travel.pull(remote, there, lambda line: None)
    Ledger(here, "farms").add("night", decision="kept", reason="", new=[])
    travel.push(remote, here, lambda line: None)
    Ledger(there, "farms").add("night", decision="worse", reason="", new=[])
    for move in (travel.push, travel.pull):
        with pytest.raises(DataError, match="have parted"):
            move(remote, there, lambda line: None)


def test_a_reference_to_a_checkpoint_of_the_store_survives_its_move(tmp_path: Path) -> None:
    weights = tmp_path / "old" / "sft" / "k1" / "model"
    weights.mkdir(parents=True)
    work = tmp_path / "old" / "model" / "k2"
    work.mkdir(parents=True)
    recipe = recipes.load("miniature", [f"model.source={weights}"])
    train.model(Context("model", recipe, work, {}, Silent()))
    assert checkpoint_of(work) == str(weights)
    shutil.move(tmp_path / "old", tmp_path / "new")
    assert checkpoint_of(tmp_path / "new" / "model" / "k2") == str(tmp_path / "new" / "sft" / "k1" / "model")
    assert "old" not in (tmp_path / "new" / "model" / "k2" / "reference.json").read_text()
