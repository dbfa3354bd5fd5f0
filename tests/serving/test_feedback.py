"""What users asked and said: kept for its days, exported, deleted, handed to the night, and told to MLflow."""

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from contextlib import closing
from types import SimpleNamespace

import pytest

from pipelines.benchmarks import own_questions
from pipelines.core.errors import BoundaryError, DataError, ResourceError
from pipelines.nightly import inbox
from pipelines.recipe.config import Nightly, Source
from pipelines.serving.feedback import DAY_S, FILE, INBOX, Feedback, prune_and_sync_feedback
from tasks.episodes import send_feedback
from tests.fakes import build_database

SQL = "SELECT count(*) FROM person"
ANSWER = [
    {"type": "sql", "sql": "SELECT name FROM person"},
    {"type": "result", "text": "name\nAda", "rows": 1, "error": None},
    {"type": "answer", "sql": SQL, "columns": ["n"], "rows": [[3]], "more": False},
]


def keep(feedback, id, user="ada", question="How many ?", database="x"):
    feedback.keep(id, user, question, "", "model", database, ANSWER)


def lines(folder):
    return [json.loads(line)["id"] for line in (folder / INBOX).read_text().splitlines()]


def holds(folder, words):
    return any(words in path.read_bytes() for path in folder.iterdir() if path.is_file())


def test_feedback_goes_when_its_days_are_over_from_the_file_and_from_the_inbox(tmp_path):
    clock = SimpleNamespace(days=0.0)
    feedback = Feedback(tmp_path, days=30, clock=lambda: 1_000_000_000 + clock.days * DAY_S)
    keep(feedback, "old", question="the-old-words ?")
    feedback.decide("old", "ada", True, None)
    clock.days = 20
    keep(feedback, "new")
    feedback.decide("new", "ada", True, None)
    clock.days = 29.9
    assert (feedback.prune(), lines(tmp_path)) == (0, ["old", "new"])
    clock.days = 30.1
    assert (feedback.prune(), lines(tmp_path)) == (1, ["new"])
    assert [row["id"] for row in feedback.export()] == ["new"]
    assert not holds(tmp_path, b"the-old-words")
    with pytest.raises(DataError, match="no such question"):
        feedback.decide("old", "ada", False, None)


def test_a_mended_answer_is_the_nights_and_the_last_word_counts(tmp_path):
    feedback = Feedback(tmp_path)
    keep(feedback, "a")
    assert feedback.decide("a", "ada", False, "SELECT 1")
    assert json.loads((tmp_path / INBOX).read_text())["sql"] == "SELECT 1"
    assert feedback.decide("a", "ada", True, None)
    assert json.loads((tmp_path / INBOX).read_text())["sql"] == SQL
    assert not feedback.decide("a", "ada", False, None)
    assert lines(tmp_path) == []
    assert [each["good"] for each in next(feedback.export())["verdicts"]] == [False, True, False]


def test_a_question_that_several_people_judge_is_one_row_for_the_night(tmp_path):
    """More than one row in twenty that says the same would have the whole batch refused."""
    feedback = Feedback(tmp_path)
    for user in ("ada", "bob", "eve"):
        keep(feedback, f"of-{user}", user)
        feedback.decide(f"of-{user}", user, True, "SELECT 2" if user == "eve" else None)
    keep(feedback, "elsewhere", database="y")
    feedback.decide("elsewhere", "ada", True, None)
    rows = [json.loads(line) for line in (tmp_path / INBOX).read_text().splitlines()]
    assert [(row["id"], row["sql"]) for row in rows] == [("of-eve", "SELECT 2"), ("elsewhere", SQL)]
    feedback.delete("eve")
    assert lines(tmp_path) == ["of-bob", "elsewhere"]


def test_the_commands_print_and_delete_what_is_kept_while_a_server_writes(tmp_path, sqltrain):
    feedback = Feedback(tmp_path)  # the server's
    for id, user in (("a", "ada"), ("b", "bo"), ("c", "ada")):
        keep(feedback, id, user)
        feedback.decide(id, user, True, None)
    code, out, _ = sqltrain("feedback", "export", str(tmp_path), "--user", "bo")
    assert (code, [json.loads(line)["id"] for line in out.splitlines()]) == (0, ["b"])
    code, out, _ = sqltrain("feedback", "delete", str(tmp_path), "--user", "ada")
    assert (code, out.strip()) == (0, "deleted 2 questions")
    assert lines(tmp_path) == ["b"]
    keep(feedback, "d", "ada")
    assert [row["id"] for row in feedback.export()] == ["b", "d"]
    code, _, err = sqltrain("feedback", "export", str(tmp_path / "none"))
    assert (code, len(err.splitlines()), "no feedback in" in err) == (2, 1, True)


def test_what_is_deleted_while_somebody_reads_is_gone_soon_and_nobody_waits(tmp_path):
    """A server deletes between its users' questions: a wait for a reader would be everybody's."""
    feedback = Feedback(tmp_path)
    keep(feedback, "a", question="the-old-words ?")
    keep(feedback, "b", "bo")
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM asked").fetchone() == (2,)
        began = time.monotonic()
        assert feedback.delete("ada") == 1
        assert feedback.prune() == 0
        keep(feedback, "c", "bo")
        assert time.monotonic() - began < 10
        assert holds(tmp_path, b"the-old-words")
        reader.execute("COMMIT")
        assert feedback.prune() == 0  # it deletes nothing, and finishes what was deleted before
        assert not holds(tmp_path, b"the-old-words")
    assert [row["id"] for row in feedback.export()] == ["b", "c"]


def test_an_export_that_is_read_slowly_keeps_nothing_that_is_deleted(tmp_path):
    feedback, command = Feedback(tmp_path), Feedback(tmp_path)
    for id in ("a", "b", "c"):
        keep(feedback, id, "bo" if id == "c" else "ada", question=f"the-words-of-{id} ?")
    rows = command.export()
    assert next(rows)["id"] == "a"
    assert feedback.delete("ada") == 2
    assert not holds(tmp_path, b"the-words-of-b")
    assert [row["id"] for row in rows] == ["c"]


def test_a_folder_that_cannot_be_written_is_one_plain_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="cannot be read or written"):
        Feedback(tmp_path / "file")
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    with pytest.raises(ResourceError, match="cannot be read or written"):
        Feedback(tmp_path)


def test_a_thumb_is_a_row_of_the_next_nights_batch_once(tmp_path):
    database = tmp_path / "people.sqlite"
    build_database(database, "CREATE TABLE person (name)")
    feedback, batches = Feedback(tmp_path / "feedback"), tmp_path / "batches"
    settings = Nightly(inbox=str(tmp_path / "feedback" / INBOX.parent))
    for id in ("first", "second"):
        keep(feedback, id, question=f"{id} ?", database=str(database))
        feedback.decide(id, "ada", True, None)
        batch = inbox.freeze_batch(settings, batches)
        assert batch is not None
        taken = own_questions.read_own_questions(Source(kind="jsonl", path=str(batch / inbox.QUESTIONS)), 0, tmp_path)
        assert [(one.question, one.gold_sql) for one in taken.examples] == [(f"{id} ?", SQL)]
    assert inbox.freeze_batch(settings, batches) is None


@pytest.mark.services
def test_verdicts_are_feedback_on_traces_in_mlflow_and_go_with_their_question(tmp_path):
    feedback, store = Feedback(tmp_path / "feedback"), tmp_path / "store"
    store.mkdir()
    keep(feedback, "a")
    keep(feedback, "b", "bo")
    feedback.decide("a", "ada", False, "SELECT 7")
    feedback.decide("a", "ada", True, None)

    assert list(feedback.unsynced())
    command = [sys.executable, "-m", "tasks.episodes", str(feedback.folder), str(store)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert not list(feedback.unsynced())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecations inside MLflow and SQLAlchemy
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{store / 'mlflow.db'}")
        (row,) = feedback.export("ada")
        trace = client.get_trace(row["trace"])
        said = [(one.name, one.value, one.source.source_id) for one in trace.info.assessments]
        assert sorted(map(str, said)) == sorted(
            map(str, [("user_verdict", False, "ada"), ("expected_response", "SELECT 7", "ada"),
                      ("user_verdict", True, "ada")])
        )  # fmt: skip
        assert [span.name for span in trace.data.spans] == ["a", "execute"]
        assert next(feedback.export("bo"))["trace"] is None
        feedback.delete("ada")
        send_feedback(feedback, store)
        place = client.get_experiment_by_name("served questions")
        assert client.search_traces(locations=[place.experiment_id]) == []


def test_a_tracking_server_that_is_away_is_told_later(tmp_path, monkeypatch):
    feedback = Feedback(tmp_path)
    keep(feedback, "a")
    feedback.decide("a", "ada", True, None)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(BoundaryError, match="does not answer"):
        send_feedback(feedback, tmp_path)
    assert list(feedback.unsynced())


def test_a_server_that_stops_waits_for_the_process_that_it_ends(tmp_path, monkeypatch):
    made, create = [], asyncio.create_subprocess_exec

    async def endless(*_, **pipes):
        made.append(await create("sleep", "60", **pipes))
        return made[0]

    async def stopped():
        monkeypatch.setattr(asyncio, "create_subprocess_exec", endless)
        feedback = SimpleNamespace(prune=lambda: None, unsynced=lambda: iter("x"), folder=tmp_path)
        task = asyncio.create_task(prune_and_sync_feedback(feedback, tmp_path))
        while not made:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])
        return made[0].returncode

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert asyncio.run(stopped()) == -signal.SIGKILL
