"""Questions looked through: what is decided is kept at once, and comes out as questions or as corrections."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="no HTTP client")
pytest.importorskip("starlette", reason="the serve extra is not installed")
pytest.importorskip("uvicorn", reason="the serve extra is not installed")

import httpx
from review_site import COUNT, DEAREST, HIDDEN, VOTE, lines, listening, reviewing, shop

from flows.commands import data
from pipelines.benchmarks import own_questions
from pipelines.core.errors import DataError, ResourceError, UserError
from pipelines.databases.of_recipe import sql_engine
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe, Source
from pipelines.review import items
from pipelines.review.decisions import Decision, Review, ReviewFiles
from pipelines.review.server import ReviewApp

BETTER = "SELECT name FROM item WHERE price = 5"


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return shop(tmp_path)


def test_what_is_right_comes_out_as_questions_and_the_rest_with_its_reason(mine: Path) -> None:
    with reviewing(mine) as running:
        assert running.decide(0, "accepted").json()["choice"] == "accepted"
        assert running.decide(1, "accepted", sql=BETTER, reason="all of them").json()["choice"] == "mended"
        assert running.decide(2, "rejected", reason="nobody may know").json()["counts"]["open"] == 1
    out, rejected = lines(mine.with_name("mine.reviewed.jsonl")), lines(mine.with_name("mine.rejected.jsonl"))
    assert out[0] == {**COUNT, "database": "shop.sqlite", "id": "mine_1", "review": {"choice": "accepted"}}
    assert (out[1]["sql"], out[1]["review"]["was"]) == (BETTER, {"sql": DEAREST["sql"]})
    assert [(row["question"], row["reason"]) for row in rejected] == [(HIDDEN["question"], "nobody may know")]
    read = own_questions.read(
        Source(kind="jsonl", path=str(mine.with_name("mine.reviewed.jsonl"))), 0, mine.parent / "stage"
    )
    assert [one.gold_sql for one in read.examples] == [COUNT["sql"], BETTER]


def test_a_question_is_shown_with_what_speaks_for_and_against_it(mine: Path) -> None:
    with reviewing(mine) as running:
        _, dearest, hidden, bare = (running.get(f"/v1/item?key={key}") for key in running.keys)
        assert dearest["votes"] == [VOTE]
        assert dearest["doubts"] == ["order ambiguous: rows 1 and 2 tie on 5"]
        assert hidden["doubts"][0].startswith("failing: hidden: ")
        assert (bare["sql"], bare["id"]) == ("", "mine_4")
        said = [row[1] for row in running.get("/v1/review")["items"]]
        assert said == [False, True, True, True]  # a question without SQL is doubted, too


def test_nothing_hidden_is_shown_and_what_does_not_run_is_not_kept(mine: Path) -> None:
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


def test_a_decision_is_taken_back_and_the_next_review_goes_on(mine: Path) -> None:
    with reviewing(mine) as running:
        running.decide(0, "accepted")
        running.decide(1, "rejected", reason="vague")
        running.decide(0, "open")
        with pytest.raises(ResourceError, match="another review writes"), reviewing(mine):
            pass
    mine.write_text("".join(mine.read_text().splitlines(keepends=True)[1:]))  # the file may change meanwhile
    with reviewing(mine) as running:
        assert [row[2] for row in running.get("/v1/review")["items"]] == ["rejected", "open", "open"]


def test_one_database_for_all_questions_stands_in_each_line(mine: Path) -> None:
    with reviewing(mine, "shop") as running:
        running.decide(0, "accepted")
    assert lines(mine.with_name("mine.reviewed.jsonl"))[0]["database"] == str(mine.parent / "shop.sqlite")


def test_only_who_has_the_token_may_look(mine: Path) -> None:
    with reviewing(mine) as running:
        for headers in ({}, {"Authorization": "Bearer guess"}):
            assert httpx.get(f"{running.url}/v1/review", headers=headers).status_code == 401
        own = {"Authorization": f"Bearer {running.site.token}"}
        assert httpx.get(f"{running.url}/v1/review", headers={**own, "Origin": "https://a.b"}).status_code == 403
        page = httpx.get(running.url)
        assert running.site.token not in page.text
        assert "script-src 'sha256-" in page.headers["content-security-policy"]


def test_a_line_that_a_kill_cut_short_is_passed_over_and_not_written_behind(tmp_path: Path) -> None:
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


def test_a_decision_that_finds_no_room_leaves_the_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ReviewFiles.of(tmp_path / "mine.jsonl")
    review = Review("mine", [], files)
    review.keep(Decision("k1", "one", "accepted", "2026-01-01T00:00:00Z"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ResourceError, match="no space left"):
        review.keep(Decision("k2", "two", "accepted", "2026-01-01T00:00:00Z"))
    review.close()
    assert list(review.decisions) == ["k1"]
    assert len(lines(files.decisions)) == 1


def reading(path: Path, corrections: Path | None = None) -> Recipe:
    """A recipe whose pools all read one file."""
    own = json.dumps({"kind": "jsonl", "path": str(path), "corrections": corrections and str(corrections)})
    return recipes.load("miniature", [f"data.sft={own}", f"data.rl=[{own}]", f"data.dev={own}", f"data.test=[{own}]"])


def test_the_gold_sql_of_a_recipe_is_mended_by_a_file_of_corrections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        with listening(ReviewApp(Review("mine", doubted, files, items.corrected(given)), sql)) as running:
            assert running.post("/v1/run", key=running.keys[0], sql=HIDDEN["sql"]).json()["type"] == "error"
            assert running.decide(0, "accepted", sql=BETTER).status_code == 400  # why ?
            running.decide(0, "accepted", sql=BETTER, reason="a tie was cut")
            running.decide(1, "rejected", reason="the table is gone")
    assert lines(files.out) == [{"id": "1", "sql": BETTER, "reason": "a tie was cut"}]
    assert [(row["id"], row["reason"]) for row in lines(files.rejected)] == [("2", "the table is gone")]
    mended = items.read_sources(reading(path, files.out), stage)
    assert mended[1].example.meta["corrected"] == {"reason": "a tie was cut", "sql": DEAREST["sql"]}
    assert items.corrected(mended) == {"1": lines(files.out)[0]}


def test_questions_of_two_sources_with_one_id_are_all_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
                items.corrected(given)
        else:
            items.corrected(given)


def test_two_lines_that_say_the_same_are_decided_apart(mine: Path) -> None:
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
        ("[]\n", "line 1: a list where an object was expected"),
        ('{"question": "q", "database": "gone.sqlite"}\n', "line 1: no such database"),
        ('{"database": "shop.sqlite", "sql": "SELECT 1"}\n', "line 1: no question"),
        ('{"question": "q", "sql": "SELECT 1"}\n', "line 1: no database"),
        ("{\n", "line 1: not JSON"),
    ],
)
def test_a_file_that_cannot_be_reviewed_is_one_plain_line(mine: Path, text: str, said: str) -> None:
    mine.write_text(text)
    with pytest.raises(DataError, match=said):
        items.read_file(mine, None)


def test_options_that_do_not_go_together_are_refused(mine: Path) -> None:
    with pytest.raises(UserError, match=r"grpo\.steps=2 changes a recipe, and mine\.jsonl is a file"):
        data.review("mine.jsonl", ["grpo.steps=2"])
    with pytest.raises(UserError, match="--database is of a file's questions"):
        data.review("miniature", data=True, database="shop")


def test_a_file_that_no_review_wrote_is_not_written_over(mine: Path) -> None:
    (mine.parent / "precious.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="no review wrote it"):
        data.review(str(mine), out=mine.parent / "precious.jsonl")
    with pytest.raises(DataError, match="no such folder"):
        data.review(str(mine), out=mine.parent / "none" / "out.jsonl")
