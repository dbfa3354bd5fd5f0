"""The scripted oracle answers right in every protocol, looks before it uses, and mends its mistakes."""

import dataclasses
import functools
import re

import pytest

from pipelines.benchmarks import base
from pipelines.core.types import ActionKind, Example, ExecutionStatus
from pipelines.protocols.base import build_protocol
from pipelines.protocols.knowledge import is_probe, lists_everything, unverified
from pipelines.recipe.config import ProtocolSection, Sampling, Source
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies.oracle import OraclePolicy, lookups
from pipelines.sql.engine import Pair
from pipelines.sql.schema import introspect
from tests.fakes import build_database, engine_fixture

sql = engine_fixture("module", timeout_s=5, memory_mb=512)
PROTOCOLS = {
    "react": ProtocolSection(name="react", prompt="brief", max_turns=6),
    "react_full": ProtocolSection(name="react", prompt="full"),
    "react_names": ProtocolSection(name="react", prompt="brief", schema_view="names"),
    "phases": ProtocolSection(name="phases", prompt="brief", schema_view="hidden"),
    "phases_full": ProtocolSection(name="phases", prompt="full", schema_view="hidden"),
    "phases_prefill": ProtocolSection(name="phases", prompt="full", schema_view="prefill"),
    "phases_ec": ProtocolSection(name="phases", prompt="full", options={"phases": ["explore", "confirm"]}),
    "tool_call": ProtocolSection(name="tool_call", prompt="brief"),
    "tool_call_full": ProtocolSection(name="tool_call", prompt="full"),
    "single_turn": ProtocolSection(name="single_turn", prompt="full", max_turns=1, forced_final=False),
}
schemas = functools.cache(introspect)


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    root = tmp_path_factory.mktemp("stage")
    source = Source(kind="miniature", split="dev", options={"databases": 14, "questions": 12})
    return base.resolve_locations(base.read(source, 0, root).examples, root)


def play(examples, settings, sql, error_rate=0.0, max_turns=None):
    protocol = build_protocol(settings)
    turns = settings.max_turns if max_turns is None else max_turns
    engine = RolloutEngine(OraclePolicy(protocol, error_rate), protocol, sql, Sampling(), turns, schemas)
    return engine.run([EpisodeRequest(example, 0, number) for number, example in enumerate(examples)])


def share_right(examples, trajectories, sql):
    pairs = [Pair(e.database, e.gold_sql, t.final_sql) for e, t in zip(examples, trajectories, strict=True)]
    return sum(verdict.scores["strict"] for verdict in sql.verdicts(pairs, ["strict"])) / len(pairs)


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("error_rate", [0.0, 1.0])
def test_every_episode_is_well_formed_and_right(examples, sql, name, error_rate):
    trajectories = play(examples[:60], PROTOCOLS[name], sql, error_rate)
    assert all(trajectory.well_formed for trajectory in trajectories)
    assert not any(trajectory.forced for trajectory in trajectories)
    assert share_right(examples[:60], trajectories, sql) == 1.0


def test_it_probes_exactly_what_the_question_filters_on(examples, sql):
    for example, trajectory in zip(examples, play(examples, PROTOCOLS["react"], sql), strict=True):
        probes = [turn.action.content for turn in trajectory.turns[:-1]]
        wanted = [f"SELECT DISTINCT {one['column']} FROM {one['table']}" for one in example.meta["filters"]]
        assert probes == list(dict.fromkeys(wanted))


@pytest.mark.parametrize("name", ["react", "phases", "tool_call"])
def test_it_never_says_a_stored_value_before_it_was_shown(examples, sql, name):
    for example, trajectory in zip(examples, play(examples, PROTOCOLS[name], sql, 0.5), strict=True):
        shown = set(example.question.split())
        for turn in trajectory.turns:
            said = {*turn.action.reasoning.split(), *re.findall(r"'(\w+)'", turn.action.content)}
            for one in example.meta["filters"]:
                assert one["stored"] not in said or one["stored"] in shown
            shown |= set(re.findall(r"\w+", turn.observation or ""))


def test_a_mistake_is_seen_and_mended(examples, sql):
    trajectories = play(examples, PROTOCOLS["react"], sql, error_rate=1.0)
    first = [trajectory.turns[0] for trajectory in trajectories]
    failed = [turn for turn in first if turn.status is ExecutionStatus.ERROR]
    assert {turn.error_class for turn in failed} == {"no_such_table"}
    guesses = [t for t, e in zip(trajectories, examples, strict=True) if e.meta["filters"]]
    assert all(len(t.turns) >= 3 for t in guesses)
    assert len(failed) == len(examples) - len(guesses)


def test_the_share_of_mistakes_is_the_error_rate(examples):
    oracle = OraclePolicy(build_protocol(PROTOCOLS["react"]), error_rate=0.25)
    plain = OraclePolicy(build_protocol(PROTOCOLS["react"]), error_rate=0.0)
    scripts = [(oracle.script(e, seed), plain.script(e, seed)) for e in examples for seed in range(12)]
    assert sum(len(ours) > len(bare) for ours, bare in scripts) / len(scripts) == pytest.approx(0.25, abs=0.03)


def test_a_column_that_it_guesses_is_never_looked_up_and_its_value_is_spelled_in_one_of_three_ways(examples):
    columns = {"country", "type", "status"}
    oracle = OraclePolicy(build_protocol(PROTOCOLS["react"]), 0.0, guesses=dict.fromkeys(columns, 1.0))
    spellings, needed = set(), [e for e in examples if any(f["column"] in columns for f in e.meta["filters"])]
    for example in needed:
        *looks, answer = oracle.script(example, seed=0)
        assert not any(f"DISTINCT {column} " in look.content for look in looks for column in columns)
        hasty = [f for f in example.meta["filters"] if f["column"] in columns]
        for filter_ in hasty:
            (spelling,) = {filter_["asked"].lower(), filter_["asked"].upper(), filter_["asked"].title()} & set(
                re.findall(r"'(\w+)'", answer.content)
            )
            spellings.add(spelling == filter_["asked"])
            assert f"{filter_['asked']} is {spelling}" in answer.reasoning
        careful = {f["column"] for f in example.meta["filters"]} - columns
        assert all(any(f"DISTINCT {column} " in look.content for look in looks) for column in careful)
    assert len(needed) > 20
    assert spellings == {True, False}


def test_a_guess_is_right_as_often_as_chance_says(examples, sql):
    """A value stored as a word, in capitals or as a title is guessed with a chance of 1 in 3; a code never is."""
    columns = {f["column"] for e in examples for f in e.meta["filters"]}
    protocol = build_protocol(PROTOCOLS["react"])
    engine = RolloutEngine(
        OraclePolicy(protocol, 0.0, guesses=dict.fromkeys(columns, 1.0)), protocol, sql, Sampling(), 6, schemas
    )
    alone = [e for e in examples if len(e.meta["filters"]) == 1]
    coded = [e for e in alone if e.meta["filters"][0]["stored"].lower() != e.meta["filters"][0]["asked"]]
    runs = [EpisodeRequest(e, sample, sample) for e in alone if e not in coded for sample in range(6)]
    assert share_right(coded, engine.run([EpisodeRequest(e, 0, 0) for e in coded]), sql) == 0.0
    assert share_right([run.example for run in runs], engine.run(runs), sql) == pytest.approx(1 / 3, abs=0.08)


def test_it_guesses_as_often_as_the_share_says_and_never_what_no_word_of_the_question_names(examples):
    often = OraclePolicy(build_protocol(PROTOCOLS["react"]), 0.0, guesses={"country": 0.75})
    plain = OraclePolicy(build_protocol(PROTOCOLS["react"]), 0.0)
    asked = [e for e in examples if [f["column"] for f in e.meta["filters"]] == ["country"]]
    looks = [len(often.script(e, seed)) == len(plain.script(e, seed)) for e in asked for seed in range(60)]
    assert sum(looks) / len(looks) == pytest.approx(0.25, abs=0.05)
    unnamed = [dataclasses.replace(e, meta={k: v for k, v in e.meta.items() if k != "filters"}) for e in asked]
    always = OraclePolicy(build_protocol(PROTOCOLS["react"]), 0.0, guesses={"country": 1.0})
    assert all(any("DISTINCT" in step.content for step in always.script(e, 0)) for e in unnamed)


def test_the_same_seed_gives_the_same_episode_and_seeds_vary_the_wording(examples):
    def thoughts(seed):
        oracle = OraclePolicy(build_protocol(PROTOCOLS["react"]), error_rate=0.1)
        return [[action.reasoning for action in oracle.script(example, seed)] for example in examples]

    assert thoughts(1) == thoughts(1)
    assert thoughts(1) != thoughts(2)


def test_a_forced_turn_is_an_answer_and_unsayable_gold_is_malformed(examples, sql):
    trajectories = play(examples, PROTOCOLS["react"], sql, max_turns=0)
    assert all(trajectory.forced and len(trajectory.turns) == 1 for trajectory in trajectories)
    assert all(trajectory.final_sql for trajectory in trajectories)
    tagged = dataclasses.replace(examples[0], gold_sql="SELECT '</solution>'")
    (trajectory,) = play([tagged], PROTOCOLS["react"], sql)
    assert not trajectory.well_formed


def test_over_a_hidden_schema_it_explores_what_it_needs_and_proposes_what_it_has_seen(examples, sql):
    for trajectory in play(examples, PROTOCOLS["phases"], sql):
        kinds = [turn.action.kind for turn in trajectory.turns]
        assert kinds[-3:] == [ActionKind.PROPOSE, ActionKind.GENERATE, ActionKind.SOLUTION]
        explored = [turn.action.content for turn in trajectory.turns if turn.action.kind is ActionKind.EXPLORE]
        assert all(is_probe(query) and not lists_everything(query) for query in explored)
        assert not unverified(trajectory)


@pytest.fixture
def music(tmp_path):
    return build_database(
        tmp_path / "music.sqlite",
        "CREATE TABLE singer (singer_id INTEGER, name TEXT, country TEXT);"
        "CREATE TABLE concert (concert_id INTEGER, singer_id INTEGER, venue TEXT);"
        "INSERT INTO singer VALUES (1, 'Ann', 'France'), (2, 'Bo', 'Spain');"
        "INSERT INTO concert VALUES (1, 1, 'Old Hall')",
    )


@pytest.mark.parametrize(
    ("sql", "plan"),
    [
        ("SELECT name FROM singer WHERE country = 'France'", [("singer", "country", "France")]),
        ('SELECT name FROM singer WHERE country = "France"', [("singer", "country", "France")]),
        (
            "SELECT T1.name FROM singer AS T1 JOIN concert AS T2 ON T1.singer_id = T2.singer_id "
            "WHERE T2.venue LIKE '%Hall%' AND T1.country IN ('France', 'Spain')",
            [("concert", "venue", "Hall"), ("singer", "country", "France"), ("singer", "country", "Spain")],
        ),
        (
            "SELECT name FROM singer JOIN concert USING (singer_id) WHERE venue = 'Old Hall'",
            [("concert", "venue", "Old Hall")],
        ),
        (
            "SELECT name FROM singer WHERE singer_id IN (SELECT singer_id FROM concert WHERE venue = 'Old Hall')",
            [("concert", "venue", "Old Hall")],
        ),
        ("SELECT name FROM singer WHERE singer_id = 1", []),
        ("SELECT name FROM singer WHERE country = name", []),
        ("SELEKT name FRUM singer", []),
    ],
)
def test_without_the_sources_plan_it_reads_the_gold_sql(music, sql, plan):
    found = lookups(Example("1", "q", music, sql), schemas(music))
    assert [(one.table, one.column, one.stored) for one in found] == plan
    assert all(one.probe == f"SELECT DISTINCT {one.column} FROM {one.table}" for one in found)


def test_without_a_schema_only_qualified_or_single_table_columns_are_looked_up(music):
    both = "SELECT name FROM singer JOIN concert USING (singer_id) WHERE venue = 'Old Hall'"
    assert lookups(Example("1", "q", music, both)) == []
    assert len(lookups(Example("1", "q", music, "SELECT 1 FROM concert WHERE venue = 'Old Hall'"))) == 1


def test_it_plays_a_question_of_any_source(music, sql):
    example = Example("1", "Who is French?", music, "SELECT name FROM singer WHERE country = 'France';")
    (trajectory,) = play([example], PROTOCOLS["react_full"], sql)
    assert [turn.action.kind for turn in trajectory.turns] == [ActionKind.SQL, ActionKind.SOLUTION]
    assert trajectory.final_sql == "SELECT name FROM singer WHERE country = 'France'"
    assert re.fullmatch(
        "country has France , (use|take|read) singer name country", trajectory.turns[1].action.reasoning
    )


def test_the_answers_reasoning_links_the_question_to_what_the_sql_reads(music):
    join = (
        "SELECT T1.name FROM singer AS T1 JOIN concert AS T2 ON T1.singer_id = T2.singer_id "
        "WHERE T2.venue = 'Old Hall' ORDER BY T1.country"
    )
    (*_, answer) = OraclePolicy(build_protocol(PROTOCOLS["react"]), 0.0).script(Example("1", "q", music, join), seed=0)
    assert re.fullmatch(
        "venue has Old Hall , (use|take|read) singer name singer_id country , concert singer_id venue", answer.reasoning
    )


def test_what_it_will_read_is_said_with_the_first_look_and_the_answer(examples):
    for example in examples:
        *looks, answer = OraclePolicy(build_protocol(PROTOCOLS["react"]), 0.0).script(example, 0)
        plan = re.search(r"(use|take|read) [a-z ,]*$", answer.reasoning)[0]
        assert [action.reasoning.startswith(f"{plan} , ") for action in looks] == [True, False][: len(looks)]
    # Where the prompt hides the columns, the first look is into the catalogue
    for example in examples:
        first = OraclePolicy(build_protocol(PROTOCOLS["react_names"]), 0.0).script(example, 0)[0]
        assert re.fullmatch(r"(columns of|look into) \w+", first.reasoning)
    oracle = OraclePolicy(build_protocol(PROTOCOLS["react"]), 0.0)
    for example in examples:
        said = oracle.script(example, 0)[-1].reasoning.rpartition(" , ")[2].split()
        table = list(example.meta["reads"])[-1]
        assert said[-len(example.meta["reads"][table]) - 1 :] == [table, *example.meta["reads"][table]]
        assert all(column in example.gold_sql.split() for column in said[said.index(table) :])


@pytest.mark.parametrize("prompt", ["brief", "scout"])
def test_a_scout_proposes_before_it_looks(music, sql, prompt):
    example = Example("1", "Who is French?", music, "SELECT name FROM singer WHERE country = 'France'")
    settings = ProtocolSection(name="react", prompt=prompt, options={"scout": True})
    (trajectory,) = play([example], settings, sql)
    assert [turn.action.kind for turn in trajectory.turns] == [ActionKind.PROPOSE, ActionKind.SQL, ActionKind.SOLUTION]
    assert trajectory.well_formed
    assert build_protocol(settings).track_turns(trajectory) == {"full": 3, "schema": 1}


@pytest.mark.parametrize(("name", "prompt"), [("react", "bare"), ("single_turn", "direct")])
def test_without_reasoning_it_says_none(music, sql, name, prompt):
    example = Example("1", "Who is French?", music, "SELECT name FROM singer WHERE country = 'France'")
    (trajectory,) = play([example], ProtocolSection(name=name, prompt=prompt, reasoning=False), sql)
    assert not any(turn.action.reasoning or "reasoning>" in turn.text for turn in trajectory.turns)
    assert trajectory.well_formed


def test_it_can_speak_in_the_schemas_words(tmp_path, sql):
    script = """
        CREATE TABLE Singer (Singer_ID INTEGER PRIMARY KEY, Full_Name TEXT, Country TEXT);
        CREATE TABLE Concert (Concert_ID INTEGER PRIMARY KEY, Singer_ID INTEGER REFERENCES Singer, Hall TEXT);
        INSERT INTO Singer VALUES (1, 'Ana', 'France');
        INSERT INTO Concert VALUES (1, 1, 'Arena');
    """
    database = build_database(tmp_path / "songs.sqlite", script)
    gold = (
        'SELECT t2.hall FROM singer AS t1 JOIN concert AS t2 ON t1.singer_id  =  t2.singer_id WHERE t1.country="France"'
    )
    example = Example("1", "Where do singers from France play?", database, gold)
    settings = ProtocolSection(name="react", prompt="compact", schema_style="lines")
    protocol = build_protocol(settings)
    oracle = OraclePolicy(protocol, 0.0, schemas, spelling="schema")
    (trajectory,) = RolloutEngine(oracle, protocol, sql, Sampling(), 4, schemas).run([EpisodeRequest(example, 0, 7)])
    assert "Concert(Concert_ID, Singer_ID, Hall)\nConcert.Singer_ID = Singer.Singer_ID" in trajectory.prompt[1][1]
    look, answer = (turn.action for turn in trajectory.turns)
    assert look.content == "SELECT DISTINCT Country FROM Singer"
    assert {"Concert", "Hall", "Singer", "Country"} <= set(look.reasoning.split())
    assert answer.reasoning.startswith("Country has France , ")
    assert answer.content == (
        "SELECT Concert.Hall FROM Singer JOIN Concert ON Singer.Singer_ID = Concert.Singer_ID "
        "WHERE Singer.Country = 'France'"
    )
    assert share_right([example], [trajectory], sql) == 1.0
    as_the_source = OraclePolicy(protocol, 0.0, schemas).script(example, 7)
    assert as_the_source[-1].content == gold


def test_where_answers_come_back_its_mistake_is_an_answer_that_it_mends(examples, sql):
    settings = ProtocolSection(name="react", prompt="full", returns_failed_answers=True, explains_missing_names=True)
    trajectories = play(examples[:60], settings, sql, error_rate=1.0)
    assert share_right(examples[:60], trajectories, sql) == 1.0
    kinds_and_statuses = [
        [(turn.action.kind, turn.status) for turn in trajectory.turns if turn.action.kind is ActionKind.SOLUTION]
        for trajectory in trajectories
    ]
    mended = [(ActionKind.SOLUTION, ExecutionStatus.ERROR), (ActionKind.SOLUTION, None)]
    right_at_once = [(ActionKind.SOLUTION, None)]
    assert all(answers in (mended, right_at_once) for answers in kinds_and_statuses)
    assert kinds_and_statuses.count(mended) > 40  # the others read no column by its name
    # No mistake where no turn would be left to mend it.
    settings = settings.model_copy(update={"max_turns": 2})
    capped = play(examples[:60], settings, sql, error_rate=1.0)
    assert share_right(examples[:60], capped, sql) == 1.0
    for trajectory in capped:
        if any(turn.status is ExecutionStatus.ERROR for turn in trajectory.turns):
            assert len(trajectory.turns) == 2
    for trajectory in trajectories:
        for turn in trajectory.turns:
            assert (turn.status is ExecutionStatus.ERROR) == ("Error" in (turn.observation or ""))
