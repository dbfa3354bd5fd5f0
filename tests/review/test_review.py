"""Questions looked through, also in a real browser: what is decided is kept at once, and outlives a kill."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from review_site import COUNT, DEAREST, HIDDEN, VOTE, lines, listening, reviewing, shop

from flows.commands import data
from pipelines.benchmarks import own_questions
from pipelines.core.errors import DataError, ResourceError, UserError
from pipelines.databases.of_recipe import sql_engine
from pipelines.recipe import recipes
from pipelines.recipe.config import Source
from pipelines.review import items
from pipelines.review.decisions import Decision, Review, ReviewFiles
from pipelines.review.server import ReviewApp
from pipelines.sql.engine import Limits, SqlEngine

BETTER = "SELECT name FROM item WHERE price = 5"


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return shop(tmp_path)


def test_what_is_right_comes_out_as_questions_and_the_rest_with_its_reason(mine):
    with reviewing(mine) as running:
        assert running.decide(0, "accepted").json()["choice"] == "accepted"
        assert running.decide(1, "accepted", sql=BETTER, reason="all of them").json()["choice"] == "mended"
        assert running.decide(2, "rejected", reason="nobody may know").json()["counts"]["open"] == 1
    out, rejected = lines(mine.with_name("mine.reviewed.jsonl")), lines(mine.with_name("mine.rejected.jsonl"))
    assert out[0] == {**COUNT, "database": "shop.sqlite", "id": "mine_1", "review": {"choice": "accepted"}}
    assert (out[1]["sql"], out[1]["review"]["was"]) == (BETTER, {"sql": DEAREST["sql"]})
    assert [(row["question"], row["reason"]) for row in rejected] == [(HIDDEN["question"], "nobody may know")]
    source = Source(kind="jsonl", path=str(mine.with_name("mine.reviewed.jsonl")))
    read = own_questions.read_own_questions(source, 0, mine.parent / "stage")
    assert [one.gold_sql for one in read.examples] == [COUNT["sql"], BETTER]


@pytest.mark.parametrize(
    ("mended", "kept"), [({"sql": BETTER}, None), ({"question": "Which ?"}, [DEAREST["sql"], BETTER])]
)
def test_further_gold_queries_go_with_the_sql_that_they_stand_beside(mine, mended, kept):
    row = {**DEAREST, "database": "shop.sqlite", "gold_sqls": [DEAREST["sql"], BETTER]}
    mine.write_text(json.dumps(row) + "\n")
    with reviewing(mine) as running:
        assert running.decide(0, "accepted", **mended).json()["choice"] == "mended"
    (line,) = lines(mine.with_name("mine.reviewed.jsonl"))
    assert line.get("gold_sqls") == kept


def test_a_question_has_the_id_that_training_knows_it_by(mine):
    ids = (0, 7, "x", " y ", "", None)
    mine.write_text("".join(json.dumps({**COUNT, "database": "shop.sqlite", "id": id}) + "\n" for id in ids))
    listed, _ = items.read_file(mine, None)
    assert [item.example.id for item in listed] == ["0", "7", "x", "y", "mine_5", "mine_6"]
    read = own_questions.read_own_questions(Source(kind="jsonl", path=str(mine)), 0, mine.parent / "stage")
    assert [one.id for one in read.examples] == ["0", "7", "x", "y", "mine_5", "mine_6"]
    mine.write_text(json.dumps({**COUNT, "database": "shop.sqlite", "id": [1]}) + "\n")
    with pytest.raises(DataError, match="line 1: id is a list, not text"):
        items.read_file(mine, None)


def test_a_vote_that_cannot_be_read_is_a_doubt(mine):
    """Whoever reviews must not take a question for agreed on; a count of one's own under that name is no vote."""
    for votes, doubts, read in (
        ([VOTE, {"by": "x", "agrees": False}, 7], 2, 1),
        ([{**VOTE, "sql": None}], 1, 0),
        (VOTE, 0, 1),
        ({"by": "x"}, 1, 0),
        (7, 0, 0),
        (None, 0, 0),
    ):
        mine.write_text(json.dumps({"database": "shop.sqlite", **COUNT, "votes": votes}) + "\n")
        listed, _ = items.read_file(mine, None)
        with SqlEngine(Limits()) as sql:
            (item,) = items.with_doubts(listed, sql)
        assert (len(item.doubts), len(item.votes)) == (doubts, read)
        assert all("cannot be read" in doubt for doubt in item.doubts)


def test_a_question_is_shown_with_what_speaks_for_and_against_it(mine):
    with reviewing(mine) as running:
        _, dearest, hidden, bare = (running.get(f"/v1/item?key={key}") for key in running.keys)
        assert dearest["votes"] == [VOTE]
        assert dearest["doubts"] == ["order ambiguous: rows 1 and 2 tie on 5"]
        assert hidden["doubts"][0].startswith("failing: hidden: ")
        assert (bare["sql"], bare["id"]) == ("", "mine_4")
        said = [row[1] for row in running.get("/v1/review")["items"]]
        assert said == [False, True, True, True]  # a question without SQL is doubted, too


FOLLOW_UP = "And how many in total ?"
EARLIER = {"pens": ["Which pens are there ?", "SELECT name FROM item WHERE name = 'pen'"], "all": ["Which ?", ""]}


def test_a_follow_up_is_shown_and_judged_with_the_questions_before_it(mine):
    """Two conversations end in the same words, and mean other things."""
    rows = [
        {"question": FOLLOW_UP, "sql": "SELECT count(*) FROM item WHERE name = 'pen'", "history": [EARLIER["pens"]]},
        {"question": FOLLOW_UP, "sql": "SELECT count(*) FROM item", "history": [EARLIER["all"]]},
        {"question": FOLLOW_UP, "sql": "SELECT count(*) FROM item"},
    ]
    mine.write_text("".join(json.dumps({"database": "shop.sqlite", **row}) + "\n" for row in rows))
    with reviewing(mine) as running:
        shown = [running.get(f"/v1/item?key={key}") for key in running.keys]
        running.decide(0, "accepted")
    assert [item["history"] for item in shown] == [[EARLIER["pens"]], [EARLIER["all"]], []]
    assert [item["doubts"] for item in shown] == [[], [], []]
    (line,) = lines(mine.with_name("mine.reviewed.jsonl"))
    assert line["history"] == [EARLIER["pens"]]
    mine.write_text(json.dumps({**rows[0], "database": "shop.sqlite", "history": "pens"}) + "\n")
    with pytest.raises(DataError, match="line 1: history is a list"):
        items.read_file(mine, None)


def test_nothing_hidden_is_shown_and_what_does_not_run_is_not_kept(mine):
    with reviewing(mine) as running:
        for sql in (HIDDEN["sql"], "SELECT * FROM item", "SELECT nothing FROM item", "DROP TABLE item"):
            assert running.post("/v1/run", key=running.keys[0], sql=sql).json()["type"] == "error"
            kept = running.decide(0, "accepted", sql=sql)
            assert (kept.status_code, kept.json()["error"]["message"][:9]) == (400, "not kept:")
        assert running.decide(3, "accepted").status_code == 400  # it has no SQL
        assert running.decide(0, "rejected").json()["error"]["message"] == "not kept. Say why: the reason is kept."
        answer = running.post("/v1/run", key=running.keys[0], sql="SELECT name, price FROM item").json()
        assert answer["rows"][0] == ["<img src=x onerror=alert(1)>", 3]
    kept = "".join(path.read_text() for path in mine.parent.glob("mine.*.jsonl"))
    assert "9992" not in kept


def test_a_query_with_half_a_character_is_refused(mine):
    with reviewing(mine) as running:
        body = json.dumps({"key": running.keys[0], "sql": "SELECT '\ud800'"})
        headers = {"Authorization": f"Bearer {running.site.token}", "Content-Type": "application/json"}
        answer = httpx.post(f"{running.url}/v1/run", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "sql must be text")


def test_a_decision_is_taken_back_and_the_next_review_goes_on(mine):
    with reviewing(mine) as running:
        running.decide(0, "accepted")
        running.decide(1, "rejected", reason="vague")
        running.decide(0, "open")
        with pytest.raises(ResourceError, match="another review writes"), reviewing(mine):
            pass
    mine.write_text("".join(mine.read_text().splitlines(keepends=True)[1:]))  # the file may change meanwhile
    with reviewing(mine) as running:
        assert [row[2] for row in running.get("/v1/review")["items"]] == ["rejected", "open", "open"]


def test_one_database_for_all_questions_stands_in_each_line(mine):
    with reviewing(mine, "shop") as running:
        running.decide(0, "accepted")
    assert lines(mine.with_name("mine.reviewed.jsonl"))[0]["database"] == str(mine.parent / "shop.sqlite")


def test_only_who_has_the_token_may_look(mine):
    with reviewing(mine) as running:
        for headers in ({}, {"Authorization": "Bearer guess"}):
            assert httpx.get(f"{running.url}/v1/review", headers=headers).status_code == 401
        own = {"Authorization": f"Bearer {running.site.token}"}
        assert httpx.get(f"{running.url}/v1/review", headers={**own, "Origin": "https://a.b"}).status_code == 403
        page = httpx.get(running.url)
        assert running.site.token not in page.text
        assert "script-src 'sha256-" in page.headers["content-security-policy"]


def test_a_line_that_a_kill_cut_short_is_passed_over_and_not_written_behind(tmp_path):
    files = ReviewFiles.of(tmp_path / "mine.jsonl")
    path, review = files.decisions, Review("mine", [], files)
    review.keep(Decision("k1", "one", "accepted", "2026-01-01T00:00:00Z"))
    review.keep(Decision("k2", "two", "rejected", "2026-01-01T00:00:00Z", reason="vague"))
    review.close()
    os.truncate(path, path.stat().st_size - 5)
    review = Review("mine", [], files)
    assert list(review.decisions) == ["k1"]
    review.keep(Decision("k3", "three", "accepted", "2026-01-01T00:00:00Z"))
    review.close()
    assert [row["key"] for row in lines(path)] == ["k1", "k3"]


def test_a_decision_that_finds_no_room_leaves_the_file_whole(tmp_path, monkeypatch):
    files = ReviewFiles.of(tmp_path / "mine.jsonl")
    review = Review("mine", [], files)
    review.keep(Decision("k1", "one", "accepted", "2026-01-01T00:00:00Z"))

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="no space left"):
        review.keep(Decision("k2", "two", "accepted", "2026-01-01T00:00:00Z"))
    review.close()
    assert list(review.decisions) == ["k1"]
    assert len(lines(files.decisions)) == 1


def reading(path, corrections=None, count=None):
    source = {"kind": "jsonl", "path": str(path), "corrections": corrections and str(corrections), "count": count}
    own = json.dumps(source)
    return recipes.load("miniature", [f"data.sft={own}", f"data.rl=[{own}]", f"data.dev={own}", f"data.test=[{own}]"])


def test_the_gold_sql_of_a_recipe_is_mended_by_a_file_of_corrections(tmp_path, monkeypatch):
    """What is mended stands in the file with the reason; the next file has it, too."""
    monkeypatch.chdir(tmp_path)
    path, stage = shop(tmp_path), tmp_path / "stage"
    rows = enumerate([COUNT, DEAREST, {**COUNT, "sql": "SELECT 1 FROM gone"}])
    texts = (json.dumps({"id": str(number), "database": "shop.sqlite", **row}) + "\n" for number, row in rows)
    path.write_text("".join(texts))
    files = ReviewFiles.of(tmp_path / "corrections.jsonl")
    with sql_engine(reading(path), 1) as sql:
        given = items.with_doubts(items.read_sources(reading(path), stage), sql)
        doubted = [item for item in given if item.doubts]
        assert [item.example.id for item in doubted] == ["1", "2"]
        with listening(
            ReviewApp(Review("mine", doubted, files, items.corrected(reading(path), given)), sql)
        ) as running:
            assert running.post("/v1/run", key=running.keys[0], sql=HIDDEN["sql"]).json()["type"] == "error"
            assert running.decide(0, "accepted", sql=BETTER).status_code == 400  # why ?
            running.decide(0, "accepted", sql=BETTER, reason="a tie was cut")
            running.decide(1, "rejected", reason="the table is gone")
    assert lines(files.out) == [{"id": "1", "sql": BETTER, "reason": "a tie was cut"}]
    assert [(row["id"], row["reason"]) for row in lines(files.rejected)] == [("2", "the table is gone")]
    mended = items.read_sources(reading(path, files.out), stage)
    assert mended[1].example.meta["corrected"] == {"reason": "a tie was cut", "sql": DEAREST["sql"]}
    assert list(items.corrected(reading(path, files.out), mended).values()) == lines(files.out)


def mend(recipe, folder, **mended):
    """The corrections that a review writes when the first of a recipe's questions is mended."""
    given = items.read_sources(recipe, folder / "stage")
    item = given[0]
    review = Review("mine", given, ReviewFiles.of(folder / "new.jsonl"), items.corrected(recipe, given))
    texts = {**item.texts, **mended}
    review.keep(Decision(item.key, item.example.id, "mended", "2026-01-01T00:00:00Z", **texts, reason="again"))
    review.write()
    review.close()
    return lines(review.files.out)


def test_corrections_of_questions_that_are_not_looked_at_stay(tmp_path, monkeypatch):
    """One of three questions is drawn; an entry that names no question stays, too."""
    monkeypatch.chdir(tmp_path)
    path, old = shop(tmp_path), tmp_path / "old.jsonl"
    rows = [{"id": str(number), "database": "shop.sqlite", **COUNT} for number in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = {"sql": "SELECT count(id) FROM item", "gold_sqls": ["SELECT 3"], "reason": "ids count"}
    entries = [{"id": id, **entry} for id in ("0", "1", "2", "gone")] + [{"question_id": "17", **entry}]
    old.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    recipe = reading(path, old, count=1)
    drawn = items.read_sources(recipe, tmp_path / "stage")
    assert len(drawn) == 1
    found = mend(recipe, tmp_path, sql=BETTER)
    others = [entry for entry in entries if entry.get("id") != drawn[0].example.id]
    assert found == [*others, {"id": drawn[0].example.id, "sql": BETTER, "reason": "again"}]


@pytest.mark.parametrize(
    ("mended", "changed"),
    [
        ({"sql": BETTER}, {"sql": BETTER}),  # the further gold query went with its SQL
        ({"evidence": "dear is 5"}, {"evidence": "dear is 5", "gold_sqls": ["SELECT 3"]}),
    ],
)
def test_what_is_mended_again_keeps_what_was_corrected_before(tmp_path, monkeypatch, mended, changed):
    monkeypatch.chdir(tmp_path)
    path, old = shop(tmp_path), tmp_path / "old.jsonl"
    path.write_text(json.dumps({"id": "1", "database": "shop.sqlite", **DEAREST}) + "\n")
    before = {"sql": "SELECT max(name) FROM item", "evidence": "dear is above 4"}
    old.write_text(json.dumps({"id": "1", **before, "gold_sqls": ["SELECT 3"], "reason": "a tie was cut"}) + "\n")
    assert mend(reading(path, old), tmp_path, **mended) == [{"id": "1", **before, **changed, "reason": "again"}]


def test_rows_that_no_review_has_are_told(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    path = shop(tmp_path)
    rows = [{"id": id, "database": name, **COUNT} for id, name in (("1", "shop.sqlite"), ("2", "gone.sqlite"))]
    rows.append({"id": "1", "database": "shop.sqlite", **DEAREST})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert len(items.read_sources(reading(path), tmp_path / "stage")) == 1
    told = [record.getMessage() for record in caplog.records]
    first = f"{path.name}:2: missing_database"
    start = f"{path}: 2 rows were set aside, and this review has none of them; the first: {first}"
    assert [text for text in told if text.startswith(start)]


def test_questions_of_two_sources_with_one_id_are_all_looked_at(tmp_path, monkeypatch):
    """Where both need a correction they are refused, for a file of corrections knows them by their id alone."""
    monkeypatch.chdir(tmp_path)
    path, other = shop(tmp_path), tmp_path / "other.jsonl"
    gone = {"question": "What is gone ?", "sql": "SELECT 1 FROM gone"}
    other.write_text(json.dumps({"id": "1", "database": "shop.sqlite", **DEAREST}) + "\n")
    recipe = reading(path)
    held_out = recipe.data.dev.model_copy(update={"path": str(other)})
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"dev": held_out})})
    for question, doubted in ((COUNT, [False, True]), (gone, [True, True])):
        path.write_text(json.dumps({"id": "1", "database": "shop.sqlite", **question}) + "\n")
        with sql_engine(recipe, 1) as sql:
            given = items.with_doubts(items.read_sources(recipe, tmp_path / "stage"), sql)
        assert [item.is_doubted for item in given] == doubted
        if all(doubted):
            with pytest.raises(DataError, match="1 ids are of several questions that need corrections; the first: '1'"):
                items.corrected(recipe, given)
        else:
            items.corrected(recipe, given)


def test_two_lines_that_say_the_same_are_decided_apart(mine):
    mine.write_text(2 * (json.dumps({**COUNT, "database": "shop.sqlite"}) + "\n"))
    with reviewing(mine) as running:
        running.decide(0, "accepted")
        running.decide(1, "rejected", reason="twice")
    assert [row["id"] for row in lines(mine.with_name("mine.reviewed.jsonl"))] == ["mine_1"]
    assert [row["id"] for row in lines(mine.with_name("mine.rejected.jsonl"))] == ["mine_2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no questions"),
        ("[]\n", "holds no questions"),
        ("[5]\n", "line 1: a int where an object was expected"),
        ('{"question": "q", "sql": "a", "sql": "b", "database": "shop.sqlite"}\n', "line 1: 'sql' stands twice"),
        (b'{"question": "Zo\xeb"}\n', "line 1: it is not UTF-8"),
        ('{"question": "q", "database": "gone.sqlite"}\n', "line 1: no such database"),
        ('{"database": "shop.sqlite", "sql": "SELECT 1"}\n', "line 1: no question"),
        ('{"question": "q", "sql": "SELECT 1"}\n', "line 1: no database"),
        ("{\n", "line 1: not JSON"),
    ],
)
def test_a_file_that_cannot_be_reviewed_is_one_plain_line(mine, text, said):
    mine.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=said):
        items.read_file(mine, None)


def test_options_that_do_not_go_together_are_refused(mine):
    with pytest.raises(UserError, match=r"grpo\.steps=2 changes a recipe, and mine\.jsonl is a file"):
        data.review("mine.jsonl", ["grpo.steps=2"])
    with pytest.raises(UserError, match="--database is for a file's questions"):
        data.review("miniature", data=True, database="shop")


def test_a_file_that_no_review_wrote_is_not_written_over(mine):
    (mine.parent / "precious.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="no review wrote it"):
        data.review(str(mine), out=mine.parent / "precious.jsonl")
    with pytest.raises(DataError, match="no such folder"):
        data.review(str(mine), out=mine.parent / "none" / "out.jsonl")
    mine.with_name("mine.decisions.jsonl").touch()  # of an earlier review
    for questions in (mine, mine.rename(mine.with_name("mine.rejected.jsonl"))):
        with pytest.raises(DataError, match="write over its questions"):
            data.review(str(questions), out=mine)


@pytest.fixture
def running(mine):
    with reviewing(mine) as opened:
        yield opened


def press(page, key, **more):
    text = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key, **({**text, **more} if kind == "keyDown" else more))


def value(page, id):
    return str(page.evaluate(f"document.getElementById('{id}').value"))


@pytest.mark.services
def test_questions_are_looked_through_by_keyboard_and_a_closed_page_loses_nothing(running, phone):
    phone.open(f"{running.url}/#{running.site.token}")
    phone.wait_for("0 of 4")
    phone.wait_for("count(*)")  # the result, without asking for it
    assert value(phone, "question") == COUNT["question"]
    press(phone, "a")
    phone.wait_for("1 of 4: 1 accepted")
    press(phone, "u")
    phone.wait_for("0 of 4")
    press(phone, "a")
    phone.wait_for("1 of 4: 1 accepted")
    phone.wait_for("order ambiguous: rows 1 and 2 tie on 5")
    phone.wait_for("other answered the question with SQL that gives another result")
    press(phone, "e")
    phone.evaluate("document.getElementById('sql').select()")
    phone.call("Input.insertText", text=BETTER)
    press(phone, "Enter", modifiers=2)
    phone.wait_for("2 rows")
    press(phone, "Escape")
    phone.wait_for("Keep as mended")
    press(phone, "a")
    phone.wait_for("2 of 4: 1 accepted, 1 mended")
    phone.wait_for("failing: hidden")
    press(phone, "r")
    phone.wait_for("Say why")
    phone.call("Input.insertText", text="nobody may know")
    press(phone, "Enter")
    phone.wait_for("1 rejected")
    phone.open("about:blank")
    phone.open(f"{running.url}/#{running.site.token}")
    phone.wait_for("3 of 4: 1 accepted, 1 mended, 1 rejected")
    press(phone, "w")
    phone.wait_for("wrote 2 to mine.reviewed.jsonl, 1 to mine.rejected.jsonl; 1 to decide")
    assert [row["sql"] for row in lines(running.site.review.files.out)] == [COUNT["sql"], BETTER]


@pytest.mark.services
def test_it_fits_a_phone_in_dark_and_light_and_shows_text_as_text(running, phone):
    phone.open(f"{running.url}/#{running.site.token}")
    phone.wait_for("0 of 4")
    phone.evaluate("document.getElementById('question').value = 'How many items of each kind are there ? '.repeat(5)")
    assert phone.evaluate("(e => e.scrollHeight <= e.clientHeight)(document.getElementById('question'))")
    phone.evaluate("document.getElementById('sql').value = 'SELECT name FROM item'")
    phone.evaluate("document.getElementById('run').click()")
    phone.wait_for("<img src=x onerror=alert(1)>")
    assert phone.evaluate("document.querySelectorAll('main img').length") == 0
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    seen = set()
    for _ in range(2):
        phone.click("Dark or light")
        seen.add(phone.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(seen) == 2
    small = "[...document.querySelectorAll('.foot button')].filter(b => b.getBoundingClientRect().height < 24).length"
    assert phone.evaluate(small) == 0


@pytest.mark.services
def test_the_questions_before_a_follow_up_stand_on_the_page(mine, phone):
    row = {"database": "shop.sqlite", "question": FOLLOW_UP, "sql": COUNT["sql"], "history": [EARLIER["pens"]]}
    mine.write_text(json.dumps(row) + "\n" + json.dumps({"database": "shop.sqlite", **COUNT}) + "\n")
    with reviewing(mine) as running:
        phone.open(f"{running.url}/#{running.site.token}")
        phone.wait_for("0 of 2")
        phone.wait_for("Which pens are there ?")
        press(phone, "j")
        phone.wait_for("question 2 of 2")
        assert phone.evaluate("document.getElementById('before').hidden")


@contextmanager
def command(folder):
    words = [sys.executable, "-m", "flows.cli", "review", "mine.jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"open (http://127\.0\.0\.1:\d+)/#(\S+)", line):
                yield process, found[1], {"Authorization": f"Bearer {found[2]}"}
                break
    finally:
        process.kill()
        process.communicate()


@pytest.mark.services
def test_what_was_decided_outlives_a_kill(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shop(tmp_path)
    with command(tmp_path) as (process, url, headers):
        key = httpx.get(f"{url}/v1/review", headers=headers).json()["items"][2][0]
        body = {"key": key, "choice": "rejected", "reason": "nobody may know"}
        assert httpx.post(f"{url}/v1/decide", json=body, headers=headers).json()["counts"]["rejected"] == 1
        process.kill()
    with command(tmp_path) as (process, url, headers):
        assert [row[2] for row in httpx.get(f"{url}/v1/review", headers=headers).json()["items"]].count("rejected") == 1
        for _ in range(2):  # pressed again while it ends
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        said, _ = process.communicate(timeout=30)
        assert "0 accepted, 0 mended, 1 rejected, 3 open" in said
        assert process.returncode == 0
    assert [row["reason"] for row in lines(tmp_path / "mine.rejected.jsonl")] == ["nobody may know"]
