"""A real server of the agent on this machine, its model a script, for the tests that talk to it."""

import asyncio
import json
import sqlite3
from contextlib import aclosing, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from pipelines.databases.card import ColumnCard, DatabaseCard, TableCard
from pipelines.databases.named import find, open_card
from pipelines.recipe import recipes
from pipelines.recipe.config import Execution
from pipelines.rollout.policies.base import ScriptedPolicy
from pipelines.serving.access import Access
from pipelines.serving.agent import Agent, AnsweringModel, QuestionBudget
from pipelines.serving.feedback import Feedback
from pipelines.serving.http_server import Service
from pipelines.serving.models import script
from tests.fakes import asgi_server

ENDLESS = "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT COUNT(*) FROM t"
COUNT = "SELECT city, count(*) AS n FROM person GROUP BY city ORDER BY city"
WIDE = "SELECT 175953614 AS amount, 'Oslo University Hospital' AS " + ", 'x y' AS ".join(
    f"column_{n}" for n in range(12)
)
LINES = {
    "What is wide ?": [f"<reasoning>Many columns.</reasoning>\n<solution>{WIDE}</solution>"],
    "How many people by city ?": [
        "<reasoning>Which cities are there ?</reasoning>\n<sql>SELECT DISTINCT city FROM person</sql>",
        f"<reasoning>Now count.</reasoning>\n<solution>{COUNT}</solution>",
    ],
    "What are their numbers ?": ["<reasoning>I try.</reasoning>\n<solution>SELECT ssn FROM person</solution>"],
    "What are the names ?": [
        "<reasoning><b id=bold>bold</b></reasoning>\n<solution>SELECT name FROM person</solution>"
    ],
    "Wait": [f"<reasoning>It takes long.</reasoning>\n<sql>{ENDLESS}</sql>"],
    "*": ["<reasoning>I do not know.</reasoning>\n<solution>SELECT NULL AS nothing</solution>"],
}


def people(folder):
    """A database of people, whose numbers are hidden, and its card."""
    with closing(sqlite3.connect(folder / "people.sqlite")) as connection:
        connection.executescript(
            "CREATE TABLE person (id INTEGER PRIMARY KEY, name TEXT, city TEXT, ssn TEXT);"
            "INSERT INTO person VALUES (1,'<img src=x onerror=alert(1)>','Oslo','SECRET-1'),"
            "(2,'=1+1','Rome','SECRET-2'),(3,'Cy','Oslo','SECRET-3');"
        )
    names = {"id": ColumnCard(type="INTEGER", key=True), "name": ColumnCard(), "city": ColumnCard()}
    table = TableCard(columns={**names, "ssn": ColumnCard(hidden=True)})
    return DatabaseCard(engine="sqlite", location=str(folder / "people.sqlite"), tables={"person": table})


def scripted(folder, lines=LINES, name="script"):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"question": q, "turns": turns}) + "\n" for q, turns in lines.items()))
    return AnsweringModel(name, script(path), recipes.load("sql_trail", []))


def says(sql):
    def say(request):
        tag = "solution" if request.turn else "sql"
        return f"<reasoning>x</reasoning>\n<{tag}>{sql}</{tag}>"

    return AnsweringModel("script", ScriptedPolicy(say, "script"), recipes.load("sql_trail", []))


def asked(database, question, sql):
    return asked_of(says(sql), database, question)


def asked_of(model, database, question):
    async def ask(agent):
        async with aclosing(agent.answer(question)) as events:
            return [event async for event in events]

    where = find(database)
    with where.sql(Execution(timeout_s=20)) as engine:
        return asyncio.run(ask(Agent(where, engine, where.schema(engine), lambda: model, QuestionBudget(30, 100))))


@dataclass
class Site:
    """A running server; the last of its models answers."""

    url: str
    folder: Path
    service: Service
    models: list[AnsweringModel]
    client: httpx.Client

    def post(self, path, body, **headers):
        return self.client.post(self.url + path, json=body, headers=headers)

    def ask(self, question, **headers):
        body = {"model": "any", "messages": [{"role": "user", "content": question}]}
        return self.post("/v1/chat/completions", body, **headers).raise_for_status().json()


def events(answer):
    return answer["choices"][0]["message"]["sqltrain"]


@contextmanager
def site(folder, access=None, budget=None, workers=1, where=None, model=None):
    """Start a server and end it; by default of the people, answered by `LINES`."""
    where = where or open_card("people", people(folder))
    models = [model or scripted(folder)]
    with where.sql(Execution(timeout_s=20), workers, folder / "statements.jsonl") as sql:
        agent = Agent(where, sql, where.schema(sql), lambda: models[-1], budget or QuestionBudget(30, 100))
        service = Service(agent, access or Access({}), folder / "questions.jsonl", Feedback(folder / "feedback"))
        with suppress(ImportError):
            from pipelines.serving.mcp_server import add_mcp

            add_mcp(service)
        with asgi_server(service.app()) as url, httpx.Client(timeout=30) as client:  # a new one each time takes 30 ms
            yield Site(url, folder, service, models, client)
