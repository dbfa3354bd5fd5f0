"""The registry mirrors the ledger: aliases and tags by reference; one that fails is one plain line."""

import shutil

import pytest

from pipelines.core.store import Store
from pipelines.nightly.ledger import Ledger
from tasks import mlflow_client, models

NAME = "sqltrain-farms"


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    folder = tmp_path_factory.mktemp("registry")
    client = mlflow_client.connect(f"sqlite:///{folder / 'mlflow.db'}", folder)
    client.create_registered_model(NAME)
    for key in ("k1", "k2", "k3"):
        client.create_model_version(NAME, f"file:///store/sft/{key}/model", tags={"key": key})
    return folder / "mlflow.db"


@pytest.fixture
def store(tmp_path, database, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copy(database, tmp_path)
    return Store(tmp_path)


def alias(store, name):
    """The key that an alias stands for, and the tags that tell of a decision."""
    version = mlflow_client.connect(f"sqlite:///{store.root / 'mlflow.db'}", store.root).get_model_version_by_alias(
        NAME, name
    )
    return version.tags["key"], {tag: text for tag, text in version.tags.items() if tag.startswith("decision")}


def decided(store, key, decision, **facts):
    Ledger(store, "farms").add(
        "night",
        decision=decision,
        reason=f"{decision} for a reason",
        numbers={"difference": 0.25, "level/hard": -0.015},
        challenger={"stage": "sft", "key": key},
        new=[],
        learned=[],
        **facts,
    )


def night(store, key, decision):
    decided(store, key, decision)
    models.announce_champion("farms", store, pytest.fail)


def test_aliases_follow_the_ledger_and_the_decision_is_tagged(store):
    night(store, "k1", "promoted")
    night(store, "k2", "kept")
    assert alias(store, "champion")[0] == "k1"
    key, tags = alias(store, "challenger")
    assert key == "k2"
    assert tags == {
        "decision": "kept",
        "decision_reason": "kept for a reason",
        "decision_difference": "0.25",
        "decision_level.hard": "-0.015",
    }
    night(store, "k3", "promoted")
    assert alias(store, "champion")[0] == alias(store, "challenger")[0] == "k3"
    store.make("sft", "k1", lambda folder: None, {}, lambda: None)
    Ledger(store, "farms").rollback()
    models.announce_champion("farms", store, pytest.fail)
    assert alias(store, "champion")[0] == "k1"


def test_the_alias_staging_follows_the_champion_of_staging(store):
    for key in ("k1", "k2"):
        store.make("sft", key, lambda folder: None, {}, lambda: None)
    night(store, "k1", "promoted")
    decided(store, "k2", "promoted", tier="staging")
    models.announce_champion("farms", store, pytest.fail)
    assert (alias(store, "champion")[0], alias(store, "staging")[0]) == ("k1", "k2")
    Ledger(store, "farms").promote()
    models.announce_if_stale("farms", store, pytest.fail)
    assert alias(store, "champion")[0] == alias(store, "staging")[0] == "k2"
    Ledger(store, "farms").rollback()
    models.announce_if_stale("farms", store, pytest.fail)
    assert alias(store, "champion")[0] == "k1"
    with pytest.raises(Exception, match="alias staging not found"):
        alias(store, "staging")


def test_what_a_killed_night_did_not_tell_the_next_one_tells(store):
    night(store, "k1", "promoted")
    decided(store, "k2", "promoted")  # killed here: the ledger has it, the registry does not
    assert alias(store, "champion")[0] == "k1"
    Ledger(store, "farms").add("night", decision="nothing", reason="no new questions", new=[])
    models.announce_champion("farms", store, pytest.fail)
    assert alias(store, "champion")[0] == "k2"
    assert alias(store, "challenger")[1]["decision"] == "promoted"


def test_a_registry_that_cannot_be_written_or_has_no_version_is_one_line(store, tmp_path, monkeypatch):
    said = []
    decided(store, "k9", "promoted")
    models.announce_champion("farms", store, said.append)
    assert len(said) == 1
    assert "was not moved: it has no version of sft/k9. With that variable" in said[0]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/file/mlflow.db")
    models.announce_champion("farms", store, said.append)
    assert len(said) == 2
    assert "was not told" in said[1]


@pytest.fixture
def server(store, tmp_path, monkeypatch):
    """A registry that several stores share, as `alias` reads it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    return store


def test_the_aliases_belong_to_the_store_that_set_them_first(server, tmp_path):
    first, second, said = Store(tmp_path / "first"), Store(tmp_path / "second"), list[str]()
    night(first, "k1", "promoted")
    for key in ("k2", "k3"):
        decided(second, key, "promoted")
        models.announce_champion("farms", second, said.append)
    series = Ledger(second, "farms").series()
    line = f"@champion of {NAME} belongs to another store's nights: the aliases of these end with -{series}"
    assert said == [line, line]
    assert alias(server, "champion")[0] == alias(server, "challenger")[0] == "k1"
    assert alias(server, f"champion-{series}")[0] == "k3"
    assert alias(server, f"challenger-{series}")[1][f"decision_level.hard-{series}"] == "-0.015"
    shutil.copytree(first.root, tmp_path / "copy")  # as a pull makes it
    night(Store(tmp_path / "copy"), "k2", "promoted")
    assert alias(server, "champion")[0] == "k2"
    models.announce_champion("farms", first, said.append)  # which has not pulled that night
    assert "it knows later nights. Run: sqltrain store pull" in said[-1]
    assert alias(server, "champion")[0] == "k2"


def test_a_rollback_from_a_shell_without_the_address_says_so_and_the_next_look_moves_the_alias(
    server, tmp_path, monkeypatch
):
    store, said = Store(tmp_path / "first"), list[str]()
    store.make("sft", "k1", lambda folder: None, {}, lambda: None)
    night(store, "k1", "promoted")
    night(store, "k2", "promoted")
    with monkeypatch.context() as shell:
        shell.delenv("MLFLOW_TRACKING_URI")
        Ledger(store, "farms").rollback()
        models.announce_champion("farms", store, said.append)
    assert alias(server, "champion")[0] == "k2"
    where = f"@champion of {NAME} in sqlite:///{tmp_path}/mlflow.db was not moved"
    why = "MLFLOW_TRACKING_URI names another registry here. With that variable set as for the nights"
    assert said == [f"{where}: {why}, run: sqltrain champion show farms"]
    models.announce_if_stale("farms", store, pytest.fail)
    assert alias(server, "champion")[0] == "k1"
    monkeypatch.setattr(models, "announce_champion", pytest.fail)
    models.announce_if_stale("farms", store, pytest.fail)  # it is right
