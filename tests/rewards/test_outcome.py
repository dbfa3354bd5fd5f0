"""From trajectories to outcomes, with a real database and the real engine."""

import dataclasses

import pytest

from pipelines.core.registry import ANALYSES
from pipelines.core.types import (
    Action,
    ActionKind,
    Database,
    Example,
    ExecutionStatus,
    SchemaItems,
    StopReason,
    Trajectory,
    Turn,
)
from pipelines.rewards import outcome
from pipelines.rewards.outcome import make_outcomes
from pipelines.sql import analyst
from pipelines.sql.schema import introspect
from tests.fakes import build_database, engine_fixture

engine = engine_fixture(timeout_s=5)


@pytest.fixture
def example(tmp_path):
    path = tmp_path / "music.sqlite"
    build_database(path, "CREATE TABLE singer (name TEXT, kind TEXT); INSERT INTO singer VALUES ('Ann', 'STR');")
    return Example("e1", "Who?", Database("music", "sqlite", str(path)), "SELECT name FROM singer", hardness="easy")


def episode(final, stop=StopReason.SOLUTION):
    turns = (Turn("", Action(ActionKind.SOLUTION, final, "r")),) if final else ()
    return Trajectory("e1", 0, "policy", "react", (), turns, final, stop)


def judged(example, engine, *trajectories, **more):
    return make_outcomes(trajectories, {"e1": example}, engine, introspect, "strict", 10, **more)


def test_an_outcome_holds_the_verdict_and_both_queries_parts(example, engine):
    finals = ("SELECT name FROM singer", "SELECT kind FROM singer", "SELECT wages FROM singer")
    right, wrong, failed = judged(example, engine, *map(episode, finals))
    gold = SchemaItems(frozenset({"singer"}), frozenset({("singer", "name")}))
    assert (right.correct, right.executable, right.n_rows, right.predicted_schema) == (True, True, 1, gold)
    assert (wrong.correct, wrong.executable, wrong.gold_schema) == (False, True, gold)
    assert (failed.correct, failed.status, failed.broken) == (False, ExecutionStatus.ERROR, False)
    assert right.gold_bigrams == {("select", "name"), ("name", "from"), ("from", "singer")}
    half = episode("SELECT name, kind FROM singer")  # graded above 0 and below 1
    (partly,) = make_outcomes([half], {"e1": example}, engine, None, "soft_f1", 10, reads=())
    assert not partly.correct


def test_no_answer_is_wrong_and_a_broken_boundary_is_broken(example, engine):
    (none,) = judged(example, engine, episode(None, StopReason.TURN_LIMIT))
    assert (none.correct, none.status, none.broken, none.predicted_schema) == (False, None, False, None)
    assert none.predicted_bigrams == frozenset()
    (episode_broke,) = judged(example, engine, episode(None, StopReason.BROKEN))
    assert episode_broke.broken
    bad_gold = dataclasses.replace(example, gold_sql="SELECT nothing FROM nowhere")
    (gold_broke,) = judged(bad_gold, engine, episode("SELECT 1"))
    assert gold_broke.broken


def test_the_consensus_gold_schema_wins_over_the_gold_sqls_own(example, engine):
    agreed = SchemaItems(frozenset({"singer"}), frozenset({("singer", "name"), ("singer", "kind")}))
    (given,) = judged(example, engine, episode("SELECT 1"), gold_schemas={"e1": agreed})
    (withheld,) = judged(example, engine, episode("SELECT 1"), gold_schemas={})
    assert (given.gold_schema, withheld.gold_schema) == (agreed, None)


def test_a_gold_query_is_analysed_once(example, engine, monkeypatch):
    asked = []
    for name in ("schema_items", "hardness"):
        real = getattr(analyst, name)

        def ask(queries, name=name, real=real):
            asked.extend((name, query[0]) for query in queries)
            return real(queries)

        monkeypatch.setattr(analyst, name, ask)
    example = dataclasses.replace(example, hardness=None)
    gold, other = example.gold_sql, "SELECT kind FROM singer"
    (none,) = judged(example, engine, episode(other), reads=())
    assert asked == []
    assert (none.correct, none.executable, none.hardness, none.gold_items) == (False, True, None, None)
    assert none.predicted_bigrams == none.gold_bigrams == frozenset()
    (own,) = judged(example, engine, episode(other), reads={"gold_schema"})
    assert asked == [("schema_items", gold)]
    read = SchemaItems(frozenset({"singer"}), frozenset({("singer", "name")}))
    assert (own.gold_schema, own.gold_items, own.predicted_schema) == (read, None, None)
    whole = judged(example, engine, episode(other), reads=ANALYSES)
    assert asked[1:] == [("schema_items", other), ("hardness", gold)]
    again = judged(example, engine, episode(other), reads=ANALYSES)
    assert asked[3:] == [("schema_items", other)]
    assert again == whole


class Forgetful(dict):
    """Another thread forgets all that is kept as soon as it was looked for."""

    def __contains__(self, key):
        return super().__contains__(key) and (self.clear() or True)


def test_what_another_thread_forgets_meanwhile_is_analysed_again(example, engine, monkeypatch):
    example = dataclasses.replace(example, hardness=None)
    whole = judged(example, engine, episode("SELECT 1"))
    for name in ("_GOLD_ITEMS", "_GOLD_LEVELS"):
        monkeypatch.setattr(outcome, name, Forgetful(getattr(outcome, name)))
    assert judged(example, engine, episode("SELECT 1")) == whole


def test_an_analysis_that_may_have_failed_is_not_kept(example, engine, monkeypatch):
    example = dataclasses.replace(example, gold_sql="SELECT kind AS k FROM singer", hardness=None)
    none = episode(None, StopReason.TURN_LIMIT)
    with monkeypatch.context() as patch:
        patch.setattr(analyst, "schema_items", lambda queries: [None] * len(queries))
        patch.setattr(analyst, "hardness", lambda queries: ["extra"] * len(queries))
        (lost,) = judged(example, engine, none)
    (found,) = judged(example, engine, none)
    assert (lost.gold_items, lost.hardness) == (None, "extra")
    assert (found.gold_items.tables, found.hardness) == ({"singer"}, "easy")


def test_a_gold_query_is_analysed_again_when_its_schema_has_changed(example, engine):
    example = dataclasses.replace(example, gold_sql="SELECT title FROM singer, band")
    found = []
    for change in (
        "CREATE TABLE band (title TEXT)",
        "ALTER TABLE band RENAME COLUMN title TO heading; ALTER TABLE singer ADD COLUMN title TEXT",
    ):
        build_database(example.database.location, change)
        (one,) = judged(example, engine, episode(None, StopReason.TURN_LIMIT), reads={"schema"})
        found.append(one.gold_items.columns)
    assert found == [{("band", "title")}, {("singer", "title")}]
