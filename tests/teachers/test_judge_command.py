"""`benchmarks/judge.py` over a real server: the figures of a judge that is taken in; nothing is paid twice."""

import functools
import json

import pytest
from teacher_world import recipe_of, world

from benchmarks import judge as script
from pipelines.core.store import Store
from tests.fakes import build_database


@pytest.fixture
def judged(sqltrain):
    return functools.partial(sqltrain, main=script.main)


def wrong_half(say):
    """A teacher whose every other question is answered with the number one."""
    order = []

    def reply(messages):
        asked = messages[1]["content"] if messages[0]["role"] == "system" else messages[0]["content"]
        if asked not in order:
            order.append(asked)
        wrong = "<reasoning>one</reasoning><solution>SELECT 1</solution>"
        return wrong if order.index(asked) % 2 else str(say(messages))

    return reply


def test_a_judge_that_likes_long_queries_is_found_out(tmp_path, servers, replies, name_endpoint, judged):
    """It calls right whatever stands in another query, and nothing else: no agreement, a shift of the whole grade."""
    store = Store(tmp_path / "s")
    judge = servers(lambda asked: "2.0" if "AS answer_that_was_written_with_care" in asked[-1]["content"] else "0.0")
    name_endpoint(servers(wrong_half(replies(recipe_of(2), store))), judge)
    command = ["miniature", *world(2), f"--store={store.root}", "--model", "endpoint:other", "--count", "6"]
    code, out, said = judged(*command)
    assert code == 0, said
    found = json.loads(out.splitlines()[-1])
    nothing = dict.fromkeys(("unread", "right_accepted", "wrong_accepted", "kappa", "place_shift"), 0)
    assert found == {"answers": 6, "length_shift": 1, **nothing}
    assert "18 of them bought now" in " ".join((out + said).split())
    assert sum(judge.delivered.values()) == 18  # six answers, asked about plainly, turned round, and padded
    assert script.doubts(found) == [
        "its kappa with execution is below 0.6: as a reward it would teach its own mistakes",
        "length raises its grade: a policy would learn to write longer queries",
    ]
    assert judged(*command)[0] == 0
    assert sum(judge.delivered.values()) == 18


def test_a_judge_grades_by_the_recipes_own_scale(tmp_path, servers, replies, name_endpoint, judged):
    """Of a scale of 4, a judge that always says 2 calls nothing right; of 2 it would call all of it right."""
    store = Store(tmp_path / "s")
    name_endpoint(servers(wrong_half(replies(recipe_of(2), store))), servers(lambda messages: "2"))
    scale = "rewards=[{term: exec}, {term: judge, options: {by: other, scale: 4}}]"
    command = ["miniature", *world(2), scale, f"--store={store.root}", "--model", "endpoint:other", "--count", "6"]
    code, out, said = judged(*command)
    assert code == 0, said
    found = json.loads(out.splitlines()[-1])
    assert (found["right_accepted"], found["wrong_accepted"], found["unread"]) == (0, 0, 0)


def test_answers_are_judged_by_the_questions_of_their_own_pool(tmp_path, servers, name_endpoint, judged, sqltrain):
    """All answers to the training questions are right; the test file gives their ids to other questions."""
    script = "CREATE TABLE item (name TEXT, price INTEGER); INSERT INTO item VALUES ('a', 3), ('b', 5)"
    build_database(tmp_path / "shop.sqlite", script)
    asked = [(f"How many cost {price}?", f"SELECT count(*) FROM item WHERE price > {price}") for price in range(2, 6)]
    pools = []
    for pool, order in (("train", asked), ("test", asked[::-1])):
        rows = [{"id": i, "question": q, "database": "shop.sqlite", "sql": sql} for i, (q, sql) in enumerate(order)]
        (tmp_path / f"{pool}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pools.append(f"{{kind: jsonl, path: {tmp_path / pool}.jsonl}}")
    own = [f"data.sft={pools[0]}", "data.rl=[]", f"data.dev={pools[1]}", f"data.test=[{pools[1]}]"]
    own += ["synthesis.teacher.error_rate=0", "contracts.max_leaked=1", f"--store={tmp_path / 's'}"]
    name_endpoint(servers(lambda messages: "2.0"))
    assert sqltrain("check", "miniature", *own)[0] == 0  # reads both pools
    code, _, said = judged("miniature", *own, "--model", "endpoint:teacher")
    assert code == 2
    assert "are all right" in said


def test_an_unknown_name_is_reported_before_anything_runs(tmp_path, judged):
    code, _, said = judged("miniature", f"--store={tmp_path / 's'}", "--model", "endpoint:nobody")
    assert (code, said.count("\n")) == (2, 1)
    assert "nobody" in said
    assert not (tmp_path / "s" / "data").exists()


def test_teachers_that_are_always_right_measure_no_judge(tmp_path, servers, name_endpoint, judged):
    name_endpoint(servers(lambda messages: "2.0"))
    careful = "synthesis.teacher.guesses={}"
    oracle = [*world(2)[:4], careful, f"--store={tmp_path / 's'}", "--model", "endpoint:teacher"]
    code, _, said = judged("miniature", *oracle)
    assert code == 2
    assert "are all right" in said
    assert "sqltrain run miniature" in said
