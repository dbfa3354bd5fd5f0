"""`sqltrain evaluate --model endpoint:NAME` against a real server, and an endpoint that chooses among the samples."""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from teacher_server import scripted_replies
from teacher_world import kept, make, recipe_of

from flows.commands import evaluate as evaluating
from flows.commands import use
from pipelines.core.errors import BoundaryError, DataError, ResourceError
from pipelines.core.files import read_json
from pipelines.core.processes import free_port
from pipelines.core.store import Store
from pipelines.core.types import Action, ActionKind
from pipelines.curation.gold_schema import gold_schemas
from pipelines.databases import named
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.endpoints.asker import Asker
from pipelines.endpoints.client import endpoint
from pipelines.protocols.base import build_protocol
from pipelines.recipe.config import RewardTerm
from pipelines.rewards.outcome import make_outcomes
from pipelines.serving.agent import Agent, QuestionBudget
from pipelines.serving.models import open_model
from pipelines.stages import answer_selection
from pipelines.stages.answerer import named_answerer
from pipelines.stages.context import examples, trajectories
from pipelines.teachers import experts

SAMPLES = ("evaluation.samples=3", "evaluation.ks=[1, 3]", "evaluation.forced_single_turn=false", "rollout.shard=4")
WRONG = "SELECT 'wrong'"
CHOOSING = "Answer with one letter and nothing else"  # what only the selector is told


def oracle_of(recipe, store, wrong=False):
    folder, protocol, schema = make(recipe, store, "test"), build_protocol(recipe.protocol), schemas(recipe)
    asked = {
        protocol.prompt(one, schema(one.database), recipe.protocol.max_turns_eval)[-1][1]: one
        for one in examples(folder, "test")
    }
    say = scripted_replies(protocol, asked)
    requests = 0

    def reply(messages):
        nonlocal requests
        requests += 1
        return (
            protocol.write(Action(ActionKind.SOLUTION, WRONG, "it is so"))
            if wrong and requests % 3 == 0
            else say(messages)
        )

    return reply


def choosing(answers):
    """A server that also compares: it prefers whatever is not the wrong query, and else the first."""

    def reply(messages):
        if CHOOSING not in " ".join(messages[0]["content"].split()):
            return answers(messages)
        return "B" if "wrong" in messages[-1]["content"].split("Query A:")[1].split("Query B:")[0] else "A"

    return reply


def ask_teacher(recipe, store, *how):
    evaluating.evaluate_policy(recipe, store, named_answerer("endpoint:teacher"), *how)


def evaluated(store):
    (folder,) = (store.root / "evaluations").glob("*/metrics.json")
    return json.loads(folder.read_text())


def test_an_endpoint_is_evaluated_asked_and_served_and_its_cost_told(tmp_path, servers, name_endpoint, capsys):
    recipe, store = recipe_of(1, *SAMPLES), Store(tmp_path / "store")
    server = servers(oracle_of(recipe, store))
    name_endpoint(server, price_in=1000.0, price_out=0.0)
    ask_teacher(recipe, store, True, True)
    planned, turns = capsys.readouterr().out, recipe.protocol.max_turns_eval
    assert f"miniature_test: 8 questions (8 greedy, 24 sampled), at most {32 * turns:,} calls" in planned
    tokens = 32 * recipe.evaluation.sampling.episode_tokens
    assert f"at most {tokens * turns:,} tokens in and {tokens:,} out: {tokens * turns / 1000:,.2f} USD" in planned
    at_most = {"questions": 8, "calls": 32 * turns, "tokens_in": tokens * turns, "tokens_out": tokens}
    assert json.loads(planned.splitlines()[-1]) == {"miniature_test": {**at_most, "cost": tokens * turns / 1000}}
    assert not server.delivered
    ask_teacher(recipe, store, True)
    figures, told = evaluated(store), capsys.readouterr().out
    assert json.loads(told.splitlines()[-1])["recipe"] == recipe.name
    assert (figures["ex"], figures["n_questions"]) == (1.0, 8)
    assert "cost (greedy)" in told
    assert "0.00000 USD" not in told
    (page,) = (store.root / "evaluations").glob("*/report.html")
    assert "model (endpoint:teacher)" in page.read_text()  # which one answered
    assert "Cost and latency" in page.read_text()
    assert sum(server.delivered.values()) >= 32  # eight questions, one greedy answer and three samples each
    # What `sqltrain ask --model endpoint:NAME` and `sqltrain serve --model endpoint:NAME` do with one question.
    question = examples(make(recipe, store, "test"), "test")[0]
    model = open_model("endpoint:teacher", "miniature", [], store)
    shown = []
    use.ask_model(model.recipe, store, question.question, question.database.location, model.policy, shown.append)
    assert f"\nSQL: {question.gold_sql}" in shown

    async def answered():
        where = named.find(question.database.location)
        with where.sql(recipe.execution) as sql:
            agent = Agent(where, sql, where.schema(sql), lambda: model, QuestionBudget(20, 50))
            events = [event async for event in agent.answer(question.question)]
            await model.policy.close()
            return events

    events = asyncio.run(answered())
    assert (events[-1]["type"], events[-1]["sql"]) == ("answer", question.gold_sql)


def test_an_endpoint_that_is_down_is_named_before_the_first_question_and_a_line_says_what_is_waited_for(
    tmp_path, name_endpoint, caplog
):
    recipe, store = recipe_of(1, *SAMPLES), Store(tmp_path / "store")
    url = f"http://127.0.0.1:{free_port()}/v1"
    name_endpoint(SimpleNamespace(url=url))
    question = examples(make(recipe, store, "test"), "test")[0]
    down = rf"endpoint 'teacher' at {url} does not answer: Connection error: "
    with pytest.raises(ResourceError, match=down):
        ask_teacher(recipe, store, False)
    model = open_model("endpoint:teacher", "miniature", [], store)
    with pytest.raises(ResourceError, match=down):
        use.ask_model(model.recipe, store, question.question, question.database.location, model.policy, lambda _: None)
    with pytest.raises(BoundaryError, match="endpoint 'teacher' at"):
        Asker(endpoint("teacher").model_copy(update={"retries": 3}), "teacher", None).ask_all([(("user", "hello"),)])
    assert "endpoint 'teacher' at" in caplog.text
    assert "it is asked again, for 300 s at most" in caplog.text


def test_a_model_that_speaks_another_protocol_is_told_so(tmp_path, servers, name_endpoint, capsys):
    recipe, store = recipe_of(1, *SAMPLES, "evaluation.samples=0"), Store(tmp_path / "store")
    name_endpoint(servers(lambda _: "I think it is 42."))
    question = examples(make(recipe, store, "test"), "test")[0]
    model = open_model("endpoint:teacher", "miniature", [], store)
    with pytest.raises(DataError, match="every turn of the model was malformed: it does not speak the protocol react"):
        use.ask_model(model.recipe, store, question.question, question.database.location, model.policy, lambda _: None)
    ask_teacher(recipe, store, False)
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "warning: every answer was malformed: does endpoint:teacher speak the protocol react (prompt brief) ?" in told
    )
    assert "cost (greedy) its entry has no price: " in told


@pytest.mark.services  # it waits for time-outs
def test_a_broken_episode_is_asked_again_and_only_it(tmp_path, servers, name_endpoint):
    recipe, store = recipe_of(1, *SAMPLES), Store(tmp_path / "store")
    server = servers(oracle_of(recipe, store), fault_rate=0.3)
    name_endpoint(server, retries=1, timeout_s=3.0)
    ask_teacher(recipe, store, False)
    before = evaluated(store)
    assert 0 < before["n_broken"] < 16  # of eight greedy and 24 sampled episodes
    paid, server.fault_rate = sum(server.delivered.values()), 0.0
    ask_teacher(recipe, store, False)
    whole = evaluated(store)
    assert (whole["n_broken"], whole["ex"], whole["n_questions"]) == (0, 1.0, 8)
    again = sum(server.delivered.values()) - paid
    assert before["n_broken"] <= again <= before["n_broken"] * (recipe.protocol.max_turns_eval + 1)  # their turns alone
    ask_teacher(recipe, store, False)
    assert sum(server.delivered.values()) - paid == again


def test_rate_and_cap_hold_whatever_number_of_processes_the_recipe_has(tmp_path, servers, name_endpoint):
    """The cap is over the life of the store: what one evaluation has bought, the next cannot spend again."""
    recipe, store = recipe_of(1, *SAMPLES, "rollout.processes=2"), Store(tmp_path / "store")
    server = servers(oracle_of(recipe, store))
    name_endpoint(server, cap_tokens=4000)
    for _ in range(2):
        with pytest.raises(ResourceError, match="cap"):
            ask_teacher(recipe, store, False)
    rows = kept(store.root)
    assert len(rows) == sum(server.delivered.values()) > 0
    assert sum(row["prompt_tokens"] + row["completion_tokens"] for row in rows) <= 4000


def test_an_endpoint_chooses_among_the_samples(tmp_path, servers, name_endpoint, capsys):
    recipe, store = recipe_of(1, *SAMPLES), Store(tmp_path / "store")
    server = servers(choosing(oracle_of(recipe, store, wrong=True)))
    name_endpoint(server)
    ask_teacher(recipe, store, False)
    before, asked = evaluated(store), sum(server.delivered.values())
    assert before["ex_sampled"] < 1.0
    assert "ex_selected" not in before
    (done,) = (store.root / "evaluations").iterdir()
    capsys.readouterr()

    ask_teacher(recipe_of(1, *SAMPLES, "evaluation.selector=teacher"), store, False)
    (folder,) = (path for path in (store.root / "evaluations").iterdir() if path != done)
    after = json.loads((folder / "metrics.json").read_text())
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    right = {
        row["record"]["example_id"] for row in records if row["pass"] == "sampled" and row["record"]["scores"]["strict"]
    }
    assert after["ex_selected"] == len(right) / 8  # right wherever some sample is
    assert after["ex_selected"] > after["ex_sampled"] == before["ex_sampled"]
    assert after["selector_first"] == 0.5  # whichever stands first
    assert "selected by teacher" in capsys.readouterr().out
    assert "endpoint:teacher, selected" in (folder / "report.html").read_text()
    compared = sum(server.delivered.values()) - asked
    assert after["selector_answers"] == compared
    assert after["selector_prompt_tokens"] > 0
    assert compared > 0
    assert len(kept(store.root)) == asked + compared  # all that was ever answered is kept


def test_another_model_behind_the_selector_chooses_anew_and_no_question_is_asked_again(
    tmp_path, servers, name_endpoint
):
    recipe, store = recipe_of(1, *SAMPLES, "evaluation.selector=other"), Store(tmp_path / "store")
    policy, selector = (servers(choosing(oracle_of(recipe, store, wrong=True))) for _ in range(2))
    entries = name_endpoint(policy, selector)
    ask_teacher(recipe, store, False)
    asked, compared = (sum(server.delivered.values()) for server in (policy, selector))
    ask_teacher(recipe, store, False)
    assert (sum(policy.delivered.values()), sum(selector.delivered.values())) == (asked, compared)
    tree = yaml.safe_load(entries.read_text())
    tree["other"]["model"] = "another"
    entries.write_text(yaml.safe_dump(tree))
    ask_teacher(recipe, store, False)
    assert (sum(policy.delivered.values()), sum(selector.delivered.values())) == (asked, 2 * compared)


def test_an_endpoint_merges_the_samples(tmp_path, servers, name_endpoint, monkeypatch):
    recipe, store = recipe_of(1, *SAMPLES, "evaluation.selector=merge:teacher"), Store(tmp_path / "store")
    answers = oracle_of(recipe, store, wrong=True)

    def reply(messages):
        if "Two draft SQL queries" not in messages[0]["content"]:
            return answers(messages)
        drafts = re.findall(r"Draft \d:\n    (.*)", messages[-1]["content"])
        return f"```sql\n{next(draft for draft in drafts if draft != WRONG)}\n```"

    name_endpoint(servers(reply))
    links = []  # the gold schemas that merged answers are held against
    monkeypatch.setattr(answer_selection, "gold_schemas", lambda folder: links.append(folder) or gold_schemas(folder))
    ask_teacher(recipe, store, False)
    metrics = evaluated(store)
    assert {None if folder is None else folder.parent.name for folder in links} == {"test_schema"}
    assert metrics["ex_selected"] > metrics["ex_sampled"]
    assert metrics["selector_answers"] % 8 == 0
    assert metrics["selector_answers"] > 0
    assert "selector_first" not in metrics


MODEL = os.environ.get("SQLTRAIN_SERVED_MODEL", "")
READY_S = 300


@pytest.fixture
def served(tmp_path, monkeypatch):
    """The server of a copy of the checkpoint: "served", and "judge" with short answers, in the endpoints' file."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    port = free_port()
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(folder), "--device", "cpu"]
    with open(tmp_path / "server.log", "wb") as log:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        _wait(server, port, tmp_path / "server.log")
        path = tmp_path / "endpoints.yaml"
        entry = {"base_url": f"http://127.0.0.1:{port}/v1", "model": str(folder)}
        path.write_text(yaml.safe_dump({"served": entry, "judge": {**entry, "extra": {"max_tokens": 16}}}))
        monkeypatch.setenv("SQLTRAIN_ENDPOINTS", str(path))
        yield "served"
    finally:
        server.terminate()
        server.wait(30)


def _wait(server, port, log):
    for _ in range(READY_S):
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except urllib.error.HTTPError:
            return  # it answers
        except OSError:
            time.sleep(1)
    pytest.fail(log.read_text())


@pytest.mark.services
@pytest.mark.timeout(900)
@pytest.mark.skipif(not MODEL, reason="SQLTRAIN_SERVED_MODEL names no checkpoint")
def test_a_served_model_teaches_and_judges(tmp_path, served):
    sampling = "{temperature: 0.0, turn_tokens: 72, episode_tokens: 512}"
    recipe = recipe_of(
        2,
        f"synthesis.teacher.endpoint={served}",
        "synthesis.teacher.concurrency=2",
        f"synthesis.teacher.sampling={sampling}",
    )
    store = Store(tmp_path / "store")
    made = trajectories(make(recipe, store, "synthesize"))
    teacher = read_json(make(recipe, store, "filter") / "quality.json")["acceptance"]["teacher"]
    print(teacher)
    assert [row["teacher"] for row in teacher] == [served]
    assert sum(one.well_formed for one in made) > 0.8 * len(made)  # it has learned the protocol from our own tokens
    assert teacher[0]["right"] > 0

    cases = {one.id: one for one in examples(make(recipe, store, "data"), "sft")}
    with sql_engine(recipe) as sql:
        outcomes = make_outcomes(made, cases, sql, schemas(recipe), "strict", recipe.protocol.max_turns)
    wrong = [one for one in outcomes if not one.correct and one.trajectory.final_sql]
    grade = experts.GradeSource([RewardTerm(term="judge", options={"by": "judge"})], store.root / "responses")
    graded = grade(wrong, cases)
    # A model that has only learned SQL gives no grades; what it says is kept, and is no zero.
    assert all(one.broken == (one.judge is None) for one in graded)
    assert len(kept(store.root, "judge")) == len({(one.example_id, one.trajectory.final_sql) for one in wrong}) > 0
