"""The ledger: the champion is what its lines say, after a rollback, a torn line, and a pull from object storage."""

import json
import shutil

import pytest

from pipelines.core.errors import DataError, ResourceError
from pipelines.core.store import Store
from pipelines.core.store_remote import Remote
from pipelines.nightly import inbox, ledger_remote
from pipelines.nightly.ledger import NOBODY, ChampionChanged, Ledger, NightInProgress, ledgers
from pipelines.nightly.store_status import store_status
from pipelines.recipe import recipes
from pipelines.recipe.config import Nightly
from pipelines.stages import train
from pipelines.stages.context import Context, Silent, checkpoint_of
from tests.nightly import farms


def ledger(folder):
    made = Ledger(Store(folder), "farms")
    made.batches.mkdir(parents=True, exist_ok=True)
    return made


def night(book, decision, key="", new=(), **facts):
    for name in new:
        (book.batches / name).mkdir(exist_ok=True)
    made = {"stage": "grpo", "key": key}
    book.add("night", decision=decision, reason="", challenger=made, new=list(new), learned=list(new), **facts)


def make(folder, key):
    Store(folder).make("grpo", key, lambda place: None, {}, lambda: None)


def test_a_champion_whose_checkpoint_is_gone_does_not_come_back(tmp_path):
    book = ledger(tmp_path)
    for key in ("k0", "k1", "k2"):
        night(book, "promoted", key)
    with pytest.raises(DataError, match="the champion before, grpo/k1, is not in the store any more"):
        book.rollback()
    assert [one.key for one in book.champions()] == ["k0", "k1", "k2"]


def test_promotions_push_and_rollbacks_pop(tmp_path):
    book = ledger(tmp_path)
    make(tmp_path, "k1")
    assert book.champion() is None
    night(book, "promoted", "k1")
    night(book, "kept", "k2")
    night(book, "promoted", "k3", ("0001-a",))
    assert [one.key for one in book.champions()] == ["k1", "k3"]
    left, came = book.rollback()
    assert (left.key, came.key) == ("k3", "k1")
    assert book.champion().key == "k1"
    assert [row["from"] for row in book.lines() if row["event"] == "rollback"] == ["k3"]
    with pytest.raises(DataError, match="no earlier champion"):
        book.rollback()


def test_staging_has_champions_of_its_own_and_what_prod_rolls_back_leaves_it_too(tmp_path):
    book = ledger(tmp_path)
    keys = lambda: [[champion.key for champion in book.champions(tier)] for tier in ("prod", "staging")]  # noqa: E731
    for key in ("k1", "k2", "k3"):
        make(tmp_path, key)
    night(book, "promoted", "k1")
    with pytest.raises(DataError, match="farms has no champion of staging"):
        book.promote()
    assert book.incumbent("staging").key == "k1"
    for key in ("k2", "k3"):
        night(book, "promoted", key, tier="staging")
    assert keys() == [["k1"], ["k2", "k3"]]
    book.promote()
    assert keys() == [["k1", "k3"], ["k2", "k3"]]
    with pytest.raises(DataError, match="grpo/k3 is prod's champion already"):
        book.promote()
    book.rollback("staging")
    assert keys() == [["k1", "k3"], ["k2"]]
    with pytest.raises(DataError, match="no earlier champion of farms in staging"):
        book.rollback("staging")
    book.promote()
    book.rollback()
    assert keys() == [["k1", "k3"], []]


def test_a_batch_that_was_set_aside_is_not_used_and_one_that_was_kept_is(tmp_path):
    book = ledger(tmp_path)
    night(book, "kept", "k1", ("0002-plain",))
    night(book, "worse", "k2", ("0003-poison",))
    (book.batches / "0004-new").mkdir()
    assert [path.name for path in book.usable()] == ["0002-plain", "0004-new"]
    assert [path.name for path in book.undecided()] == ["0004-new"]


def test_a_refused_batch_was_never_taken_and_may_come_again(tmp_path):
    book, bad = ledger(tmp_path), tmp_path / "quarantine.jsonl"
    bad.write_text("{}\n")
    for _ in range(2):  # the same rows, two nights in a row
        night(book, "refused", new=("0001-bad",))
        assert [path.name for path in book.undecided()] == ["0001-bad"]
        assert (book.take_back(book.batches / "0001-bad", bad) / "quarantine.jsonl").is_file()
        assert book.usable() == book.undecided() == []


def test_a_line_that_a_kill_cut_short_never_happened(tmp_path):
    book = ledger(tmp_path)
    night(book, "promoted", "k1")
    with (book.folder / "ledger.jsonl").open("a") as file:
        file.write('{"event": "night", "decision": "prom')
    assert len(book.lines()) == 1
    night(book, "promoted", "k2")
    assert [one.key for one in book.champions()] == ["k1", "k2"]
    (book.folder / "ledger.jsonl").write_text('{"at": "2026"}\n')  # edited by hand
    with pytest.raises(DataError, match="a line is not one of a ledger"):
        book.champion()


def test_one_night_at_a_time(tmp_path):
    book = ledger(tmp_path)
    with book.locked(), pytest.raises(NightInProgress, match="another night"), ledger(tmp_path).locked():
        pass
    night(ledger(tmp_path), "promoted", "k1")
    assert list(ledgers(Store(tmp_path))) == ["farms"]
    (tmp_path / "file").touch()
    store = Store(tmp_path / "file" / "x")
    with pytest.raises(ResourceError, match=r"cannot write .*--store DIR"), Ledger(store, "farms").locked():
        pass


def test_a_line_about_a_champion_that_has_left_is_not_written(tmp_path):
    book = ledger(tmp_path)
    make(tmp_path, "k1")
    for key in ("k1", "k2"):
        night(book, "promoted", key)
    with book.locked():  # a night is at work
        ledger(tmp_path).rollback()
    with pytest.raises(ChampionChanged, match="another champion of farms stands by now"):
        book.add("night", standing="k2", decision="kept")
    with pytest.raises(ChampionChanged):
        ledger(tmp_path / "without").add("night", standing="k2", decision="kept")
    assert [row["event"] for row in book.lines()] == ["night", "night", "rollback"]


def test_a_line_decided_without_a_champion_is_not_written_beside_one_that_came_meanwhile(tmp_path):
    """A person promotes from staging while the first night of prod is at work."""
    book = ledger(tmp_path)
    make(tmp_path, "k1")
    night(book, "promoted", "k1", tier="staging")
    assert book.incumbent("prod") is None
    book.promote()
    with pytest.raises(ChampionChanged, match="another champion of farms stands by now"):
        night(book, "promoted", "k2", standing=NOBODY)
    night(book, "refused")  # it is about no champion
    assert book.champion().key == "k1"
    other = ledger(tmp_path / "other")
    night(other, "promoted", "k3", standing=NOBODY)
    assert other.champion().key == "k3"


DECIDED = {"at": "2026-11-01T02:00:00Z", "reason": "", "new": []}
MADE = {"challenger": {"stage": "sft", "key": "k1"}, "learned": []}


@pytest.mark.parametrize(
    "line",
    [
        {"event": "party", "at": "2026-11-01T02:00:00Z"},
        {"event": ["night"]},
        {"event": "night", **DECIDED},
        {"event": "night", "decision": "kept", **DECIDED, "at": None},
        {"event": "night", "decision": "kept", "at": "2026-11-01T02:00:00Z", "new": []},
        {"event": "night", "decision": "kept", "at": "2026-11-01T02:00:00Z", "reason": ""},
        {"event": "night", "decision": "kept", **DECIDED, "new": "0001-a"},
        {"event": "night", "decision": "kept", **DECIDED, "new": [["0001-a"]]},
        {"event": "night", "decision": "better", **DECIDED},
        {"event": "night", "decision": "kept", **DECIDED, "numbers": []},
        {"event": "night", "decision": "kept", **DECIDED, "challenger": {"stage": "sft"}},
        {"event": "night", "decision": "promoted", **DECIDED, "learned": []},
        {"event": "promotion", "decision": "promoted", **DECIDED, "challenger": {"stage": "sft", "key": "k1"}},
        {"event": "promotion", **DECIDED, **MADE},
        {"event": "rollback", "at": "2026-11-01T02:00:00Z", "to": "k1"},
        {"event": "rollback", "at": "2026-11-01T02:00:00Z", "from": "k1"},
    ],
)
def test_a_line_without_the_fields_of_its_event_is_damage_and_no_traceback(tmp_path, line):
    book = ledger(tmp_path)
    night(book, "promoted", "k1")
    with (book.folder / "ledger.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    for read in (book.champions, book.withdrawn, lambda: store_status(Store(tmp_path))):
        with pytest.raises(DataError, match=r"ledger\.jsonl is damaged: a line is not one of a ledger\. Mend it"):
            read()


def collected(tmp_path, store, kind):
    farms.questions(tmp_path / "inbox", f"{kind}.jsonl", farms.named(kind, 2), [0, 1])
    batch = inbox.freeze_batch(Nightly(inbox=str(tmp_path / "inbox")), Ledger(store, "farms").batches)
    assert batch is not None
    return batch


@pytest.fixture
def here(tmp_path):
    """A store with two nights and one batch of four rows."""
    store = Store(tmp_path / "here")
    book = Ledger(store, "farms")
    batch = collected(tmp_path, store, "n")
    made = {"stage": "sft", "key": "k1"}
    book.add("night", decision="promoted", reason="", challenger=made, new=[batch.name], learned=[batch.name])
    book.add("night", decision="nothing", reason="", new=[])
    return store


@pytest.fixture
def remote(tmp_path):
    return Remote((tmp_path / "remote").as_uri())


def test_after_a_pull_there_is_the_champion_and_nothing_is_new(tmp_path, here, remote):
    said = []
    ledger_remote.push_nights(remote, here, said.append)
    there = Store(tmp_path / "there")
    ledger_remote.pull_nights(remote, there, said.append)
    assert said == ["nights of farms: 2 pushed", "nights of farms: 2 pulled"]
    champion = Ledger(there, "farms").champion()
    assert (champion.stage, champion.key) == ("sft", "k1")
    batches = Ledger(there, "farms").batches
    assert inbox.freeze_batch(Nightly(inbox=str(tmp_path / "inbox")), batches) is None
    (batch,) = batches.glob("[0-9]*")
    assert (batch / "n00.sqlite").is_file()
    ledger_remote.pull_nights(remote, there, said.append)
    ledger_remote.push_nights(remote, there, said.append)
    assert len(said) == 2  # nothing is new on either side


def test_a_pull_that_was_cut_short_is_gone_on_with(tmp_path, here, remote, monkeypatch):
    """Half a file is none; links that a list of links names are made, however early the pull before it ended."""
    ledger_remote.push_nights(remote, here, lambda line: None)
    there, get = Store(tmp_path / "there"), Remote.get

    def cut(remote, name, path):
        get(remote, name, path)
        if name.endswith("questions.jsonl"):
            path.write_bytes(path.read_bytes()[:10])
            raise KeyboardInterrupt

    monkeypatch.setattr(Remote, "get", cut)
    with pytest.raises(KeyboardInterrupt):
        ledger_remote.pull_nights(remote, there, lambda line: None)
    monkeypatch.setattr(Remote, "get", get)
    for link in Ledger(there, "farms").batches.rglob("*.sqlite"):
        link.unlink()
    ledger_remote.pull_nights(remote, there, lambda line: None)
    (batch,), (whole,) = (Ledger(store, "farms").batches.glob("[0-9]*") for store in (there, here))
    assert (batch / "questions.jsonl").read_bytes() == (whole / "questions.jsonl").read_bytes()
    assert (batch / "n00.sqlite").is_symlink()


def test_ledgers_that_have_parted_are_not_mixed(tmp_path, here, remote):
    ledger_remote.push_nights(remote, here, lambda line: None)
    there = Store(tmp_path / "there")
    ledger_remote.pull_nights(remote, there, lambda line: None)
    Ledger(here, "farms").add("night", decision="kept", reason="", new=[])
    ledger_remote.push_nights(remote, here, lambda line: None)
    Ledger(there, "farms").add("night", decision="worse", reason="", new=[])
    for move in (ledger_remote.push_nights, ledger_remote.pull_nights):
        with pytest.raises(DataError, match="have parted"):
            move(remote, there, lambda line: None)


def test_a_push_behind_the_ledger_there_says_so_and_changes_nothing(tmp_path, here, remote):
    said = []
    ledger_remote.push_nights(remote, here, said.append)
    there = Store(tmp_path / "there")
    ledger_remote.pull_nights(remote, there, said.append)
    Ledger(here, "farms").add("night", decision="kept", reason="", new=[])
    ledger_remote.push_nights(remote, here, said.append)
    before = remote.read("nightly/farms/ledger.jsonl")
    ledger_remote.push_nights(remote, there, said.append)
    assert said[-1] == "not pushed: the nights of farms, which have gone on further there; pull them"
    assert remote.read("nightly/farms/ledger.jsonl") == before


def test_nights_of_a_name_that_no_store_takes_are_not_pulled_without_a_word(tmp_path, here, remote):
    ledger_remote.push_nights(remote, here, lambda line: None)
    remote.put(remote.read("nightly/farms/ledger.jsonl"), "nightly/two words/ledger.jsonl")
    said = []
    ledger_remote.pull_nights(remote, Store(tmp_path / "there"), said.append)
    assert said[0] == "nights of farms: 2 pulled"
    assert said[1].startswith("not pulled: the nights of 'two words', whose name ")
    assert list(ledgers(Store(tmp_path / "there"))) == ["farms"]


def test_nights_travel_again_and_a_line_that_a_kill_cut_short_does_not(tmp_path, here, remote):
    there, half = Store(tmp_path / "there"), '{"event": "night", "reason": "ü'.encode()[:-1]
    for _ in range(2):
        for side in (here, there):
            Ledger(side, "farms").folder.mkdir(parents=True, exist_ok=True)
            with (Ledger(side, "farms").folder / "ledger.jsonl").open("ab") as file:
                file.write(half)
        ledger_remote.push_nights(remote, here, lambda line: None)
        ledger_remote.pull_nights(remote, there, lambda line: None)
        assert Ledger(there, "farms").lines() == Ledger(here, "farms").lines()
        Ledger(here, "farms").add("night", decision="kept", reason="", new=[])


def test_a_batch_is_pushed_only_when_a_night_has_decided_on_it(tmp_path, here, remote):
    said = []
    with Ledger(here, "farms").locked():
        ledger_remote.push_nights(remote, here, said.append)
    assert said == ["not pushed: the nights of farms, of which one is at work; push again when it is over"]
    assert remote.files_below("nightly") == {}
    batch = collected(tmp_path, here, "m")
    ledger_remote.push_nights(remote, here, lambda line: None)
    pushed = {name.split("/")[1] for name in remote.files_below("nightly/farms") if name.startswith("batches/")}
    assert pushed == {path.name for path in Ledger(here, "farms").batches.glob("0001-*")}
    Ledger(here, "farms").add("night", decision="kept", reason="", new=[batch.name])
    ledger_remote.push_nights(remote, here, lambda line: None)
    assert remote.read(f"nightly/farms/batches/{batch.name}/rows.json") == (batch / "rows.json").read_bytes()


def test_nights_are_not_pulled_over_one_that_is_at_work(tmp_path, here, remote):
    Ledger(here, "farms").add("night", decision="nothing", reason="", new=[])
    Ledger(here, "fields").add("night", decision="nothing", reason="", new=[])
    ledger_remote.push_nights(remote, here, lambda line: None)
    there = Store(tmp_path / "there")
    said = []
    with Ledger(there, "farms").locked():
        ledger_remote.pull_nights(remote, there, said.append)
    assert said == [
        "not pulled: the nights of farms, of which one is at work; pull again when it is over",
        "nights of fields: 1 pulled",
    ]


def test_rows_that_a_night_left_out_replace_those_that_travelled_before_it(tmp_path, here, remote):
    batch, there = collected(tmp_path, here, "m"), Store(tmp_path / "there")
    content = (batch / inbox.QUESTIONS).read_bytes()
    remote.put(batch / inbox.QUESTIONS, f"nightly/farms/batches/{batch.name}/questions.jsonl")
    copy = Ledger(there, "farms").batches / batch.name / inbox.QUESTIONS
    copy.parent.mkdir(parents=True)
    copy.write_bytes(content)
    assert inbox.set_held_out_aside(batch, {json.loads(content.splitlines()[0])["id"]: "held out"})
    Ledger(here, "farms").add("night", decision="kept", reason="", new=[batch.name])
    ledger_remote.push_nights(remote, here, lambda line: None)
    ledger_remote.pull_nights(remote, there, lambda line: None)
    assert len(copy.read_bytes().splitlines()) == 3
    assert len(inbox.held_out_rows(copy.parent)) == 1


def test_a_batch_that_the_ledger_there_does_not_name_is_not_pulled(tmp_path, here, remote):
    refused, there = collected(tmp_path, here, "m"), Store(tmp_path / "there")
    ledger_remote.push_nights(remote, here, lambda line: None)
    for name in ("questions.jsonl", "rows.json"):
        remote.put(refused / name, f"nightly/farms/batches/{refused.name}/{name}")
    ledger_remote.pull_nights(remote, there, lambda line: None)
    assert [path.name[:4] for path in Ledger(there, "farms").batches.iterdir()] == ["0001"]


@pytest.mark.parametrize(
    "links", ['{".questions.jsonl.partial": "%s"}', '{"questions.jsonl": "%s"}', '{"../b": "%s"}', '["%s"]', '{"a": 1}']
)
def test_the_links_of_a_batch_lead_no_file_out_of_it(tmp_path, here, remote, links):
    """Whoever can write to the remote must not be able to write a file of the user's."""
    own, there = tmp_path / "own.txt", Store(tmp_path / "there")
    own.write_text("mine")
    ledger_remote.push_nights(remote, here, lambda line: None)
    (batch,) = Ledger(here, "farms").batches.glob("0001-*")
    (tmp_path / "links.json").write_text(links.replace("%s", str(own)))
    remote.put(tmp_path / "links.json", f"nightly/farms/batches/{batch.name}/links.json")
    for _ in range(2):
        with pytest.raises(DataError, match="is refused"):
            ledger_remote.pull_nights(remote, there, lambda line: None)
    assert own.read_text() == "mine"
    assert Ledger(there, "farms").lines() == []


def test_a_database_in_a_hidden_folder_of_the_inbox_comes_along(tmp_path, here, remote):
    there = Store(tmp_path / "there")
    ledger_remote.push_nights(remote, here, lambda line: None)
    (batch,) = Ledger(here, "farms").batches.glob("0001-*")
    (tmp_path / "links.json").write_text(json.dumps({".databases/shop.sqlite": "/data/shop.sqlite"}))
    remote.put(tmp_path / "links.json", f"nightly/farms/batches/{batch.name}/links.json")
    ledger_remote.pull_nights(remote, there, lambda line: None)
    link = Ledger(there, "farms").batches / batch.name / ".databases" / "shop.sqlite"
    assert str(link.readlink()) == "/data/shop.sqlite"


def test_a_pull_does_not_write_through_a_link_in_the_place_of_its_own_file(tmp_path, here, remote):
    own, there = tmp_path / "own.txt", Store(tmp_path / "there")
    own.write_text("mine")
    ledger_remote.push_nights(remote, here, lambda line: None)
    (batch,) = Ledger(here, "farms").batches.glob("0001-*")
    left = Ledger(there, "farms").batches / batch.name / ".questions.jsonl.partial"
    left.parent.mkdir(parents=True)
    left.symlink_to(own)
    ledger_remote.pull_nights(remote, there, lambda line: None)
    assert own.read_text() == "mine"
    assert (left.parent / "questions.jsonl").read_bytes() == (batch / "questions.jsonl").read_bytes()


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{",
        '{"event": "night"}',
        '{"event": "night", "decision": "promoted", "learned": [], "new": []}',
        '{"event": "night", "decision": "promoted", "learned": [], "new": [], "challenger": {"stage": "..", "key": 0}}',
        '{"event": "night", "at": "", "reason": "", "decision": "kept", "new": [[]]}',
        '{"event": "rollback"}',
    ],
)
def test_what_is_no_ledger_is_refused(tmp_path, remote, line):
    (tmp_path / "ledger.jsonl").write_text(f"{line}\n")
    remote.put(tmp_path / "ledger.jsonl", "nightly/farms/ledger.jsonl")
    with pytest.raises(DataError, match="it is not a ledger"):
        ledger_remote.pull_nights(remote, Store(tmp_path / "there"), lambda line: None)


def test_a_reference_to_a_checkpoint_of_the_store_survives_its_move(tmp_path):
    weights = tmp_path / "old" / "sft" / "k1" / "model"
    weights.mkdir(parents=True)
    work = tmp_path / "old" / "model" / "k2"
    work.mkdir(parents=True)
    train.model(Context("model", recipes.load("miniature", [f"model.source={weights}"]), work, {}, Silent()))
    assert checkpoint_of(work) == str(weights)
    shutil.move(tmp_path / "old", tmp_path / "new")
    assert checkpoint_of(tmp_path / "new" / "model" / "k2") == str(tmp_path / "new" / "sft" / "k1" / "model")
    assert "old" not in (tmp_path / "new" / "model" / "k2" / "reference.json").read_text()
