"""The gold schema is what extractors that fail differently agree on; what they do not agree on is kept and named."""

import functools
import json

import polars as pl
import pytest

from pipelines.core import frames
from pipelines.core.types import Example, SchemaItems
from pipelines.curation.gold_schema import SchemaConsensus, consensus, gold_schemas, static_extractors
from pipelines.sql.schema import introspect
from tests.fakes import build_database

NAME = SchemaItems(frozenset({"singer"}), frozenset({("singer", "name")}))
BOTH = SchemaItems(frozenset({"singer"}), frozenset({("singer", "name"), ("singer", "age")}))


def found(example, extractors):
    return consensus(example.id, {name: extractor(example) for name, extractor in extractors.items()})


def test_a_majority_of_extractors_must_agree_and_a_reason_names_the_rest():
    assert consensus("q", {"scope": NAME, "authorizer": NAME}).items == NAME
    assert consensus("q", {"scope": NAME, "authorizer": BOTH}).items is None
    assert consensus("q", {"scope": NAME, "authorizer": None}).items is None
    views = {"scope": NAME, "authorizer": BOTH, "llm": BOTH}
    expected = SchemaConsensus("q", BOTH, views, ("authorizer", "llm"), "scope lacks singer.age")
    assert consensus("q", views) == expected
    other = SchemaItems(frozenset({"concert"}), frozenset({("concert", "year")}))
    schema = consensus("q", {"scope": NAME, "authorizer": NAME, "llm": other, "second": None})
    assert schema.reason == ("llm adds concert, concert.year and lacks singer, singer.name; second could not read it")
    schema = consensus("q", {"scope": None, "authorizer": None})
    assert schema.items is None
    assert schema.reason == "scope could not read it; authorizer could not read it"
    views = dict.fromkeys("abc", NAME)
    assert consensus("all", views) == SchemaConsensus("all", NAME, views, ("a", "b", "c"), "")


def test_a_record_is_sorted_json():
    both = {"tables": ["singer"], "columns": [["singer", "age"], ["singer", "name"]]}
    facts = {"example_id": "q", "accepted": True, "agree": ["a", "b"], "reason": ""}
    assert consensus("q", {"a": BOTH, "b": BOTH}).record() == facts | both | {"views": {"a": both, "b": both}}


def test_only_accepted_schemas_are_read(tmp_path):
    records = [consensus("q", {"a": NAME, "b": NAME}).record(), consensus("r", {"a": NAME, "b": BOTH}).record()]
    rows = [{name: json.dumps(value) for name, value in record.items()} for record in records]
    frames.write(tmp_path / frames.DATA, pl.DataFrame(rows))
    assert gold_schemas(tmp_path) == {"q": NAME}


@pytest.fixture
def music(tmp_path):
    return build_database(
        tmp_path / "music.sqlite",
        "CREATE TABLE singer (id INTEGER PRIMARY KEY, name TEXT, age INTEGER);"
        "CREATE TABLE concert (id INTEGER PRIMARY KEY, singer_id INTEGER, year INTEGER)",
    )


def test_the_two_static_extractors_agree_on_a_join_in_a_subquery(music):
    sql = "SELECT T.name FROM singer AS T WHERE T.id IN (SELECT singer_id FROM concert WHERE year > 2000)"
    schema = found(Example("q", "?", music, sql), static_extractors(functools.cache(introspect)))
    assert schema.agree == ("scope", "authorizer")
    assert schema.items == SchemaItems(
        frozenset({"singer", "concert"}),
        frozenset({("singer", "name"), ("singer", "id"), ("concert", "singer_id"), ("concert", "year")}),
    )


def test_an_extra_extractor_is_one_more_callable_and_unrunnable_sql_is_not_accepted(music):
    schema = found(Example("q", "?", music, "SELECT nam FROM singer"), static_extractors(introspect))
    assert schema.items is None
    assert "authorizer could not read it" in schema.reason
    extractors = static_extractors(introspect) | {"llm": lambda example: BOTH}
    schema = found(Example("q", "?", music, "SELECT name FROM singer"), extractors)
    assert schema.items == NAME
    assert schema.reason == "llm adds singer.age"
