"""What answers: a script's lines, a champion that changes while it is served, and mistakes in one plain line."""

import asyncio
import json
from contextlib import aclosing
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the serve extra is not installed")

from served import people

from pipelines.core.errors import DataError, RecipeError
from pipelines.core.store import Store
from pipelines.core.types import Action, ActionKind, StopReason, Trajectory, Turn
from pipelines.databases.named import open_card
from pipelines.nightly.ledger import Ledger
from pipelines.recipe.config import Execution
from pipelines.rollout.policies.base import ScriptedPolicy
from pipelines.serving import models
from pipelines.serving.agent import Agent, AnsweringModel, QuestionBudget, why_unanswered
from pipelines.serving.http_server import Metrics
from pipelines.serving.models import CurrentModel, open_model, script


def test_a_promotion_and_a_rollback_are_picked_up_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, names = Store(tmp_path), []
    ledger = Ledger(store, "miniature")
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"question": "*", "turns": ["x"]}) + "\n")

    def loaded(folder: Path, recipe: str, overrides: object, name: str) -> AnsweringModel:
        assert folder == store.folder("grpo", name) / "model"
        return AnsweringModel(name, script(path), models.recipes.load("sql_trail", []))

    monkeypatch.setattr(models, "_checkpoint", loaded)  # weights are loaded elsewhere; here it is about which
    monkeypatch.setattr(models, "LOOK_S", 0.01)

    def promote(key: str) -> None:
        store.make("grpo", key, lambda folder: None, {}, lambda: None)
        ledger.add("night", decision="promoted", challenger={"stage": "grpo", "key": key}, learned=[], new=[])

    async def until(served: CurrentModel, key: str) -> None:
        async with asyncio.timeout(20):
            while served.model.name != key:
                await asyncio.sleep(0.01)
        names.append(served.model.name)

    async def nights() -> None:
        promote("one")
        served = CurrentModel("champion:miniature", "sql_trail", [], store)
        following = asyncio.create_task(served.follow())
        await until(served, "one")
        promote("two")
        await until(served, "two")
        ledger.rollback()
        await until(served, "one")
        following.cancel()

    asyncio.run(nights())
    assert names == ["one", "two", "one"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/none", "no model in /none. Pass a checkpoint folder, champion:RECIPE"),
        ("champion:miniature", "recipe miniature has no champion"),
        ("script:/none.jsonl", "no such file: /none.jsonl"),
        ("endpoint:none", "there is no endpoint 'none'"),
    ],
)
def test_an_unknown_policy_is_reported(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises((DataError, RecipeError)) as raised:
        open_model(text, "sql_trail", [], Store(tmp_path))
    assert message in str(raised.value)


def test_without_a_champion_the_last_decision_and_its_model_are_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    challenger = {"stage": "sft", "key": "0a1b"}
    Ledger(store, "shop").add("night", decision="kept", reason="not shown to be better", challenger=challenger, new=[])
    with pytest.raises(DataError) as raised:
        open_model("champion:shop", "sql_trail", [], store)
    assert str(raised.value) == (
        f"recipe shop has no champion in {tmp_path}: its last model was kept, not shown to be better. "
        f"Add questions and train again, or name that model itself: {tmp_path}/sft/0a1b/model"
    )


def test_what_an_endpoint_takes_is_counted_and_nothing_grows(tmp_path: Path) -> None:
    paid = [{"answers": 2.0, "prompt_tokens": 90.0}, {"answers": 1.0, "prompt_tokens": 10.0}]
    policy = ScriptedPolicy(lambda _: "<reasoning>x</reasoning>\n<solution>SELECT 1</solution>", "script")
    policy.take_used = lambda: paid.pop(0)  # type: ignore[method-assign]
    where, model = (
        open_card("people", people(tmp_path)),
        AnsweringModel("m", policy, models.recipes.load("sql_trail", [])),
    )

    async def ask(agent: Agent) -> None:
        async with aclosing(agent.answer("Who ?")) as events:
            async for _ in events:
                pass

    with where.sql(Execution()) as sql:
        agent = Agent(where, sql, where.schema(sql), lambda: model, QuestionBudget())
        for _ in range(2):
            asyncio.run(ask(agent))
    assert paid == []
    assert "sqltrain_endpoint_prompt_tokens_total 100\n" in Metrics().text(agent.used)


def test_a_line_without_turns_is_named(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"question": "*", "turns": ["x"]}\n{"question": "y"}\n')
    with pytest.raises(DataError, match="line 2: no turns"):
        script(path)


def test_why_there_is_no_answer_is_said_as_it_is() -> None:
    def ended(stop: StopReason, turns: int, kind: ActionKind = ActionKind.SQL, failure: str | None = None) -> str:
        spoken = (Turn("x", Action(kind)),) * turns
        return why_unanswered(Trajectory("q", 0, "p", "react", (), spoken, None, stop, failure=failure))

    assert "longer than the model's context" in ended(StopReason.TOKEN_LIMIT, 0)
    assert ended(StopReason.TOKEN_LIMIT, 3) == "the model used up its tokens without an answer"
    assert ended(StopReason.TURN_LIMIT, 3) == "the model gave no answer within its turns"
    said = "every turn of the model was malformed: it does not speak the protocol react"
    assert ended(StopReason.TURN_LIMIT, 3, ActionKind.INVALID).startswith(said)
    assert "used up its tokens" in ended(StopReason.TOKEN_LIMIT, 1, ActionKind.INVALID)
    names = ("EndpointError", "database_missing", "KeyError")
    assert {name: ended(StopReason.BROKEN, 1, failure=name) for name in names} == {
        "EndpointError": "no answer: the model's server does not answer",
        "database_missing": "no answer: the database is away",
        "KeyError": "no answer: the model failed; the server's log says more",
    }
