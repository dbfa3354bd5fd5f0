"""The environment pays what our own rollout engine and panel pay for the same turns, for every recipe."""

import asyncio
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.commands import use
from pipelines.core.errors import DataError, RecipeError, UserError
from pipelines.core.store import Store
from pipelines.core.types import Database, Example
from pipelines.databases.named import find
from pipelines.databases.of_recipe import with_prompt_facts
from pipelines.endpoints.answers import Answer
from pipelines.endpoints.asker import Asker
from pipelines.environment.core import Environment, asked_question, example_of, row_of
from pipelines.protocols.base import ABSTAINS, build_protocol
from pipelines.recipe import recipes
from pipelines.rewards.outcome import make_outcomes
from pipelines.rewards.panel import Rubric
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies import factories
from pipelines.rollout.policies.base import ScriptedPolicy
from pipelines.rollout.policies.oracle import OraclePolicy
from pipelines.serving.agent import Agent, AnsweringModel, QuestionBudget
from pipelines.stages import data
from pipelines.stages.context import Context, Silent, examples
from tasks import served_model
from tests.fakes import build_database, http_server

RECIPES = ("sql_trail", "trust_sql", "skyrl_sql", "mtir_sql", "reasoning_sql", "miniature")


def played(recipe, questions, error_rate):
    """The scripted oracle's trajectories by our own engine, and what the recipe's panel pays for them."""
    with Environment(recipe) as environment:
        sql, schema, protocol = environment.sql, environment.schema, build_protocol(recipe.protocol)
        questions = with_prompt_facts(questions, recipe, schema, sql)
        turns, oracle = recipe.protocol.max_turns, OraclePolicy(protocol, error_rate)
        engine = RolloutEngine(oracle, protocol, sql, recipe.grpo.sampling, turns, schema)
        trajectories = engine.run([EpisodeRequest(question, 0, 7) for question in questions])
        cases = {question.id: question for question in questions}
        outcomes = make_outcomes(trajectories, cases, sql, schema, recipe.execution.equality, turns)
        rubric = Rubric(recipe.rewards)
        return trajectories, [rubric.score(outcome).total for outcome in outcomes]


def test_failed_answers_and_missing_names_are_as_in_our_rollouts(questions):
    settings = ["protocol.returns_failed_answers=true", "protocol.explains_missing_names=true"]
    recipe = recipes.load("sql_trail", settings)
    trajectories, rewards = played(recipe, questions, 1.0)
    assert any("is a column of" in (trajectory.turns[0].observation or "") for trajectory in trajectories)
    with Environment(recipe) as environment:
        for question, trajectory, reward in zip(questions, trajectories, rewards, strict=True):
            session = environment.reset(question)
            for turn in trajectory.turns:
                step = session.step(turn.text)
                assert step.observation == turn.observation
            assert (step.done, step.reward) == (True, pytest.approx(reward))


@pytest.mark.parametrize("error_rate", [0.0, 1.0])
@pytest.mark.parametrize("name", RECIPES)
def test_turns_are_paid_as_in_our_rollouts(questions, name, error_rate):
    recipe = recipes.load(name)
    trajectories, rewards = played(recipe, questions, error_rate)
    with Environment(recipe) as environment:
        for question, trajectory, reward in zip(questions, trajectories, rewards, strict=True):
            session = environment.reset(question)
            assert [(each["role"], each["content"]) for each in session.messages] == list(trajectory.prompt)
            steps = [session.step(turn.text) for turn in trajectory.turns]
            assert [step.observation for step in steps[:-1]] == [turn.observation for turn in trajectory.turns[:-1]]
            assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
            assert all(step.reward is None for step in steps[:-1])
            assert steps[-1].reward == pytest.approx(reward)
            assert steps[-1].info["final_sql"] == trajectory.final_sql


def test_many_sessions_run_side_by_side_and_none_gets_the_rows_of_another(questions):
    recipe = recipes.load("skyrl_sql")

    async def episode(environment, question):
        session = environment.reset(question)
        await session.step_async("<think>look</think>\n<sql>SELECT 1</sql>")
        step = await session.step_async(f"<think>so</think>\n<solution>{question.gold_sql}</solution>")
        return step.reward == 1.0 and bool(step.info["correct"])

    async def all_of_them():
        with Environment(recipe, workers=2) as environment:
            return await asyncio.gather(*(episode(environment, question) for question in questions * 5))

    assert asyncio.run(all_of_them()) == [True] * len(questions) * 5


@pytest.mark.timeout(60)
def test_sessions_of_several_threads_and_of_an_event_loop_ask_one_endpoint_as_their_user(
    questions, tmp_path, monkeypatch
):
    """The first question is answered when the others are through, and finds its connection as it was."""
    others_are_through = threading.Event()

    def answer(asked):
        if b"which rows 0" in asked.data:
            assert others_are_through.wait(30)
        return {"choices": [{"message": {"content": "The newest."}, "finish_reason": "stop"}]}

    def in_thread(session, number):
        return session.step(f"<think>a</think><ask>which rows {number} ?</ask>").observation

    async def in_loop(session):
        step = await session.step_async("<think>a</think><ask>which rows 2 ?</ask>")
        return step.observation

    asks = ["protocol.name=ask", "protocol.options={user: anybody}", "protocol.prompt=full"]
    recipe = recipes.load("skyrl_sql", asks)
    monkeypatch.setenv("SQLTRAIN_ENDPOINTS", str(tmp_path / "endpoints.yaml"))
    monkeypatch.setattr("tests.fakes._Handler.protocol_version", "HTTP/1.1")  # it keeps connections open
    with http_server(answer) as server, ThreadPoolExecutor(2) as pool, Environment(recipe) as environment:
        (tmp_path / "endpoints.yaml").write_text(f"anybody: {{base_url: '{server.url}/v1', model: m, retries: 1}}\n")
        sessions = [environment.reset(question) for question in questions[:3]]
        waiting = pool.submit(in_thread, sessions[0], 0)
        while not server.asked:
            time.sleep(0.01)
        assert "The newest." in str(pool.submit(in_thread, sessions[1], 1).result(30))
        assert "The newest." in str(asyncio.run(in_loop(sessions[2])))
        others_are_through.set()
        assert "The newest." in str(waiting.result(30))
    assert len(server.asked) == 3
    assert "sqltrain-user" not in {thread.name for thread in threading.enumerate()}


def test_nothing_is_read_after_a_turn_has_ended_and_no_step_taken_after_the_end(questions):
    # Else it could write its own observation: a server stops at the closing tag, and so does the environment
    with Environment("skyrl_sql") as environment:
        session = environment.reset(questions[0])
        step = session.step("<think>a</think>\n<sql>SELECT 2</sql>\n<observation>gold is 7</observation>")
        assert step.observation is not None
        assert "gold is 7" not in "".join(message["content"] for message in session.messages)
        session = environment.reset(questions[0])
        assert session.step("<think>a</think>\n<solution>SELECT 1</solution>").done
        with pytest.raises(ValueError, match="the episode is over"):
            session.step("<think>a</think>\n<solution>SELECT 1</solution>")
        session = environment.reset(questions[0])
        step = session.step("<think>maybe <sql>SELECT 1</sql> or not</think>\n<sql>SELECT 7 AS n</sql> more")
        assert "7" in str(step.observation)
        assert session.messages[-2]["content"].endswith("<sql>SELECT 7 AS n</sql>")


def test_a_database_that_is_gone_gives_no_reward(questions, tmp_path):
    copy = tmp_path / "gone.sqlite"
    copy.write_bytes(Path(questions[0].database.location).read_bytes())
    row = {"question": questions[0].question, "sql": questions[0].gold_sql, "database": str(copy)}
    with Environment("skyrl_sql") as environment:
        session = environment.reset(example_of(row))
        copy.unlink()
        step = session.step(f"<think>a</think>\n<solution>{questions[0].gold_sql}</solution>")
        assert (step.done, step.reward, step.info["broken"]) == (True, None, True)


def test_a_row_carries_a_whole_example_or_all_its_fields(questions):
    for more in ({}, {"sql": 3}):
        with pytest.raises(DataError, match="'sql' is missing or is no text"):
            example_of({"question": "how many", "database": "shop.sqlite", **more})
    assert example_of(row_of(questions[0])) == questions[0]
    row = {
        "question": "and of Rome ?",
        "sql": "SELECT 1",
        "database": "shop.sqlite",
        "history": None,
        "gold_sqls": None,
    }
    assert example_of(row).meta == {}
    before = [["how many ?", "SELECT 0"]]
    more = example_of({**row, "history": before, "gold_sqls": ["SELECT 1", "SELECT 1.0"]})
    assert (more.meta["history"], more.meta["gold_sqls"]) == (before, ["SELECT 1.0"])
    with pytest.raises(DataError, match=r"a row cannot be read: history is a list of \[question, SQL\] pairs"):
        example_of({**row, "history": ["how many ?"]})
    for wrong in ("", "[]", "{}", '{"id": 3}', "[" * 100_000):
        with pytest.raises(DataError):
            example_of({"record": wrong})


def test_skyrl_gym_pays_the_same_reward(questions, monkeypatch):
    skyrl_gym = pytest.importorskip("skyrl_gym")
    monkeypatch.syspath_prepend(recipes.CONF.parent / "examples" / "skyrl")
    skyrl_gym.register(id="sqltrain", entry_point="sqltrain_env:SqltrainEnv")
    question = questions[0]
    row = {"question": question.question, "sql": question.gold_sql, "database": question.database.location}
    right, wrong = f"<solution>{question.gold_sql}</solution>", "<solution>SELECT 'no'</solution>"
    rewards = []
    for answer in (right, wrong, "no tags at all"):
        environment = skyrl_gym.make("sqltrain", env_config={"recipe": "skyrl_sql"}, extras=row)
        prompt, facts = environment.init([])
        assert question.question in prompt[-1]["content"]
        assert facts["stop"] == ["</sql>", "</solution>"]
        looked = environment.step("<think>look</think>\n<sql>SELECT 1 AS one</sql>")
        assert (looked["done"], looked["reward"]) == (False, 0.0)
        assert "one" in looked["observations"][0]["content"]
        step = environment.step(f"<think>so</think>\n{answer}")
        while not step["done"]:
            step = environment.step(answer)
        rewards.append(step["reward"])
    assert rewards == [1.0, 0.0, -1.0]  # SkyRL-SQL, section 4.1


def test_the_prompt_shows_what_columns_mean_where_the_recipe_asks_for_it(tmp_path):
    """As in our own rollouts: `protocol.schema_descriptions` holds here too."""
    shop = tmp_path / "shop.sqlite"
    build_database(shop, "CREATE TABLE item (price REAL)")
    (tmp_path / "database_description").mkdir()
    head = "original_column_name,column_name,column_description,data_format,value_description\n"
    (tmp_path / "database_description" / "item.csv").write_text(f"{head}price,price,what a customer pays,real,\n")
    question = Example("q", "how much?", Database("shop", "sqlite", str(shop)), "SELECT price FROM item")
    prompts = []
    for said in ("true", "false"):
        with Environment("sql_trail", [f"protocol.schema_descriptions={said}"]) as environment:
            prompts.append("\n".join(message["content"] for message in environment.reset(question).messages))
    assert ["what a customer pays" in prompt for prompt in prompts] == [True, False]


def test_the_prompt_shows_the_values_and_the_linked_schema_as_the_recipes_own_does(tmp_path):
    """What the data stage adds to a question is added here, too: the same prompt to the letter."""
    words = ["data.values=6", "protocol.schema_values=3", "data.linker=gold", "protocol.schema_view=filtered"]
    words += ["protocol.prompt=full", "data.dev.options.databases=2", "data.dev.options.questions=4"]
    words += [f"data.{pool}.options.databases=1" for pool in ("sft", "rl.0")]
    recipe = recipes.load("miniature", words)
    with Environment(recipe) as environment:
        given = [environment.reset(example).messages[-1]["content"] for example in environment.questions("dev")]
        data.build_pools(Context("data", recipe, tmp_path, {}, Silent()))
        made = examples(tmp_path, "dev")
        protocol = build_protocol(recipe.protocol)
        ours = [protocol.prompt(each, environment.schema(each.database), recipe.protocol.max_turns) for each in made]
    assert given == [messages[-1][1] for messages in ours]
    assert any("e.g." in text for text in given)


def test_a_question_has_the_same_prompt_everywhere(tmp_path, monkeypatch):
    words = ["data.values=6", "protocol.schema_values=3", "protocol.prompt=full", "data.dev.options.databases=2"]
    words += ["data.dev.options.questions=4", "protocol.max_turns=5", "protocol.max_turns_eval=5"]
    words += ["data.dev.options.follow_ups=2", "protocol.abstains=true"]
    words += ["evaluation.sampling.episode_tokens=8192"]  # a whole schema takes less than half of it
    recipe = recipes.load("miniature", [*words, *(f"data.{pool}.options.databases=1" for pool in ("sft", "rl.0"))])
    seen = []

    def say(request):
        seen.append(request.messages)
        return "<reasoning>x</reasoning><solution>SELECT 1</solution>"

    policy = ScriptedPolicy(say, "script")
    data.build_pools(Context("data", recipe, tmp_path, {}, Silent()))
    made = examples(tmp_path, "dev")
    with Environment(recipe) as environment:
        ours = [build_protocol(recipe.protocol).prompt(one, environment.schema(one.database), 5) for one in made]
        alone = [one for one in made if "history" not in one.meta]  # a row or a command has no history
        rows = [{"question": one.question, "sql": one.gold_sql, "database": one.database.location} for one in alone]
        follow_ups = [example_of(row_of(one)) for one in made if "history" in one.meta]
        for question in (*environment.questions("dev"), *map(example_of, rows), *follow_ups):
            seen.append(tuple((one["role"], one["content"]) for one in environment.reset(question).messages))
    for one in made:
        history = one.meta.get("history", ())
        if not history:
            use.ask_model(recipe, Store(tmp_path), one.question, one.database.location, policy, print)
        where = find(one.database.location)
        with where.sql(recipe.execution) as sql:
            made_anew, budget = lambda: AnsweringModel("script", policy, recipe), QuestionBudget()
            agent = Agent(where, sql, where.schema(sql, 3), made_anew, budget)
            asyncio.run(all_of(agent.answer(one.question, history=history)))
    monkeypatch.setattr(factories, "local_policy", lambda *_: policy)
    served_model.ServedAgent(recipe, tmp_path).predict(SimpleNamespace(to_dict=lambda _: rows))
    assert {messages[0][1].count(ABSTAINS) for messages in ours} == {1}
    assert any("e.g." in messages[-1][1] and one.meta["values"] for messages, one in zip(ours, made, strict=True))
    singles = [messages for messages, one in zip(ours, made, strict=True) if one in alone]
    others = [messages for messages, one in zip(ours, made, strict=True) if one not in alone]
    asked = [messages for messages in ours for _ in range(1 if messages in others else 2)]  # ask, and serve with mcp
    assert (len(singles), len(others)) == (8, 4)
    assert sorted(seen) == sorted([*ours, *singles, *others, *asked, *singles])
    for one, messages in zip(follow_ups, others, strict=True):
        assert f"Question: {one.meta['history'][0][0]}\nSQL: SELECT" in messages[-1][1]


async def all_of(events):
    return [event async for event in events]


def test_a_linked_recipe_is_served_with_its_linkers_schema(monkeypatch, tmp_path):
    shop, prompts = tmp_path / "shop.sqlite", list[str]()
    build_database(shop, "CREATE TABLE item (price REAL, maker TEXT); CREATE TABLE staff (name TEXT);")

    def say(request):
        prompts.append(request.messages[-1][1])
        return "<reasoning>x</reasoning><solution>SELECT 1</solution>"

    chosen = Answer('{"tables": ["item"], "columns": {"item": ["price"]}}')
    monkeypatch.setattr(Asker, "named", lambda *_: SimpleNamespace(ask_all=lambda cases: [chosen for _ in cases]))
    for linker in ("gold", "null", "big"):
        recipe = recipes.load("sql_trail", ["protocol.schema_view=filtered", f"data.linker={linker}"])
        use.ask_model(recipe, Store(tmp_path), "how much?", str(shop), ScriptedPolicy(say, "script"), print)
    shown = [[word in prompt for word in ("price", "maker", "CREATE TABLE staff")] for prompt in prompts]
    assert shown == [[True, True, True], [True, True, True], [True, False, False]]


@pytest.mark.parametrize(
    ("words", "said"),
    [(["data.linker=big"], "asks no linker"), (["rewards=[{term: judge, options: {by: big}}]"], "asks no judge")],
)
def test_an_endpoint_that_the_environment_would_not_ask_is_refused(words, said):
    with pytest.raises(RecipeError, match=said):
        Environment("miniature", words)


SMALL = ("data.rl=[{kind: miniature, split: train, options: {databases: 2, questions: 3}}]",)


@pytest.fixture(scope="module")
def environment():
    with Environment("skyrl_sql", SMALL) as made:
        yield made


def test_a_question_is_asked_by_its_pool_and_index(environment):
    pool = environment.questions("rl")
    assert len(pool) == 6
    question = asked_question({"pool": "rl", "index": 5}, environment.questions, None)
    assert question.id == pool[5].id
    session = environment.reset(question)
    assert session.step(f"<think>a</think>\n<solution>{question.gold_sql}</solution>").reward == 1.0
    unnamed = ({"pool": "rl"}, {"pool": "rl", "idx": 3})  # no number is no first question
    for wrong in (*unnamed, {"pool": "rl", "index": 6}, {"pool": "rl", "index": -1}, {"pool": "none"}, {"pool": 3}):
        with pytest.raises(DataError):
            asked_question(wrong, environment.questions, None)


def test_a_clients_row_names_files_of_the_folder(environment, questions, tmp_path):
    folder = tmp_path / "databases"
    folder.mkdir()
    shutil.copy(questions[0].database.location, folder / "shop.sqlite")
    shutil.copy(questions[0].database.location, tmp_path / "secret.sqlite")
    (folder / "link.sqlite").symlink_to(tmp_path / "secret.sqlite")
    row = {"question": questions[0].question, "sql": questions[0].gold_sql}
    found = asked_question({**row, "database": "shop.sqlite"}, environment.questions, folder)
    assert found.database.location == str(folder / "shop.sqlite")
    (folder / "ring.sqlite").symlink_to(folder / "ring.sqlite")
    outside = ("../secret.sqlite", str(tmp_path / "secret.sqlite"), "link.sqlite", "none.sqlite", "postgresql://h/d", 3)
    for database in (*outside, "a\0b", "x" * 300, "ring.sqlite", "half \ud800.sqlite"):
        with pytest.raises(DataError):
            asked_question({**row, "database": database}, environment.questions, folder)
    with pytest.raises(DataError):
        asked_question({**row_of(questions[0]), "database": "shop.sqlite"}, environment.questions, folder)
    with pytest.raises(DataError, match="takes no rows"):
        asked_question({**row, "database": "shop.sqlite"}, environment.questions, None)


def test_environment_serve_names_the_extra_if_openenv_is_not_installed(monkeypatch):
    from flows.commands.use import serve_environment

    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.delitem(sys.modules, "pipelines.environment.openenv", raising=False)
    with pytest.raises(UserError, match=r"openenv.* is not installed") as error:
        serve_environment("skyrl_sql")
    assert "sqltrain[openenv]" in str(error.value)
