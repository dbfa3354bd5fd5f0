"""Five nights of a deployment, with real training: incremental, poisoned twice, promoted when better, rolled back."""

import json
import warnings
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.prefect.remote import run_elsewhere
from pipelines.core.errors import DataError
from pipelines.core.store import Store
from pipelines.nightly.ledger import Ledger
from pipelines.recipe import recipes
from tests.nightly import farms
from tests.services.conftest import end

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]
MODEL = "sqltrain-miniature"
NEW = farms.named("n", 60)


class Nights:
    """A recipe with its inbox and a store of its own, run by the deployment that cron runs."""

    def __init__(self, site, folder):
        self.site, self.folder, self.store = site, folder, folder / "store"
        base = farms.questions(folder / "base", "base.jsonl", farms.named("b", 20), [0, 1])
        self.overrides = farms.overrides(folder, base)
        (folder / "inbox").mkdir()

    def drop(self, file, first, families, poison=()):
        farms.questions(self.folder / "inbox", file, NEW[first : first + 20], families, poison)

    def run(self, **more):
        places = {"store": str(self.store), "inbox": str(self.folder / "inbox")}
        done = self.site.deployment_run("retrain/nightly", self.overrides, "--watch", **places, **more)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return done.returncode, self.lines()[-1]

    def lines(self):
        path = self.store / "nightly" / "miniature" / "ledger.jsonl"
        assert path.is_file(), self.site.newest_run()["state"]["message"]
        return [json.loads(line) for line in path.read_text().splitlines()]

    def follow(self, nights):
        """Skip a test that goes on from nights of this file's other tests, where those were not asked for."""
        if not (self.store / "nightly").is_dir() or sum(line["event"] == "night" for line in self.lines()) < nights:
            pytest.skip("goes on from the nights before it: pytest -m services tests/services/test_nightly.py")

    def command(self, line):
        done = self.site.run(line)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def aliases(self):
        from mlflow import MlflowClient

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations inside MLflow and SQLAlchemy
            client = MlflowClient(f"sqlite:///{self.store / 'mlflow.db'}")
            found = {name: client.get_model_version_by_alias(MODEL, name) for name in ("champion", "challenger")}
        return {name: version.tags["key"] for name, version in found.items()}

    def made(self, line):
        return {name.partition("/")[0]: self.store / name for name in line["made"]}


@pytest.fixture(scope="module")
def nights(site, tmp_path_factory):
    return Nights(site, tmp_path_factory.mktemp("nights"))


def metrics(folder):
    return json.loads((folder / "metrics.json").read_text())


def test_the_first_night_makes_a_champion_on_the_gpu_pool(nights):
    worker = nights.site.start("gpu-worker")
    try:
        code, line = nights.run(gpu_pool=True)
    finally:
        end(worker)
    assert (code, line["decision"]) == (0, "promoted")
    elsewhere = nights.site.newest_run("make")
    assert (elsewhere["work_pool_name"], elsewhere["state"]["type"]) == ("gpu", "COMPLETED")
    assert {name.partition("/")[0] for name in line["made"]} >= {"model", "sft", "evaluate_sft"}
    assert nights.aliases() == {"champion": line["challenger"]["key"], "challenger": line["challenger"]["key"]}


def test_a_breach_on_the_gpu_pool_comes_back_as_one(nights):
    """A batch is refused for it; any other error leaves it for the next night."""
    poisoned = farms.questions(
        nights.folder / "base", "poisoned.jsonl", farms.named("b", 20), [0, 1], ["SELECT 1 FROM x"]
    )
    recipe = recipes.load("miniature", [*nights.overrides, f"data.sft.path={poisoned}", "data.max_bad_share=0"])
    parameters = {"name": "miniature", "recipe": recipe.model_dump(mode="json"), "store": str(nights.store)}
    known = {"PREFECT_API_URL": PREFECT_API_URL, "PREFECT_API_AUTH_STRING": PREFECT_API_AUTH_STRING}
    settings = {setting: nights.site.environment[name] for name, setting in known.items()}
    worker = nights.site.start("gpu-worker")
    try:
        with temporary_settings(settings), pytest.raises(DataError, match=r"1 of 40 rows.* See its flow run"):
            run_elsewhere("make/gpu", {**parameters, "given": {}, "stages": ["data"]}, print)
    finally:
        end(worker)
    assert nights.site.newest_run("make")["state"]["name"] == "Refused"


def test_a_better_night_is_promoted_for_work_on_new_questions_alone(nights):
    nights.drop("monday.jsonl", 0, [2, 3])
    code, line = nights.run(since="2000-01-01")  # as the replay of the day of that file
    print(json.dumps(line, indent=1))
    assert (code, line["decision"]) == (0, "promoted")
    assert line["numbers"]["low"] > 0
    made = nights.made(line)
    new = ["data", "evaluate_sft", "filter", "gold_schema", "leakage", "model", "sft", "synthesize"]
    assert sorted(made) == new
    assert len(line["made"]) == len(made)  # one of each: of the new batch, and the one challenger
    assert metrics(made["synthesize"])["trajectories"] == 40
    assert metrics(made["filter"])["kept"] == 40
    shown = nights.site.newest_run()
    assert shown["state"]["name"] == "Promoted"
    found = nights.site.api(
        "artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [shown["id"]]}, "key": {"any_": ["decision"]}}}
    )
    assert "PROMOTED" in found[0]["data"]


def test_a_night_with_broken_gold_is_stopped_by_the_contract(nights):
    before = nights.aliases()
    nights.drop("tuesday.jsonl", 20, [2, 3], poison=("SELECT size FROM nowhere",) * 4)
    code, line = nights.run()
    assert (code, line["decision"]) == (1, "refused")
    assert "4 of 40 rows" in line["reason"]
    assert nights.aliases() == before
    nights.drop("tuesday.jsonl", 20, [2, 3])  # the four are mended: all forty rows come with the next night


@pytest.mark.slow  # CI decides on such nights without a server: tests/nightly
def test_a_night_whose_gold_is_wrong_and_runs_is_not_promoted(nights):
    nights.follow(3)
    before = nights.aliases()["champion"]
    nights.drop("wednesday.jsonl", 20, [0, 1], poison=(farms.WRONG,) * 4)
    code, line = nights.run()
    print(json.dumps(line, indent=1))
    assert (code, line["decision"] in ("kept", "worse")) == (0, True)
    assert line["rows"] == 80
    assert nights.aliases()["champion"] == before


@pytest.mark.slow
def test_a_better_night_after_bad_ones_is_promoted(nights):
    nights.follow(4)
    nights.drop("thursday.jsonl", 40, [4, 5])
    code, line = nights.run()
    print(json.dumps(line, indent=1))
    assert (code, line["decision"]) == (0, "promoted")
    assert metrics(nights.made(line)["synthesize"])["trajectories"] == 40


def test_rollback_is_one_command_and_lasts(nights):
    promoted = [line["challenger"]["key"] for line in nights.lines() if line.get("decision") == "promoted"]
    assert len(promoted) >= 2
    (nights.folder / "inbox" / "tuesday.jsonl").unlink(missing_ok=True)  # the mended batch, where no night has taken it
    nights.command(f"sqltrain champion rollback miniature --store={nights.store}")
    assert nights.aliases()["champion"] == promoted[-2]
    code, line = nights.run()  # nothing new: nothing is done
    assert (code, line["decision"]) == (0, "nothing")
    assert nights.aliases()["champion"] == promoted[-2]
    status = nights.command(f"sqltrain status --store {nights.store}")
    assert f"champion sft/{promoted[-2]}" in status
    assert status.count("●") >= len(promoted)


def test_a_person_promotes_from_staging_to_prod_by_a_deployment(nights, tmp_path):
    store = Store(tmp_path / "store")
    for key, tier in (("k1", "prod"), ("k2", "staging")):
        store.make("sft", key, lambda folder: None, {}, lambda: None)
        made = {"challenger": {"stage": "sft", "key": key}, "numbers": {}, "learned": [], "new": []}
        Ledger(store, "miniature").add("night", decision="promoted", reason="better", tier=tier, **made)
    for code, name, message in ((0, "Promoted", "sft/k2"), (1, "Failed", "sft/k2 is prod's champion already")):
        command = f"prefect deployment run promote/prod --watch --param store={tmp_path}/store"
        assert nights.site.run(command).returncode == code
        state = nights.site.newest_run("promote")["state"]
        assert (state["name"], message in state["message"]) == (name, True)
    assert [champion.key for champion in Ledger(store, "miniature").champions()] == ["k1", "k2"]


def test_gc_leaves_what_the_champion_needs(nights):
    nights.command(f"sqltrain store gc --days 0 --delete --store {nights.store}")
    nights.command(f"sqltrain store verify --store {nights.store}")
    shown = json.loads(nights.command(f"sqltrain champion show miniature --store={nights.store} --json"))
    assert all(Path(one["model"], "config.json").is_file() for one in shown["champions"])
