"""A small database behind the real sandbox, the real ReAct protocol, and a tiny untrained model with its tokenizer."""

import asyncio
import sqlite3

import pytest

from pipelines.core.types import Action, ActionKind, Database, Example
from pipelines.protocols.base import build_protocol
from pipelines.protocols.one_action import React
from pipelines.recipe import config
from pipelines.recipe.config import Model, Sampling, TinyModel
from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.engine import RolloutEngine
from pipelines.sql.schema import introspect
from tests.fakes import engine_fixture

sql = engine_fixture("session", timeout_s=10)
TEXT = "how many singers are there in paris select name from singer where city is count of the answer left now"
WORDS = TEXT.split()


class Talk(React):
    """ReAct for a model that has learned nothing: whatever it says counts as a look into the database."""

    sql = "SELECT name FROM singer WHERE city = 'paris'"

    def parse(self, text):
        return Action(ActionKind.SQL, self.sql)

    def observe(self, action, result, turns_left):
        return f"<observation> name ann cy {turns_left} left</observation>"


class Held:
    def __init__(self, query, wait):
        self.work, self._query, self._wait = query.work, query, wait

    async def result(self):
        result = await self._query.result()
        await self._wait()
        return result


class Stuck:
    """The real engine, but its first answer comes only when all other episodes are done."""

    def __init__(self, sql, others):
        self._sql, self._others, self._queries = sql, others, 0
        self._free = asyncio.Event()

    def on_done(self, _):
        self._others -= 1
        if not self._others:
            self._free.set()

    def begin(self, database, sql, max_rows=None):
        self._queries += 1
        first = self._queries == 1
        return Held(self._sql.begin(database, sql, max_rows), self._free.wait if first else lambda: asyncio.sleep(0))


@pytest.fixture(scope="session")
def database(tmp_path_factory):
    path = tmp_path_factory.mktemp("databases") / "music.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE singer (singer_id INTEGER PRIMARY KEY, name TEXT, city TEXT)")
        rows = [(1, "ann", "paris"), (2, "bo", "rome"), (3, "cy", "paris")]
        connection.executemany("INSERT INTO singer VALUES (?, ?, ?)", rows)
    connection.close()
    return Database("music", "sqlite", str(path))


@pytest.fixture(scope="session")
def examples(database):
    """40 questions of different length; the gold SQL is the same."""
    gold = "SELECT count(*) FROM singer"
    asked = [" ".join(WORDS[(i + 3 * k) % len(WORDS)] for k in range(6 + i % 9)) for i in range(40)]
    return [Example(f"q{i}", f"{question} {i} ?", database, gold) for i, question in enumerate(asked)]


@pytest.fixture
def protocol():
    def make(**settings):
        return build_protocol(config.ProtocolSection(name="react", prompt="brief", **settings))

    return make


@pytest.fixture
def talk():
    return Talk(config.ProtocolSection(name="react", prompt="brief", forced_final=False))


@pytest.fixture
def engine(sql):
    def make(policy, protocol, max_turns=4, **sampling):
        return RolloutEngine(policy, protocol, sql, Sampling(**sampling), max_turns, introspect)

    return make


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    from pipelines.training.model import make_tiny

    folder = tmp_path_factory.mktemp("tiny")
    tags = React(config.ProtocolSection()).tags
    sizes = TinyModel(width=32, layers=2, heads=4, ffn=64, vocabulary=400, context=1024)
    make_tiny(Model(tiny=sizes), [TEXT] * 50, tags, folder, seed=0)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tiny_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_folder)


@pytest.fixture(scope="session")
def codec(tokenizer):
    return ChatCodec(tokenizer)


@pytest.fixture
def model(tiny_folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder)
