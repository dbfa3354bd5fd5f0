"""verifiers plays a recipe's questions with a model behind HTTP: the rewards of our sessions on the same turns."""

import asyncio
import json

import pytest

from pipelines.environment.core import Environment
from tests.fakes import http_server

pytest.importorskip("verifiers")
pytestmark = [pytest.mark.services, pytest.mark.filterwarnings("ignore")]  # the library's own

SMALL = "data.rl=[{kind: miniature, split: train, options: {databases: 1, questions: 3}}]"
LOOK = "<think>a</think>\n<sql>SELECT 1 AS one</sql>"


def chat(asked, answers):
    messages = asked.json["messages"]
    sql = next(sql for question, sql in answers.items() if question in str(messages))
    turn = sum(message["role"] == "assistant" for message in messages)
    text = f"<think>a</think>\n<solution>{sql}</solution>" if turn else LOOK
    whole = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
    said = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}]}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
    events = [*(json.dumps(whole | part) for part in (said, end, usage)), "[DONE]"]
    return 200, {"Content-Type": "text/event-stream"}, "".join(f"data: {event}\n\n" for event in events).encode()


def test_verifiers_records_the_rewards_of_our_panel(tmp_path, monkeypatch):
    import verifiers.v1 as vf

    from pipelines.environment.verifiers import SqlConfig, SqlEnvConfig, SqlTaskset

    (tmp_path / "my_sql.py").write_text(
        "from pipelines.environment.verifiers import SqlEnv, SqlTaskset\n\n__all__ = ['SqlEnv', 'SqlTaskset']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    taskset = {"id": "my_sql", "recipe": "skyrl_sql", "overrides": [SMALL], "pool": "rl"}
    with Environment("skyrl_sql", [SMALL]) as environment:
        questions = environment.questions("rl")
        answers = {asked.question: asked.gold_sql if place else "SELECT 'no'" for place, asked in enumerate(questions)}
        expected = []
        for question in questions:
            session = environment.reset(question)
            session.step(LOOK)
            expected.append(session.step(f"<think>a</think>\n<solution>{answers[question.question]}</solution>"))

    async def played():
        env = vf.load_environment(SqlEnvConfig(taskset=taskset))
        context = vf.ModelContext(model="m", client=vf.EvalClientConfig(base_url=f"{server.url}/v1"))
        async with env.serving():
            return await asyncio.gather(*(env.run_slot(env.slots(task)[0], context) for task in env.taskset))

    with http_server(lambda asked: chat(asked, answers)) as server:
        episodes = asyncio.run(played())
    assert [(episode.ok, episode.errors) for episode in episodes] == [(True, [])] * 3
    traces = [episode.traces[0] for episode in episodes]
    scores = [trace.rewards["sqltrain"].score for trace in traces]
    assert scores == [step.reward for step in expected] == [0.0, 1.0, 1.0]
    assert [trace.metrics["correct"] for trace in traces] == [0.0, 1.0, 1.0]
    assert [trace.num_turns for trace in traces] == [2, 2, 2]
    config = SqlConfig(id="my_sql", recipe="trust_sql", overrides=[SMALL, "variant=prefill"])
    given = next(iter(SqlTaskset(config).load())).data.prompt  # with the first turn, which the recipe gives
    assert [message.role for message in given] == ["user", "assistant", "user"]
