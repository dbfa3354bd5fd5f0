"""verifiers plays a recipe's questions with a model behind HTTP: the rewards of our sessions on the same turns."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipelines.environment.core import Environment

pytest.importorskip("verifiers")
pytestmark = [pytest.mark.services, pytest.mark.filterwarnings("ignore")]  # the library's own

SMALL = "data.rl=[{kind: miniature, split: train, options: {databases: 1, questions: 3}}]"
LOOK = "<think>a</think>\n<sql>SELECT 1 AS one</sql>"


class Model(BaseHTTPRequestHandler):
    """A chat model that looks first, and then answers by what it is asked."""

    answers: dict[str, str]  # question: SQL

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["messages"]
        sql = next(sql for question, sql in self.answers.items() if question in str(asked))
        turn = sum(message["role"] == "assistant" for message in asked)
        text = f"<think>a</think>\n<solution>{sql}</solution>" if turn else LOOK
        whole = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        said = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}]}
        end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
        events = [*(json.dumps(whole | part) for part in (said, end, usage)), "[DONE]"]
        data = "".join(f"data: {event}\n\n" for event in events).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def model() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_verifiers_records_the_rewards_of_our_panel(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import verifiers.v1 as vf

    from pipelines.environment.verifiers import SqlEnvConfig

    (tmp_path / "my_sql.py").write_text(
        "from pipelines.environment.verifiers import SqlEnv, SqlTaskset\n\n__all__ = ['SqlEnv', 'SqlTaskset']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    taskset = {"id": "my_sql", "recipe": "skyrl_sql", "overrides": [SMALL], "pool": "rl"}
    with Environment("skyrl_sql", [SMALL]) as environment:
        questions = environment.questions("rl")
        Model.answers = {
            question.question: question.gold_sql if place else "SELECT 'no'" for place, question in enumerate(questions)
        }
        expected = []
        for question in questions:
            session = environment.reset(question)
            session.step(LOOK)
            expected.append(session.step(f"<think>a</think>\n<solution>{Model.answers[question.question]}</solution>"))

    async def played() -> list[Any]:
        env = vf.load_environment(SqlEnvConfig(taskset=taskset))
        context = vf.ModelContext(model="m", client=vf.EvalClientConfig(base_url=model))
        async with env.serving():
            return await asyncio.gather(*(env.run_slot(env.slots(task)[0], context) for task in env.taskset))

    episodes = asyncio.run(played())
    assert [(episode.ok, episode.errors) for episode in episodes] == [(True, [])] * 3
    traces = [episode.traces[0] for episode in episodes]
    assert (
        [trace.rewards["sqltrain"].score for trace in traces] == [step.reward for step in expected] == [0.0, 1.0, 1.0]
    )
    assert [trace.metrics["correct"] for trace in traces] == [0.0, 1.0, 1.0]
    assert [trace.num_turns for trace in traces] == [2, 2, 2]
