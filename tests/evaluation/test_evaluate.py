"""From trajectories to records to figures to comparisons, on a real database; and which questions are the same."""

import dataclasses
import functools
import io
import re

import pytest
from evaluation_world import RECORD, report_data
from rich.console import Console

from pipelines.core.errors import DataError
from pipelines.core.types import (
    Action,
    ActionKind,
    Database,
    Example,
    ExecutionStatus,
    SchemaItems,
    StopReason,
    Trajectory,
    Turn,
    from_dict,
    read_jsonl,
    to_dict,
    write_jsonl,
)
from pipelines.evaluation import evaluate
from pipelines.evaluation.metrics import value_of
from pipelines.evaluation.paired_comparison import Question, common_names, compare, matched
from pipelines.evaluation.previews import preview_results
from pipelines.evaluation.record import EpisodeRecord, text_digest
from pipelines.evaluation.stats import pairs_needed
from pipelines.evaluation.summary import Summary, summarise
from pipelines.report import console_text
from pipelines.sql.diagnoses import ERROR_CLASSES
from pipelines.sql.schema import introspect
from tests.fakes import engine_fixture

engine = engine_fixture("module", timeout_s=5.0)
GOLD = "SELECT name FROM ships WHERE flag = 'NO'"


@pytest.fixture
def judge(harbour, engine):
    """Evaluate answers to the one question which ships sail under NO."""
    example = Example("q", "?", harbour, GOLD, hardness="easy", meta={"needs_probe": True, "difficulty": "simple"})

    def run(*trajectories, mode="greedy", gold=None):
        schemas = functools.cache(introspect)
        return evaluate.evaluate(trajectories, {"q": example}, engine, schemas, ("strict", "bird"), mode, gold)

    return run


def episode(sql, sample=0, **changes):
    """One probe, one mistake, then the answer; 10 tokens of prompt and observations, 6 of the agent."""
    probe = Action(ActionKind.SQL, "SELECT DISTINCT flag FROM ships", "let me look")
    turns = (
        Turn("p", probe, "NO PA LR", ExecutionStatus.OK, None, 3),
        Turn(
            "m", Action(ActionKind.SQL, "SELECT flg FROM ships", "hm"), "error", ExecutionStatus.ERROR, "no_such_column"
        ),
        Turn("a", Action(ActionKind.SOLUTION, sql or "", "so")),
    )
    values = {
        "example_id": "q",
        "sample": sample,
        "policy": "hand",
        "protocol": "react",
        "prompt": (),
        "turns": turns,
        "final_sql": sql,
        "stop": StopReason.SOLUTION,
        "token_ids": (1,) * 16,
        "agent_mask": (0,) * 10 + (1,) * 6,
    }
    return Trajectory(**{**values, **changes})


def test_a_record_holds_the_verdicts_and_the_costs(judge):
    (found,) = judge(episode("SELECT DISTINCT name FROM ships WHERE flag = 'NO' ORDER BY name"))
    assert dict(found.scores) == {"strict": 1.0, "bird": 1.0}
    assert (found.turns, found.tool_calls, found.failed_calls) == (3, 2, 1)
    assert (found.tokens_in, found.tokens_out) == (10, 6)
    assert found.reasoning_chars == len("let me look") + len("hm") + len("so")
    assert (found.needs_probe, found.difficulty, found.database) == (True, "simple", "harbour")
    assert (found.n_rows, found.gold_rows, found.executable) == (2, 2, True)
    assert found.linking.exact
    assert found.signature is None  # greedy answers do not vote
    assert (found.question_digest, found.gold_digest) == (text_digest("?"), text_digest(f" {GOLD} ;"))
    (text,) = judge(episode(GOLD, token_ids=(), agent_mask=()))
    assert (text.tokens_in, text.tokens_out) == (None, None)
    (found,) = judge(episode(GOLD), gold={"q": SchemaItems(frozenset({"ships"}), frozenset({("ships", "name")}))})
    assert (found.linking.columns.precision, found.linking.columns.recall) == (0.5, 1.0)
    assert judge(episode(GOLD), gold={})[0].linking is None


def test_equalities_can_disagree_and_an_error_counts_where_it_is_one(judge, tmp_path):
    (found,) = judge(episode("SELECT name FROM ships WHERE flag = 'NO' UNION ALL SELECT 'Aurora'"))
    assert dict(found.scores) == {"strict": 0.0, "bird": 1.0}
    assert found.wrong("bird") is None
    assert found.wrong("strict").error == "semantic"
    assert summarise([found], "strict").errors["semantic"] == 1
    assert sum(summarise([found], "bird").errors.values()) == 0
    records = judge(episode(GOLD), episode("SELECT flag FROM ships"), episode(None))
    write_jsonl(tmp_path / "records.jsonl", records)
    assert list(read_jsonl(tmp_path / "records.jsonl", EpisodeRecord)) == records


def test_samples_that_agree_share_a_signature(judge):
    answers = [
        GOLD,
        "SELECT T.name FROM ships AS T WHERE T.flag = 'NO'",
        "SELECT name FROM ports",
        "SELECT nme FROM ships",
        None,
    ]
    found = judge(*(episode(sql, sample) for sample, sql in enumerate(answers)), mode="sampled")
    signatures = [each.signature for each in found]
    assert signatures[0] == signatures[1] is not None
    assert signatures[2] not in (None, signatures[0])
    assert signatures[3:] == [None, None]
    assert [each.score("strict") for each in found] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_broken_episode_or_gold_is_never_scored_or_diagnosed(harbour, engine):
    examples = {
        "bad_gold": Example("bad_gold", "?", harbour, "SELECT nme FROM ships", hardness="easy"),
        "no_file": Example(
            "no_file", "?", Database("gone", "sqlite", harbour.location + ".gone"), GOLD, hardness="easy"
        ),
        "endpoint": Example("endpoint", "?", harbour, GOLD, hardness="easy"),
    }
    trajectories = [
        episode(GOLD, example_id="bad_gold"),
        episode(GOLD, example_id="no_file"),
        episode(None, example_id="endpoint", stop=StopReason.BROKEN, failure="endpoint"),
    ]
    found = evaluate.evaluate(trajectories, examples, engine, functools.cache(introspect), ("strict",), "greedy")
    assert [each.broken for each in found] == [True, True, True]
    assert [each.failure for each in found] == ["no_such_column", "database_missing", "endpoint"]
    assert [each.diagnosis for each in found] == [None, None, None]


def test_previews_show_the_first_rows_of_wrong_answers_and_their_gold(judge, harbour, engine):
    wrong = "SELECT cargo FROM visits ORDER BY visit_id DESC"
    records = judge(episode(wrong), episode(GOLD), episode("SELECT nme FROM ships"))
    example = Example("q", "?", harbour, GOLD, hardness="easy")
    found = preview_results(records, {"q": example}, engine)
    assert set(found) == {("harbour", wrong), ("harbour", GOLD)}
    assert found["harbour", GOLD].rows == (("Aurora",), ("Dunlin",))
    assert found["harbour", wrong].rows[0] == ("NULL",)
    assert (len(found["harbour", wrong].rows), found["harbour", wrong].total) == (8, 8)
    unclassed = [dataclasses.replace(one, diagnosis=None) for one in records]
    assert preview_results(unclassed, {"q": example}, engine) == found  # wrong by a result file: of no class
    gone = [dataclasses.replace(one, final_sql="SELECT no_more FROM visits") for one in records]
    assert set(preview_results(gone, {"q": example}, engine)) == {("harbour", GOLD)}


def test_a_bare_prediction_is_a_trajectory_of_one_turn():
    answered, silent = evaluate.of_prediction("q", GOLD, "din"), evaluate.of_prediction("q", None, "din")
    assert (answered.final_sql, len(answered.turns), answered.stop) == (GOLD, 1, StopReason.SOLUTION)
    assert (silent.final_sql, silent.stop, silent.well_formed) == (None, StopReason.TURN_LIMIT, False)


def mixed(record):
    """Four questions of two levels, greedy and two samples each, and one broken episode."""
    right = {"a": (1, (1, 1)), "b": (0, (1, 0)), "c": (1, (0, 1)), "d": (0, (0, 0))}
    records = []
    for example, (greedy, samples) in right.items():
        level = "easy" if example in "ab" else "extra"
        common = {"example_id": example, "database": f"db_{example}", "hardness": level}
        records.append(record(float(greedy), turns=1 + greedy, **common))
        for sample, score in enumerate(samples):
            records.append(record(float(score), mode="sampled", sample=sample, signature=str(score), turns=9, **common))
    return [*records, record(0.0, example_id="e", broken=True, failure="worker_died")]


def test_a_summary_by_hand(record):
    found = summarise(mixed(record), "strict", ks=(1, 2, 4))
    assert (found.n_questions, found.n_databases, found.n_broken) == (4, 4, 1)
    assert dict(found.failures) == {"worker_died": 1}
    assert found.ex["strict"].value == 0.5
    assert found.sampled.value == 0.5  # (1 + 1/2 + 1/2 + 0) / 4
    assert [point.k for point in found.points] == [1, 2]  # nobody has four samples
    assert found.points[1].pass_at.value == 0.75
    assert found.points[1].majority_at.value == 0.5  # b: its first sample, right; c: its first sample, wrong
    assert value_of(found.measured["turns"]) == 1.5  # of the greedy episodes only
    shown = [(level.name, level.n, level.ex.value) for level in found.by_hardness if level.ex]
    assert shown == [("easy", 2, 0.5), ("extra", 2, 0.5)]
    assert list(found.errors) == list(ERROR_CLASSES)
    assert from_dict(Summary, to_dict(found)) == found


def test_a_summary_is_flat_numbers_for_a_tracker(record):
    flat = summarise(mixed(record), "strict", ks=(1, 2)).flat()
    assert flat["ex_strict"] == 0.5
    assert flat["ex_strict_low"] < 0.5 < flat["ex_strict_high"]
    assert (flat["pass_at_2"], flat["majority_at_2"], flat["ex_strict_easy"]) == (0.75, 0.5, 0.5)
    assert all(isinstance(value, int | float) for value in flat.values())
    assert not any("/" in name for name in flat)
    found = summarise([each for each in mixed(record) if each.mode == "sampled"], "strict")
    assert dict(found.ex) == {}
    assert found.headline == found.sampled
    assert value_of(found.measured["turns"]) == 9


def test_figures_need_records_and_verdicts_a_named_equality(engine):
    with pytest.raises(ValueError, match="nothing to summarise"):
        summarise([], "strict")
    with pytest.raises(ValueError, match="named equality"):
        evaluate.evaluate([], {}, engine, introspect, (), "greedy")


def pair_of_runs(record):
    """Twenty shared questions: 8 right before, 14 after; 7 gained, 1 lost; each run has one question of its own."""
    before = [record(float(n < 8), example_id=f"q{n}", database=f"db{n % 10}") for n in range(20)]
    after = [record(float(1 <= n < 15), example_id=f"q{n}", database=f"db{n % 10}") for n in range(20)]
    return [*before, record(1.0, example_id="old")], [record(1.0, example_id="new"), *after]


def test_a_comparison_by_hand(record):
    found = compare(*pair_of_runs(record), "strict", ("SFT", "GRPO"))
    assert (found.paired.n, found.gained, found.lost) == (20, 7, 1)
    assert (found.accuracy_before, found.accuracy_after) == (0.4, 0.7)
    assert found.paired.difference == pytest.approx(0.3)
    assert found.p_mcnemar == pytest.approx(2 * (1 + 8) / 2**8)  # C(8,0) + C(8,1)
    assert found.needed == pairs_needed(0.4, 0.3)
    assert [flip.example_id for flip in found.flips if not flip.gained] == ["q0"]


def test_sampled_runs_are_compared_by_their_means(record):
    before = [record(float(s == 0), mode="sampled", sample=s, example_id="a") for s in range(4)]
    after = [record(float(s < 3), mode="sampled", sample=s, example_id="a") for s in range(4)]
    found = compare(before, after, "strict", mode="sampled")
    assert found.paired.difference == pytest.approx(0.5)
    assert (found.p_mcnemar, found.flips, found.needed) == (None, (), None)
    assert compare([record(example_id="a")], [record(example_id="b")], "strict") is None
    assert compare([record(example_id="a")], [record(example_id="a", broken=True)], "strict") is None


def printed(show):
    console = Console(file=io.StringIO(), width=140, highlight=False)
    show(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_end_of_a_run_fits_a_terminal(record):
    summaries = {"after SFT": summarise(mixed(record), "strict"), "[bold]odd[/]": summarise(mixed(record), "strict")}
    judged = {"far": summaries, "near": {"after SFT": summarise(mixed(record), "strict")}}
    shown = printed(lambda console: console_text.show_end(console, judged, {"report": "store/report/1/report.html"}))
    assert re.findall(r"accuracy on (\w+), equality (\w+)", shown) == [("far", "strict"), ("near", "strict")]
    assert "50.0 [15.0, 85.0]" in shown  # Wilson's interval of 2 in 4
    assert "[bold]odd[/]" in shown
    assert "report  store/report/1/report.html" in shown


def test_a_comparison_in_a_terminal_names_its_tests_and_no_escape_code_passes(record):
    before, after = pair_of_runs(record)
    after[1:] = [
        record(each.score("strict"), example_id=each.example_id, database=each.database, final_sql="\x1b[31mSELECT")
        for each in after[1:]
    ]
    found = compare(before, after, "strict", ("SFT", "GRPO"))
    assert found is not None
    shown = printed(lambda console: console_text.show_comparison(console, found))
    assert "SFT → GRPO (greedy, strict, 20 questions): 40.0 → 70.0 %, +30.0 points" in shown
    assert "gained 7, lost 1; McNemar p 0.070" in shown
    assert "− q0" in shown
    assert "\x1b" not in shown


def phases_episode(first, proposal):
    turns = (
        Turn("", Action(ActionKind.EXPLORE, first), "name\nships", ExecutionStatus.OK, None, 1),
        Turn("", Action(ActionKind.PROPOSE, proposal), "noted"),
        Turn("", Action(ActionKind.SOLUTION, GOLD)),
    )
    return Trajectory("q", 0, "mine", "phases", (), turns, GOLD, StopReason.SOLUTION)


def test_phases_are_watched_for_listing_everything_and_for_unseen_names(judge):
    honest = phases_episode("SELECT DISTINCT flag FROM ships", '{"tables": ["ships"], "columns": {"ships": ["flag"]}}')
    hacked = phases_episode("SELECT sql FROM sqlite_master", '{"tables": ["ships"], "columns": {"ships": ["crew"]}}')
    first, second, plain = judge(honest, hacked, episode(GOLD))
    assert (first.lists_first, first.unverified) == (False, 0)
    assert (second.lists_first, second.unverified) == (True, 1)  # crew was never shown
    assert (plain.lists_first, plain.unverified) == (None, None)


def test_examples_with_accepted_results_are_judged_by_them(harbour, engine):
    accepted = {"results": [[["ship"], ["Aurora"], ["Dunlin"]]], "columns": [[]], "ignore_order": True}
    example = Example("q", "?", harbour, "", hardness="extra", meta={"gold_results": accepted})

    def run(*answers, equalities=("spider2",)):
        made = [evaluate.of_prediction("q", sql, "mine") for sql in answers]
        return evaluate.evaluate(made, {"q": example}, engine, functools.cache(introspect), equalities, "sampled")

    right, wrong, invented, none = run(GOLD, "SELECT name FROM ports", "SELECT crew FROM ships", None)
    found = [one.scores for one in (right, wrong, invented, none)]
    assert found == [{"spider2": 1.0}, {"spider2": 0.0}, {"spider2": 0.0}, {"spider2": 0.0}]
    assert (right.gold_rows, right.broken, right.linking) == (2, False, None)
    assert wrong.diagnosis is None  # without a gold query, linking and logic cannot be told apart
    assert invented.diagnosis.error == "hallucination"
    assert none.diagnosis.error == "generation"
    with pytest.raises(DataError, match="stands alone"):
        run(GOLD, equalities=("spider2", "strict"))
    with pytest.raises(DataError, match="no gold SQL"):
        run(GOLD, equalities=("strict",))


def asked(name, gold, words="", database="harbour", score=1.0):
    return dataclasses.replace(
        RECORD,
        example_id=name,
        database=database,
        scores={"strict": score},
        gold_digest=text_digest(gold),
        question_digest=text_digest(words),
    )


def test_spaces_and_closing_signs_make_no_other_text():
    assert text_digest("SELECT  1\n;") == text_digest("SELECT 1")
    assert text_digest("How many ships ?") == text_digest("How many ships?")
    assert text_digest("WHERE flag = 'NO'") != text_digest("WHERE flag = 'no'")
    assert text_digest(" ") == ""


def test_equal_line_numbers_of_unrelated_files_are_not_the_same_question():
    one = [asked("0", "SELECT 1", database="ships"), asked("1", "SELECT 2", database="ships")]
    other = [asked("0", "SELECT 1", database="singers"), asked("1", "SELECT 3", database="ships")]
    assert compare(one, other, "strict") is None
    assert common_names([one, other]) == [{"0": "0", "1": "1"}, {"0": "0 (2)", "1": "1 (2)"}]
    bare = [dataclasses.replace(RECORD, example_id="0", database=name) for name in ("ships", "singers")]
    assert compare(bare[:1], bare[1:], "strict") is None  # nothing is known but the database


def test_a_checkpoint_and_a_prediction_file_are_joined_by_their_questions():
    evaluated = [
        asked("spider_dev_1", "SELECT count(*) FROM ships", "How many ships?", score=1.0),
        asked("spider_dev_0", "SELECT name FROM ports", "Name the ports.", score=0.0),
    ]
    predicted = [asked("0", "SELECT name FROM ports;"), asked("1", "SELECT count(*) FROM ships", score=0.0)]
    found = compare(evaluated, predicted, "strict")
    assert (found.paired.n, found.gained, found.lost) == (2, 1, 1)
    assert [(flip.example_id, flip.gained) for flip in found.flips] == [("spider_dev_1", False), ("spider_dev_0", True)]
    assert common_names([evaluated, predicted])[1] == {"0": "spider_dev_0", "1": "spider_dev_1"}
    assert [each.paired.n for each in report_data(questions=6, samples=0).comparisons] == [6, 6, 6]


def test_paraphrases_with_one_gold_query_differ_by_their_words():
    first = [Question("a", "d", "g", "one"), Question("b", "d", "g", "two")]
    assert matched(first, [Question("0", "d", "g", "two"), Question("1", "d", "g", "one")]) == {"0": "b", "1": "a"}
    assert matched(first, [Question("0", "d", "g", ""), Question("1", "d", "g", "")]) == {"0": "a", "1": "b"}
    assert matched(first, [Question("0", "d", "g", "")]) == {}  # which of the two is not known
    assert matched(first, [Question("0", "d", "g", "three"), Question("1", "d", "g", "four")]) == {}
    twice = [Question("a", "d", "g", "q"), Question("b", "d", "g", "q")]
    assert matched(twice, [Question("0", "d", "g", "q"), Question("1", "d", "g", "q")]) == {"0": "a", "1": "b"}
    assert matched(twice, [Question("b", "d", "g", "q")]) == {"b": "b"}
