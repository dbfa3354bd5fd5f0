"""A shop, questions about it, and a running review of them, for the tests that look through questions."""

import json
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from pipelines.databases import card, named
from pipelines.databases.card import ColumnCard, DatabaseCard, TableCard
from pipelines.recipe.config import Execution
from pipelines.review import items
from pipelines.review.decisions import Review, ReviewFiles
from pipelines.review.server import ReviewApp
from tests.fakes import asgi_server, build_database

SHOP = """
CREATE TABLE item (id INTEGER PRIMARY KEY, name TEXT, price INTEGER, cost INTEGER);
INSERT INTO item VALUES (1,'<img src=x onerror=alert(1)>',3,999111),(2,'pen',5,999222),(3,'cup',5,999333);
"""
COUNT = {"question": "How many items are there ?", "sql": "SELECT count(*) FROM item", "style": "plain"}
DEAREST = {"question": "What costs the most ?", "sql": "SELECT name FROM item ORDER BY price DESC LIMIT 1"}
VOTE = {"by": "other", "sql": "SELECT name FROM item WHERE price = (SELECT max(price) FROM item)", "agrees": False}
HIDDEN = {"question": "What did the pen cost us ?", "sql": "SELECT cost FROM item WHERE id = 2"}
QUESTIONS = [COUNT, {**DEAREST, "votes": [VOTE]}, HIDDEN, {"question": "Which names are there ?"}]


def shop(folder):
    """The database, its card in databases/ of the working folder (what an item cost is hidden), and questions."""
    build_database(folder / "shop.sqlite", SHOP)
    names = {"id": ColumnCard(key=True), "name": ColumnCard(), "price": ColumnCard(), "cost": ColumnCard(hidden=True)}
    tables = {"item": TableCard(columns=names)}
    known = DatabaseCard(engine="sqlite", location=str(folder / "shop.sqlite"), tables=tables)
    card.write(card.path_of("shop"), known)
    path = folder / "mine.jsonl"
    rows = [{"database": "shop.sqlite", **row} for row in QUESTIONS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@dataclass
class Running:
    url: str
    site: ReviewApp

    @property
    def keys(self):
        return list(self.site.review.items)

    def get(self, path):
        return httpx.get(self.url + path, headers=self._headers).raise_for_status().json()

    def post(self, path, **body):
        return httpx.post(self.url + path, json=body, headers=self._headers, timeout=30)

    def decide(self, number, choice, **changed):
        """Say something of a question, its texts as they are but for the changed ones."""
        shown = self.get(f"/v1/item?key={self.keys[number]}")
        texts = {name: shown[name] for name in ("question", "sql", "evidence")}
        return self.post("/v1/decide", key=self.keys[number], choice=choice, **{**texts, **changed})

    @property
    def _headers(self):
        return {"Authorization": f"Bearer {self.site.token}"}


@contextmanager
def reviewing(path, database=None):
    files = ReviewFiles.of(path.with_name("mine.reviewed.jsonl"))
    given, databases = items.read_file(path, database)
    with named.sandbox(databases, Execution(timeout_s=20)) as sql:
        address = databases[0].address if database else None
        review = Review(path.name, items.with_doubts(given, sql), files, None, address)
        with listening(ReviewApp(review, sql)) as running:
            yield running


@contextmanager
def listening(site):
    with asgi_server(site.app()) as url:
        yield Running(url, site)


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
