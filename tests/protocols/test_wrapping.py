"""What models put around their SQL: seen, taken off by the recipe's rule, and told with the setting that does."""

import logging
import sqlite3

import pytest

from pipelines.core.types import Database, Example
from pipelines.databases.of_recipe import schemas
from pipelines.protocols.base import build_protocol
from pipelines.protocols.wrapping import read_plain, wrapping
from pipelines.recipe import recipes
from pipelines.recipe.config import ProtocolSection, Sampling
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies.base import ScriptedPolicy
from tests.fakes import engine_fixture

sql = engine_fixture()
LITERALS = "SELECT '```sql', \"&gt;\", 'a &lt; b' || '`'"


@pytest.mark.parametrize(
    ("text", "kind", "stripped"),
    [
        ("SELECT 1", None, "SELECT 1"),
        (LITERALS, None, LITERALS),
        ("SELECT 1 & 3", None, "SELECT 1 & 3"),
        ("SELECT 'a\n```\nb'", None, "SELECT 'a\n```\nb'"),
        ("-- the total\nSELECT '\n```\n'", None, "-- the total\nSELECT '\n```\n'"),
        ("```sql\nSELECT 1\n```", "fence", "SELECT 1"),
        ("```\nSELECT 1\n```", "fence", "SELECT 1"),
        ("```SELECT 1```", "fence", "SELECT 1"),
        ("```SELECT\n1```", "fence", "SELECT\n1"),
        ("```SQLite\nSELECT 1;\n```\n", "fence", "SELECT 1;"),
        ("```sql SELECT 1", "fence", "SELECT 1"),
        ("```sql\nSELECT 1\n```\nIt counts the rows.", "fence", "SELECT 1"),
        ("```sql\n`SELECT a &gt; 1`\n```", "fence", "SELECT a > 1"),
        ("Here it is:\n```sql\nSELECT 1\n```", "fence among words", "SELECT 1"),
        ("`SELECT 1`", "backticks", "SELECT 1"),
        ("`SELECT `a` FROM `t``", "backticks", "SELECT `a` FROM `t`"),
        ("``SELECT 1``", "backticks", "SELECT 1"),
        ("SELECT a FROM t WHERE a &gt;= 1 AND b &#60; 2", "entities", "SELECT a FROM t WHERE a >= 1 AND b < 2"),
        ("SELECT &quot;a&quot; FROM t&#x3b;", "entities", 'SELECT "a" FROM t;'),
        ("SELECT a &gt; 3 FROM t WHERE b = 'x &amp; y'", "entities", "SELECT a > 3 FROM t WHERE b = 'x &amp; y'"),
        ("-- select the number\n```sql\nSELECT 1\n```", "fence among words", "SELECT 1"),  # the comment is no query
    ],
)
def test_what_stands_around_a_query_is_seen_and_taken_off(text, kind, stripped):
    assert wrapping(text) == kind
    assert read_plain(text, "kept") == (text, None)
    assert read_plain(text, "stripped") == (stripped, None)
    is_fault = kind not in (None, "entities")
    assert read_plain(text, "malformed") == (("", "fenced") if is_fault else (text, None))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("rule", ["kept", "stripped", "malformed"])
@pytest.mark.parametrize("line", ["-" * 60, "-- " * 60, "/* a */ " * 60])
def test_a_long_ruled_line_before_a_fence_is_read_at_once(line, rule):
    """A comment may begin at each dash: tried in every way, sixty of them would take for ever."""
    text = f"{line}\nThe query:\n```sql\nSELECT 1\n```"
    assert wrapping(text) == "fence among words"
    assert read_plain(text, rule) == {"kept": (text, None), "stripped": ("SELECT 1", None)}.get(rule, ("", "fenced"))


def test_any_number_of_backticks_is_taken_off():
    assert read_plain("` " * 3000 + "SELECT 1", "stripped") == ("SELECT 1", None)
    assert read_plain("` " * 3000, "stripped") == ("", None)


def test_of_two_fenced_queries_none_is_chosen():
    two = "```sql\nSELECT 1\n```\nor\n```sql\nSELECT 2\n```"
    assert read_plain(two, "stripped") == ("", "two_fences")
    assert read_plain(f"Either\n{two}", "stripped") == ("", "two_fences")


@pytest.fixture
def episodes(tmp_path, sql, caplog):
    """Runs so many questions whose answers are given by their number; returns the warnings."""
    place = tmp_path / "d.sqlite"
    with sqlite3.connect(place) as table:
        table.execute("CREATE TABLE t (a INTEGER)")

    def run(answer, count, protocol=None, policy=None):
        spoken = build_protocol(protocol or ProtocolSection(name="react", reasoning=False))
        tag = "solution" if spoken.name == "react" else "answer"
        policy = policy or ScriptedPolicy(lambda request: f"<{tag}>{answer(int(request.example.id))}</{tag}>", "script")
        schema = schemas(recipes.load("miniature"))
        engine = RolloutEngine(policy, spoken, sql, Sampling(), 1, schema)
        questions = [Example(str(n), "How many?", Database("d", "sqlite", str(place)), "") for n in range(count)]
        with caplog.at_level(logging.WARNING):
            engine.run([EpisodeRequest(question, 0, 0) for question in questions])
        return [record.getMessage() for record in caplog.records], policy

    return run


FENCED = "```sql\nSELECT 1\n```"


def test_answers_with_fences_are_told_once_after_the_first_ones(episodes):
    """Of the first 40, those with a number from 3 on have a fence."""
    said, policy = episodes(lambda number: "SELECT 1" if number < 3 else FENCED, 60)
    assert said == ["37 of 40 answers begin with a fence: set protocol.options.fence=stripped"]
    again, _ = episodes(lambda _: "", 60, policy=policy)
    assert again == said


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (FENCED, "8 of 8 answers begin with a fence: set protocol.options.fence=stripped"),
        ("`SELECT 1`", "8 of 8 answers stand in backticks: set"),
        ("SELECT a &gt; 1 FROM t", "8 of 8 answers write signs as HTML does, such as &gt;: set"),
        (f"It is:\n{FENCED}", "8 of 8 answers stand in a fence with words around it: set"),
    ],
)
def test_a_short_run_tells_at_its_end(episodes, answer, words):
    (said,), _ = episodes(lambda _: answer, 8)
    assert said.startswith(words)


def test_a_rare_fence_and_clean_answers_are_no_habit(episodes):
    assert episodes(lambda number: FENCED if number == 0 else "SELECT 1", 20)[0] == []


def test_a_recipe_that_takes_fences_off_has_nothing_to_tell(episodes):
    stripping = ProtocolSection(name="react", reasoning=False, options={"fence": "stripped"})
    assert episodes(lambda _: FENCED, 8, stripping)[0] == []


def test_a_protocol_without_the_setting_says_what_it_takes(episodes):
    wanted = ProtocolSection(name="single_turn", reasoning=False)
    assert episodes(lambda _: FENCED, 8, wanted)[0] == []  # it asks for this fence
    (said,), _ = episodes(lambda _: "```\nSELECT 1\n```", 8, wanted)
    assert said == "8 of 8 answers begin with a fence: this protocol takes one ```sql fence with the query alone"
