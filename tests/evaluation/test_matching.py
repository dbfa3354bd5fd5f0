"""Which questions of two evaluations are the same, whatever each calls them."""

import dataclasses

from evaluation_world import RECORD, report_data

from pipelines.evaluation.paired_comparison import Question, common_names, compare, matched
from pipelines.evaluation.record import EpisodeRecord, text_digest


def asked(name: str, gold: str, words: str = "", database: str = "harbour", score: float = 1.0) -> EpisodeRecord:
    return dataclasses.replace(
        RECORD,
        example_id=name,
        database=database,
        scores={"strict": score},
        gold_digest=text_digest(gold),
        question_digest=text_digest(words),
    )


def test_spaces_and_closing_signs_make_no_other_text() -> None:
    assert text_digest("SELECT  1\n;") == text_digest("SELECT 1")
    assert text_digest("How many ships ?") == text_digest("How many ships?")
    assert text_digest("WHERE flag = 'NO'") != text_digest("WHERE flag = 'no'")
    assert text_digest(" ") == ""


def test_equal_line_numbers_of_unrelated_files_are_not_the_same_question() -> None:
    one = [asked("0", "SELECT 1", database="ships"), asked("1", "SELECT 2", database="ships")]
    other = [asked("0", "SELECT 1", database="singers"), asked("1", "SELECT 3", database="ships")]
    assert compare(one, other, "strict") is None
    assert common_names([one, other]) == [{"0": "0", "1": "1"}, {"0": "0 (2)", "1": "1 (2)"}]
    bare = [dataclasses.replace(RECORD, example_id="0", database=name) for name in ("ships", "singers")]
    assert compare(bare[:1], bare[1:], "strict") is None  # nothing is known but the database


def test_a_checkpoint_and_a_prediction_file_are_joined_by_their_questions() -> None:
    evaluated = [
        asked("spider_dev_1", "SELECT count(*) FROM ships", "How many ships?", score=1.0),
        asked("spider_dev_0", "SELECT name FROM ports", "Name the ports.", score=0.0),
    ]
    predicted = [asked("0", "SELECT name FROM ports;"), asked("1", "SELECT count(*) FROM ships", score=0.0)]
    found = compare(evaluated, predicted, "strict")
    assert found is not None
    assert (found.paired.n, found.gained, found.lost) == (2, 1, 1)
    assert [(flip.example_id, flip.gained) for flip in found.flips] == [("spider_dev_1", False), ("spider_dev_0", True)]
    assert common_names([evaluated, predicted])[1] == {"0": "spider_dev_0", "1": "spider_dev_1"}


def test_paraphrases_with_one_gold_query_differ_by_their_words() -> None:
    first = [Question("a", "d", "g", "one"), Question("b", "d", "g", "two")]
    assert matched(first, [Question("0", "d", "g", "two"), Question("1", "d", "g", "one")]) == {"0": "b", "1": "a"}
    assert matched(first, [Question("0", "d", "g", ""), Question("1", "d", "g", "")]) == {"0": "a", "1": "b"}
    assert matched(first, [Question("0", "d", "g", "")]) == {}  # which of the two is not known
    assert matched(first, [Question("0", "d", "g", "three"), Question("1", "d", "g", "four")]) == {}


def test_a_question_that_comes_twice_is_matched_in_its_order() -> None:
    twice = [Question("a", "d", "g", "q"), Question("b", "d", "g", "q")]
    assert matched(twice, [Question("0", "d", "g", "q"), Question("1", "d", "g", "q")]) == {"0": "a", "1": "b"}
    assert matched(twice, [Question("b", "d", "g", "q")]) == {"b": "b"}


def test_systems_of_one_report_share_their_questions() -> None:
    data = report_data(questions=6, samples=0)
    assert [each.paired.n for each in data.comparisons] == [6, 6, 6]
